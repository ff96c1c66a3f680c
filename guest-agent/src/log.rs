//! Messages for people who look at the guest's console.
//!
//! The console may be a slow serial port, so only what needs attention is said.

use std::io::Write as _;

/// Writes one line to standard error. A console that cannot be written is no reason to fail.
pub(crate) fn warn(message: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "coppice-agent: {message}");
}
