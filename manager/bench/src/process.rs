//! Processes of contenders: none of them outlives the benchmark, however that ends.
//!
//! All of them are in the process group of a guard, a shell that waits for the end of its standard
//! input and then kills its whole group. The other end of that pipe is open in this process alone,
//! so the kernel closes it when this process ends, even by SIGKILL. Children are therefore started
//! without code between fork and exec, which the library does without copying this process.

use std::io::{self, PipeWriter};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use rustix::io::FdFlags;

use crate::error::{Doing as _, Error};

/// What the guard runs.
const GUARD: &str = "read -r line; kill -9 0";

/// The working directory belongs to the whole process, and children take it over.
static DIRECTORY: Mutex<()> = Mutex::new(());

/// A process group that ends with this process.
#[derive(Debug)]
pub struct Group {
    guard: Child,
    /// Its end is the group's end.
    lifeline: Mutex<Option<PipeWriter>>,
}

impl Group {
    /// Starts the guard.
    ///
    /// # Errors
    /// When there is no shell.
    pub fn new() -> Result<Self, Error> {
        let (input, lifeline) = io::pipe().doing("making a pipe")?;
        let guard = Command::new("/bin/sh")
            .args(["-c", GUARD])
            .process_group(0)
            .stdin(input)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .doing("starting /bin/sh as the guard of all machines")?;
        Ok(Self { guard, lifeline: Mutex::new(Some(lifeline)) })
    }

    /// Starts a program in the group, in the directory `at`, which also has the descriptor `pass`,
    /// under its number here.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(
        &self,
        mut command: Command,
        at: &Path,
        pass: Option<BorrowedFd<'_>>,
    ) -> Result<Process, Error> {
        let group = i32::try_from(self.guard.id())
            .map_err(|_| Error::Missing("the guard has no process ID".into()))?;
        command.process_group(group);
        let _held = DIRECTORY.lock().unwrap_or_else(PoisonError::into_inner);
        // A directory given to the command would be entered between fork and exec.
        std::env::set_current_dir(at).doing(format!("entering {}", at.display()))?;
        // No other child is started while it can be inherited.
        let inherit = |flags| {
            let set = pass.map(|fd| rustix::io::fcntl_setfd(fd, flags));
            set.transpose().doing("passing a descriptor on")
        };
        inherit(FdFlags::empty())?;
        let child = command.spawn();
        inherit(FdFlags::CLOEXEC)?;
        let program = command.get_program().to_string_lossy();
        let child = child.doing(format!("starting {program}"))?;
        Ok(Process { child, ended: false })
    }
}

impl Group {
    /// Has all its processes killed; none can be started any more.
    pub fn end(&self) {
        *self.lifeline.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end();
        // The guard kills itself last; there is nothing to do about one that cannot be waited for.
        let _ = self.guard.wait();
    }
}

/// One program; it is killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    ended: bool,
}

impl Process {
    /// Its ID.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its standard output, if that is a pipe and was not taken yet.
    pub fn output(&mut self) -> Option<std::process::ChildStdout> {
        self.child.stdout.take()
    }

    /// Kills it; returns when it is gone.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn kill(&mut self) -> Result<(), Error> {
        if !self.ended {
            self.child.kill().doing("killing a machine")?;
            self.child.wait().doing("waiting for a machine's end")?;
            self.ended = true;
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Already gone is as good as killed.
        let _ = self.kill();
    }
}
