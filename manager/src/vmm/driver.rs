//! The task that owns a VMM process and its control socket.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::time::Duration;

use coppice_vmm_protocol::{
    ControlSocket, EventBody, ExitReason, Incoming, Op, Request, ResultBody, SocketError,
};
use tokio::io::AsyncReadExt;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, ChildStderr};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::{End, Error, borrowed};
use crate::sys;

/// How long a VMM whose socket is closed may take to end before it is killed.
const EXIT_GRACE: Duration = Duration::from_secs(5);
/// How long a VMM may take to end after it was asked to stop, before its socket is closed.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How much of the end of the VMM's standard error is kept.
const STDERR_TAIL: usize = 4096;

/// What the handle asks of the task.
#[derive(Debug)]
pub(super) enum Command {
    /// Pass a request on.
    Request { op: Op, fds: Vec<OwnedFd>, reply: oneshot::Sender<ResultBody> },
    /// Pass the wish to stop on, and see that it is met.
    Stop { reply: oneshot::Sender<ResultBody> },
}

/// What ties the process to this one.
pub(super) enum Tie {
    /// It is a child that ends with its handle.
    Owned(Child),
    /// It is a child that goes on without us.
    Detached(Child),
    /// Somebody else started it.
    Foreign,
}

/// The process, its socket, and the requests that wait for an answer.
pub(super) struct Driver {
    tie: Tie,
    stderr: Option<ChildStderr>,
    link: Link,
    commands: mpsc::Receiver<Command>,
    reason: Option<ExitReason>,
    panicked: bool,
}

struct Link {
    socket: AsyncFd<ControlSocket>,
    next_id: u64,
    pending: HashMap<u64, oneshot::Sender<ResultBody>>,
}

impl Driver {
    pub(super) fn new(
        mut tie: Tie,
        socket: ControlSocket,
        commands: mpsc::Receiver<Command>,
    ) -> Result<Self, Error> {
        let socket = sys::watch(socket).map_err(Error::Watch)?;
        let stderr = match &mut tie {
            Tie::Owned(child) => child.stderr.take(),
            Tie::Detached(_) | Tie::Foreign => None,
        };
        let link = Link { socket, next_id: 1, pending: HashMap::new() };
        Ok(Self { tie, stderr, link, commands, reason: None, panicked: false })
    }

    /// Serves until the VMM closes the socket or the handle is gone, then reaps the process if it
    /// is ours.
    pub(super) async fn run(mut self) -> End {
        let stderr = self.stderr.take().map(|pipe| tokio::spawn(tail_of(pipe)));
        let closed_by = self.serve().await;
        let Self { tie, link, commands, reason, panicked, .. } = self;
        // Closing the socket is the order to end for an owned one; requests without an answer fail
        // here too.
        drop(link);
        drop(commands);
        let status = match (tie, closed_by) {
            (Tie::Owned(child), _) | (Tie::Detached(child), Closed::ByVmm) => reap(child).await,
            (Tie::Detached(_), Closed::ByUs) | (Tie::Foreign, _) => None,
        };
        let stderr = match stderr {
            Some(task) => task.await.unwrap_or_default(),
            None => String::new(),
        };
        End { reason, panicked, status, stderr }
    }

    async fn serve(&mut self) -> Closed {
        let stop_due = tokio::time::sleep(Duration::MAX);
        tokio::pin!(stop_due);
        loop {
            let incoming = tokio::select! {
                command = self.commands.recv() => {
                    let sent = match command {
                        None => return Closed::ByUs,
                        Some(Command::Request { op, fds, reply }) => {
                            self.link.send(op, &fds, reply).await
                        }
                        Some(Command::Stop { reply }) => {
                            stop_due.as_mut().reset(tokio::time::Instant::now() + STOP_GRACE);
                            self.link.send(Op::Stop {}, &[], reply).await
                        }
                    };
                    match sent {
                        Ok(()) => continue,
                        // What the VMM said last may still be in the socket: read to its end.
                        Err(SocketError::Closed) => self.link.receive().await,
                        Err(_) => return Closed::ByVmm,
                    }
                }
                incoming = self.link.receive() => incoming,
                () = &mut stop_due => return Closed::ByVmm,
            };
            match incoming {
                Ok(Incoming::Reply(reply)) => self.link.answer(reply.id, reply.result),
                Ok(Incoming::Event(event)) => self.note(event.event),
                Err(_) => return Closed::ByVmm,
            }
        }
    }

    fn note(&mut self, event: EventBody) {
        match event {
            EventBody::Exited { reason } => self.reason = Some(reason),
            EventBody::Panicked {} => self.panicked = true,
        }
    }
}

/// Who ended the conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Closed {
    /// The handle is gone.
    ByUs,
    /// The VMM closed its end, broke the protocol, or did not stop when it was asked to.
    ByVmm,
}

/// Waits for a process that has no reason to go on, and kills it when it does.
async fn reap(mut child: Child) -> Option<ExitStatus> {
    match timeout(EXIT_GRACE, child.wait()).await {
        Ok(status) => status.ok(),
        Err(_) => {
            let _ = child.start_kill();
            child.wait().await.ok()
        }
    }
}

impl Link {
    async fn send(
        &mut self,
        op: Op,
        fds: &[OwnedFd],
        reply: oneshot::Sender<ResultBody>,
    ) -> Result<(), SocketError> {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let request = Request { id, op };
        loop {
            match self.socket.get_ref().send(&request, &borrowed(fds)) {
                Ok(()) => break,
                Err(SocketError::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => {
                    let mut ready = self.socket.writable().await.map_err(SocketError::Io)?;
                    ready.clear_ready();
                }
                Err(e) => return Err(e),
            }
        }
        self.pending.insert(id, reply);
        Ok(())
    }

    async fn receive(&mut self) -> Result<Incoming, SocketError> {
        loop {
            let mut ready = self.socket.readable_mut().await.map_err(SocketError::Io)?;
            match ready.get_inner_mut().receive::<Incoming>() {
                Ok((incoming, _no_descriptors)) => return Ok(incoming),
                Err(SocketError::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => {
                    ready.clear_ready();
                }
                Err(e) => return Err(e),
            }
        }
    }

    fn answer(&mut self, id: u64, result: ResultBody) {
        if let Some(reply) = self.pending.remove(&id) {
            // The asker may have given up.
            let _ = reply.send(result);
        }
    }
}

/// Reads a pipe to its end and keeps the last of it.
async fn tail_of(mut pipe: ChildStderr) -> String {
    let mut tail = Vec::new();
    let mut chunk = [0u8; 1024];
    while let Ok(count @ 1..) = pipe.read(&mut chunk).await {
        tail.extend_from_slice(chunk.get(..count).unwrap_or_default());
        tail.drain(..tail.len().saturating_sub(STDERR_TAIL));
    }
    String::from_utf8_lossy(&tail).trim_end().to_owned()
}
