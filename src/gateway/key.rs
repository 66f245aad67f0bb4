//! An endpoint's key: read from the environment or a file, shown to nobody.
//!
//! Knows how to keep a secret out of texts. Must not know what the key opens.

use std::path::Path;

/// A secret. It has no text form, so that no log, error or trajectory can hold it by accident.
#[derive(Clone)]
pub struct Key(String);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key([key])")
    }
}

/// What stands in a text where the key was.
pub const REDACTED: &str = "[key]";

impl Key {
    /// From a text; surrounding white space is no part of a key.
    ///
    /// # Errors
    /// When there is none, or it can't be the value of a header.
    pub fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() {
            return Err("the key is empty".into());
        }
        if text.len() > 8192 || !text.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\') {
            return Err(
                "the key holds characters that no key has (a blank, a quote, a line break, a letter beyond ASCII)"
                    .into(),
            );
        }
        Ok(Self(text.to_owned()))
    }

    /// From a file that holds the key and nothing else.
    ///
    /// # Errors
    /// Names the file.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{} can't be read: {e}", path.display()))?;
        Self::new(&text).map_err(|why| format!("{}: {why}", path.display()))
    }

    /// For the header of a request, and for nothing else.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }

    /// The text without the key: servers repeat what they were sent, in errors above all.
    #[must_use]
    pub fn redact(&self, text: &str) -> String {
        // A key of a few letters ("none", "x") is a placeholder of servers that want none.
        if self.0.len() < 6 { text.to_owned() } else { text.replace(&self.0, REDACTED) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_shows_in_no_text() {
        let key = Key::new(" sk-0123456789\n").unwrap();
        assert_eq!(key.reveal(), "sk-0123456789");
        assert_eq!(format!("{key:?}"), "Key([key])");
        assert_eq!(key.redact("bad key sk-0123456789."), "bad key [key].");
    }

    #[test]
    fn what_is_no_key_is_refused() {
        for text in ["", " \n", "two words", "a\nb", "schlüssel"] {
            assert!(Key::new(text).is_err(), "{text:?}");
        }
        let error = Key::from_file(Path::new("/no/such/key")).unwrap_err();
        assert!(error.contains("/no/such/key can't be read"), "{error}");
    }
}
