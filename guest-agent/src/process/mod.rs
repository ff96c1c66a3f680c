//! Processes started for the host: their table, life and streams.
//!
//! Everything here runs on one thread. A process is forked and entered into the table in one
//! stretch without an await, and children are reaped by another task of the same thread
//! ([`Processes::reap`]), so an exit can never be reaped before its process is known.
//!
//! One task per process ([`pump`]) moves its output to all subscribed streams. It waits for each
//! subscriber, so a slow reader slows the process down; without subscribers output is read and
//! dropped, so that nobody watching does not mean standing still.

mod input;
mod pump;
mod spawn;
mod status;
mod stream;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bytes::Bytes;
use coppice_agent_protocol::process::{
    EndEvent, ProcessConfig, ProcessInfo, ProcessSelector, PtySize, Signal,
};
use nix::pty::Winsize;
use nix::sys::signal::{self, killpg};
use nix::unistd::Pid;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, Notify, mpsc};

pub(crate) use input::InputError;
pub(crate) use spawn::SpawnError;
pub(crate) use stream::{ProcessStream, Watch};

use crate::sys::{self, RawStatus, Reaped};

/// Ended processes remembered for a late `Connect`; the oldest are forgotten first.
const RETAINED_EXITS: usize = 256;

/// A process started for the host.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    config: ProcessConfig,
    tag: Option<String>,
    subscribers: RefCell<Vec<mpsc::Sender<Bytes>>>,
    /// Set when the process was reaped.
    exit: OnceCell<EndEvent>,
    exited: Notify,
    /// Set when all output it wrote before its exit is with the subscribers.
    ended: Cell<bool>,
    /// Set when its deadline ended it.
    timed_out: Cell<bool>,
    /// The writing end of its standard input, while open. The lock keeps writes whole.
    stdin: Mutex<Option<AsyncFd<OwnedFd>>>,
    /// The controlling side of its terminal. Closed at its end.
    terminal: RefCell<Option<Rc<AsyncFd<OwnedFd>>>>,
    has_terminal: bool,
}

/// Why a signal or a resize did not work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// The process ended meanwhile.
    #[error("process {0} has ended")]
    Ended(i32),
    /// A resize of something that is no terminal.
    #[error("process {0} has no terminal: start it with pty to resize it")]
    NoTerminal(i32),
    /// A size no terminal can have.
    #[error("a terminal has at most 65535 columns and rows")]
    Size,
    /// The kernel refused.
    #[error("the kernel refused for process {pid}")]
    Kernel {
        /// Which process.
        pid: i32,
        /// Why.
        source: std::io::Error,
    },
}

impl Process {
    /// Its process ID as the wire has it.
    pub(crate) fn pid(&self) -> u32 {
        self.pid.unsigned_abs()
    }

    /// Whether it has not been reaped.
    pub(crate) fn runs(&self) -> bool {
        self.exit.get().is_none()
    }

    /// Sends a signal to its process group: to it and what it started, unless that left the group.
    pub(crate) fn signal(&self, signal: Signal) -> Result<(), ControlError> {
        if !self.runs() {
            return Err(ControlError::Ended(self.pid));
        }
        let signal = match signal {
            Signal::Term => signal::Signal::SIGTERM,
            Signal::Kill => signal::Signal::SIGKILL,
        };
        killpg(Pid::from_raw(self.pid), signal)
            .map_err(|errno| ControlError::Kernel { pid: self.pid, source: errno.into() })
    }

    /// Changes the size of its terminal.
    pub(crate) fn resize(&self, size: PtySize) -> Result<(), ControlError> {
        let terminal = self.terminal.borrow();
        let terminal = match terminal.as_ref() {
            Some(terminal) => terminal,
            None if self.has_terminal => return Err(ControlError::Ended(self.pid)),
            None => return Err(ControlError::NoTerminal(self.pid)),
        };
        let size = window_size(size).ok_or(ControlError::Size)?;
        sys::set_window_size(terminal.get_ref(), size)
            .map_err(|source| ControlError::Kernel { pid: self.pid, source })
    }

    /// Resolves when the process was reaped.
    async fn wait(&self) {
        while self.runs() {
            self.exited.notified().await;
        }
    }

    fn info(&self) -> ProcessInfo {
        ProcessInfo { config: self.config.clone(), pid: self.pid(), tag: self.tag.clone() }
    }

    /// Ends it when `deadline` passes first.
    async fn enforce(self: Rc<Self>, deadline: tokio::time::Instant) {
        let outcome = tokio::time::timeout_at(deadline, self.wait()).await;
        if outcome.is_err() && self.signal(Signal::Kill).is_ok() {
            self.timed_out.set(true);
        }
    }
}

/// A terminal's size for the kernel, if it fits.
fn window_size(size: PtySize) -> Option<Winsize> {
    let ws_row = u16::try_from(size.rows).ok()?;
    let ws_col = u16::try_from(size.cols).ok()?;
    Some(Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 })
}

/// All processes started for the host.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    by_pid: RefCell<BTreeMap<i32, Rc<Process>>>,
    /// Ended ones among them, oldest first.
    ended: RefCell<VecDeque<Rc<Process>>>,
    /// Set when the machine goes down: nothing new starts.
    closed: Cell<bool>,
    /// Told whenever children were reaped.
    reaped: Notify,
}

impl Processes {
    fn insert(&self, process: &Rc<Process>) {
        self.by_pid.borrow_mut().insert(process.pid, Rc::clone(process));
    }

    /// The process a request means, running or ended.
    pub(crate) fn find(&self, selector: &ProcessSelector) -> Option<Rc<Process>> {
        let by_pid = self.by_pid.borrow();
        match selector {
            ProcessSelector::Pid(pid) => by_pid.get(&i32::try_from(*pid).ok()?).cloned(),
            ProcessSelector::Tag(tag) => {
                let tagged = || by_pid.values().filter(|process| process.tag.as_ref() == Some(tag));
                // A tag may be used again after its process ended: running ones come first.
                tagged().find(|process| process.runs()).or_else(|| tagged().next_back()).cloned()
            }
        }
    }

    /// The processes that run.
    pub(crate) fn list(&self) -> Vec<ProcessInfo> {
        let by_pid = self.by_pid.borrow();
        by_pid.values().filter(|process| process.runs()).map(|process| process.info()).collect()
    }

    /// How many processes run.
    pub(crate) fn running(&self) -> usize {
        self.by_pid.borrow().values().filter(|process| process.runs()).count()
    }

    /// Asks all running processes to end.
    pub(crate) fn terminate(&self) {
        for process in self.by_pid.borrow().values() {
            // One that has just ended needs no signal.
            let _ = process.signal(Signal::Term);
        }
    }

    /// Tells the sessions on terminals that their terminals are gone.
    pub(crate) fn hang_up(&self) {
        for process in self.by_pid.borrow().values() {
            if process.has_terminal && process.runs() {
                // One that has just ended needs no signal.
                let _ = killpg(Pid::from_raw(process.pid), signal::Signal::SIGHUP);
            }
        }
    }

    /// Lets nothing new start.
    pub(crate) fn close(&self) {
        self.closed.set(true);
    }

    /// Reaps all ended children, orphans that fell to the agent included. False when there is no
    /// child left.
    pub(crate) fn reap(&self) -> bool {
        let mut children = true;
        loop {
            match sys::reap_one() {
                Reaped::Process(pid, status) => self.on_exit(pid, status),
                Reaped::AllRunning => break,
                Reaped::NoChildren => {
                    children = false;
                    break;
                }
            }
        }
        self.reaped.notify_waiters();
        children
    }

    /// Resolves when no child is left. For init that means: no process at all, since every orphan
    /// becomes init's child.
    pub(crate) async fn all_ended(&self) {
        while self.reap() {
            self.reaped.notified().await;
        }
    }

    fn on_exit(&self, pid: i32, status: RawStatus) {
        let Some(process) = self.by_pid.borrow().get(&pid).cloned() else { return };
        if process.exit.set(status::end_event(status)).is_err() {
            // An orphan with the process ID of one that ended long ago.
            return;
        }
        process.exited.notify_waiters();
        let mut ended = self.ended.borrow_mut();
        ended.push_back(process);
        if ended.len() > RETAINED_EXITS
            && let Some(oldest) = ended.pop_front()
        {
            let mut by_pid = self.by_pid.borrow_mut();
            if by_pid.get(&oldest.pid).is_some_and(|process| Rc::ptr_eq(process, &oldest)) {
                by_pid.remove(&oldest.pid);
            }
        }
    }
}
