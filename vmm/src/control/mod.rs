//! The protocol server: the one loop of the process's main thread.
//!
//! It waits for requests on the control socket, for what the guest reports, for signals that ask
//! the process to end, and for the console's host side. Whatever ends the machine, the same few
//! lines take it apart and tell the manager why.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use coppice_vmm_protocol::{
    ControlSocket, ErrorBody, ErrorKind, Event, EventBody, ExitReason, Op, Reply, Request,
    ResultBody, SocketError, VmState,
};
use thiserror::Error;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::sys::fd::set_nonblocking;
use crate::sys::process::{parent_id, set_parent_death_signal};
use crate::sys::signal::{SignalFd, install_kick_handler};
use crate::vm::Lifecycle;

/// Sent to this process when a thread of its parent ends; see [`Server::on_signal`].
const PARENT_SIGNAL: libc::c_int = libc::SIGUSR1;

/// Failures of the server itself, not of a request.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The process cannot be prepared.
    #[error("the process cannot {step}")]
    Setup {
        /// What was to be done.
        step: &'static str,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// The loop cannot wait for events.
    #[error("the machine's events cannot be waited for")]
    Wait(#[source] io::Error),
    /// The manager does not take its answers, or its packets break the protocol.
    #[error("the control connection broke")]
    Control(#[source] SocketError),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum Token {
    Control,
    Guest,
    Signal,
    Console,
}

struct Server {
    socket: ControlSocket,
    epoll: Epoll,
    signals: SignalFd,
    lifecycle: Lifecycle,
    parent: u32,
    /// The console's descriptor while it is watched.
    console: Option<RawFd>,
}

/// Serves one machine until it ends, and says why it did. `parent` is the process ID of the
/// manager, as seen before anything else was done.
///
/// The manager is told with the last packet if it still listens. When this returns, the machine
/// is gone.
///
/// # Errors
/// [`ServeError`] when the process, not the machine, cannot go on; the machine is gone then too.
pub fn serve(socket: OwnedFd, parent: u32) -> Result<ExitReason, ServeError> {
    let mut server = Server::new(socket, parent)?;
    let result = server.run();
    server.lifecycle.end();
    let reason = match &result {
        Ok(reason) => reason.clone(),
        Err(error) => ExitReason::Failed { message: crate::vm::one_line(error) },
    };
    tracing::info!(?reason, "the machine ended");
    if reason == ExitReason::Panic {
        server.tell(EventBody::Panicked {});
    }
    server.tell(EventBody::Exited { reason });
    result
}

impl Server {
    fn new(socket: OwnedFd, parent: u32) -> Result<Self, ServeError> {
        let setup = |step| move |source| ServeError::Setup { step, source };
        set_nonblocking(socket.as_fd()).map_err(setup("prepare its control socket"))?;
        let signals = SignalFd::new(&[libc::SIGTERM, libc::SIGINT, PARENT_SIGNAL])
            .map_err(setup("receive signals"))?;
        set_parent_death_signal(PARENT_SIGNAL).map_err(setup("follow its parent"))?;
        install_kick_handler().map_err(setup("handle the vCPU signal"))?;
        let lifecycle = Lifecycle::new().map_err(setup("make its events"))?;
        let epoll = Epoll::new().map_err(setup("wait for events"))?;
        let server = Self {
            socket: ControlSocket::new(socket),
            epoll,
            signals,
            lifecycle,
            parent,
            console: None,
        };
        let watched = [
            (server.socket.as_raw_fd(), Token::Control),
            (server.lifecycle.guest_fd(), Token::Guest),
            (server.signals.as_raw_fd(), Token::Signal),
        ];
        for (fd, token) in watched {
            server.watch(fd, token).map_err(setup("wait for events"))?;
        }
        Ok(server)
    }

    fn watch(&self, fd: RawFd, token: Token) -> io::Result<()> {
        let event = EpollEvent::new(EventSet::IN, token as u64);
        self.epoll.ctl(ControlOperation::Add, fd, event)
    }

    fn run(&mut self) -> Result<ExitReason, ServeError> {
        if self.orphaned() {
            return Ok(ExitReason::Stopped);
        }
        let mut ready = [EpollEvent::default(); 4];
        loop {
            let count = match self.epoll.wait(-1, &mut ready) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(ServeError::Wait(error)),
            };
            for event in ready.iter().take(count) {
                let token = event.data();
                let end = if token == Token::Control as u64 {
                    self.on_request()?
                } else if token == Token::Guest as u64 {
                    self.lifecycle.guest_end()
                } else if token == Token::Signal as u64 {
                    self.on_signal()?
                } else {
                    self.lifecycle.console_event();
                    None
                };
                if let Some(reason) = end {
                    return Ok(reason);
                }
            }
            self.follow_console()?;
        }
    }

    /// Whether the parent this process was started by is gone.
    fn orphaned(&self) -> bool {
        parent_id() != self.parent
    }

    /// A signal that asks to end, or news of the parent. The latter also comes when only the
    /// thread that started this process ended; then the process goes on, and the signal will
    /// come again when the rest of the parent ends.
    fn on_signal(&mut self) -> Result<Option<ExitReason>, ServeError> {
        while let Some(signal) = self.signals.take().map_err(ServeError::Wait)? {
            if signal != PARENT_SIGNAL || self.orphaned() {
                tracing::info!(signal, "asked to end by a signal");
                return Ok(Some(ExitReason::Stopped));
            }
        }
        Ok(None)
    }

    /// Takes one request and answers it.
    fn on_request(&mut self) -> Result<Option<ExitReason>, ServeError> {
        let (packet, fds) = match self.socket.receive::<serde_json::Value>() {
            Ok(received) => received,
            // The manager is gone, orderly or not.
            Err(SocketError::Closed) => return Ok(Some(ExitReason::Stopped)),
            Err(SocketError::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(SocketError::Json(error)) => {
                self.answer(0, bad_request(&error))?;
                return Ok(None);
            }
            Err(error) => return Err(ServeError::Control(error)),
        };
        let id = packet.get("id").and_then(serde_json::Value::as_u64).unwrap_or(0);
        let request = match serde_json::from_value::<Request>(packet) {
            Ok(request) => request,
            Err(error) => {
                self.answer(id, bad_request(&error))?;
                return Ok(None);
            }
        };
        let stop = matches!(request.op, Op::Stop {});
        let result = self.lifecycle.request(request.op, fds);
        self.answer(id, result)?;
        Ok(stop.then_some(ExitReason::Stopped))
    }

    fn answer(&self, id: u64, result: ResultBody) -> Result<(), ServeError> {
        match self.socket.send(&Reply { id, result }, &[]) {
            // A manager that went away is noticed when its socket is read.
            Ok(()) | Err(SocketError::Closed) => Ok(()),
            Err(error) => Err(ServeError::Control(error)),
        }
    }

    /// Sends an event to a manager that may be gone.
    fn tell(&self, event: EventBody) {
        if let Err(error) = self.socket.send(&Event { event }, &[]) {
            tracing::debug!(%error, "the manager was not told");
        }
    }

    /// Watches the console while the guest runs, and not while it is paused.
    fn follow_console(&mut self) -> Result<(), ServeError> {
        let wanted = match self.lifecycle.state() {
            VmState::Running => self.lifecycle.console_fd(),
            VmState::Empty | VmState::Created | VmState::Paused | VmState::Exited => None,
        };
        match (self.console, wanted) {
            (None, Some(fd)) => self.watch(fd, Token::Console).map_err(ServeError::Wait)?,
            (Some(fd), None) => self
                .epoll
                .ctl(ControlOperation::Delete, fd, EpollEvent::default())
                .map_err(ServeError::Wait)?,
            (None, None) | (Some(_), Some(_)) => {}
        }
        self.console = wanted;
        Ok(())
    }
}

fn bad_request(error: &serde_json::Error) -> ResultBody {
    let message = format!("the request could not be understood: {error}");
    ResultBody::Error(ErrorBody { kind: ErrorKind::BadRequest, message })
}
