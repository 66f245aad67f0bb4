//! Lower-case hexadecimal. Knows bytes and nothing else.

use std::fmt::Write;

/// Two digits a byte.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_byte_has_two_digits() {
        assert_eq!(super::hex(&[0, 9, 10, 255]), "00090aff");
        assert_eq!(super::hex(&[]), "");
    }
}
