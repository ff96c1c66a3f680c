//! Socket calls for the vsock device: data moves between Unix sockets and guest memory without a
//! copy in between, and nothing here ever blocks or raises SIGPIPE.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

/// Most pieces of guest memory moved by one call; further ones are left out.
pub const MAX_SLICES: usize = 32;

const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Sends the bytes of `slices` to `socket` and returns how many it took.
///
/// # Errors
/// The error of sendmsg(2): `WouldBlock` when the socket is full, `BrokenPipe` when the peer does
/// not read any more.
pub fn send_slices<'s, 'm: 's, B: BitmapSlice + 's>(
    socket: BorrowedFd<'_>,
    slices: impl Iterator<Item = &'s VolatileSlice<'m, B>>,
) -> io::Result<usize> {
    let mut guards = [const { None }; MAX_SLICES];
    let mut iov = [EMPTY; MAX_SLICES];
    let mut count = 0;
    for (slice, (guard, entry)) in slices.zip(guards.iter_mut().zip(iov.iter_mut())) {
        let guard = guard.insert(slice.ptr_guard());
        *entry = libc::iovec { iov_base: guard.as_ptr().cast_mut().cast(), iov_len: guard.len() };
        count += 1;
    }
    let message = message(&mut iov, count);
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    retry(|| {
        // SAFETY: the message names `count` entries of `iov`, each of which lies in guest memory
        // that `slices` and `guards` keep mapped during the call. The kernel only reads them.
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) }
    })
}

/// Receives at most `limit` bytes from `socket` into `slices`, marks them dirty and returns their
/// number; zero means that the peer has sent its last byte (or that there was no room).
///
/// # Errors
/// The error of recvmsg(2): `WouldBlock` when nothing is there yet.
pub fn receive_slices<'s, 'm: 's, B: BitmapSlice + 's>(
    socket: BorrowedFd<'_>,
    slices: impl Iterator<Item = &'s VolatileSlice<'m, B>> + Clone,
    limit: usize,
) -> io::Result<usize> {
    let mut guards = [const { None }; MAX_SLICES];
    let mut iov = [EMPTY; MAX_SLICES];
    let mut count = 0;
    let mut room = limit;
    for (slice, (guard, entry)) in slices.clone().zip(guards.iter_mut().zip(iov.iter_mut())) {
        let guard = guard.insert(slice.ptr_guard_mut());
        let len = guard.len().min(room);
        *entry = libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: len };
        room -= len;
        count += 1;
    }
    let mut message = message(&mut iov, count);
    let received = retry(|| {
        // SAFETY: the message names `count` entries of `iov`, each of which lies in guest memory
        // that `slices` and `guards` keep mapped during the call. Guest memory holds plain bytes
        // that change under us at any time anyway.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }
    })?;
    let mut left = received;
    for slice in slices {
        let len = slice.len().min(left);
        slice.bitmap().mark_dirty(0, len);
        left -= len;
    }
    Ok(received)
}

/// Sends `bytes` and returns how many the socket took.
///
/// # Errors
/// As [`send_slices`].
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    retry(|| {
        // SAFETY: pointer and length are those of one live slice.
        unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) }
    })
}

/// Receives into `bytes`; with `peek` the data stays in the socket.
///
/// # Errors
/// As [`receive_slices`].
pub fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8], peek: bool) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | if peek { libc::MSG_PEEK } else { 0 };
    retry(|| {
        // SAFETY: pointer and length are those of one live, writable slice.
        unsafe { libc::recv(socket.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), flags) }
    })
}

/// Connects to the Unix socket at `path` without waiting.
///
/// # Errors
/// `WouldBlock` when the listener's backlog is full, `InvalidInput` when the path does not fit
/// into a socket address, otherwise the error of socket(2) or connect(2).
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let mut address = libc::sockaddr_un {
        sun_family: libc::sa_family_t::try_from(libc::AF_UNIX).unwrap_or_default(),
        sun_path: [0; 108],
    };
    let bytes = path.as_os_str().as_bytes();
    // One byte stays zero and ends the path.
    if bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (target, byte) in address.sun_path.iter_mut().zip(bytes) {
        *target = byte.cast_signed();
    }
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: socket(2) takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = libc::socklen_t::try_from(size_of::<libc::sockaddr_un>())
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the address is a live sockaddr_un of the length given.
    let result = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(UnixStream::from(socket))
}

fn message(iov: &mut [libc::iovec; MAX_SLICES], count: usize) -> libc::msghdr {
    libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: iov.as_mut_ptr(),
        msg_iovlen: count,
        msg_control: std::ptr::null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    }
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(count) = usize::try_from(call()) {
            return Ok(count);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn connecting_to_a_path_that_is_too_long_is_refused() {
        let path = "x".repeat(108);
        let error = connect(Path::new(&path)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_closed_peer_is_an_error_and_not_a_signal() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let error = send(ours.as_fd(), b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn received_bytes_respect_the_limit_and_split_over_slices() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(theirs.as_fd(), b"abcdefgh").unwrap();
        let (mut first, mut second) = ([0u8; 3], [0u8; 5]);
        let slices = [VolatileSlice::from(&mut first[..]), VolatileSlice::from(&mut second[..])];
        assert_eq!(receive_slices(ours.as_fd(), slices.iter(), 5).unwrap(), 5);
        assert_eq!((&first, &second), (b"abc", b"de\0\0\0"));
    }
}
