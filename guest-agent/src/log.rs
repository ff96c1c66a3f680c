//! Messages for people: what needs attention goes to the guest's console, and all of it to a
//! bounded log in memory that the manager reads.
//!
//! The console may be a serial port that costs an exit of the machine for every byte, so requests
//! are not told of there.

use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coppice_agent_protocol::control::{Log, LogLine, ReadLog};
use tokio::sync::Notify;

use crate::clock;

/// Lines that are kept; the oldest go first.
const KEPT: usize = 512;
/// The most bytes of a line.
const MAX_LINE: usize = 256;

static LOG: Mutex<Lines> = Mutex::new(Lines { lines: VecDeque::new(), next: 1 });
static ADDED: Notify = Notify::const_new();

#[derive(Debug)]
struct Lines {
    lines: VecDeque<LogLine>,
    /// Number of the next line.
    next: u64,
}

impl Lines {
    fn add(&mut self, mut text: String) {
        if text.len() > MAX_LINE {
            text.truncate(text.floor_char_boundary(MAX_LINE));
        }
        if self.lines.len() == KEPT {
            self.lines.pop_front();
        }
        let (number, unix_ms) = (self.next, clock::unix_ns() / 1_000_000);
        self.lines.push_back(LogLine { number, unix_ms, text });
        self.next += 1;
    }

    fn after(&self, number: u64) -> Vec<LogLine> {
        self.lines.iter().filter(|line| line.number > number).cloned().collect()
    }
}

fn lines() -> MutexGuard<'static, Lines> {
    LOG.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says something that needs attention. A console that cannot be written is no reason to fail.
pub(crate) fn warn(message: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "coppice-agent: {message}");
    note(message);
}

/// Writes one line to the log.
pub(crate) fn note(message: std::fmt::Arguments<'_>) {
    lines().add(message.to_string());
    ADDED.notify_waiters();
}

/// The lines that are asked for, once there are any or the time is over.
pub(crate) async fn read(wanted: &ReadLog) -> Log {
    let wait = Duration::from_millis(wanted.wait_ms.min(ReadLog::MAX_WAIT_MS).into());
    let some = async {
        loop {
            let added = ADDED.notified();
            let found = lines().after(wanted.after);
            if !found.is_empty() {
                return found;
            }
            added.await;
        }
    };
    Log { lines: tokio::time::timeout(wait, some).await.unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_and_cut() {
        let mut log = Lines { lines: VecDeque::new(), next: 1 };
        for number in 0..2 * KEPT {
            log.add(format!("{number}"));
        }
        log.add("\u{e9}".repeat(MAX_LINE));
        assert_eq!(log.lines.len(), KEPT);
        let last = log.after(u64::try_from(2 * KEPT).unwrap());
        assert_eq!(last.len(), 1);
        assert_eq!(last[0].text.len(), MAX_LINE);
    }
}
