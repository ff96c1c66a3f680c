//! What a machine leaves to be read: its kernel's words, its emulator's and its keeper's.

use std::fs;
use std::io;
use std::path::Path;

use super::{Error, at};

const LOGS: [&str; 3] = ["console.log", "qemu.log", "keeper.log"];

/// So many lines of each log are shown for a machine that went away.
const LAST_LINES: usize = 30;

/// Keeps the logs of the machine that ran here before, which may have ended by a fault.
pub(super) fn keep(directory: &Path) -> Result<(), Error> {
    for log in LOGS {
        let path = directory.join(log);
        match fs::rename(&path, directory.join(format!("{log}.previous"))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&path)(error)),
            _ => {}
        }
    }
    Ok(())
}

/// The last lines of all logs.
pub(super) fn last_words(directory: &Path) -> String {
    let last = |log| {
        let bytes = fs::read(directory.join(log)).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().rev().take(LAST_LINES).collect();
        lines.iter().rev().map(|line| format!("{log}: {line}\n")).collect::<String>()
    };
    LOGS.map(last).concat()
}
