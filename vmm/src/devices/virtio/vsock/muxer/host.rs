//! The host's side: new clients, their command, and what sockets and the timer report.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vmm_sys_util::epoll::{ControlOperation, EpollEvent, EventSet};

use super::super::connection::Connection;
use super::command::{COMMAND_MAX, Command, parse};
use super::{Client, EVENTS, FIRST_HOST_PORT, HOLD, LISTENER, Muxer, Ports, RESUME, Stream, TIMER};
use crate::sys::vsock as sys;

/// Clients accepted per event.
const ACCEPTS: usize = 16;
/// How long the listener rests when the process has no descriptor to spare.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

impl Muxer {
    /// Handles what the descriptors in [`Muxer::fd`] report, a bounded number per call.
    pub(crate) fn host_event(&mut self) {
        let mut events = [EpollEvent::default(); EVENTS];
        let count = match self.epoll.wait(0, &mut events) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
            Err(error) => {
                tracing::error!(%error, "vsock sockets cannot be waited for");
                return;
            }
        };
        for event in events.iter().take(count) {
            match event.data() {
                LISTENER => self.accept(),
                TIMER => self.expire(),
                RESUME => {
                    // The device goes on with its queues after each call anyway.
                    let _ = self.resume.read();
                }
                id if self.clients.contains_key(&id) => {
                    self.command(id);
                    // The socket may be closed already, behind a command that is well formed.
                    self.socket_event(id, event.event_set());
                }
                id => self.socket_event(id, event.event_set()),
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => {
                        tracing::warn!(%error, "the vsock socket cannot accept a connection");
                        self.listen(false);
                        self.deadlines.add(LISTENER, ACCEPT_PAUSE);
                        return;
                    }
                },
            };
            if self.is_full() {
                let limit = self.limits.connections;
                tracing::warn!("a vsock client is refused: {limit} connections exist");
                continue;
            }
            let id = self.next_id();
            if let Err(error) = self.watch(&socket, id) {
                tracing::warn!(%error, "a vsock client cannot be watched");
                continue;
            }
            let deadline = self.deadlines.add(id, self.limits.command);
            self.clients.insert(id, Client { socket, deadline });
        }
    }

    fn listen(&self, on: bool) {
        let operation = if on { ControlOperation::Add } else { ControlOperation::Delete };
        let event = EpollEvent::new(EventSet::IN, LISTENER);
        if let Err(error) = self.epoll.ctl(operation, self.listener.as_raw_fd(), event) {
            tracing::error!(%error, "the vsock socket cannot be watched");
        }
    }

    /// Handles deadlines that have passed.
    fn expire(&mut self) {
        while let Some(id) = self.deadlines.take_due() {
            if id == LISTENER {
                self.listen(true);
            } else if id == HOLD {
                self.hold = None;
            } else if self.clients.remove(&id).is_none()
                && let Some(stream) = self.streams.get_mut(&id)
            {
                stream.connection.reset();
                self.settle(id);
            }
        }
        self.deadlines.arm(true);
    }

    /// Reads the command of a client, once all of it is there, and not a byte more.
    fn command(&mut self, id: u64) {
        let Some(client) = self.clients.get(&id) else { return };
        let mut line = [0; COMMAND_MAX];
        let parsed = match sys::receive(client.socket.as_fd(), &mut line, true) {
            Ok(0) => Command::Invalid,
            Ok(count) => parse(&line[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Command::Incomplete,
            Err(_) => Command::Invalid,
        };
        if parsed == Command::Incomplete {
            return;
        }
        let Some(client) = self.clients.remove(&id) else { return };
        self.deadlines.remove(id, client.deadline);
        if let Command::Connect { port, length } = parsed
            && self.active
            && sys::receive(client.socket.as_fd(), &mut line[..length], false).is_ok()
        {
            let ports = Ports { host: self.free_port(port), guest: port };
            self.insert(id, ports, client.socket, Connection::request(), false);
        }
    }

    /// A host port that no connection with the guest's port `guest` has.
    fn free_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.next_port;
            self.next_port = FIRST_HOST_PORT + (host - FIRST_HOST_PORT + 1) % FIRST_HOST_PORT;
            // There are far fewer connections than ports.
            if !self.by_ports.contains_key(&Ports { host, guest }) {
                return host;
            }
        }
    }

    fn socket_event(&mut self, id: u64, events: EventSet) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if events.contains(EventSet::OUT) {
            flush(stream);
        }
        // After a hang-up there may be bytes to read still, and their end is to be found.
        stream.connection.host_readable();
        if events.intersects(EventSet::HANG_UP | EventSet::ERROR) {
            stream.connection.host_stopped_reading();
        }
        self.settle(id);
    }
}

/// Sends buffered bytes until there are none or the socket is full.
fn flush(stream: &mut Stream) {
    let Some(socket) = &stream.socket else { return };
    while stream.connection.is_blocked() {
        match sys::send(socket.as_fd(), stream.connection.buffered()) {
            Ok(count) => stream.connection.drained(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) => stream.connection.host_stopped_reading(),
        }
    }
}

/// Answers the client's command.
pub(super) fn confirm(socket: &UnixStream, port: u32) -> io::Result<()> {
    let line = format!("OK {port}\n");
    // Nothing was sent before, so there is room.
    if sys::send(socket.as_fd(), line.as_bytes())? == line.len() {
        Ok(())
    } else {
        Err(io::Error::from(io::ErrorKind::WriteZero))
    }
}
