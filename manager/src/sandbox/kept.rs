//! Sandboxes that outlive the command that made them: their VMM listens on a socket in the store,
//! and whoever holds the sandbox's lock may change it.
//!
//! The store says what is kept for a sandbox, the VMM what its machine stands on. Each operation
//! writes down its intention, has the VMM do it, then writes down the result; what a dead command
//! left open is settled when the sandbox is locked again, by asking the VMM.

mod changes;
mod shell;
mod suspend;
mod transcript;

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_agent_protocol::READY_PORT;
use coppice_agent_protocol::control::{Identity, Init};
use coppice_agent_protocol::json::Blob;
use coppice_vmm_protocol::VmStatus;
use tokio::net::UnixListener;
use tokio::time::timeout;

pub use changes::{CheckpointRequest, Made};
pub use shell::Shell;
pub use transcript::{Follower, Transcript};

use super::boot::Booting;
use super::console::Console;
use super::parts::Parts;
use super::{BootTime, Config, Error};
use crate::agent::Agent;
use crate::random::random_bytes;
use crate::store::{self, Id, Name, NewSandbox, SandboxRecord, Store, View};
use crate::vmm::{ProcessId, Vmm};

/// File name of the vsock socket in a sandbox's directory.
const VSOCK_NAME: &str = "vsock.sock";
/// File name of the VMM's log there.
pub const LOG_NAME: &str = "vmm.log";
/// How long a VMM that said it ends may take to be gone.
const EXIT_GRACE: Duration = Duration::from_secs(5);
/// Secret bytes that a guest's random generator gets after it was copied or taken back.
const ENTROPY: usize = 64;

/// A kept sandbox whose lock this process holds. Dropping it leaves the machine alone.
#[derive(Debug)]
pub struct Kept {
    vmm: Vmm,
    agent: Arc<Agent>,
    entry: store::Sandbox,
    store: Store,
}

/// The guest of a kept sandbox, for running commands in it; no lock is held.
#[derive(Debug)]
pub struct Guest {
    agent: Arc<Agent>,
    vmm: Vmm,
    id: Id,
    /// Keeps the path of its socket valid.
    _view: View,
}

impl Guest {
    /// Connects to the guest of a sandbox.
    ///
    /// # Errors
    /// [`Error::Gone`] when its machine has ended, or the store's.
    pub fn open(store: &Store, id: &Id) -> Result<Self, Error> {
        let view = store.look_at(id)?;
        let pid = view.record().process.map_or(0, |process| process.pid);
        let vmm = Vmm::connect(pid, &view.control_socket())
            .map_err(|_| Error::Gone { id: id.clone() })?;
        let token = view.record().guest.access_token.clone();
        let agent = Arc::new(Agent::over_vsock(&view.socket(VSOCK_NAME)).with_token(token));
        Ok(Self { agent, vmm, id: id.clone(), _view: view })
    }

    /// Its agent.
    pub fn agent(&self) -> &Arc<Agent> {
        &self.agent
    }

    /// Its VMM.
    pub fn vmm(&self) -> &Vmm {
        &self.vmm
    }

    /// Waits until the machine has ended, and says why in an error.
    pub async fn ended(&self) -> Error {
        let end = self.vmm.ended().await;
        match end.reason {
            Some(_) => Error::ended(&end, ""),
            None => Error::Gone { id: self.id.clone() },
        }
    }
}

impl Kept {
    /// Boots a sandbox that stays when this process ends, with this ID or a new one; on failure
    /// nothing is left of it, nor when `interrupt` comes first, with a signal's number.
    ///
    /// # Errors
    /// As for [`super::Sandbox::start`], the store's, or [`Error::Interrupted`].
    pub async fn boot(
        store: &Store,
        config: &Config,
        id: Option<Id>,
        name: Option<Name>,
        interrupt: impl Future<Output = u8>,
    ) -> Result<(Self, BootTime), Error> {
        let mut parts = Parts::open(config)?;
        let machine = parts.machine().ok_or(Error::BootedTwice)?;
        let disks = parts.disks().to_vec();
        let new = NewSandbox { id, name, machine, disks };
        let (entry, tops) = store.create_sandbox(new)?;
        let started = Instant::now();
        let (kept, (parts, ready, mut console)) =
            Self::start(store, entry, &config.vmm, |entry| {
                parts.add_tops(tops)?;
                let ready = entry.socket(&format!("{VSOCK_NAME}_{READY_PORT}"));
                let ready = UnixListener::bind(ready).map_err(Error::Socket)?;
                bind_vsock(&mut parts, entry)?;
                add_console(&mut parts, entry)?;
                let console = Console::of_fifo(&transcript::fifo(entry.directory()))
                    .map_err(Error::Console)?;
                Ok((parts, ready, console))
            })?;
        let booting =
            Booting { vmm: &kept.vmm, ready: &ready, started, limit: config.boot_timeout };
        let up = async {
            let time = booting.up(parts, &mut console).await?;
            transcript::begin(kept.entry.directory(), &console.tail()).map_err(Error::Console)?;
            kept.introduce().await.map(|()| time)
        };
        let booted = tokio::select! {
            booted = up => booted,
            signal = interrupt => Err(Error::Interrupted { signal }),
        };
        kept.or_nothing(booted).await
    }

    /// Locks a sandbox whose machine runs, and settles what a dead command left open.
    ///
    /// # Errors
    /// [`Error::Gone`] when its machine has ended, or the store's.
    pub async fn open(store: &Store, id: &Id) -> Result<Self, Error> {
        let entry = store.lock_sandbox(id)?;
        let pid = entry.record().process.map_or(0, |process| process.pid);
        let vmm = Vmm::connect(pid, &entry.control_socket())
            .map_err(|_| Error::Gone { id: id.clone() })?;
        let mut kept = Self::of(store, entry, vmm);
        if kept.entry.record().next.is_some() {
            kept.settle().await?;
        }
        Ok(kept)
    }

    /// Its record.
    pub fn record(&self) -> &SandboxRecord {
        self.entry.record()
    }

    /// Its VMM.
    pub fn vmm(&self) -> &Vmm {
        &self.vmm
    }

    /// Its agent.
    pub fn agent(&self) -> &Arc<Agent> {
        &self.agent
    }

    /// The machine's state and counters.
    ///
    /// # Errors
    /// When the VMM is gone.
    pub async fn status(&self) -> Result<VmStatus, Error> {
        Ok(self.vmm.status().await?)
    }

    /// Ends a sandbox's machine at once, if it still runs, and removes the sandbox with all that
    /// only it had.
    ///
    /// # Errors
    /// [`Error::Kill`] when the machine's process may not be ended, or the store's.
    pub async fn remove(store: &Store, id: &Id) -> Result<(), Error> {
        let entry = store.lock_sandbox(id)?;
        end_machine(&entry).await?;
        Ok(store.remove_sandbox(entry)?)
    }

    /// Prepares what a new sandbox's machine is made of and starts its VMM; on failure nothing is
    /// left of the sandbox.
    fn start<T>(
        store: &Store,
        mut entry: store::Sandbox,
        program: &Path,
        prepare: impl FnOnce(&store::Sandbox) -> Result<T, Error>,
    ) -> Result<(Self, T), Error> {
        let started = prepare(&entry).and_then(|prepared| {
            let vmm = start_process(&mut entry, program)?;
            Ok((vmm, prepared))
        });
        match started {
            Ok((vmm, prepared)) => Ok((Self::of(store, entry, vmm), prepared)),
            Err(error) => {
                store.remove_sandbox(entry)?;
                Err(error)
            }
        }
    }

    fn of(store: &Store, entry: store::Sandbox, vmm: Vmm) -> Self {
        let token = entry.record().guest.access_token.clone();
        let agent = Arc::new(Agent::over_vsock(&entry.socket(VSOCK_NAME)).with_token(token));
        Self { vmm, agent, entry, store: store.clone() }
    }

    /// Puts a machine that goes on from a checkpoint into a VMM that was prepared for its shape,
    /// and lets it run.
    async fn fill(&mut self, from: &Id) -> Result<(), Error> {
        let Self { vmm, entry, store, .. } = self;
        let (meta, tops) = store.stand_on(entry, from)?;
        let mut parts = Parts::of_checkpoint(store, &meta, tops)?;
        bind_vsock(&mut parts, entry)?;
        add_console(&mut parts, entry)?;
        let names = parts.names();
        let (spec, passed) = parts.finish();
        vmm.create(spec, passed).await.map_err(|source| names.refusal(source))?;
        vmm.run().await.map_err(|source| names.refusal(source))
    }

    /// Tells the guest who and when it is, and gives its random generator secret bytes of its own.
    ///
    /// # Errors
    /// When the agent does not answer, or the machine ends.
    pub async fn introduce(&self) -> Result<(), Error> {
        let record = self.entry.record();
        let hostname = record.name.as_ref().map_or(record.id.as_str(), Name::as_str);
        let entropy = random_bytes::<ENTROPY>().map_err(Error::Socket)?;
        let identity = Identity {
            hostname: Some(hostname.replace('_', "-")),
            machine_id: Some(record.machine_id.clone()),
            entropy: Some(Blob(entropy.to_vec())),
        };
        // Also what is not set: its memory may be of a guest that was told something.
        let init = Init {
            access_token: Some(record.guest.access_token.clone().unwrap_or_default()),
            envs: Some(record.guest.envs.clone()),
            default_user: Some(record.guest.default_user.clone().unwrap_or_default()),
            default_workdir: Some(record.guest.default_workdir.clone().unwrap_or_default()),
        };
        let told = async {
            self.agent.set_identity(&identity).await?;
            self.agent.init(&init).await?;
            self.agent.sync_time().await
        };
        tokio::select! {
            told = told => Ok(told?),
            end = self.vmm.ended() => Err(Error::ended(&end, "")),
        }
    }

    /// Ends the machine and removes the sandbox.
    async fn discard(self) -> Result<(), Error> {
        let Self { vmm, entry, store, .. } = self;
        vmm.stop().await;
        end_machine(&entry).await?;
        Ok(store.remove_sandbox(entry)?)
    }

    /// The sandbox with a result, or after a failure nothing of it.
    async fn or_nothing<T>(self, result: Result<T, Error>) -> Result<(Self, T), Error> {
        match result {
            Ok(value) => Ok((self, value)),
            Err(error) => {
                self.discard().await?;
                Err(error)
            }
        }
    }
}

/// Starts the VMM of a sandbox and writes down which process it is.
fn start_process(entry: &mut store::Sandbox, program: &Path) -> Result<Vmm, Error> {
    let log = entry.directory().join(LOG_NAME);
    let mut options = OpenOptions::new();
    let log = options.append(true).create(true).mode(0o600).open(log).map_err(Error::Socket)?;
    let vmm = Vmm::start_detached(program, &entry.control_socket(), log)?;
    let process = ProcessId::of(vmm.pid()).map_err(Error::Socket)?;
    entry.set_process(process)?;
    Ok(vmm)
}

fn bind_vsock(parts: &mut Parts, entry: &store::Sandbox) -> Result<(), Error> {
    let handle = entry.handle().try_clone().map_err(Error::Socket)?;
    parts.add_vsock(&entry.socket(VSOCK_NAME), handle, VSOCK_NAME)
}

fn add_console(parts: &mut Parts, entry: &store::Sandbox) -> Result<(), Error> {
    parts.add_console(transcript::open(entry.directory()).map_err(Error::Console)?)
}

/// Ends the machine of a sandbox, if it still runs; returns when its process is gone.
async fn end_machine(entry: &store::Sandbox) -> Result<(), Error> {
    let process = entry.record().process;
    let pid = process.map_or(0, |process| process.pid);
    if let Ok(vmm) = Vmm::connect(pid, &entry.control_socket()) {
        vmm.stop().await;
    }
    let Some(process) = process else { return Ok(()) };
    let failed = |source| Error::Kill { id: entry.record().id.clone(), source };
    match timeout(EXIT_GRACE, process.gone()).await {
        Ok(gone) => gone.map_err(failed),
        Err(_) => process.kill().await.map_err(failed),
    }
}
