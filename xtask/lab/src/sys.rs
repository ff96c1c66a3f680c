//! Terminal requests and the time stamp counter, which no safe wrapper offers.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;

use crate::wire::TerminalSize;

/// Makes `terminal` the controlling terminal of the calling session leader.
///
/// # Errors
/// What the system said, such as `EPERM` for a caller that leads no session.
pub fn make_controlling_terminal(terminal: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: TIOCSCTTY takes an integer argument and touches no memory of this process; the
    // descriptor is borrowed, hence open.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) };
    Errno::result(result).map(drop)
}

/// Sets the size of a terminal.
///
/// # Errors
/// What the system said, such as `ENOTTY`.
pub fn set_terminal_size(terminal: impl AsFd, size: TerminalSize) -> Result<(), Errno> {
    let size =
        libc::winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    let descriptor = terminal.as_fd().as_raw_fd();
    // SAFETY: TIOCSWINSZ reads one `winsize`, which lives until the call returns; the descriptor
    // is borrowed, hence open.
    let result = unsafe { libc::ioctl(descriptor, libc::TIOCSWINSZ, &raw const size) };
    Errno::result(result).map(drop)
}

/// The size of a terminal.
///
/// # Errors
/// What the system said, such as `ENOTTY`.
pub fn terminal_size(terminal: impl AsFd) -> Result<TerminalSize, Errno> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    let descriptor = terminal.as_fd().as_raw_fd();
    // SAFETY: TIOCGWINSZ writes one `winsize`, to which this is the only reference; the
    // descriptor is borrowed, hence open.
    let result = unsafe { libc::ioctl(descriptor, libc::TIOCGWINSZ, &raw mut size) };
    Errno::result(result)?;
    Ok(TerminalSize { rows: size.ws_row, columns: size.ws_col })
}

/// Reads the time stamp counter of the CPU this thread runs on.
#[must_use]
pub fn read_tsc() -> u64 {
    // SAFETY: RDTSC is part of every x86-64 processor and touches no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}
