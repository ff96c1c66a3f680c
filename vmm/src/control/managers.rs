//! The managers at the other ends of the control connections.
//!
//! A machine has either the one manager it was started by, and ends with it, or a socket that
//! managers connect to, and outlives them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use coppice_vmm_protocol::{ControlSocket, SocketError};

use crate::sys::fd::{accept, set_nonblocking};

/// Number of a connection; never used twice.
pub(super) type ConnectionId = u64;

/// Most connections at a time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 16;

/// Where managers come from.
pub enum Manager {
    /// A connected socket; the machine ends when it closes.
    Connected(OwnedFd),
    /// A listening socket; the machine does not depend on who connects.
    Listening(OwnedFd),
}

/// The open connections.
pub(super) struct Managers {
    listener: Option<OwnedFd>,
    connections: BTreeMap<ConnectionId, ControlSocket>,
    next: ConnectionId,
}

impl Managers {
    /// Connection numbers begin with `first`.
    pub(super) fn new(manager: Manager, first: ConnectionId) -> io::Result<Self> {
        let mut managers = Self { listener: None, connections: BTreeMap::new(), next: first };
        match manager {
            Manager::Connected(socket) => {
                managers.add(socket)?;
            }
            Manager::Listening(socket) => {
                set_nonblocking(socket.as_fd())?;
                managers.listener = Some(socket);
            }
        }
        Ok(managers)
    }

    fn add(&mut self, socket: OwnedFd) -> io::Result<(ConnectionId, RawFd)> {
        set_nonblocking(socket.as_fd())?;
        let (id, fd) = (self.next, socket.as_raw_fd());
        self.connections.insert(id, ControlSocket::new(socket));
        self.next += 1;
        Ok((id, fd))
    }

    /// Whether the machine ends with its manager.
    pub(super) fn is_attached(&self) -> bool {
        self.listener.is_none()
    }

    /// The listening socket, while there is room for connections.
    pub(super) fn listener(&self) -> Option<RawFd> {
        let listener = self.listener.as_ref().map(AsRawFd::as_raw_fd);
        listener.filter(|_| self.connections.len() < MAX_CONNECTIONS)
    }

    /// All connections with their descriptors.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ConnectionId, RawFd)> + '_ {
        self.connections.iter().map(|(id, socket)| (*id, socket.as_raw_fd()))
    }

    /// Takes in one manager that waits; `None` when there is none.
    ///
    /// # Errors
    /// Those of `accept`.
    pub(super) fn accept(&mut self) -> io::Result<Option<(ConnectionId, RawFd)>> {
        let Some(listener) = &self.listener else { return Ok(None) };
        match accept(listener.as_fd()) {
            Ok(socket) => self.add(socket).map(Some),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) fn get(&mut self, id: ConnectionId) -> Option<&mut ControlSocket> {
        self.connections.get_mut(&id)
    }

    /// Closes a connection.
    pub(super) fn close(&mut self, id: ConnectionId) {
        self.connections.remove(&id);
    }

    /// Sends to everybody who still listens.
    pub(super) fn tell_all<T: serde::Serialize>(&self, value: &T) {
        for socket in self.connections.values() {
            if let Err(error) = socket.send(value, &[]) {
                tracing::debug!(%error, "a manager was not told");
            }
        }
    }

    /// Sends one answer; one who went away is noticed when its connection is read.
    ///
    /// # Errors
    /// When the other end does not take its answers.
    pub(super) fn answer<T: serde::Serialize>(
        &self,
        id: ConnectionId,
        value: &T,
    ) -> Result<(), SocketError> {
        match self.connections.get(&id).map(|socket| socket.send(value, &[])) {
            None | Some(Ok(()) | Err(SocketError::Closed)) => Ok(()),
            Some(Err(error)) => Err(error),
        }
    }
}
