//! Terminals.

use std::io;
use std::os::fd::AsRawFd;

use nix::pty::Winsize;

/// Sets a terminal's size; its foreground processes get `SIGWINCH`.
///
/// # Errors
/// Those of ioctl(2).
pub(crate) fn set_window_size(terminal: &impl AsRawFd, size: Winsize) -> io::Result<()> {
    // SAFETY: TIOCSWINSZ reads one winsize through the pointer, which is `size`.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    nix::errno::Errno::result(result)?;
    Ok(())
}
