//! What a build says, for clients that ask for it piece by piece.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// The most entries that are kept.
const MAX_ENTRIES: usize = 2000;
/// The most bytes of an entry's text.
const MAX_TEXT: usize = 1000;

/// How grave an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What a command said on its standard output.
    Debug,
    /// What is done.
    Info,
    /// What a command said on its standard error.
    Warn,
    /// What failed.
    Error,
}

/// A line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// When it was written, in milliseconds since 1970.
    pub at_ms: u64,
    /// How grave it is.
    pub level: Level,
    /// Its text.
    pub message: String,
    /// The step it is about.
    pub step: Option<String>,
}

/// The lines of a build, oldest first. A build that says too much loses the rest of it: places of
/// lines do not change.
#[derive(Debug, Default)]
pub struct Log(Mutex<Vec<Entry>>);

impl Log {
    /// Adds a line.
    pub fn add(&self, level: Level, step: Option<&str>, text: &str) {
        let mut entries = self.entries();
        let message = match entries.len() {
            MAX_ENTRIES => return,
            last if last + 1 == MAX_ENTRIES => "what follows is not kept".to_owned(),
            _ => cut(text).to_owned(),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        entries.push(Entry { at_ms, level, message, step: step.map(str::to_owned) });
    }

    /// At most `limit` lines from a place on.
    pub fn from(&self, offset: usize, limit: usize) -> Vec<Entry> {
        self.entries().iter().skip(offset).take(limit).cloned().collect()
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The beginning of a text.
fn cut(text: &str) -> &str {
    text.get(..text.floor_char_boundary(MAX_TEXT)).unwrap_or(text)
}

/// Cuts what comes in pieces into lines.
#[derive(Debug, Default)]
pub(super) struct Lines(Vec<u8>);

impl Lines {
    /// Takes a piece, and gives the lines that are whole now, and those that are too long.
    pub(super) fn push(&mut self, piece: &[u8], mut line: impl FnMut(&str)) {
        for byte in piece {
            if *byte != b'\n' {
                self.0.push(*byte);
            }
            if *byte == b'\n' || self.0.len() >= MAX_TEXT {
                self.end(&mut line);
            }
        }
    }

    /// Gives what is left.
    pub(super) fn end(&mut self, mut line: impl FnMut(&str)) {
        let text = String::from_utf8_lossy(&self.0);
        let text = text.trim_end();
        if !text.is_empty() {
            line(text);
        }
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_log_that_is_full_says_so_and_stays_as_it_is() {
        let log = Log::default();
        for number in 0..=MAX_ENTRIES {
            log.add(Level::Info, None, &number.to_string());
        }
        let entries = log.from(0, usize::MAX);
        assert_eq!(entries.len(), MAX_ENTRIES);
        assert_eq!(entries.last().unwrap().message, "what follows is not kept");
        assert_eq!(log.from(3, 1)[0].message, "3");
        assert!(log.from(MAX_ENTRIES, 10).is_empty());
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let log = Log::default();
        log.add(Level::Info, None, &format!("a{}", "\u{e9}".repeat(MAX_TEXT)));
        assert_eq!(log.from(0, 1)[0].message.len(), MAX_TEXT - 1);
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_the_pieces(
            text in "[a-z\n]{0,200}", cuts in prop::collection::vec(0_usize..200, 0..5)
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.sort_unstable();
            cuts.push(text.len());
            let (mut lines, mut seen, mut from) = (Lines::default(), Vec::new(), 0);
            for cut in cuts {
                lines.push(&text.as_bytes()[from..cut], |line| seen.push(line.to_owned()));
                from = cut;
            }
            lines.end(|line| seen.push(line.to_owned()));
            let wanted: Vec<&str> = text.split('\n').filter(|line| !line.is_empty()).collect();
            prop_assert_eq!(seen, wanted);
        }
    }
}
