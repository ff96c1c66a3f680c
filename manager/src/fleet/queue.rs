//! Starts of machines wait in line: a few are under way at a time, and tenants take turns, so that
//! one who asks for hundreds delays another by one start and not by hundreds.
//!
//! Whoever waits may go away at any time and gives up its place; nothing was promised to it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::Error;
use crate::registry::Tenant;

/// The most starts of a tenant, and of all, that wait.
const MAX_OWN: usize = 512;
const MAX_ALL: usize = 4096;

/// Why there is no place in the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    /// Too many of this one wait already.
    Own,
    /// Too many wait already.
    All,
}

/// The order of those that wait: pure, without anybody who does.
#[derive(Debug)]
struct Line<K> {
    /// How many more may be under way now.
    free: usize,
    /// Those whose turn it is, the next one first, with their tickets in order.
    waiting: VecDeque<(K, VecDeque<u64>)>,
    /// Those that come when nobody else waits.
    idle: VecDeque<u64>,
    next_ticket: u64,
}

impl<K: PartialEq> Line<K> {
    fn new(free: usize) -> Self {
        Self { free, waiting: VecDeque::new(), idle: VecDeque::new(), next_ticket: 0 }
    }

    /// Takes a ticket for somebody, or for what is done when nobody else waits.
    fn join(&mut self, key: Option<K>) -> Result<u64, Full> {
        let ticket = self.next_ticket;
        match key {
            None => self.idle.push_back(ticket),
            Some(key) => {
                let all: usize = self.waiting.iter().map(|(_, tickets)| tickets.len()).sum();
                let own = self.waiting.iter_mut().find(|(other, _)| *other == key);
                if all >= MAX_ALL {
                    return Err(Full::All);
                }
                match own {
                    Some((_, tickets)) if tickets.len() >= MAX_OWN => return Err(Full::Own),
                    Some((_, tickets)) => tickets.push_back(ticket),
                    None => self.waiting.push_back((key, VecDeque::from([ticket]))),
                }
            }
        }
        self.next_ticket += 1;
        Ok(ticket)
    }

    /// Gives a ticket back that was not called.
    fn leave(&mut self, ticket: u64) {
        self.idle.retain(|other| *other != ticket);
        for (_, tickets) in &mut self.waiting {
            tickets.retain(|other| *other != ticket);
        }
        self.waiting.retain(|(_, tickets)| !tickets.is_empty());
    }

    /// Calls the next ticket, if one more may be under way.
    fn call(&mut self) -> Option<u64> {
        if self.free == 0 {
            return None;
        }
        let ticket = match self.waiting.pop_front() {
            Some((key, mut tickets)) => {
                let ticket = tickets.pop_front();
                if !tickets.is_empty() {
                    self.waiting.push_back((key, tickets));
                }
                ticket
            }
            None => self.idle.pop_front(),
        }?;
        self.free -= 1;
        Some(ticket)
    }

    /// One that was called is over.
    fn done(&mut self) {
        self.free += 1;
    }
}

#[derive(Debug)]
struct Now {
    line: Line<Tenant>,
    /// Those that wait for their tickets.
    waiters: Vec<(u64, oneshot::Sender<Start>)>,
}

/// The line of starts.
#[derive(Debug)]
pub(super) struct Queue(Mutex<Now>);

/// A start that may be under way; the next one may be when it is dropped.
#[derive(Debug)]
pub(super) struct Start(Arc<Queue>);

/// A place in the line, given up when dropped.
struct Place<'a> {
    queue: &'a Arc<Queue>,
    ticket: u64,
}

impl Queue {
    /// A line of which so many may be under way at a time.
    pub(super) fn new(starts: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Now { line: Line::new(starts), waiters: Vec::new() })))
    }

    /// Waits until a tenant may start a machine.
    ///
    /// # Errors
    /// [`Error::Queue`] or [`Error::Busy`], at once, when too many wait.
    pub(super) async fn start(self: &Arc<Self>, tenant: &Tenant) -> Result<Start, Error> {
        self.wait(Some(tenant.clone())).await.map_err(|full| match full {
            Full::Own => Error::Queue { limit: MAX_OWN },
            Full::All => Error::Busy,
        })
    }

    /// Waits until nobody waits.
    pub(super) async fn idle(self: &Arc<Self>) -> Option<Start> {
        self.wait(None).await.ok()
    }

    async fn wait(self: &Arc<Self>, tenant: Option<Tenant>) -> Result<Start, Full> {
        let (sender, called) = oneshot::channel();
        let ticket = {
            let mut now = self.now();
            let ticket = now.line.join(tenant)?;
            now.waiters.push((ticket, sender));
            ticket
        };
        let place = Place { queue: self, ticket };
        self.call();
        let start = called.await;
        drop(place);
        // The other end is only dropped by being called.
        start.map_err(|_| Full::All)
    }

    /// Calls all that may start.
    fn call(self: &Arc<Self>) {
        loop {
            let sender = {
                let mut now = self.now();
                let Some(ticket) = now.line.call() else { return };
                let at = now.waiters.iter().position(|(other, _)| *other == ticket);
                at.map(|at| now.waiters.swap_remove(at).1)
            };
            // Dropped if nobody takes it, which is when the next one is called.
            let start = Start(Arc::clone(self));
            if let Some(sender) = sender {
                let _ = sender.send(start);
            }
        }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Start {
    fn drop(&mut self) {
        self.0.now().line.done();
        self.0.call();
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut now = self.queue.now();
        now.line.leave(self.ticket);
        now.waiters.retain(|(other, _)| *other != self.ticket);
    }
}

#[cfg(test)]
mod tests;
