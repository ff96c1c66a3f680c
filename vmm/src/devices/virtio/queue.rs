//! A split virtqueue in use: the ring, guest memory around it and the interrupt line, with the
//! loop that nearly every device runs over it.
//!
//! Everything in a ring is the guest's to write. When something makes no sense, the driver is
//! asked for a reset, and nothing more is done until it comes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{DescriptorChain, Error, Queue, QueueOwnedT as _, QueueT as _};

use super::{Interrupt, QueuePosition};
use crate::memory::GuestRam;

/// A queue that the driver handed over.
#[derive(Debug)]
pub struct ActiveQueue {
    queue: Queue,
    ram: Arc<GuestRam>,
    interrupt: Interrupt,
}

impl ActiveQueue {
    /// Takes over a queue of an activation.
    pub fn new(queue: Queue, ram: Arc<GuestRam>, interrupt: Interrupt) -> Self {
        Self { queue, ram, interrupt }
    }

    /// How far the device is with the queue.
    pub fn position(&self) -> QueuePosition {
        QueuePosition::from(&self.queue)
    }

    /// Descriptors of the queue.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Guest memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Gives every available chain to `handle`, which returns how many bytes it wrote, and hands
    /// the chain back to the driver. Kicks that arrive meanwhile are taken along; the driver is
    /// interrupted after each chain unless it asked for less.
    pub fn drain(&mut self, mut handle: impl FnMut(&GuestRam, DescriptorChain<&GuestRam>) -> u32) {
        self.guarded(|this| {
            loop {
                this.queue.disable_notification(&*this.ram)?;
                while let Some(chain) = next_chain(&mut this.queue, &this.ram)? {
                    let head = chain.head_index();
                    let written = handle(&this.ram, chain);
                    this.queue.add_used(&*this.ram, head, written)?;
                    this.notify()?;
                }
                if !this.queue.enable_notification(&*this.ram)? {
                    return Ok(());
                }
            }
        });
    }

    /// Takes one chain, looks at it with `handle` and keeps it: the driver has it back only after
    /// [`ActiveQueue::give_back`] with the number returned here. Call it until there is `None`.
    pub fn take<T>(
        &mut self,
        handle: impl FnOnce(&GuestRam, DescriptorChain<&GuestRam>) -> T,
    ) -> Option<(u16, T)> {
        let mut taken = None;
        self.guarded(|this| {
            if let Some(chain) = next_chain(&mut this.queue, &this.ram)? {
                let head = chain.head_index();
                if head >= this.queue.size() {
                    // It could not be given back, nor kept across a restore.
                    return Err(Error::InvalidDescriptorIndex);
                }
                taken = Some((head, handle(&this.ram, chain)));
                // The driver is to kick for the next one; one it added before this is seen by
                // the next call all the same.
                this.queue.enable_notification(&*this.ram)?;
            }
            Ok(())
        });
        taken
    }

    /// Hands a chain that [`ActiveQueue::take`] kept back to the driver, with nothing written.
    pub fn give_back(&mut self, head: u16) {
        self.guarded(|this| {
            this.queue.add_used(&*this.ram, head, 0)?;
            this.notify()
        });
    }

    fn notify(&mut self) -> Result<(), Error> {
        if self.queue.needs_notification(&*self.ram)? {
            self.interrupt.signal_used_ring();
        }
        Ok(())
    }

    /// Runs `work` unless the device waits for a reset, and asks for one when `work` finds that
    /// the queue makes no sense.
    fn guarded(&mut self, work: impl FnOnce(&mut Self) -> Result<(), Error>) {
        if self.interrupt.needs_reset() {
            return;
        }
        if let Err(error) = work(self) {
            // The guest can bring this about at will, so it must not fill anybody's log.
            tracing::debug!(%error, "a driver broke its queue");
            self.interrupt.signal_needs_reset();
        }
    }
}

/// The next available chain.
///
/// # Errors
/// The available index is out of reach, or an entry cannot be read: with nothing taken, asking
/// again would never end.
pub fn next_chain<'m>(
    queue: &mut Queue,
    ram: &'m GuestRam,
) -> Result<Option<DescriptorChain<&'m GuestRam>>, Error> {
    // Looked at first: the driver may add a chain at any time, and one that it adds between two
    // looks must not make the queue seem broken.
    let available = queue.avail_idx(ram, Ordering::Acquire)?;
    if available.0 == queue.next_avail() {
        return Ok(None);
    }
    queue.iter(ram)?.next().map(Some).ok_or(Error::InvalidAvailRingIndex)
}

#[cfg(test)]
mod tests;
