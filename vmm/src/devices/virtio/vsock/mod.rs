//! virtio-vsock (virtio 1.2 section 5.10) in user space: streams between the guest and Unix
//! sockets of the host.
//!
//! A **host client** connects to the listening Unix socket, writes `CONNECT <port>\n` and reads
//! one line. `OK <host port>\n` means that the guest accepted; everything after it is the stream.
//! End of file (or ECONNRESET, when the client sent more than its command) in place of that line
//! means refusal: nobody listens in the guest, no driver is there, the command is malformed or
//! came later than [`COMMAND_TIMEOUT`], the guest did not answer within [`HANDSHAKE_TIMEOUT`],
//! or there are [`MAX_CONNECTIONS`] connections.
//!
//! A **guest program** that connects to CID 2, port P, reaches the Unix socket `<name>_<P>` in
//! the directory the device was given. If nobody listens there, or the listener's backlog is
//! full, the connection is refused.
//!
//! Each end may shut down either direction by itself, and the other end sees exactly that.
//! Back pressure goes through: a reader that is slow, on either side, stops the writer on the
//! other. The device holds at most 64 KiB for a connection, and nothing while its reader keeps
//! up. A connection that the guest has closed stays until the host reader has taken those bytes
//! or is gone.
//!
//! ```text
//!  guest queues --- device --- muxer --- connection (one per stream, no I/O)
//!                     |          |
//!                   packet     Unix sockets, one epoll descriptor, one timer
//! ```

mod connection;
mod device;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod muxer;
mod packet;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use thiserror::Error;

pub use device::Vsock;

/// Most connections at a time, of both kinds and in all states. One needs one descriptor of the
/// process; when those run out, clients are accepted later.
pub const MAX_CONNECTIONS: usize = 1024;
/// Most of them that the guest may have asked for, so that it cannot keep host clients out.
pub const MAX_GUEST_CONNECTIONS: usize = 768;
/// How long a host client may take for its command. A client costs little while it waits, and an
/// honest one may be slow where machines are emulated.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the guest may take to accept or refuse a connection.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the guest may take to confirm the end of a connection before it gets an RST.
pub const LINGER_TIMEOUT: Duration = Duration::from_secs(10);
/// What bounds a device; tests have smaller ones.
#[derive(Debug, Clone, Copy)]
struct Limits {
    connections: usize,
    guest_connections: usize,
    command: Duration,
    handshake: Duration,
    linger: Duration,
}

const LIMITS: Limits = Limits {
    connections: MAX_CONNECTIONS,
    guest_connections: MAX_GUEST_CONNECTIONS,
    command: COMMAND_TIMEOUT,
    handshake: HANDSHAKE_TIMEOUT,
    linger: LINGER_TIMEOUT,
};

/// Longest name of the device in bytes.
pub const NAME_MAX: usize = 64;

/// What a vsock device is made of.
#[derive(Debug)]
pub struct VsockConfig {
    /// The guest's address, 3 or above and below 2^32 - 1 (section 5.10.4).
    pub cid: u32,
    /// Where host clients connect.
    pub listener: UnixListener,
    /// Directory with the sockets that guest programs connect to.
    pub directory: OwnedFd,
    /// First part of the names of those sockets: a file name of 1 to [`NAME_MAX`] bytes.
    pub name: String,
}

/// Why a vsock device cannot be made.
#[derive(Debug, Error)]
pub enum VsockError {
    /// The address is reserved.
    #[error("{0} cannot be the vsock CID of a guest: choose one from 3 to 4294967294")]
    Cid(u32),
    /// The name is no file name, or too long.
    #[error("{0:?} cannot be the name of a vsock socket: use a file name of 1 to 64 bytes")]
    Name(String),
    /// Epoll, timer or event descriptors cannot be made.
    #[error("descriptors for the vsock device cannot be made; see the limit `ulimit -n`")]
    Descriptors(#[source] io::Error),
}
