//! Watched directories: their table, and what is asked of them.
//!
//! A [`Collector`] does the work on helper threads; here is who calls it, and when. A stream sends
//! on what it collects; a polled watcher collects by itself, so that its queue in the kernel stays
//! short, and once more whenever it is asked.

mod stream;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coppice_agent_protocol::filesystem::FilesystemEvent;
use coppice_agent_protocol::{Code, ConnectError};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

pub(crate) use stream::WatchStream;

use crate::files::{Collector, Progress, Scope};
use crate::sys;

/// Watches at once, streams and polled ones together. The kernel lets a user have 128 by default.
const MAX_WATCHES: usize = 64;

/// Bytes of events that wait for a polled watcher's client; more waits in the kernel.
const POLLED_BYTES: usize = 1024 * 1024;

/// A directory being watched.
#[derive(Debug)]
struct Watch {
    collector: Arc<Mutex<Collector>>,
    readable: AsyncFd<OwnedFd>,
    _slot: OwnedSemaphorePermit,
}

impl Watch {
    /// Waits for events and collects them.
    async fn next(&self, limit: usize) -> Progress {
        let Ok(mut guard) = self.readable.readable().await else { return Progress::Failed };
        let progress = self.collect(limit).await;
        if progress == Progress::Drained {
            // What came after that is told anew.
            guard.clear_ready();
        }
        progress
    }

    /// Collects what there is.
    async fn collect(&self, limit: usize) -> Progress {
        let collector = Arc::clone(&self.collector);
        let collected = tokio::task::spawn_blocking(move || lock(&collector).collect(limit));
        collected.await.unwrap_or(Progress::Failed)
    }

    fn take(&self) -> (Vec<FilesystemEvent>, Option<ConnectError>) {
        lock(&self.collector).take()
    }
}

/// A collector is fit for use whatever a thread that held it ran into.
fn lock(collector: &Mutex<Collector>) -> MutexGuard<'_, Collector> {
    collector.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A watcher whose events are fetched.
#[derive(Debug)]
struct Polled {
    watch: Rc<Watch>,
    /// Told when events were fetched.
    fetched: Rc<Notify>,
    collecting: AbortHandle,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.collecting.abort();
    }
}

/// All watches of the agent.
#[derive(Debug)]
pub(crate) struct Watches {
    polled: RefCell<BTreeMap<String, Rc<Polled>>>,
    /// Polled watchers made so far.
    made: Cell<u64>,
    slots: Arc<Semaphore>,
}

impl Default for Watches {
    fn default() -> Self {
        let slots = Arc::new(Semaphore::new(MAX_WATCHES));
        Self { polled: RefCell::default(), made: Cell::new(0), slots }
    }
}

impl Watches {
    async fn open(&self, scope: Scope) -> Result<Watch, ConnectError> {
        let slot = Arc::clone(&self.slots).try_acquire_owned().map_err(|_| {
            let message = format!("{MAX_WATCHES} directories are watched: end some watches first");
            ConnectError::new(Code::ResourceExhausted, message)
        })?;
        let internal = |message: String| ConnectError::new(Code::Internal, message);
        let opened = tokio::task::spawn_blocking(move || Collector::new(scope)).await;
        let collector = opened.map_err(|error| internal(error.to_string()))??;
        let readable = collector.descriptor().and_then(sys::watch);
        let readable = readable.map_err(|error| internal(format!("watching: {error}")))?;
        Ok(Watch { collector: Arc::new(Mutex::new(collector)), readable, _slot: slot })
    }

    /// Makes a watcher whose events are fetched; its name.
    pub(crate) async fn create(&self, scope: Scope) -> Result<String, ConnectError> {
        let watch = Rc::new(self.open(scope).await?);
        let fetched = Rc::new(Notify::new());
        let task = tokio::task::spawn_local(keep(Rc::clone(&watch), Rc::clone(&fetched)));
        let polled = Polled { watch, fetched, collecting: task.abort_handle() };
        let number = self.made.get().saturating_add(1);
        self.made.set(number);
        let name = format!("w{number}");
        self.polled.borrow_mut().insert(name.clone(), Rc::new(polled));
        Ok(name)
    }

    /// What a watcher collected since this was last called.
    pub(crate) async fn events(&self, name: &str) -> Result<Vec<FilesystemEvent>, ConnectError> {
        let polled = self.polled.borrow().get(name).cloned().ok_or_else(|| not_found(name))?;
        // What happened until now counts, whether the watcher has had its turn or not.
        polled.watch.collect(POLLED_BYTES).await;
        let (events, failure) = polled.watch.take();
        polled.fetched.notify_one();
        match failure {
            Some(error) if events.is_empty() => Err(error),
            // The failure is told when there is nothing else to tell.
            _ => Ok(events),
        }
    }

    /// Ends a watcher.
    pub(crate) fn remove(&self, name: &str) -> Result<(), ConnectError> {
        let removed = self.polled.borrow_mut().remove(name);
        removed.map(drop).ok_or_else(|| not_found(name))
    }
}

/// Collects for a polled watcher as long as there is room.
async fn keep(watch: Rc<Watch>, fetched: Rc<Notify>) {
    loop {
        match watch.next(POLLED_BYTES).await {
            Progress::Drained => {}
            Progress::Full => fetched.notified().await,
            Progress::Failed => return,
        }
    }
}

fn not_found(name: &str) -> ConnectError {
    ConnectError::new(Code::NotFound, format!("watcher with id {name} not found"))
}
