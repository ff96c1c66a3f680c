//! One sandbox of the fleet: what was promised about it, and the way to its guest.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::metrics::Samples;
use super::quota::Usage;
use crate::registry::{Row, State, Tenant};
use crate::sandbox::Guest;
use crate::store::{Id, Machine, SandboxRecord};

/// A sandbox of the fleet.
#[derive(Debug)]
pub struct Member {
    id: Id,
    tenant: Tenant,
    /// Held while its lifecycle changes.
    pub(super) turn: Arc<tokio::sync::Mutex<()>>,
    /// Whether it is to be removed, whatever it waits for.
    unwanted: watch::Sender<bool>,
    now: Mutex<Now>,
    samples: Mutex<Samples>,
}

#[derive(Debug)]
struct Now {
    row: Row,
    /// What it takes when it runs.
    usage: Usage,
    machine: Option<Machine>,
    disk_bytes: u64,
    token: Option<String>,
    guest: Option<Arc<Guest>>,
}

/// A sandbox as it is shown.
#[derive(Debug, Clone)]
pub struct Shown {
    /// What was promised.
    pub row: Row,
    /// Its machine's shape; none before its machine is made.
    pub machine: Option<Machine>,
    /// Size of its disks in bytes, as its guest sees them.
    pub disk_bytes: u64,
    /// What its agent wants to see.
    pub token: Option<String>,
}

impl Member {
    pub(super) fn new(row: Row, usage: Usage) -> Self {
        let (id, tenant) = (row.id.clone(), row.tenant.clone());
        let now = Now { row, usage, machine: None, disk_bytes: 0, token: None, guest: None };
        Self {
            id,
            tenant,
            turn: Arc::default(),
            unwanted: watch::Sender::default(),
            now: Mutex::new(now),
            samples: Mutex::default(),
        }
    }

    /// Its ID.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Whose it is.
    pub fn tenant(&self) -> Tenant {
        self.tenant.clone()
    }

    /// Has [`Member::unwanted`] return: it is to be removed.
    pub(super) fn give_up(&self) {
        self.unwanted.send_replace(true);
    }

    /// Waits until it is to be removed.
    pub(super) async fn unwanted(&self) {
        let mut told = self.unwanted.subscribe();
        // The other end lives as long as this.
        let _said = told.wait_for(|unwanted| *unwanted).await;
    }

    /// Whether it is this tenant's.
    pub(super) fn is_of(&self, tenant: &Tenant) -> bool {
        self.tenant == *tenant
    }

    /// What it takes now.
    pub(super) fn usage(&self) -> Usage {
        let now = self.now();
        if now.row.state == State::Paused { now.usage.paused() } else { now.usage }
    }

    /// What it takes more when it goes on.
    pub(super) fn usage_when_woken(&self) -> Usage {
        self.now().usage.woken()
    }

    /// What it is like now.
    pub fn shown(&self) -> Shown {
        let now = self.now();
        Shown {
            row: now.row.clone(),
            machine: now.machine.clone(),
            disk_bytes: now.disk_bytes,
            token: now.token.clone(),
        }
    }

    /// What is said about what was promised, without a copy of that.
    pub fn about<T>(&self, say: impl FnOnce(&Row) -> T) -> T {
        say(&self.now().row)
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.now().row.state
    }

    /// The way to its guest, while it runs.
    pub fn guest(&self) -> Option<Arc<Guest>> {
        let now = self.now();
        now.guest.clone().filter(|_| now.row.state == State::Running)
    }

    /// Whether anybody was told of it.
    pub(super) fn is_told(&self) -> bool {
        !matches!(self.state(), State::Creating | State::Killing)
    }

    pub(super) fn row(&self) -> Row {
        self.now().row.clone()
    }

    pub(super) fn set_row(&self, row: Row) {
        self.now().row = row;
    }

    pub(super) fn set_machine(&self, record: &SandboxRecord) {
        let mut now = self.now();
        now.usage = Usage::of(&record.machine);
        now.machine = Some(record.machine.clone());
        now.disk_bytes = record.standing.disks.iter().map(|disk| disk.base.size).sum();
        now.token = record.guest.access_token.clone();
    }

    /// Sets or takes the way to its guest; the one before is returned.
    pub(super) fn set_guest(&self, guest: Option<Arc<Guest>>) -> Option<Arc<Guest>> {
        std::mem::replace(&mut self.now().guest, guest)
    }

    /// Whether this is the guest it has now.
    pub(super) fn has(&self, guest: &Arc<Guest>) -> bool {
        self.now().guest.as_ref().is_some_and(|now| Arc::ptr_eq(now, guest))
    }

    pub(super) fn samples(&self) -> MutexGuard<'_, Samples> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
