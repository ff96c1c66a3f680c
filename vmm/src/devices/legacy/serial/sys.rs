//! The system calls of the console that have no safe form in the standard library.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Whether one of `events` (`POLLIN`, `POLLOUT`), an error or a hang-up is there now. Does not
/// wait.
pub(super) fn is_ready(fd: BorrowedFd<'_>, events: libc::c_short) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    // SAFETY: `poll` is one valid entry, alive for the call, and the count says one.
    match unsafe { libc::poll(&raw mut poll, 1, 0) } {
        0 => Ok(false),
        1.. => Ok(true),
        _ => {
            let error = io::Error::last_os_error();
            // Interrupted: whoever asked will ask again.
            if error.kind() == io::ErrorKind::Interrupted { Ok(false) } else { Err(error) }
        }
    }
}

/// Whether reads and writes of the open file description never wait.
pub(super) fn is_nonblocking(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: F_GETFL takes no argument and touches no memory.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 { Err(io::Error::last_os_error()) } else { Ok(flags & libc::O_NONBLOCK != 0) }
}
