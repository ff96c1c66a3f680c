//! One sandbox: a VMM process, its private directory, and the agent in its guest.
//!
//! [`Sandbox::new`] opens and binds everything and starts the VMM process; [`Sandbox::boot`]
//! builds the machine and waits for the agent's report. Whatever happens, and however the value
//! goes away, the process, the sockets and the directory go with it.

mod boot;
mod console;
pub mod diagnosis;
mod error;
mod kept;
mod parts;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_agent_protocol::READY_PORT;
use tokio::net::UnixListener;
use tokio::time::timeout;

pub use error::Error;
pub use kept::{CheckpointRequest, Follower, Guest, Kept, LOG_NAME, Made, Shell, Transcript};

use crate::agent::Agent;
use crate::vmm::{End, MemoryUse, Vmm};
use crate::workdir::WorkDir;
use console::Console;
use parts::Parts;

/// Least memory of a guest, in MiB.
pub const MIN_MEMORY_MIB: u32 = 64;
/// How much longer than the guest's own grace an orderly end may take.
const SHUTDOWN_SLACK: Duration = Duration::from_secs(3);
/// File name of the vsock socket in the private directory.
const VSOCK_NAME: &str = "vsock";

/// What a sandbox is made of.
#[derive(Debug, Clone)]
pub struct Config {
    /// The `coppice-vmm` program, an absolute path.
    pub vmm: PathBuf,
    /// The guest's kernel.
    pub kernel: PathBuf,
    /// The guest's root file system: an ext4 or EROFS image or a cpio archive. It is only read;
    /// what the guest writes goes to a file that is gone with the sandbox.
    pub image: PathBuf,
    /// Guest memory in MiB, from [`MIN_MEMORY_MIB`].
    pub memory_mib: u32,
    /// Number of vCPUs, 1 to 8.
    pub vcpus: u8,
    /// More kernel parameters, after our own.
    pub append: Option<String>,
    /// Directory for what the guest writes; another is used when it cannot be written.
    pub scratch: PathBuf,
    /// Directory under which the private directory is made.
    pub runtime: PathBuf,
    /// How long the guest may take until its agent reports.
    pub boot_timeout: Duration,
}

/// How long a boot took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootTime {
    /// From the start of the VMM process until the agent, the guest's init, reported.
    pub until_ready: Duration,
    /// The guest's own clock when its init began.
    pub guest_clock: Duration,
}

/// A sandbox, running or about to.
#[derive(Debug)]
pub struct Sandbox {
    // Dropped in this order: the machine ends before its directory goes.
    vmm: Vmm,
    agent: Arc<Agent>,
    console: Console,
    parts: Option<Parts>,
    ready: Option<UnixListener>,
    started: Instant,
    boot_timeout: Duration,
    work: WorkDir,
}

impl Sandbox {
    /// Opens files, binds sockets and starts the VMM process; no guest code runs yet.
    ///
    /// # Errors
    /// The class of failure says which of the parts is missing or unusable.
    pub fn new(config: &Config) -> Result<Self, Error> {
        let mut parts = Parts::open(config)?;
        let work = WorkDir::new(&config.runtime)?;
        parts.add_overlay(&config.scratch, work.path())?;
        let socket = work.path().join(VSOCK_NAME);
        parts.add_vsock(&socket, work.handle()?, VSOCK_NAME)?;
        let ready = work.path().join(format!("{VSOCK_NAME}_{READY_PORT}"));
        let ready = UnixListener::bind(ready).map_err(Error::Socket)?;
        let (console, output) = Console::open().map_err(Error::Console)?;
        parts.add_console(output)?;
        let started = Instant::now();
        let vmm = Vmm::start(&config.vmm)?;
        Ok(Self {
            vmm,
            agent: Arc::new(Agent::over_vsock(&socket)),
            console,
            parts: Some(parts),
            ready: Some(ready),
            started,
            boot_timeout: config.boot_timeout,
            work,
        })
    }

    /// Makes and boots a sandbox; on failure nothing is left of it.
    ///
    /// # Errors
    /// Those of [`Self::new`] and [`Self::boot`].
    pub async fn start(config: &Config) -> Result<(Self, BootTime), Error> {
        let mut sandbox = Self::new(config)?;
        match sandbox.boot().await {
            Ok(time) => Ok((sandbox, time)),
            Err(error) => {
                sandbox.stop().await;
                Err(error)
            }
        }
    }

    /// The agent in the guest.
    pub fn agent(&self) -> &Arc<Agent> {
        &self.agent
    }

    /// The VMM process.
    pub fn vmm(&self) -> &Vmm {
        &self.vmm
    }

    /// When the VMM process was started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The private directory.
    pub fn directory(&self) -> &Path {
        self.work.path()
    }

    /// The last 64 KiB of what the guest wrote to its serial console.
    pub fn console(&self) -> String {
        self.console.tail()
    }

    /// What the VMM process takes, without the guest's RAM.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn memory_use(&self) -> Result<MemoryUse, Error> {
        Ok(self.vmm.memory_use()?)
    }

    /// Waits until the machine has ended by itself, and says why in an error.
    pub async fn ended(&mut self) -> Error {
        let end = self.vmm.ended().await;
        Error::ended(&end, &self.console.rest().await)
    }

    /// Ends the machine now; returns when the process is gone.
    pub async fn stop(&self) -> End {
        self.vmm.stop().await
    }

    /// Has the guest end in order, with `grace` for its processes, and ends the machine when that
    /// takes too long.
    pub async fn shutdown(&self, grace: Duration) -> End {
        if self.agent.shutdown(grace).await.is_ok() {
            let limit = grace.saturating_add(SHUTDOWN_SLACK);
            if let Ok(end) = timeout(limit, self.vmm.ended()).await {
                return end;
            }
        }
        self.stop().await
    }
}
