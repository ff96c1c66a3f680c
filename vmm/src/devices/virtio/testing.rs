//! The driver's side of a split virtqueue, for tests of devices.

mod machine;

use std::sync::Arc;

use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Activation, EVENT_IDX, Interrupt};
use crate::memory::GuestRam;

pub(super) use machine::{Machine, check_hostile, check_restore, edits};

/// Bytes of guest memory, in two regions that touch.
pub(super) const MEMORY: u64 = 4 << 20;
/// Where the second region starts: buffers around here are in two pieces.
pub(super) const SEAM: u64 = 2 << 20;

pub(super) fn memory() -> Arc<GuestRam> {
    let half = usize::try_from(SEAM).unwrap();
    let ranges = [(GuestAddress(0), half), (GuestAddress(SEAM), half)];
    Arc::new(GuestRam::from_ranges(&ranges).unwrap())
}

/// An interrupt and the eventfd that tells whether it was raised.
pub(super) fn interrupt() -> (Interrupt, Arc<EventFd>) {
    let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    (Interrupt::new(Arc::clone(&line)), line)
}

/// A descriptor: address, length, whether the device writes to it.
pub(super) type Piece = (u64, u32, bool);

/// One queue as its driver sees it. Its rings take the first 64 KiB from `base` on.
#[derive(Clone)]
pub(super) struct Driver {
    ram: Arc<GuestRam>,
    base: u64,
    size: u16,
    available: u16,
    used: u16,
}

impl Driver {
    pub(super) fn new(ram: &Arc<GuestRam>, base: u64, size: u16) -> Self {
        Self { ram: Arc::clone(ram), base, size, available: 0, used: 0 }
    }

    fn available_ring(&self) -> u64 {
        self.base + 0x8000
    }

    fn used_ring(&self) -> u64 {
        self.base + 0xC000
    }

    /// What the device is activated with when `drivers` have set up its queues.
    pub(super) fn activation(
        drivers: &[&Self],
        interrupt: &Interrupt,
        features: u64,
    ) -> Activation {
        let queues = drivers.iter().map(|driver| driver.queue(features)).collect();
        let ram = Arc::clone(&drivers[0].ram);
        Activation { ram, queues, interrupt: interrupt.clone(), features }
    }

    fn queue(&self, features: u64) -> Queue {
        let mut queue = Queue::new(self.size).unwrap();
        queue.try_set_desc_table_address(GuestAddress(self.base)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(self.available_ring())).unwrap();
        queue.try_set_used_ring_address(GuestAddress(self.used_ring())).unwrap();
        queue.set_event_idx(features & EVENT_IDX != 0);
        queue.set_ready(true);
        assert!(queue.is_valid(&*self.ram));
        queue
    }

    /// Makes a well-formed chain of `pieces` available, in the first descriptors of the table.
    pub(super) fn offer(&mut self, pieces: &[Piece]) {
        for (index, &(addr, len, writable)) in (0u16..).zip(pieces) {
            let last = usize::from(index) + 1 == pieces.len();
            let next = if last { 0 } else { VRING_DESC_F_NEXT };
            let write = if writable { VRING_DESC_F_WRITE } else { 0 };
            let flags = u16::try_from(next | write).unwrap();
            self.describe(index, addr, len, flags, index + 1);
        }
        self.publish(0);
    }

    /// Writes one descriptor as it is.
    pub(super) fn describe(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let at = self.base + 16 * u64::from(index);
        self.ram.write_obj(addr, GuestAddress(at)).unwrap();
        self.ram.write_obj(len, GuestAddress(at + 8)).unwrap();
        self.ram.write_obj(flags, GuestAddress(at + 12)).unwrap();
        self.ram.write_obj(next, GuestAddress(at + 14)).unwrap();
    }

    /// Makes the chain that starts at `head` available.
    pub(super) fn publish(&mut self, head: u16) {
        let entry = self.available_ring() + 4 + 2 * u64::from(self.available % self.size);
        self.ram.write_obj(head, GuestAddress(entry)).unwrap();
        self.set_available(self.available.wrapping_add(1));
    }

    /// Sets the available index, sense or nonsense.
    pub(super) fn set_available(&mut self, index: u16) {
        self.available = index;
        self.ram.write_obj(index, GuestAddress(self.available_ring() + 2)).unwrap();
    }

    /// From which used index on the driver wants an interrupt (EVENT_IDX).
    pub(super) fn set_used_event(&self, index: u16) {
        let at = self.available_ring() + 4 + 2 * u64::from(self.size);
        self.ram.write_obj(index, GuestAddress(at)).unwrap();
    }

    /// The next chain the device gave back: its head and how much was written.
    pub(super) fn completed(&mut self) -> Option<(u32, u32)> {
        let index: u16 = self.ram.read_obj(GuestAddress(self.used_ring() + 2)).unwrap();
        if index == self.used {
            return None;
        }
        let entry = self.used_ring() + 4 + 8 * u64::from(self.used % self.size);
        self.used = self.used.wrapping_add(1);
        let head = self.ram.read_obj(GuestAddress(entry)).unwrap();
        let len = self.ram.read_obj(GuestAddress(entry + 4)).unwrap();
        Some((head, len))
    }
}
