//! Many streams between Unix sockets and the guest's queues.
//!
//! The muxer owns the sockets and one [`Connection`] for each. After every input it settles the
//! connection concerned: the socket is shut down, watched or closed, deadlines start or stop, and
//! a connection with something for the guest joins the line in which each waits for its turn at
//! the next receive buffer.
//!
//! Sockets are watched edge-triggered: what epoll said is remembered until a call would block.
//! So a connection that must not read now (no credit, no receive buffer) costs no wake-ups, and
//! no system calls to say so.

mod command;
mod deadlines;
mod guest;
mod host;

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::Limits;
use super::connection::{Connection, Wait};
use super::packet::Header;
use deadlines::Deadlines;

/// RSTs for connections that are not ours, kept until the guest gives receive buffers. When they
/// fill up the guest's packets wait.
const MAX_RESETS: usize = 64;
/// First of the host ports given to host clients; they end at twice this.
const FIRST_HOST_PORT: u32 = 1 << 30;
/// Events taken per call; more stay for the next one.
const EVENTS: usize = 32;

/// Numbers of the descriptors that are not connections.
const LISTENER: u64 = 0;
const TIMER: u64 = 1;
const RESUME: u64 = 2;
const HOLD: u64 = 3;
const FIRST_CONNECTION: u64 = 16;

/// The two ports of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Ports {
    host: u32,
    guest: u32,
}

/// A host client that has not said what it wants.
struct Client {
    socket: UnixStream,
    deadline: Instant,
}

/// A connection with its socket.
struct Stream {
    connection: Connection,
    ports: Ports,
    /// Gone once the connection has no use for it.
    socket: Option<UnixStream>,
    /// The wait that a deadline bounds.
    wait: Option<(Wait, Instant)>,
    /// epoll tells when the socket can be written.
    watches_writes: bool,
    /// Stands in the line for receive buffers.
    queued: bool,
    /// The guest asked for it.
    by_guest: bool,
}

/// See the module's documentation.
pub(crate) struct Muxer {
    cid: u64,
    listener: UnixListener,
    directory: OwnedFd,
    name: String,
    limits: Limits,
    epoll: Epoll,
    deadlines: Deadlines,
    resume: EventFd,
    clients: HashMap<u64, Client>,
    streams: HashMap<u64, Stream>,
    by_ports: HashMap<Ports, u64>,
    /// Streams with something for the guest, each once.
    ready: VecDeque<u64>,
    resets: VecDeque<Header>,
    by_guest: usize,
    next_id: u64,
    next_port: u32,
    /// A driver is there.
    active: bool,
    /// Nothing goes to the guest before it has seen that its streams are gone.
    hold: Option<Instant>,
}

impl Muxer {
    pub(crate) fn new(
        cid: u64,
        listener: UnixListener,
        directory: OwnedFd,
        name: String,
        limits: Limits,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let epoll = Epoll::new()?;
        let deadlines = Deadlines::new()?;
        let resume = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        for (fd, id) in [
            (listener.as_raw_fd(), LISTENER),
            (deadlines.fd(), TIMER),
            (resume.as_raw_fd(), RESUME),
        ] {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, id))?;
        }
        // A guest that was restored may remember ports of an earlier device, so two devices
        // must not start at the same one.
        let random = u32::try_from(RandomState::new().hash_one(cid) >> 34).unwrap_or_default();
        Ok(Self {
            cid,
            listener,
            directory,
            name,
            limits,
            epoll,
            deadlines,
            resume,
            clients: HashMap::new(),
            streams: HashMap::new(),
            by_ports: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            by_guest: 0,
            next_id: FIRST_CONNECTION,
            next_port: FIRST_HOST_PORT + random,
            active: false,
            hold: None,
        })
    }

    /// A descriptor that is readable when [`Muxer::host_event`] has something to do.
    pub(crate) fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Gives the guest another address; there must be no streams.
    pub(crate) fn set_cid(&mut self, cid: u64) {
        self.cid = cid;
    }

    /// Says whether a driver is there. Without one, host clients are turned away.
    pub(crate) fn set_active(&mut self, active: bool) {
        self.active = active;
    }

    /// Makes [`Muxer::fd`] readable, for work left undone.
    pub(crate) fn resume_later(&self) {
        // A full counter is readable as well.
        let _ = self.resume.write(1);
    }

    /// Closes all streams without a word to the guest; the listener stays.
    pub(crate) fn close_streams(&mut self) {
        let ids: Vec<u64> = self.streams.keys().copied().collect();
        for id in ids {
            self.remove(id);
        }
        self.resets.clear();
    }

    /// Closes host clients that have not said what they want.
    pub(crate) fn close_clients(&mut self) {
        for (id, client) in self.clients.drain() {
            self.deadlines.remove(id, client.deadline);
        }
    }

    /// Keeps packets from the guest until [`Muxer::release`], or until `limit` has passed.
    pub(crate) fn hold(&mut self, limit: Duration) {
        self.release();
        self.hold = Some(self.deadlines.add(HOLD, limit));
    }

    /// Ends [`Muxer::hold`].
    pub(crate) fn release(&mut self) {
        if let Some(deadline) = self.hold.take() {
            self.deadlines.remove(HOLD, deadline);
        }
    }

    /// Whether packets wait, or may wait, for receive buffers.
    pub(crate) fn has_packets(&self) -> bool {
        self.hold.is_none() && !(self.resets.is_empty() && self.ready.is_empty())
    }

    /// Number of connections, those that have not been asked for yet included.
    pub(crate) fn connections(&self) -> usize {
        self.streams.len() + self.clients.len()
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn buffered(&self) -> usize {
        self.streams.values().map(|stream| stream.connection.buffer_capacity()).sum()
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn queued(&self) -> usize {
        self.ready.len()
    }

    fn is_full(&self) -> bool {
        self.connections() >= self.limits.connections
    }

    fn next_id(&mut self) -> u64 {
        let id = self.next_id;
        // 2^64 connections do not happen.
        self.next_id = self.next_id.wrapping_add(1);
        id
    }

    /// Watches a new connection's socket for reads. Hang-ups are always told.
    fn watch(&self, socket: &UnixStream, id: u64) -> io::Result<()> {
        let events = EventSet::IN | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        self.epoll.ctl(ControlOperation::Add, socket.as_raw_fd(), EpollEvent::new(events, id))
    }

    fn insert(
        &mut self,
        id: u64,
        ports: Ports,
        socket: UnixStream,
        connection: Connection,
        by_guest: bool,
    ) {
        let stream = Stream {
            connection,
            ports,
            socket: Some(socket),
            wait: None,
            watches_writes: false,
            queued: false,
            by_guest,
        };
        self.streams.insert(id, stream);
        self.by_ports.insert(ports, id);
        self.by_guest += usize::from(by_guest);
        self.settle(id);
    }

    fn remove(&mut self, id: u64) {
        let Some(stream) = self.streams.remove(&id) else { return };
        self.forget_ports(stream.ports, id);
        self.by_guest -= usize::from(stream.by_guest);
        if let Some((_, deadline)) = stream.wait {
            self.deadlines.remove(id, deadline);
        }
        if stream.queued {
            self.ready.retain(|&other| other != id);
        }
    }

    fn forget_ports(&mut self, ports: Ports, id: u64) {
        // The same ports may have a newer connection.
        if self.by_ports.get(&ports) == Some(&id) {
            self.by_ports.remove(&ports);
        }
    }

    /// Brings socket, deadline and line up to what the connection wants after an input.
    fn settle(&mut self, id: u64) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let connection = &mut stream.connection;
        if connection.needs_host() {
            if let Some(socket) = &stream.socket {
                shut_down(socket, connection.take_shutdown());
                let blocked = connection.is_blocked();
                if blocked != stream.watches_writes {
                    stream.watches_writes = blocked;
                    watch_writes(&self.epoll, socket, id, blocked);
                }
            }
        } else {
            stream.socket = None;
        }
        let wait = connection.wait();
        if wait != stream.wait.map(|(wait, _)| wait) {
            if let Some((_, deadline)) = stream.wait {
                self.deadlines.remove(id, deadline);
            }
            stream.wait = wait.map(|wait| {
                let limit = match wait {
                    Wait::Handshake => self.limits.handshake,
                    Wait::Linger => self.limits.linger,
                };
                (wait, self.deadlines.add(id, limit))
            });
        }
        if connection.wants_to_send() && !stream.queued {
            stream.queued = true;
            self.ready.push_back(id);
        }
        let (ports, known, over) =
            (stream.ports, connection.is_known_to_guest(), connection.is_over());
        if !known {
            self.forget_ports(ports, id);
        }
        if over {
            self.remove(id);
        }
    }
}

/// Shuts down the sides of a socket that `(read, write)` say.
fn shut_down(socket: &UnixStream, (read, write): (bool, bool)) {
    for (wanted, side) in [(read, Shutdown::Read), (write, Shutdown::Write)] {
        if wanted {
            // A peer that is gone already needs no word.
            let _ = socket.shutdown(side);
        }
    }
}

fn watch_writes(epoll: &Epoll, socket: &UnixStream, id: u64, watch: bool) {
    let mut events = EventSet::IN | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
    events.set(EventSet::OUT, watch);
    let event = EpollEvent::new(events, id);
    if let Err(error) = epoll.ctl(ControlOperation::Modify, socket.as_fd().as_raw_fd(), event) {
        tracing::error!(%error, "a vsock connection's socket cannot be watched");
    }
}
