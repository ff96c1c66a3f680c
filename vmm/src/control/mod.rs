//! The protocol server: the one loop of the process's main thread.
//!
//! It waits for requests on the control socket, for what the guest reports, for signals that ask
//! the process to end, and for the console's host side. Whatever ends the machine, the same few
//! lines take it apart and tell the manager why.

mod managers;

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use coppice_vmm_protocol::{
    ErrorBody, ErrorKind, Event, EventBody, ExitReason, Op, Reply, Request, ResultBody,
    SocketError, VmState,
};
use thiserror::Error;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

pub use self::managers::Manager;
use self::managers::{ConnectionId, Managers};
use crate::sys::jail::{self, JailError, Role};
use crate::sys::privileges;
use crate::sys::process::{parent_id, set_parent_death_signal};
use crate::sys::signal::{SignalFd, install_kick_handler, survive_file_limit};
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
    /// The process cannot be confined.
    #[error("the process cannot be confined")]
    Confine(#[from] JailError),
    /// The loop cannot wait for events.
    #[error("the machine's events cannot be waited for")]
    Wait(#[source] io::Error),
    /// The manager does not take its answers, or its packets break the protocol.
    #[error("the control connection broke")]
    Control(#[source] SocketError),
}

/// What an event is about. From [`FIRST_CONNECTION`] on, the number is a connection's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum Token {
    Listener,
    Guest,
    Signal,
    Console,
    Written,
}

const FIRST_CONNECTION: ConnectionId = 16;

struct Server {
    managers: Managers,
    epoll: Epoll,
    signals: SignalFd,
    lifecycle: Lifecycle,
    parent: u32,
    /// Descriptors that are watched only at times.
    watched: [(Token, Option<RawFd>); 3],
    /// Who asked for the checkpoint under way, and with which request; the manager that may still
    /// commit it.
    asker: Option<(ConnectionId, u64)>,
    /// Whether this thread took its role, which makes no virtual machine.
    confined: bool,
}

/// Serves one machine until it ends, and says why it did. `parent` is the process ID of the
/// process that started this one, as seen before anything else was done.
///
/// Managers are told with the last packet if they still listen. When this returns, the machine is
/// gone.
///
/// # Errors
/// [`ServeError`] when the process, not the machine, cannot go on; the machine is gone then too.
pub fn serve(manager: Manager, parent: u32) -> Result<ExitReason, ServeError> {
    let mut server = Server::new(manager, parent)?;
    confine()?;
    let result = server.run();
    server.lifecycle.end();
    let reason = match &result {
        Ok(reason) => reason.clone(),
        Err(error) => ExitReason::Failed { message: crate::vm::one_line(error) },
    };
    tracing::info!(?reason, "the machine ended");
    if reason == ExitReason::Panic {
        server.managers.tell_all(&Event { event: EventBody::Panicked {} });
    }
    server.managers.tell_all(&Event { event: EventBody::Exited { reason } });
    result
}

/// Gives up all that is not needed from here on, before the first word of anybody is heard.
fn confine() -> Result<(), ServeError> {
    privileges::give_up()
        .map_err(|source| ServeError::Setup { step: "give up its privileges", source })?;
    Ok(jail::confine_process()?)
}

impl Server {
    fn new(manager: Manager, parent: u32) -> Result<Self, ServeError> {
        let setup = |step| move |source| ServeError::Setup { step, source };
        let managers = Managers::new(manager, FIRST_CONNECTION)
            .map_err(setup("prepare its control socket"))?;
        let signals = SignalFd::new(&[libc::SIGTERM, libc::SIGINT, PARENT_SIGNAL])
            .map_err(setup("receive signals"))?;
        if managers.is_attached() {
            set_parent_death_signal(PARENT_SIGNAL).map_err(setup("follow its parent"))?;
        }
        install_kick_handler().map_err(setup("handle the vCPU signal"))?;
        survive_file_limit().map_err(setup("handle the signal for large files"))?;
        let lifecycle = Lifecycle::new().map_err(setup("make its events"))?;
        let epoll = Epoll::new().map_err(setup("wait for events"))?;
        let (asker, confined) = (None, false);
        let watched = [(Token::Listener, None), (Token::Console, None), (Token::Written, None)];
        let mut server =
            Self { managers, epoll, signals, lifecycle, parent, watched, asker, confined };
        let connections: Vec<_> = server.managers.iter().collect();
        let fixed = [
            (Token::Guest as u64, server.lifecycle.guest_fd()),
            (Token::Signal as u64, server.signals.as_raw_fd()),
        ];
        for (token, fd) in fixed.into_iter().chain(connections) {
            server.watch(fd, token).map_err(setup("wait for events"))?;
        }
        server.follow().map_err(setup("wait for events"))?;
        Ok(server)
    }

    fn watch(&self, fd: RawFd, token: u64) -> io::Result<()> {
        self.epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, token))
    }

    fn run(&mut self) -> Result<ExitReason, ServeError> {
        if self.managers.is_attached() && self.orphaned() {
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
                if let Some(reason) = self.on_event(event.data())? {
                    return Ok(reason);
                }
                // At once: a descriptor that was closed may come back as another one.
                self.follow().map_err(ServeError::Wait)?;
            }
        }
    }

    fn on_event(&mut self, token: u64) -> Result<Option<ExitReason>, ServeError> {
        if self.lifecycle.state() == VmState::Running {
            // Not at once when it was started: a guest's first steps are waited for, and the kernel
            // interrupts all processors for a new filter.
            self.take_role();
        }
        const LISTENER: u64 = Token::Listener as u64;
        const GUEST: u64 = Token::Guest as u64;
        const SIGNAL: u64 = Token::Signal as u64;
        const CONSOLE: u64 = Token::Console as u64;
        const WRITTEN: u64 = Token::Written as u64;
        match token {
            LISTENER => {
                if let Some((id, fd)) = self.managers.accept().map_err(ServeError::Wait)? {
                    self.watch(fd, id).map_err(ServeError::Wait)?;
                }
            }
            GUEST => return Ok(self.lifecycle.guest_end()),
            SIGNAL => return self.on_signal(),
            CONSOLE => self.lifecycle.console_event(),
            WRITTEN => self.on_written()?,
            connection => return self.on_request(connection),
        }
        Ok(None)
    }

    /// Confines this thread to what it needs from now on: nothing makes a virtual machine any more.
    fn take_role(&mut self) {
        if !self.confined {
            jail::confine(Role::Control);
            self.confined = true;
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
            let of_parent = signal == PARENT_SIGNAL;
            if !of_parent || (self.managers.is_attached() && self.orphaned()) {
                tracing::info!(signal, "asked to end by a signal");
                return Ok(Some(ExitReason::Stopped));
            }
        }
        Ok(None)
    }

    /// The checkpoint under way is written, or is not going to be.
    fn on_written(&mut self) -> Result<(), ServeError> {
        let Some(result) = self.lifecycle.written() else { return Ok(()) };
        match self.asker {
            Some((connection, id)) => self.answer(connection, id, result),
            None => Ok(()),
        }
    }

    /// Takes one request and answers it.
    fn on_request(&mut self, connection: ConnectionId) -> Result<Option<ExitReason>, ServeError> {
        let Some(socket) = self.managers.get(connection) else { return Ok(None) };
        let (packet, fds) = match socket.receive::<serde_json::Value>() {
            Ok(received) => received,
            Err(SocketError::Closed) => return Ok(self.on_close(connection)),
            Err(SocketError::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(SocketError::Json(error)) => {
                self.answer(connection, 0, bad_request(&error))?;
                return Ok(None);
            }
            Err(error) if self.managers.is_attached() => return Err(ServeError::Control(error)),
            Err(error) => {
                tracing::warn!(%error, "a manager broke the protocol");
                return Ok(self.on_close(connection));
            }
        };
        let id = packet.get("id").and_then(serde_json::Value::as_u64).unwrap_or(0);
        let request = match serde_json::from_value::<Request>(packet) {
            Ok(request) => request,
            Err(error) => {
                self.answer(connection, id, bad_request(&error))?;
                return Ok(None);
            }
        };
        let stop = matches!(request.op, Op::Stop {});
        match self.lifecycle.request(request.op, fds) {
            Some(result) => {
                if self.lifecycle.state() == VmState::Prepared {
                    // A clone that comes is waited for, as are its first steps.
                    self.take_role();
                }
                self.answer(connection, id, result)?;
            }
            None => self.asker = Some((connection, id)),
        }
        Ok(stop.then_some(ExitReason::Stopped))
    }

    /// A manager is gone, orderly or not.
    fn on_close(&mut self, connection: ConnectionId) -> Option<ExitReason> {
        if self.managers.is_attached() {
            return Some(ExitReason::Stopped);
        }
        self.managers.close(connection);
        // Nobody is left to make something of a machine that never ran.
        let unused = matches!(self.lifecycle.state(), VmState::Prepared | VmState::Created);
        if unused && self.managers.iter().next().is_none() {
            return Some(ExitReason::Stopped);
        }
        if self.asker.is_some_and(|(asker, _)| asker == connection) {
            self.asker = None;
            self.lifecycle.abandon();
        }
        None
    }

    fn answer(
        &self,
        connection: ConnectionId,
        id: u64,
        result: ResultBody,
    ) -> Result<(), ServeError> {
        match self.managers.answer(connection, &Reply { id, result }) {
            Err(error) if self.managers.is_attached() => Err(ServeError::Control(error)),
            Err(error) => {
                tracing::warn!(%error, "a manager does not take its answers");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Watches what is of interest now: the listener while there is room, the console while the
    /// guest runs, the checkpoint while one is written.
    fn follow(&mut self) -> io::Result<()> {
        let running = self.lifecycle.state() == VmState::Running;
        let wanted = [
            self.managers.listener(),
            self.lifecycle.console_fd().filter(|_| running),
            self.lifecycle.writing_fd(),
        ];
        for ((token, watched), wanted) in self.watched.iter_mut().zip(wanted) {
            if *watched == wanted {
                continue;
            }
            if let Some(fd) = *watched {
                // A descriptor that was closed is not watched any more by itself.
                let _ = self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
            }
            if let Some(fd) = wanted {
                let event = EpollEvent::new(EventSet::IN, *token as u64);
                self.epoll.ctl(ControlOperation::Add, fd, event)?;
            }
            *watched = wanted;
        }
        Ok(())
    }
}

fn bad_request(error: &serde_json::Error) -> ResultBody {
    let message = format!("the request could not be understood: {error}");
    ResultBody::Error(ErrorBody { kind: ErrorKind::BadRequest, message })
}
