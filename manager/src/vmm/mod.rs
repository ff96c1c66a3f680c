//! One `coppice-vmm` process: starting it, asking it, hearing from it, ending it.
//!
//! A background task owns the process and the control socket. [`Vmm`] is the handle to it: when
//! the handle is dropped the task closes the socket, which ends the machine, and reaps the
//! process. The same happens, without the task, when the manager dies: the kernel closes the
//! socket.

mod driver;
mod memory;
mod process;
mod spawn;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use coppice_vmm_protocol::{
    CheckpointInfo, CheckpointSpec, ControlSocket, ErrorBody, ErrorKind, ExitReason, FdIndex,
    MachineSpec, Op, ResultBody, RollbackInfo, RollbackSpec, SocketError, VmStatus,
};
use rustix::process::Signal;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use driver::{Command, Tie};
pub use memory::{MemoryUse, WholeMemory};
pub use process::ProcessId;
pub use spawn::locate;

/// Longest time a VMM may take to answer; reading a large kernel from a cold disk is the slowest.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Failures of a VMM process and of requests to it.
#[derive(Debug, Error)]
pub enum Error {
    /// The program is not there or cannot be started.
    #[error("the VMM program {} cannot be started", path.display())]
    Spawn {
        /// The program.
        path: PathBuf,
        /// What failed.
        #[source]
        source: io::Error,
    },
    /// The VMM's control socket does not take connections.
    #[error("the VMM does not listen")]
    Connect(#[source] io::Error),
    /// The control socket could not be made.
    #[error("the VMM's control socket cannot be set up")]
    Socket(#[source] SocketError),
    /// The process's life cannot be followed.
    #[error("the VMM process cannot be watched")]
    Watch(#[source] io::Error),
    /// The VMM said no.
    #[error("{}", .0.message)]
    Refused(ErrorBody),
    /// The VMM is gone.
    #[error("the VMM ended before it answered{}", stderr_part(.0))]
    Ended(End),
    /// The VMM runs but does not answer.
    #[error("the VMM did not answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// The VMM ended by a failure of its own.
    #[error("{0}")]
    Failed(String),
    /// The answer does not fit the request.
    #[error("the VMM's answer does not fit the request")]
    Mismatch,
    /// The memory figures cannot be read.
    #[error("the VMM's memory use cannot be read")]
    Memory(#[source] io::Error),
}

impl Error {
    /// The class the VMM gave, if it refused.
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Refused(body) => Some(body.kind),
            _ => None,
        }
    }
}

fn stderr_part(end: &End) -> String {
    if end.is_by_filter() {
        return format!(": {FORBIDDEN_CALL}");
    }
    match end.stderr.lines().last() {
        Some(line) => format!(": {line}"),
        None => String::new(),
    }
}

/// What to say of a VMM that [`End::is_by_filter`]. Whoever waits for the process is not told which
/// call it was, but the kernel writes it down.
pub(crate) const FORBIDDEN_CALL: &str = "the kernel killed it for a system call that it may not make; this is a bug or an attack by its \
     guest: see `dmesg | grep type=1326` for the call's number, and report it";

/// How a VMM process ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct End {
    /// What it said; nothing when it died without a word.
    pub reason: Option<ExitReason>,
    /// Whether the guest had announced a panic.
    pub panicked: bool,
    /// How the process ended; nothing when that could not be learned.
    pub status: Option<ExitStatus>,
    /// The last of what it wrote to its standard error.
    pub stderr: String,
}

impl End {
    /// Whether the kernel killed the process for a system call outside its lists.
    pub fn is_by_filter(&self) -> bool {
        self.status.and_then(|status| status.signal()) == Some(Signal::SYS.as_raw())
    }
}

/// Descriptors that travel with a request, and their positions.
#[derive(Debug, Default)]
pub struct Passed {
    fds: Vec<OwnedFd>,
}

impl Passed {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.fds.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.fds.is_empty()
    }

    /// Adds a descriptor and returns the position by which a spec names it.
    ///
    /// # Errors
    /// Never in practice: fails over `u32::MAX` descriptors.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> Result<FdIndex, io::Error> {
        let index = FdIndex::try_from(self.fds.len())
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        self.fds.push(fd.into());
        Ok(index)
    }
}

/// A running `coppice-vmm`. Dropping it ends the machine, unless it was made to outlive us.
#[derive(Debug)]
pub struct Vmm {
    pid: u32,
    commands: mpsc::Sender<Command>,
    end: watch::Receiver<Option<End>>,
}

impl Vmm {
    /// Starts the program at the absolute path `program`: clean environment, its own process
    /// group, nothing passed but the control socket and standard error.
    ///
    /// Must be called in a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// [`Error::Spawn`] when the program cannot be executed.
    pub fn start(program: &Path) -> Result<Self, Error> {
        let (child, socket) = spawn::spawn(program)?;
        let pid = child.id().unwrap_or_default();
        Self::drive(pid, Tie::Owned(child), socket)
    }

    /// Starts the program so that it outlives this process: it listens on a socket at `control`
    /// and writes what it has to say to `log`. The handle is the first to connect; dropping it
    /// leaves the machine alone.
    ///
    /// # Errors
    /// As for [`Self::start`], and when the socket cannot be bound.
    pub fn start_detached(program: &Path, control: &Path, log: File) -> Result<Self, Error> {
        let listener = spawn::listen(control)?;
        let child = spawn::spawn_detached(program, &listener, log)?;
        let pid = child.id().unwrap_or_default();
        // With our copy open, the end of the VMM would not close the socket.
        let socket = spawn::connect(control);
        drop(listener);
        Self::drive(pid, Tie::Detached(child), socket?)
    }

    /// Connects to a VMM with process ID `pid` that listens at `control`. Dropping the handle
    /// leaves the machine alone.
    ///
    /// # Errors
    /// [`Error::Connect`] when it is gone.
    pub fn connect(pid: u32, control: &Path) -> Result<Self, Error> {
        Self::drive(pid, Tie::Foreign, spawn::connect(control)?)
    }

    fn drive(pid: u32, tie: Tie, socket: ControlSocket) -> Result<Self, Error> {
        let (commands, requests) = mpsc::channel(8);
        let (tell, end) = watch::channel(None);
        let driver = driver::Driver::new(tie, socket, requests)?;
        tokio::spawn(async move {
            tell.send_replace(Some(driver.run().await));
        });
        Ok(Self { pid, commands, end })
    }

    /// Process ID of the VMM.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process is not known to have ended.
    pub fn is_alive(&self) -> bool {
        self.end.borrow().is_none()
    }

    /// Makes what a machine of this shape needs of KVM ahead of [`Self::create`].
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub async fn prepare(&self, vcpus: u8, memory_mib: u32) -> Result<(), Error> {
        self.expect_done(Op::Prepare { vcpus, memory_mib }, Vec::new()).await
    }

    /// Builds the machine; its vCPUs do not run yet.
    ///
    /// # Errors
    /// [`Error::Refused`] with the VMM's class and text, or the VMM's end.
    pub async fn create(&self, spec: MachineSpec, passed: Passed) -> Result<(), Error> {
        self.expect_done(Op::Create(Box::new(spec)), passed.fds).await
    }

    /// Lets the vCPUs run.
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub async fn run(&self) -> Result<(), Error> {
        self.expect_done(Op::Start {}, Vec::new()).await
    }

    /// Stops all vCPUs and quiesces the devices; done when both are true.
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub async fn pause(&self) -> Result<(), Error> {
        self.expect_done(Op::Pause {}, Vec::new()).await
    }

    /// Undoes [`Self::pause`].
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub async fn resume(&self) -> Result<(), Error> {
        self.expect_done(Op::Resume {}, Vec::new()).await
    }

    /// Writes a checkpoint; done when its file is complete. The machine stands on it when
    /// [`Self::commit`] was done, too.
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub async fn checkpoint(
        &self,
        spec: CheckpointSpec,
        passed: Passed,
    ) -> Result<CheckpointInfo, Error> {
        // As long as it takes: how much is written is not known here.
        match self.ask(Op::Checkpoint(spec), passed.fds, None).await? {
            ResultBody::Checkpoint(info) => Ok(info),
            _ => Err(Error::Mismatch),
        }
    }

    /// Has the machine stand on the checkpoint that was written last.
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub async fn commit(&self, id: String) -> Result<(), Error> {
        self.expect_done(Op::Commit { id }, Vec::new()).await
    }

    /// Brings the machine back to a checkpoint.
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub async fn rollback(
        &self,
        spec: RollbackSpec,
        passed: Passed,
    ) -> Result<RollbackInfo, Error> {
        match self.request(Op::Rollback(spec), passed.fds).await? {
            ResultBody::Rollback(info) => Ok(info),
            _ => Err(Error::Mismatch),
        }
    }

    /// Writes down which pages of its checkpoint the machine has used since it started.
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub async fn record_working_set(&self, file: OwnedFd) -> Result<(), Error> {
        self.expect_done(Op::RecordWorkingSet { file: 0 }, vec![file]).await
    }

    /// The machine's state and counters.
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub async fn status(&self) -> Result<VmStatus, Error> {
        match self.request(Op::Status {}, Vec::new()).await? {
            ResultBody::Status(status) => Ok(status),
            _ => Err(Error::Mismatch),
        }
    }

    /// What the VMM process itself takes, without the guest's RAM.
    ///
    /// # Errors
    /// [`Error::Memory`] when the process is gone or not ours to look at.
    pub fn memory_use(&self) -> Result<MemoryUse, Error> {
        memory::of_process(self.pid).map_err(Error::Memory)
    }

    /// Waits until the process is gone and reaped; may be called any number of times.
    pub async fn ended(&self) -> End {
        let mut end = self.end.clone();
        let seen = end.wait_for(Option::is_some).await;
        seen.ok().and_then(|end| end.clone()).unwrap_or_default()
    }

    /// Ends the machine without asking the guest; returns when the process is gone.
    pub async fn stop(&self) -> End {
        // Whether the request is answered does not matter: the end is waited for, and dropping
        // the senders would force it.
        let (reply, _ignored) = oneshot::channel();
        let _ = self.commands.send(Command::Stop { reply }).await;
        self.ended().await
    }

    async fn expect_done(&self, op: Op, fds: Vec<OwnedFd>) -> Result<(), Error> {
        match self.request(op, fds).await? {
            ResultBody::Done => Ok(()),
            _ => Err(Error::Mismatch),
        }
    }

    async fn request(&self, op: Op, fds: Vec<OwnedFd>) -> Result<ResultBody, Error> {
        self.ask(op, fds, Some(REPLY_TIMEOUT)).await
    }

    async fn ask(
        &self,
        op: Op,
        fds: Vec<OwnedFd>,
        limit: Option<Duration>,
    ) -> Result<ResultBody, Error> {
        let (reply, answer) = oneshot::channel();
        let command = Command::Request { op, fds, reply };
        if self.commands.send(command).await.is_err() {
            return Err(Error::Ended(self.ended().await));
        }
        let answer = match limit {
            Some(limit) => timeout(limit, answer).await.map_err(|_| Error::Silent(limit))?,
            None => answer.await,
        };
        match answer {
            Ok(ResultBody::Error(body)) => Err(Error::Refused(body)),
            Ok(body) => Ok(body),
            Err(_) => Err(Error::Ended(self.ended().await)),
        }
    }
}

/// Borrows each descriptor, as the control socket wants them.
fn borrowed(fds: &[OwnedFd]) -> Vec<std::os::fd::BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}

#[cfg(test)]
mod tests;
