//! Watches console output for the line with which Linux announces a panic.
//!
//! It gives the text for the report, and lets a reset be recognised as a panic when the guest has
//! no pvpanic driver. It never ends a machine by itself, because any program that may write to
//! the console can print the same words.

/// What precedes the reason.
const MARK: &[u8] = b"Kernel panic - not syncing: ";
/// Longest reason kept, in bytes.
const TEXT_MAX: usize = 240;

/// A matcher that is fed every byte of output.
#[derive(Debug, Default)]
pub(super) struct PanicTail {
    /// Bytes of the mark seen so far.
    matched: usize,
    text: Vec<u8>,
    complete: bool,
}

impl PanicTail {
    /// Takes one byte of output.
    pub(super) fn push(&mut self, byte: u8) {
        if self.complete {
            return;
        }
        match MARK.get(self.matched) {
            Some(wanted) if *wanted == byte => self.matched += 1,
            // The mark's first byte occurs nowhere else in it, so no partial match is missed.
            Some(_) => self.matched = usize::from(MARK.first() == Some(&byte)),
            None if matches!(byte, b'\n' | b'\r') => self.complete = true,
            None => {
                self.text.push(byte);
                self.complete = self.text.len() == TEXT_MAX;
            }
        }
    }

    /// The reason of the first panic announced, on one line of printable ASCII.
    pub(super) fn text(&self) -> Option<String> {
        if self.matched < MARK.len() {
            return None;
        }
        let printable = |byte: &u8| match byte {
            b' '..=b'~' => char::from(*byte),
            _ => '?',
        };
        Some(self.text.iter().map(printable).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text_of(output: &[u8]) -> Option<String> {
        let mut tail = PanicTail::default();
        output.iter().for_each(|byte| tail.push(*byte));
        tail.text()
    }

    #[test]
    fn the_reason_is_found_after_a_false_start() {
        let output = b"[    0.5] KKernel panic - not syncing: VFS: Unable to mount root fs\r\nmore";
        assert_eq!(text_of(output).as_deref(), Some("VFS: Unable to mount root fs"));
    }

    #[test]
    fn the_first_panic_counts() {
        let output = b"Kernel panic - not syncing: one\nKernel panic - not syncing: two\n";
        assert_eq!(text_of(output).as_deref(), Some("one"));
    }

    #[test]
    fn a_reason_cut_by_the_end_is_given() {
        assert_eq!(text_of(b"Kernel panic - not syncing: Att").as_deref(), Some("Att"));
    }

    #[test]
    fn other_output_has_no_reason() {
        assert_eq!(text_of(b"Kernel panic - not sync: no\nlogin: "), None);
    }

    proptest! {
        #[test]
        fn the_reason_is_found_wherever_it_stands(
            before in proptest::collection::vec(any::<u8>(), 0..200),
            reason in "[ -~]{0,300}",
        ) {
            let mut output = before;
            output.extend_from_slice(b"\nKernel panic - not syncing: ");
            output.extend_from_slice(reason.as_bytes());
            output.push(b'\n');
            let wanted: String = reason.chars().take(TEXT_MAX).collect();
            prop_assert_eq!(text_of(&output), Some(wanted));
        }

        #[test]
        fn memory_stays_bounded(output in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let mut tail = PanicTail::default();
            MARK.iter().chain(&output).for_each(|byte| tail.push(*byte));
            prop_assert!(tail.text.len() <= TEXT_MAX);
        }
    }
}
