//! Descriptors and reading into uninitialised memory.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd, RawFd};

use hyper::rt::ReadBufCursor;
use tokio::io::unix::AsyncFd;

/// Takes over a descriptor that a system call has just returned.
pub(crate) fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: callers pass the fresh result of accept4, which nothing else owns.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Receives what a socket has into the free part of `cursor`; the bytes received, 0 at the end.
///
/// # Errors
/// Those of recv(2).
pub(crate) fn receive(socket: &impl AsRawFd, cursor: &mut ReadBufCursor<'_>) -> io::Result<usize> {
    // SAFETY: the slice is only written to, by recv below, never de-initialised.
    let free = unsafe { cursor.as_mut() };
    let (start, len) = (free.as_mut_ptr().cast::<libc::c_void>(), free.len());
    // SAFETY: start and len describe the writable slice above.
    let received = unsafe { libc::recv(socket.as_raw_fd(), start, len, 0) };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: recv has initialised this many bytes of the slice.
    unsafe { cursor.advance(received) };
    Ok(received)
}

/// Bytes that wait in a pipe.
///
/// # Errors
/// Those of ioctl(2).
pub(crate) fn pending_bytes(pipe: &impl AsRawFd) -> io::Result<usize> {
    let mut pending: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int to where the pointer points, which is `pending`.
    let result = unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut pending) };
    nix::errno::Errno::result(result)?;
    Ok(usize::try_from(pending).unwrap_or(0))
}

/// Lets the runtime watch a descriptor.
///
/// # Errors
/// When it cannot be watched; regular files cannot.
pub(crate) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd always yields the same descriptor and keeps it open until it is dropped,
    // which AsyncFd does only after it has stopped watching.
    let watched = unsafe { AsyncFd::register(fd) };
    watched.map_err(io::Error::from)
}
