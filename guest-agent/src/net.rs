//! Listeners and streams over vsock, TCP and Unix sockets.
//!
//! In a guest the agent listens on vsock and takes only the host as a peer: a process in the guest
//! must not gain root by asking the agent. TCP and Unix sockets serve tests on a host.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, AddressFamily, Backlog, MsgFlags, SockFlag, SockType, VsockAddr};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::sys;

/// Peers waiting to be accepted; a burst beyond it is refused by the kernel.
const BACKLOG: i32 = 128;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A vsock port, for the host only.
    Vsock(u32),
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix socket; the path must not exist.
    Unix(PathBuf),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vsock(port) => write!(f, "vsock:{port}"),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// An endpoint's text is none of `vsock:PORT`, `tcp:ADDRESS:PORT` and `unix:PATH`.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not an endpoint: give vsock:PORT, tcp:ADDRESS:PORT or unix:PATH")]
pub struct EndpointError(String);

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || EndpointError(text.to_owned());
        let (kind, value) = text.split_once(':').ok_or_else(error)?;
        match kind {
            "vsock" => value.parse().map(Self::Vsock).map_err(|_| error()),
            "tcp" => value.parse().map(Self::Tcp).map_err(|_| error()),
            "unix" if !value.is_empty() => Ok(Self::Unix(value.into())),
            _ => Err(error()),
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: AsyncFd<OwnedFd>,
    host_only: bool,
}

impl Listener {
    /// Listens on `endpoint`. Needs a runtime.
    pub(crate) fn bind(endpoint: &Endpoint) -> io::Result<Self> {
        let (socket, host_only): (OwnedFd, bool) = match endpoint {
            Endpoint::Vsock(port) => (listen_vsock(*port)?, true),
            Endpoint::Tcp(address) => {
                let listener = std::net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                (listener.into(), false)
            }
            Endpoint::Unix(path) => {
                let listener = std::os::unix::net::UnixListener::bind(path)?;
                listener.set_nonblocking(true)?;
                (listener.into(), false)
            }
        };
        Ok(Self { socket: sys::watch(socket)?, host_only })
    }

    /// The next peer that may talk to the agent.
    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        loop {
            let mut guard = self.socket.readable().await?;
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let accepted =
                guard.try_io(|socket| Ok(sys::own(socket::accept4(socket.as_raw_fd(), flags)?)));
            let Ok(accepted) = accepted else { continue };
            let peer = accepted?;
            if self.host_only && !is_host(&peer) {
                continue;
            }
            return Ok(Stream { socket: sys::watch(peer)? });
        }
    }
}

fn listen_vsock(port: u32) -> io::Result<OwnedFd> {
    let socket = vsock_socket()?;
    socket::bind(socket.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_ANY, port))?;
    socket::listen(&socket, Backlog::new(BACKLOG)?)?;
    Ok(socket)
}

/// Whether vsock leads to a host. Without a driver for it the kernel lets one listen all the same,
/// and nobody would ever connect.
pub(crate) fn has_host() -> bool {
    match sys::local_cid() {
        Ok(cid) => cid != libc::VMADDR_CID_ANY && cid != libc::VMADDR_CID_LOCAL,
        // Not knowing is no reason to give up.
        Err(_) => true,
    }
}

fn vsock_socket() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    Ok(socket::socket(AddressFamily::Vsock, SockType::Stream, flags, None)?)
}

fn is_host(peer: &OwnedFd) -> bool {
    socket::getpeername::<VsockAddr>(peer.as_raw_fd())
        .is_ok_and(|address| address.cid() == libc::VMADDR_CID_HOST)
}

/// Connects to `endpoint` and writes `line`. A vsock port is one of the host.
pub(crate) async fn tell_host(endpoint: &Endpoint, line: &[u8]) -> io::Result<()> {
    let socket = match endpoint {
        Endpoint::Vsock(port) => connect_vsock(*port).await?,
        Endpoint::Tcp(address) => sys::watch(std::net::TcpStream::connect(address)?.into())?,
        Endpoint::Unix(path) => sys::watch(std::os::unix::net::UnixStream::connect(path)?.into())?,
    };
    let mut rest = line;
    while !rest.is_empty() {
        let mut guard = socket.writable().await?;
        if let Ok(sent) = guard.try_io(|socket| send(socket, rest)) {
            rest = rest.get(sent?..).unwrap_or_default();
        }
    }
    Ok(())
}

async fn connect_vsock(port: u32) -> io::Result<AsyncFd<OwnedFd>> {
    let socket = vsock_socket()?;
    let address = VsockAddr::new(libc::VMADDR_CID_HOST, port);
    let decided = match socket::connect(socket.as_raw_fd(), &address) {
        Ok(()) => true,
        Err(nix::errno::Errno::EINPROGRESS) => false,
        Err(error) => return Err(error.into()),
    };
    // Watched only now: a socket that connects to nothing counts as writable.
    let socket = sys::watch(socket)?;
    if !decided {
        // Writable means decided: connected, or refused with the reason in SO_ERROR.
        socket.writable().await?.retain_ready();
    }
    match socket::getsockopt(socket.get_ref(), socket::sockopt::SocketError)? {
        0 => Ok(socket),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

fn send(socket: &AsyncFd<OwnedFd>, bytes: &[u8]) -> io::Result<usize> {
    Ok(socket::send(socket.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL)?)
}

/// A connection, in the forms hyper and tokio read and write.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: AsyncFd<OwnedFd>,
}

impl Stream {
    /// Lets somebody wait for the peer to leave.
    pub(crate) fn departure(&self) -> io::Result<Departure> {
        // A descriptor of its own, since readiness that one waiter uses up is lost for another.
        Ok(Departure { socket: sys::watch(self.socket.get_ref().try_clone()?)? })
    }
}

/// Tells when the peer of a [`Stream`] is gone: it takes no more bytes, and sends none.
#[derive(Debug)]
pub(crate) struct Departure {
    socket: AsyncFd<OwnedFd>,
}

impl Departure {
    /// Resolves when the peer has left at once. Of one that first stops sending and leaves later,
    /// the next write tells.
    pub(crate) async fn wait(&self) {
        while let Ok(mut guard) = self.socket.readable().await {
            if guard.ready().is_read_closed() {
                if is_gone(self.socket.get_ref()) {
                    return;
                }
                break;
            }
            guard.clear_ready();
        }
        std::future::pending().await
    }
}

/// Whether a peer that sends no more takes no more bytes either. Unix sockets tell it when asked,
/// vsock only a writer.
fn is_gone(socket: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let told = poll(&mut asked, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    told || socket::send(socket.as_raw_fd(), &[], MsgFlags::MSG_NOSIGNAL).is_err()
}

impl Read for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.socket.poll_read_ready(cx))?;
            if let Ok(received) = guard.try_io(|socket| sys::receive(socket.get_ref(), &mut buffer))
            {
                return Poll::Ready(received.map(drop));
            }
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.socket.poll_read_ready(cx))?;
            let free = buffer.initialize_unfilled();
            let flags = MsgFlags::empty();
            if let Ok(received) =
                guard.try_io(|socket| Ok(socket::recv(socket.as_raw_fd(), free, flags)?))
            {
                return Poll::Ready(received.map(|len| buffer.advance(len)));
            }
        }
    }
}

/// The same as for hyper.
impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Write::poll_write(self, cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Write::poll_flush(self, cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Write::poll_shutdown(self, cx)
    }
}

impl Write for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.socket.poll_write_ready(cx))?;
            if let Ok(sent) = guard.try_io(|socket| send(socket, bytes)) {
                return Poll::Ready(sent);
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = socket::shutdown(self.socket.as_raw_fd(), socket::Shutdown::Write);
        match result {
            Ok(()) | Err(nix::errno::Errno::ENOTCONN) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }
}
