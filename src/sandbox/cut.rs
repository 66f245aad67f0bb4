//! Output that is kept in bounded memory: its beginning, its end, and how much lay between.
//!
//! Knows bytes. Must not know where they come from.

use std::collections::VecDeque;

#[derive(Debug)]
pub struct Cut {
    limit: usize,
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl Cut {
    /// Keeps at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { limit, head: Vec::new(), tail: VecDeque::new(), total: 0 }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = (self.limit / 2).saturating_sub(self.head.len()).min(bytes.len());
        let (head, rest) = bytes.split_at(room);
        self.head.extend_from_slice(head);
        let keep = self.limit - self.limit / 2;
        let rest = &rest[rest.len().saturating_sub(keep)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(keep);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    /// Everything since the last call as text, and the number of bytes that it lacks.
    pub fn take(&mut self) -> (String, u64) {
        let (head, tail) = (std::mem::take(&mut self.head), Vec::from(std::mem::take(&mut self.tail)));
        let cut = std::mem::take(&mut self.total) - (head.len() + tail.len()) as u64;
        if cut == 0 {
            return (String::from_utf8_lossy(&[head, tail].concat()).into_owned(), 0);
        }
        // A character that the cut went through is left out whole.
        let start = tail.iter().take(3).take_while(|b| **b & 0xC0 == 0x80).count();
        let stop = match std::str::from_utf8(&head) {
            Err(e) if e.error_len().is_none() => e.valid_up_to(),
            _ => head.len(),
        };
        let cut = cut + (start + head.len() - stop) as u64;
        let text = format!(
            "{}\n[... {cut} bytes left out here ...]\n{}",
            String::from_utf8_lossy(&head[..stop]),
            String::from_utf8_lossy(&tail[start..])
        );
        (text, cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_fits_is_whole_and_what_does_not_is_cut_in_the_middle() {
        let mut cut = Cut::new(8);
        cut.push(b"12345678");
        assert_eq!(cut.take(), ("12345678".into(), 0));
        assert_eq!(cut.take(), (String::new(), 0));
        for byte in b"123456789abc" {
            cut.push(&[*byte]);
        }
        assert_eq!(cut.take(), ("1234\n[... 4 bytes left out here ...]\n9abc".into(), 4));
    }

    #[test]
    fn a_cut_leaves_no_half_characters() {
        let mut cut = Cut::new(9);
        cut.push("äöüß€äöüß".as_bytes());
        let (text, left_out) = cut.take();
        assert_eq!(text, "äö\n[... 11 bytes left out here ...]\nüß");
        assert_eq!(left_out, 11);
    }

    proptest! {
        #![proptest_config(crate::properties::usual())]

        #[test]
        fn memory_is_bounded_and_the_count_is_exact(
            limit in 2usize..64,
            pieces in proptest::collection::vec(proptest::collection::vec(97u8..120, 0..100), 0..20),
        ) {
            let mut cut = Cut::new(limit);
            for piece in &pieces {
                cut.push(piece);
                prop_assert!(cut.head.len() + cut.tail.len() <= limit);
            }
            let whole = pieces.concat();
            let (text, left_out) = cut.take();
            if whole.len() <= limit {
                prop_assert_eq!(text.into_bytes(), whole);
                prop_assert_eq!(left_out, 0);
            } else {
                prop_assert_eq!(left_out as usize, whole.len() - limit);
                prop_assert!(text.as_bytes().starts_with(&whole[..limit / 2]));
                prop_assert!(text.as_bytes().ends_with(&whole[whole.len() - (limit - limit / 2)..]));
            }
        }
    }
}
