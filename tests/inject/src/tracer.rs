//! Following the threads of a process from call to call (`ptrace(2)`).

use std::collections::BTreeSet;
use std::fs;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::libc::user_regs_struct;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::Fault;
use crate::calls::{Kind, Word, about_to_make, halve, void};

/// `PTRACE_EVENT_STOP`: the stop of a thread that was asked to.
const EVENT_STOP: i32 = 128;

/// What was seen and done so far.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Calls that count.
    pub(crate) seen: usize,
    /// The call that was meant, when it came.
    pub(crate) done: Option<&'static str>,
    /// The call that was changed and did not return yet.
    changed: Option<Changed>,
}

/// A call that is not what its thread wanted.
#[derive(Debug)]
struct Changed {
    thread: Pid,
    /// The registers with which it was made.
    wanted: user_regs_struct,
    /// What was overwritten in memory.
    overwritten: Option<Word>,
    /// How it is to fail, if it is.
    errno: Option<Errno>,
}

/// Progress that another thread may ask for.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    progress: Mutex<Progress>,
    settled: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The progress at a moment at which no call is on its way to its failure. None gets there
    /// while the result is held.
    pub(crate) fn settled(&self) -> MutexGuard<'_, Progress> {
        let settled = self.settled.wait_while(self.lock(), |progress| progress.changed.is_some());
        settled.unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct Tracer {
    fault: Fault,
    number: usize,
    process: Pid,
    shared: Arc<Shared>,
    /// Threads that were asked to stop and did not yet.
    awaited: BTreeSet<Pid>,
    /// Threads that are in a call.
    inside: BTreeSet<Pid>,
    /// How the process ended, as `wait` says it.
    end: Option<i32>,
}

impl Tracer {
    pub(crate) fn new(fault: Fault, number: usize, process: Pid, shared: Arc<Shared>) -> Self {
        let (awaited, inside) = (BTreeSet::new(), BTreeSet::new());
        Self { fault, number, process, shared, awaited, inside, end: None }
    }

    /// Follows all threads of the process but vCPUs; none runs unseen when this returns.
    pub(crate) fn seize_all(&mut self) -> Result<()> {
        let options = Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE;
        for entry in fs::read_dir(format!("/proc/{}/task", self.process))? {
            let entry = entry?;
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            let id = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let thread = Pid::from_raw(id.context("a thread without a number")?);
            if !name.starts_with("vcpu") {
                ptrace::seize(thread, options).context("cannot follow the process")?;
                ptrace::interrupt(thread).context("cannot stop a thread")?;
                self.awaited.insert(thread);
            }
        }
        while !self.awaited.is_empty() {
            self.step()?;
        }
        Ok(())
    }

    /// Follows the process to its end; gives how it ended, if it was this one's child.
    pub(crate) fn trace(&mut self) -> Result<Option<i32>> {
        while self.step()? {}
        Ok(self.end)
    }

    /// Waits for the next stop of any thread and lets it go on; `false` when there is none left.
    fn step(&mut self) -> Result<bool> {
        let status = match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Ok(status) => status,
            Err(Errno::ECHILD) => return Ok(false),
            Err(error) => return Err(error).context("cannot wait for the process"),
        };
        let (thread, signal) = match status {
            WaitStatus::Exited(thread, code) if thread == self.process => {
                self.end = Some(code << 8);
                return Ok(true);
            }
            WaitStatus::Signaled(thread, signal, _) if thread == self.process => {
                self.end = Some(signal as i32);
                return Ok(true);
            }
            WaitStatus::PtraceSyscall(thread) => {
                // A thread may be killed while it is stopped.
                match self.call(thread) {
                    Err(Errno::ESRCH) => {}
                    result => result.context("cannot change a call")?,
                }
                (thread, None)
            }
            WaitStatus::PtraceEvent(thread, _, event) => {
                if event == EVENT_STOP {
                    self.awaited.remove(&thread);
                }
                (thread, None)
            }
            WaitStatus::Stopped(thread, signal) => (thread, Some(signal)),
            gone => {
                gone.pid().map(|thread| self.awaited.remove(&thread));
                return Ok(true);
            }
        };
        match ptrace::syscall(thread, signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(true),
            Err(error) => Err(error).context("cannot let a thread go on"),
        }
    }

    /// A thread is about to make a call, or has made it.
    fn call(&mut self, thread: Pid) -> Result<(), Errno> {
        if self.inside.remove(&thread) {
            return self.restore(thread);
        }
        self.inside.insert(thread);
        let mut registers = ptrace::getregs(thread)?;
        let Some(call) = about_to_make(thread, &registers) else { return Ok(()) };
        let counts = match self.fault {
            Fault::Short => call.kind == Kind::Writes,
            Fault::Fails(_) => call.kind != Kind::Tells,
            Fault::Kill => true,
        };
        if !counts {
            return Ok(());
        }
        let mut progress = self.shared.lock();
        progress.seen += 1;
        if progress.seen != self.number {
            return Ok(());
        }
        progress.done = Some(call.name);
        match self.fault {
            Fault::Kill => kill(self.process, Signal::SIGKILL),
            Fault::Short => {
                let wanted = registers;
                let overwritten = halve(thread, &mut registers)?;
                progress.changed = Some(Changed { thread, wanted, overwritten, errno: None });
                Ok(())
            }
            Fault::Fails(errno) => {
                let errno = Some(errno);
                let wanted = registers;
                progress.changed = Some(Changed { thread, wanted, overwritten: None, errno });
                void(thread, &mut registers)
            }
        }
    }

    /// Has the call that a thread made look as if it were the one that it wanted, if it was changed.
    fn restore(&self, thread: Pid) -> Result<(), Errno> {
        let mut progress = self.shared.lock();
        let Some(changed) = progress.changed.take_if(|changed| changed.thread == thread) else {
            return Ok(());
        };
        self.shared.settled.notify_all();
        if let Some(word) = changed.overwritten {
            word.write(thread)?;
        }
        let mut registers = ptrace::getregs(thread)?;
        registers.rdi = changed.wanted.rdi;
        registers.rsi = changed.wanted.rsi;
        registers.rdx = changed.wanted.rdx;
        if let Some(errno) = changed.errno {
            registers.rax = i64::from(-(errno as i32)).cast_unsigned();
        }
        ptrace::setregs(thread, registers)
    }
}
