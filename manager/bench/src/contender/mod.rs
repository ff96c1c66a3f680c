//! Who is measured: Coppice and its peers, each driven by its public interface.
//!
//! Every contender gets the same kernel, root file system, memory, vCPUs and kernel parameters. A
//! contender that cannot do something says so by [`Contender::lacks`], and the report repeats it.

mod console;
pub mod coppice;
mod coppice_vm;
pub mod e2b;
pub mod firecracker;
mod http;
pub mod qemu;
mod qmp;
mod vsock;

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coppice_vmm_protocol::FAST_BOOT_OPTIONS;
use tempfile::TempDir;

use crate::agent::Command;
use crate::clock::Clock;
use crate::error::{Doing as _, Error};
use crate::model;
use crate::process::Group;

/// What every contender runs.
#[derive(Debug, Clone)]
pub struct Guest {
    /// ELF kernel.
    pub kernel: PathBuf,
    /// Root file system with the agent, as ext4; it is not written to.
    pub image: PathBuf,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Longest time for one answer.
    pub limit: Duration,
}

/// What all contenders that run here share.
#[derive(Debug)]
pub struct Host {
    /// Their processes.
    pub group: Group,
    /// The directory of all sockets, disks and checkpoints.
    pub scratch: PathBuf,
}

/// A fresh directory, for a machine or what is saved of one.
fn directory(host: &Host, prefix: &str) -> Result<TempDir, Error> {
    tempfile::Builder::new()
        .prefix(prefix)
        .tempdir_in(&host.scratch)
        .doing(format!("making a directory in {}", host.scratch.display()))
}

/// The directory of one machine; gone when dropped.
#[derive(Debug)]
pub struct Place {
    /// Nothing for machines elsewhere.
    dir: Option<TempDir>,
    /// Tells of new files in it.
    watch: Option<OwnedFd>,
}

impl Place {
    fn new(host: &Host, prefix: &str) -> Result<Self, Error> {
        let dir = directory(host, prefix)?;
        Ok(Self { dir: Some(dir), watch: None })
    }

    /// For a machine elsewhere.
    fn nowhere() -> Self {
        Self { dir: None, watch: None }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.as_ref().map_or(Path::new("/nonexistent"), TempDir::path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}

/// What a contender may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Booting the guest that is given, with its console seen.
    Boot,
    /// Saving a running machine, memory and all, and making machines of it.
    Save,
    /// Saving only what changed since the last time.
    Diff,
    /// Several machines of one saved state at a time.
    Many,
    /// Processes here, whose memory is seen.
    Memory,
}

/// Somebody who makes machines.
pub trait Contender: Debug + Send + Sync {
    /// Name in reports; no two of a run have the same.
    fn name(&self) -> &str;

    /// Who it is.
    fn about(&self) -> model::Contender;

    /// Why it cannot do something; nothing if it can.
    fn lacks(&self, feature: Feature) -> Option<&'static str>;

    /// A saved state that is always there.
    fn template(&self) -> Option<Saved> {
        None
    }

    /// Makes, ahead of the clock, the directory of the next machine, with a disk of its own where
    /// the contender wants one: as it was when `from` was saved, or the image.
    ///
    /// # Errors
    /// When it cannot be made.
    fn place(&self, guest: &Guest, from: Option<&Saved>) -> Result<Place, Error>;

    /// Boots a machine whose init writes `token` to the console, which [`Vm::wait_for_line`]
    /// waits for.
    ///
    /// # Errors
    /// When it does not start.
    fn boot_to_console(
        &self,
        guest: &Guest,
        token: &str,
        place: Place,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error>;

    /// Boots a machine with the agent; returns when the agent says that it serves, which is the
    /// stage `ready`.
    ///
    /// # Errors
    /// When it does not come up.
    fn boot(&self, guest: &Guest, how: Boot, clock: &mut Clock) -> Result<Box<dyn Vm>, Error>;

    /// Prepares, ahead of the clock, a process for a machine to be restored; nothing if the
    /// contender has no such thing.
    ///
    /// # Errors
    /// When it does not start.
    fn prepare(&self, _guest: &Guest) -> Result<Option<Box<dyn Shell>>, Error> {
        Ok(None)
    }

    /// Makes a machine of a saved one and lets it run; the stage `running` is when the contender
    /// says that it runs.
    ///
    /// # Errors
    /// When it does not.
    fn restore(
        &self,
        guest: &Guest,
        from: &Saved,
        place: Place,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error>;

    /// Ends, when the benchmark is broken off, machines that would outlive it.
    fn abandon(&self) {}
}

/// How a machine with the agent is booted.
#[derive(Debug)]
pub struct Boot {
    /// Where.
    pub place: Place,
    /// Whether it will be asked for what changed since it was saved.
    pub diff: bool,
}

/// A process that waits for a machine.
pub trait Shell: Debug + Send {
    /// As [`Contender::restore`].
    ///
    /// # Errors
    /// When the machine does not run.
    fn restore(
        self: Box<Self>,
        guest: &Guest,
        from: &Saved,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error>;
}

/// How much of a machine is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All.
    Full,
    /// What changed since it was last saved.
    Diff,
}

/// How long it took to save a machine, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Saving {
    /// For how long it stood still.
    pub pause_ms: f64,
    /// From the request until all was written and the machine ran again.
    pub total_ms: f64,
}

/// A running machine; it is killed when dropped.
pub trait Vm: Debug + Send + Sync {
    /// The process, if there is one here.
    fn pid(&self) -> Option<u32>;

    /// Reads the console until a line has `token` in it.
    ///
    /// # Errors
    /// When the console ends before, or takes too long.
    fn wait_for_line(&mut self, token: &str) -> Result<(), Error>;

    /// Has the agent run a command; `on_output` gets its standard output as it comes.
    ///
    /// # Errors
    /// When the agent is not reached, or the command fails.
    fn run(&self, command: &Command, on_output: &mut dyn FnMut(&[u8])) -> Result<(), Error>;

    /// Saves it; it runs on.
    ///
    /// # Errors
    /// When it cannot be saved.
    fn save(&mut self, guest: &Guest, extent: Extent) -> Result<(Saved, Saving), Error>;

    /// Brings it back in place to what was saved of it; `None` where the contender has no such
    /// thing, and nothing is done.
    ///
    /// # Errors
    /// When it cannot be brought back.
    fn roll_back(&mut self, _from: &Saved) -> Result<Option<()>, Error> {
        Ok(None)
    }

    /// Notes, where the contender has such a thing, what the machine used since it was restored,
    /// for later ones of the same saved state.
    ///
    /// # Errors
    /// When it cannot be noted.
    fn note_working_set(&mut self, _from: &mut Saved) -> Result<bool, Error> {
        Ok(false)
    }

    /// Lets go of what only the start needed.
    fn settle(&mut self) {}

    /// Ends it; returns when it is gone. Its directory stays until it is dropped.
    ///
    /// # Errors
    /// When it cannot be ended.
    fn end(&mut self) -> Result<(), Error>;
}

/// The saved state of a machine.
#[derive(Debug, Clone)]
pub enum Saved {
    /// Open files of Coppice.
    Coppice(coppice::Node),
    /// A directory of a peer's files.
    Files(Arc<TempDir>),
    /// A service's name for it.
    Named(String),
}

impl Saved {
    /// Paths of its files, where they have any.
    #[must_use]
    pub fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::Coppice(node) => node.paths(),
            Self::Files(directory) => std::fs::read_dir(directory.path())
                .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
                .unwrap_or_default(),
            Self::Named(_) => Vec::new(),
        }
    }

    /// The directory of a peer's files.
    fn directory(&self) -> Result<&Path, Error> {
        match self {
            Self::Files(directory) => Ok(directory.path()),
            Self::Coppice(_) | Self::Named(_) => {
                Err(Error::Missing("what was saved is of another contender".into()))
            }
        }
    }
}

/// A path as text; those of contenders go through JSON and command lines.
fn text(path: &Path) -> Result<&str, Error> {
    path.to_str().ok_or_else(|| {
        Error::Missing(format!("{} is not UTF-8: choose another path", path.display()))
    })
}

/// Kernel parameters of every contender besides its root device; those about the keyboard are what
/// Firecracker's documents recommend.
const OPTIONS: &str = "console=ttyS0 panic=-1 reboot=k rootfstype=ext4 i8042.noaux i8042.nomux \
                       i8042.dumbkbd";

/// Kernel parameters for a guest with the agent.
fn agent_cmdline() -> String {
    format!("{FAST_BOOT_OPTIONS} {OPTIONS} init=/sbin/init")
}

/// Kernel parameters for a guest whose init, a shell, writes a token to the console and waits;
/// what follows `--` are the arguments of init. A kernel that prints its parameters does not print
/// the token: the shell puts its halves together.
fn console_cmdline(root: &str, token: &str) -> String {
    let (one, other) = token.split_at_checked(token.len() / 2).unwrap_or((token, ""));
    format!(
        "{FAST_BOOT_OPTIONS} {OPTIONS} {root} init=/bin/sh -- \
         -c \"echo {one}''{other}; exec sleep 9999\""
    )
}

/// The first line that a program prints when it is asked for its version.
fn version_of(program: &Path) -> String {
    let output = std::process::Command::new(program).arg("--version").output();
    let text = output.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&text).lines().next().unwrap_or("unknown").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_of_init_come_last() {
        let line = console_cmdline("root=/dev/vda ro", "77ab");
        let (kernel, init) = line.split_once(" -- ").unwrap();
        assert!(kernel.ends_with("root=/dev/vda ro init=/bin/sh"));
        assert_eq!(init, "-c \"echo 77''ab; exec sleep 9999\"");
    }
}
