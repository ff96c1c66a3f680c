//! The few system calls without a safe interface: the host's vsock sockets. All `unsafe` of this
//! crate is here.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::Duration;

/// Any context ID, for a socket that listens.
pub(crate) const ANY_CID: u32 = libc::VMADDR_CID_ANY;

/// `SO_VM_SOCKETS_CONNECT_TIMEOUT` of `linux/vm_sockets.h`.
const CONNECT_TIMEOUT: libc::c_int = 6;

/// Connects a vsock stream socket to a port of a guest, which may take so long.
pub(crate) fn vsock_connect(cid: u32, port: u32, limit: Duration) -> io::Result<OwnedFd> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let socket = vsock_socket()?;
    let limit = libc::timeval {
        tv_sec: libc::time_t::try_from(limit.as_secs()).map_err(invalid)?,
        tv_usec: libc::suseconds_t::from(limit.subsec_micros()),
    };
    let length = libc::socklen_t::try_from(size_of::<libc::timeval>()).map_err(invalid)?;
    // SAFETY: `limit` has `length` bytes, which the call only reads.
    let ret = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::AF_VSOCK,
            CONNECT_TIMEOUT,
            (&raw const limit).cast(),
            length,
        )
    };
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    let (address, length) = vsock_address(cid, port)?;
    // SAFETY: `address` is a whole address of `length` bytes, which the call only reads.
    let ret = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(socket) }
}

/// Listens for vsock streams to a port of this host.
pub(crate) fn vsock_listen(cid: u32, port: u32) -> io::Result<OwnedFd> {
    let socket = vsock_socket()?;
    let (address, length) = vsock_address(cid, port)?;
    // SAFETY: as for `vsock_connect`.
    let ret = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::net::listen(&socket, 16)?;
    Ok(socket)
}

fn vsock_socket() -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let ret = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the descriptor is open and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(ret) })
}

/// The address with its length.
fn vsock_address(cid: u32, port: u32) -> io::Result<(libc::sockaddr_vm, libc::socklen_t)> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    // SAFETY: all-zero bytes are a valid `sockaddr_vm`, which is plain data.
    let mut address = unsafe { std::mem::zeroed::<libc::sockaddr_vm>() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).map_err(invalid)?;
    address.svm_cid = cid;
    address.svm_port = port;
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_vm>()).map_err(invalid)?;
    Ok((address, length))
}
