//! A packet socket that carries JSON and file descriptors.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;

use crate::sys;

/// Longest packet, in bytes.
pub const MAX_PACKET: usize = 64 * 1024;

/// Most descriptors in one packet; the kernel's limit is 253 (`SCM_MAX_FD`).
pub const MAX_FDS: usize = 250;

/// Failures of the control socket.
#[derive(Debug, Error)]
pub enum SocketError {
    /// The other end is gone.
    #[error("the control socket was closed by the other side")]
    Closed,
    /// A system call failed; `WouldBlock` on a non-blocking socket with nothing to do.
    #[error("the control socket failed")]
    Io(#[source] io::Error),
    /// The packet is longer than [`MAX_PACKET`] or carries more than [`MAX_FDS`] descriptors.
    #[error("a control packet is over the limit of {MAX_PACKET} bytes or {MAX_FDS} descriptors")]
    TooLong,
    /// The packet is not the JSON that was expected.
    #[error("a control packet could not be understood")]
    Json(#[source] serde_json::Error),
}

/// One end of the control connection.
#[derive(Debug)]
pub struct ControlSocket {
    fd: OwnedFd,
}

impl ControlSocket {
    /// Takes over a connected `SOCK_SEQPACKET` Unix socket.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Makes a connected pair; both ends are close-on-exec.
    ///
    /// # Errors
    /// [`SocketError::Io`] when the process is out of descriptors.
    pub fn pair() -> Result<(Self, Self), SocketError> {
        let (a, b) = sys::seqpacket_pair().map_err(SocketError::Io)?;
        Ok((Self::new(a), Self::new(b)))
    }

    /// Sends one value and the descriptors it refers to, in order.
    ///
    /// # Errors
    /// [`SocketError::Closed`] when the peer is gone, [`SocketError::TooLong`] over the limits.
    pub fn send<T: Serialize>(&self, value: &T, fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        let bytes = serde_json::to_vec(value).map_err(SocketError::Json)?;
        if bytes.len() > MAX_PACKET || fds.len() > MAX_FDS {
            return Err(SocketError::TooLong);
        }
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        match sys::send_with_fds(self.fd.as_raw_fd(), &bytes, &raw) {
            Ok(()) => Ok(()),
            Err(e) if is_gone(&e) => Err(SocketError::Closed),
            Err(e) => Err(SocketError::Io(e)),
        }
    }

    /// Receives one value and the descriptors that came with it (all close-on-exec).
    ///
    /// # Errors
    /// [`SocketError::Closed`] at the end of the connection, [`SocketError::Json`] for a packet
    /// that is not a `T` (its descriptors are closed; the connection stays usable).
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<(T, Vec<OwnedFd>), SocketError> {
        let failed = |e| if is_gone(&e) { SocketError::Closed } else { SocketError::Io(e) };
        // Packets are short and rare, so each gets just the room it needs, for just as long.
        let len = sys::next_packet_len(self.fd.as_raw_fd()).map_err(failed)?;
        let mut buffer = vec![0; len.min(MAX_PACKET)];
        let received =
            sys::receive_with_fds(self.fd.as_raw_fd(), &mut buffer, MAX_FDS).map_err(failed)?;
        if received.truncated {
            return Err(SocketError::TooLong);
        }
        if received.len == 0 {
            return Err(SocketError::Closed);
        }
        let bytes = buffer.get(..received.len).ok_or(SocketError::TooLong)?;
        let value = serde_json::from_slice(bytes).map_err(SocketError::Json)?;
        Ok((value, received.fds))
    }

    /// Gives the descriptor back, for example to pass it to a child process.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for ControlSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use proptest::prelude::*;

    use super::*;
    use crate::{Op, Request};

    #[test]
    fn a_request_arrives_with_its_descriptors() {
        let (a, mut b) = ControlSocket::pair().unwrap();
        let zero = File::open("/dev/zero").unwrap();
        let request = Request { id: 7, op: Op::Status {} };
        a.send(&request, &[zero.as_fd(), zero.as_fd()]).unwrap();
        let (got, fds): (Request, _) = b.receive().unwrap();
        assert_eq!(got, request);
        assert_eq!(fds.len(), 2);
        let mut byte = [1u8];
        File::from(fds.into_iter().next().unwrap()).read_exact(&mut byte).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    fn the_end_of_the_peer_is_told_apart_from_errors() {
        let (a, mut b) = ControlSocket::pair().unwrap();
        drop(a);
        assert!(matches!(b.receive::<Request>(), Err(SocketError::Closed)));
        assert!(matches!(
            b.send(&Request { id: 1, op: Op::Stop {} }, &[]),
            Err(SocketError::Closed)
        ));
    }

    #[test]
    fn a_packet_over_the_limit_is_refused_by_the_receiver() {
        let (a, mut b) = ControlSocket::pair().unwrap();
        let long = vec![b' '; MAX_PACKET + 1];
        sys::send_with_fds(a.as_raw_fd(), &long, &[]).unwrap();
        assert!(matches!(b.receive::<Request>(), Err(SocketError::TooLong)));
    }

    #[test]
    fn too_many_descriptors_are_refused_before_sending() {
        let (a, _b) = ControlSocket::pair().unwrap();
        let zero = File::open("/dev/zero").unwrap();
        let fds = vec![zero.as_fd(); MAX_FDS + 1];
        assert!(matches!(
            a.send(&Request { id: 1, op: Op::Stop {} }, &fds),
            Err(SocketError::TooLong)
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_not_a_panic(bytes in proptest::collection::vec(any::<u8>(), 1..512)) {
            let (a, mut b) = ControlSocket::pair().unwrap();
            sys::send_with_fds(a.as_raw_fd(), &bytes, &[]).unwrap();
            let _ = b.receive::<Request>();
        }
    }
}
