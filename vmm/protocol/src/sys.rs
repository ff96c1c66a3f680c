//! The few system calls behind [`crate::ControlSocket`]; all `unsafe` of this crate is here.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// One received packet.
pub(crate) struct Received {
    /// Bytes written to the buffer.
    pub(crate) len: usize,
    /// Descriptors that came along, already owned.
    pub(crate) fds: Vec<OwnedFd>,
    /// Whether the packet or its descriptors did not fit.
    pub(crate) truncated: bool,
}

/// Makes a connected pair of close-on-exec packet sockets.
pub(crate) fn seqpacket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds: [RawFd; 2] = [-1; 2];
    // SAFETY: `fds` has room for the two descriptors the call writes.
    let ret = unsafe {
        libc::socketpair(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC,
            0,
            fds.as_mut_ptr(),
        )
    };
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the descriptor is open and owned by nobody else.
    let first = unsafe { OwnedFd::from_raw_fd(fds[0]) };
    // SAFETY: as above.
    let second = unsafe { OwnedFd::from_raw_fd(fds[1]) };
    Ok((first, second))
}

/// Bytes of ancillary space for `count` descriptors.
fn control_space(count: usize) -> io::Result<usize> {
    let bytes = u32::try_from(count.saturating_mul(size_of::<RawFd>()))
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: a pure computation.
    let space = unsafe { libc::CMSG_SPACE(bytes) };
    usize::try_from(space).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// Ancillary buffer of `space` bytes with the alignment of `cmsghdr`.
fn control_buffer(space: usize) -> Vec<libc::cmsghdr> {
    // SAFETY: all-zero bytes are a valid `cmsghdr`, which is plain data.
    let zero = unsafe { zeroed::<libc::cmsghdr>() };
    vec![zero; space.div_ceil(size_of::<libc::cmsghdr>())]
}

/// An empty message header.
fn empty_header() -> libc::msghdr {
    // SAFETY: all-zero bytes are a valid `msghdr` with null pointers and zero lengths.
    unsafe { zeroed::<libc::msghdr>() }
}

/// Sends `bytes` and `fds` as one packet.
pub(crate) fn send_with_fds(socket: RawFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut header = empty_header();
    header.msg_iov = &raw mut iov;
    header.msg_iovlen = 1;
    let space = control_space(fds.len())?;
    let mut control = control_buffer(space);
    if !fds.is_empty() {
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = space;
        put_fds(&header, fds)?;
    }
    loop {
        // SAFETY: `header` points to `iov`, `bytes` and `control`, all alive for the call; the
        // kernel only reads through them.
        let ret = unsafe { libc::sendmsg(socket, &raw const header, libc::MSG_NOSIGNAL) };
        if ret >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Writes one `SCM_RIGHTS` record with `fds` into the header's ancillary buffer.
fn put_fds(header: &libc::msghdr, fds: &[RawFd]) -> io::Result<()> {
    let bytes = u32::try_from(size_of_val(fds))
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the header's ancillary buffer is set and large enough for one record.
    let record = unsafe { libc::CMSG_FIRSTHDR(header) };
    if record.is_null() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // SAFETY: a pure computation.
    let len = unsafe { libc::CMSG_LEN(bytes) };
    let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let head =
        libc::cmsghdr { cmsg_len: len, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS };
    // SAFETY: `record` points into the ancillary buffer, which is aligned for `cmsghdr`.
    unsafe { record.write(head) };
    // SAFETY: `record` is the valid header just written.
    let data = unsafe { libc::CMSG_DATA(record) };
    // SAFETY: the buffer was sized by CMSG_SPACE for exactly these bytes, and does not overlap.
    unsafe { std::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), data, size_of_val(fds)) };
    Ok(())
}

/// Waits for a packet, unless the socket does not wait, and gives its length without taking it;
/// 0 at the end of the connection.
pub(crate) fn next_packet_len(socket: RawFd) -> io::Result<usize> {
    loop {
        let flags = libc::MSG_PEEK | libc::MSG_TRUNC;
        // SAFETY: a buffer of length zero is never written.
        let ret = unsafe { libc::recv(socket, std::ptr::null_mut(), 0, flags) };
        if let Ok(len) = usize::try_from(ret) {
            return Ok(len);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Receives one packet into `buffer`, with at most `max_fds` descriptors.
pub(crate) fn receive_with_fds(
    socket: RawFd,
    buffer: &mut [u8],
    max_fds: usize,
) -> io::Result<Received> {
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let space = control_space(max_fds)?;
    let mut control = control_buffer(space);
    let mut header = empty_header();
    header.msg_iov = &raw mut iov;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = space;
    let len = loop {
        // SAFETY: `header` points to `iov`, `buffer` and `control`, all alive and writable.
        let ret = unsafe { libc::recvmsg(socket, &raw mut header, libc::MSG_CMSG_CLOEXEC) };
        if let Ok(len) = usize::try_from(ret) {
            break len;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    };
    let truncated = header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    Ok(Received { len, fds: take_fds(&header), truncated })
}

/// Takes ownership of every descriptor in the header's ancillary buffer.
fn take_fds(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel filled the ancillary buffer and set its length.
    let mut record = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !record.is_null() {
        // SAFETY: a non-null record lies whole and aligned inside the ancillary buffer.
        let head = unsafe { record.read() };
        if head.cmsg_level == libc::SOL_SOCKET && head.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: `record` is valid as above.
            let data = unsafe { libc::CMSG_DATA(record) };
            let offset = (data as usize).saturating_sub(record as usize);
            let count = head.cmsg_len.saturating_sub(offset) / size_of::<RawFd>();
            for index in 0..count {
                // SAFETY: `index` is inside the record's data, as its length says; the data
                // need not be aligned for `RawFd`.
                let at = unsafe { data.cast::<RawFd>().add(index) };
                // SAFETY: as above.
                let fd = unsafe { at.read_unaligned() };
                // SAFETY: the kernel installed this descriptor for us; nobody else owns it.
                fds.push(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
        // SAFETY: `header` and `record` are as the kernel left them.
        record = unsafe { libc::CMSG_NXTHDR(header, record) };
    }
    fds
}
