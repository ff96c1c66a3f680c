//! Warm shells: processes with all that KVM needs for a machine but nothing in it, made ahead of
//! the sandboxes that will be put into them.
//!
//! A shell fits machines of exactly its shape, so there is a shelf for each shape that was asked
//! for. A shelf holds as many as were taken from it lately; one that nobody took from is emptied,
//! and all are while the host is short of memory. The processes end with the daemon.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::timeout;

use super::memory::HostMemory;
use super::{Error, Fleet, blocking};
use crate::sandbox::Shell;
use crate::store::{Id, Machine};

/// How long a shell that was taken counts.
const LATELY: Duration = Duration::from_secs(60);
/// The most shells of a shape.
const MAX: usize = 8;
/// How often shelves are looked at when nobody takes from them.
const CHECK: Duration = Duration::from_secs(15);

/// All shelves.
#[derive(Debug, Default)]
pub(super) struct Pool {
    shelves: Mutex<Vec<Shelf>>,
    taken: Notify,
    /// No more shells are to be made.
    closed: AtomicBool,
}

/// Shells of one shape.
#[derive(Debug)]
struct Shelf {
    machine: Machine,
    shells: Vec<Shell>,
    takes: VecDeque<Instant>,
}

impl Shelf {
    /// How many shells there should be now.
    fn target(&mut self, now: Instant) -> usize {
        while self.takes.front().is_some_and(|take| now.duration_since(*take) > LATELY) {
            self.takes.pop_front();
        }
        self.takes.len().min(MAX)
    }
}

impl Pool {
    /// A shell for a machine, if one is ready; and more will be.
    pub(super) fn take(&self, machine: &Machine) -> Option<Shell> {
        let mut shelves = self.shelves();
        let at = shelves.iter().position(|shelf| shelf.machine == *machine);
        let at = at.unwrap_or_else(|| {
            let (machine, shells) = (machine.clone(), Vec::new());
            shelves.push(Shelf { machine, shells, takes: VecDeque::new() });
            shelves.len() - 1
        });
        let shelf = shelves.get_mut(at)?;
        shelf.takes.push_back(Instant::now());
        if shelf.takes.len() > MAX {
            shelf.takes.pop_front();
        }
        self.taken.notify_one();
        // One whose process ended is of no use; its directory goes when the daemon starts again.
        std::iter::from_fn(|| shelf.shells.pop()).find(Shell::is_alive)
    }

    /// How many shells are ready.
    pub(super) fn depth(&self) -> usize {
        self.shelves().iter().map(|shelf| shelf.shells.len()).sum()
    }

    /// Puts a shell where it belongs; gives it back if there is no such shelf any more.
    fn put(&self, machine: &Machine, shell: Shell) -> Option<Shell> {
        let mut shelves = self.shelves();
        match shelves.iter_mut().find(|shelf| shelf.machine == *machine) {
            Some(shelf) => {
                shelf.shells.push(shell);
                None
            }
            None => Some(shell),
        }
    }

    /// A shape of which there are too few.
    fn short_of(&self) -> Option<Machine> {
        let now = Instant::now();
        let mut shelves = self.shelves();
        let short = |shelf: &mut &mut Shelf| shelf.shells.len() < shelf.target(now);
        shelves.iter_mut().find_map(|mut shelf| short(&mut shelf).then(|| shelf.machine.clone()))
    }

    /// Takes out the shells that are too many, or all.
    fn surplus(&self, all: bool) -> Vec<Shell> {
        let now = Instant::now();
        let mut shelves = self.shelves();
        let mut surplus = Vec::new();
        for shelf in shelves.iter_mut() {
            let target = if all { 0 } else { shelf.target(now) };
            let kept = target.min(shelf.shells.len());
            surplus.extend(shelf.shells.drain(kept..));
        }
        shelves.retain(|shelf| !shelf.takes.is_empty());
        surplus
    }

    fn shelves(&self) -> MutexGuard<'_, Vec<Shelf>> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fleet {
    /// Keeps as many shells ready as are being taken, until [`Fleet::close_pool`].
    pub async fn keep_warm(self: Arc<Self>) {
        while !self.pool.closed.load(Ordering::Acquire) {
            // More often than looked at, it is woken.
            let _woken = timeout(CHECK, self.pool.taken.notified()).await;
            let spares = || HostMemory::now().spares(self.settings.reserve);
            self.discard(self.pool.surplus(!spares())).await;
            while let Some(machine) = self.pool.short_of() {
                // Behind all sandboxes that wait; meanwhile things may have changed.
                let start = self.queue.idle().await;
                if !spares() || self.pool.closed.load(Ordering::Acquire) {
                    break;
                }
                if let Err(error) = self.make_shell(machine).await {
                    tracing::warn!(%error, "a machine could not be prepared ahead");
                    break;
                }
                drop(start);
            }
        }
    }

    /// Has [`Fleet::keep_warm`] return when the shell that it makes now is made.
    pub fn close_pool(&self) {
        self.pool.closed.store(true, Ordering::Release);
        self.pool.taken.notify_one();
    }

    /// Ends all shells; for after [`Fleet::keep_warm`] has returned.
    pub async fn empty_pool(&self) {
        self.discard(self.pool.surplus(true)).await;
    }

    async fn make_shell(&self, machine: Machine) -> Result<(), Error> {
        let id = Id::new().map_err(Error::Random)?;
        self.registry.put_shell(&id)?;
        let (store, program) = (self.store.clone(), self.settings.vmm.clone());
        let (wanted, shape) = (id.clone(), machine.clone());
        let made = blocking(move || async move {
            Shell::new(&store, &program, shape, Some(wanted), None).await
        });
        match made.await {
            Ok(shell) => {
                let unwanted = self.pool.put(&machine, shell);
                self.discard(unwanted).await;
                Ok(())
            }
            Err(error) => {
                self.registry.remove_shell(&id)?;
                Err(error.into())
            }
        }
    }

    pub(super) async fn discard(&self, shells: impl IntoIterator<Item = Shell>) {
        for shell in shells {
            let id = shell.id().clone();
            let discarded = blocking(move || shell.discard()).await;
            // What cannot be removed now is tried again when the daemon starts.
            match discarded {
                Ok(()) => drop(self.registry.remove_shell(&id)),
                Err(error) => tracing::warn!(%error, "a prepared machine could not be removed"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(vcpus: u8) -> Machine {
        Machine { vcpus, memory_mib: 128, ..crate::fleet::stub::machine() }
    }

    #[test]
    fn a_shelf_wants_as_many_as_were_taken_lately() {
        let pool = Pool::default();
        assert!(pool.short_of().is_none());
        for _ in 0..3 {
            assert!(pool.take(&machine(1)).is_none());
        }
        assert_eq!(pool.short_of(), Some(machine(1)));
        let mut shelves = pool.shelves();
        assert_eq!(shelves[0].target(Instant::now()), 3);
        let later = Instant::now() + LATELY + Duration::from_secs(1);
        assert_eq!(shelves[0].target(later), 0);
    }

    #[test]
    fn a_shelf_never_wants_more_than_its_limit() {
        let pool = Pool::default();
        for _ in 0..100 {
            assert!(pool.take(&machine(1)).is_none());
        }
        assert_eq!(pool.shelves()[0].target(Instant::now()), MAX);
    }

    #[test]
    fn a_shape_that_nobody_asks_for_is_forgotten() {
        let pool = Pool::default();
        assert!(pool.take(&machine(1)).is_none());
        assert!(pool.take(&machine(2)).is_none());
        pool.shelves()[0].takes.clear();
        assert!(pool.surplus(false).is_empty());
        assert_eq!(pool.shelves().len(), 1);
    }
}
