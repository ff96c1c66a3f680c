//! The sandboxes that the daemon answers for: made, found, paused, resumed and removed, by time
//! and by request.
//!
//! ```text
//! api, gateway -> fleet -> { registry, sandbox -> { store, vmm, agent } }
//! ```
//!
//! A member's lifecycle changes one at a time, under its turn, each in a task of its own: a client
//! that goes away stops nothing half-way. The store's locks may be held by other processes, so
//! what takes them runs on the blocking pool. What is promised is in the registry before it is
//! done, so that a restart can finish it.

mod admin;
mod adopt;
mod build;
mod create;
mod error;
mod expiry;
mod lifecycle;
mod member;
mod memory;
mod meters;
mod metrics;
mod pool;
mod queue;
mod quota;
#[cfg(test)]
pub(crate) mod stub;
mod tags;
mod template;
#[cfg(test)]
mod tests;
mod tree;
mod upload;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

pub use adopt::Adopted;
pub use build::{BuildRequest, Built};
pub use create::Order;
pub use error::Error;
pub use member::{Member, Shown};
pub use metrics::Sample;
pub use tags::Tagged;
pub use tree::{Checkpoint, Marked};
pub use upload::{Upload, VALID as UPLOAD_TIME};

use build::Builds;
use meters::Meters;
use pool::Pool;
use queue::Queue;
use quota::Reserved;
use upload::Uploads;

use crate::home::Home;
use crate::registry::{Registry, Tenant};
use crate::store::{Id, Store};
use crate::trace;

/// Machines that are started at the same time, per processor: more only wait for each other.
const STARTS_PER_CPU: usize = 2;

/// How the daemon runs sandboxes.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the store and the registry are.
    pub home: Home,
    /// The `coppice-vmm` program, an absolute path.
    pub vmm: PathBuf,
    /// The most sandboxes, running and paused, that a tenant may have.
    pub max_per_tenant: usize,
    /// Memory of the host, in bytes, that no new machine may take.
    pub reserve: u64,
}

/// All sandboxes of the daemon.
#[derive(Debug)]
pub struct Fleet {
    settings: Settings,
    store: Store,
    registry: Arc<Registry>,
    members: Mutex<BTreeMap<Id, Arc<Member>>>,
    /// A deadline came nearer.
    expiry: Notify,
    /// Machines being started, and those that wait for it.
    queue: Arc<Queue>,
    /// What tenants wait for.
    reserved: Arc<Reserved>,
    meters: Meters,
    pool: Pool,
    /// Held while the built-in template is made.
    base: tokio::sync::Mutex<()>,
    builds: Builds,
    uploads: Uploads,
    /// Held while tags of templates change.
    tagging: Mutex<()>,
}

impl Fleet {
    /// A fleet without members; [`Fleet::adopt`] finds those of before.
    ///
    /// # Errors
    /// The store's or the registry's, when they cannot be opened.
    pub fn open(settings: Settings) -> Result<Arc<Self>, Error> {
        let store = Store::open(&settings.home)?;
        let registry = Arc::new(Registry::open(settings.home.path())?);
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let uploads = Uploads::below(settings.home.path());
        Ok(Arc::new(Self {
            settings,
            store,
            registry,
            members: Mutex::default(),
            expiry: Notify::new(),
            meters: Meters::new()?,
            pool: Pool::default(),
            queue: Queue::new(cpus.saturating_mul(STARTS_PER_CPU)),
            reserved: Arc::default(),
            base: tokio::sync::Mutex::new(()),
            builds: Builds::default(),
            uploads,
            tagging: Mutex::default(),
        }))
    }

    /// Who a key belongs to, and what templates there are.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// A tenant's sandbox.
    ///
    /// # Errors
    /// [`Error::NotFound`], for those of others too.
    pub fn find(&self, tenant: &Tenant, id: &str) -> Result<Arc<Member>, Error> {
        let found = self.member(id).filter(|member| member.is_of(tenant));
        found.filter(|member| member.is_told()).ok_or_else(|| Error::NotFound { id: id.into() })
    }

    /// A sandbox, whoever it belongs to: for requests that carry no key.
    pub fn member(&self, id: &str) -> Option<Arc<Member>> {
        Id::parse(id).and_then(|id| self.members().get(&id).cloned())
    }

    /// All sandboxes of a tenant that were told of, by ID.
    pub fn of_tenant(&self, tenant: &Tenant) -> Vec<Arc<Member>> {
        let members = self.members();
        let own = members.values().filter(|member| member.is_of(tenant) && member.is_told());
        own.cloned().collect()
    }

    fn members(&self) -> MutexGuard<'_, BTreeMap<Id, Arc<Member>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs a job that takes locks of the store on the blocking pool, to its end whoever waits for it.
async fn blocking<T, F>(job: impl FnOnce() -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let handle = tokio::runtime::Handle::current();
    let work = trace::Work::current();
    match tokio::task::spawn_blocking(move || handle.block_on(work.of(job()))).await {
        Ok(value) => value,
        // A job is not cancelled, so it panicked; whoever waits for it goes the same way.
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => std::future::pending().await,
        },
    }
}
