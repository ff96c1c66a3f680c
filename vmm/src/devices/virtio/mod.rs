//! Virtio 1.2 devices behind the memory-mapped transport (section 4.2 of the specification).
//!
//! The transport handles registers, feature negotiation and the status field. Once the driver
//! sets DRIVER_OK it hands the queues to the device with [`VirtioDevice::activate`]. From then on
//! an I/O thread calls [`VirtioDevice::queue_event`] when the guest kicked a queue and
//! [`VirtioDevice::host_event`] when the device's host descriptor is readable.
//!
//! All work on guest memory happens inside these calls, under the device's lock. Holding the lock
//! therefore quiesces the device: that is how a machine pauses, and how a checkpoint sees queues
//! and memory that agree.

pub mod balloon;
pub mod blk;
pub mod io_thread;
pub mod mmio;
pub mod queue;
pub mod rng;
#[cfg(test)]
mod testing;
pub mod vsock;

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use virtio_queue::{Queue, QueueT as _};
use vmm_sys_util::eventfd::EventFd;

use crate::devices::{OwnState, StateError};
use crate::memory::GuestRam;

/// Interrupt status bit: a queue has used buffers.
pub const INTERRUPT_USED_RING: u32 = 1;
/// Interrupt status bit: the configuration space changed.
pub const INTERRUPT_CONFIG: u32 = 2;

/// Feature bit VIRTIO_F_EVENT_IDX (section 2.7.10): each side says from which ring index on it
/// wants to be told.
pub const EVENT_IDX: u64 = 1 << virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// The interrupt line of one virtio device: the registers a device may change at any time, and
/// the irqfd behind them.
#[derive(Debug, Clone)]
pub struct Interrupt {
    shared: Arc<Shared>,
    line: Arc<EventFd>,
}

#[derive(Debug, Default)]
struct Shared {
    status: AtomicU32,
    config_generation: AtomicU32,
    needs_reset: AtomicBool,
}

impl Interrupt {
    /// Makes a line over an eventfd that is (or will be) registered as an irqfd.
    pub fn new(line: Arc<EventFd>) -> Self {
        Self { shared: Arc::default(), line }
    }

    /// Tells the driver that buffers were used. Call it only when the queue asks for it
    /// (`Queue::needs_notification`).
    pub fn signal_used_ring(&self) {
        self.signal(INTERRUPT_USED_RING);
    }

    /// Tells the driver that the configuration space changed. Call it with the device's lock
    /// still held since the change, so that no driver sees half of it with an old generation.
    pub fn signal_config(&self) {
        self.shared.config_generation.fetch_add(1, Ordering::AcqRel);
        self.signal(INTERRUPT_CONFIG);
    }

    /// Tells the driver that the device cannot go on, such as after a ring index that makes no
    /// sense: DEVICE_NEEDS_RESET shows in the status register until the driver resets.
    pub fn signal_needs_reset(&self) {
        self.shared.needs_reset.store(true, Ordering::Release);
        self.signal_config();
    }

    /// The interrupt status register (`InterruptStatus`).
    pub fn status(&self) -> u32 {
        self.shared.status.load(Ordering::Acquire)
    }

    /// Clears acknowledged bits (`InterruptACK`).
    pub fn acknowledge(&self, bits: u32) {
        self.shared.status.fetch_and(!bits, Ordering::AcqRel);
    }

    /// Counts the changes of the configuration space (`ConfigGeneration`); wraps around.
    pub fn config_generation(&self) -> u32 {
        self.shared.config_generation.load(Ordering::Acquire)
    }

    /// Whether the device asked for a reset since the last one.
    pub fn needs_reset(&self) -> bool {
        self.shared.needs_reset.load(Ordering::Acquire)
    }

    /// The driver reset the device: nothing is pending any more.
    fn reset(&self) {
        self.shared.needs_reset.store(false, Ordering::Release);
        self.shared.status.store(0, Ordering::Release);
    }

    fn save(&self) -> InterruptState {
        InterruptState {
            status: self.status(),
            config_generation: self.config_generation(),
            needs_reset: self.needs_reset(),
        }
    }

    /// Takes over saved registers without raising the line.
    fn restore(&self, state: &InterruptState) {
        self.shared.status.store(state.status, Ordering::Release);
        self.shared.config_generation.store(state.config_generation, Ordering::Release);
        self.shared.needs_reset.store(state.needs_reset, Ordering::Release);
    }

    /// Raises the line for what the driver has yet to acknowledge.
    fn raise_pending(&self) {
        if self.status() != 0 {
            self.raise();
        }
    }

    fn signal(&self, bit: u32) {
        self.shared.status.fetch_or(bit, Ordering::AcqRel);
        self.raise();
    }

    fn raise(&self) {
        // The counter of an irqfd is drained by KVM; a full counter means the line is already
        // pending, so there is nothing to lose.
        let _ = self.line.write(1);
    }
}

/// The registers of an [`Interrupt`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InterruptState {
    status: u32,
    config_generation: u32,
    needs_reset: bool,
}

/// How far a device is with the rings of one queue: all of a queue's state that is neither in
/// the transport's registers nor in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueuePosition {
    /// Index of the next available chain to take.
    pub next_avail: u16,
    /// Index of the next used entry to fill.
    pub next_used: u16,
}

impl From<&Queue> for QueuePosition {
    fn from(queue: &Queue) -> Self {
        Self { next_avail: queue.next_avail(), next_used: queue.next_used() }
    }
}

/// What a device gets when its driver is ready.
#[derive(Debug)]
pub struct Activation {
    /// Guest memory, in which the queues and buffers live.
    pub ram: Arc<GuestRam>,
    /// The first [`VirtioDevice::required_queues`] queues in index order: ready, validated
    /// against guest memory, and with EVENT_IDX switched on if it was accepted.
    pub queues: Vec<Queue>,
    /// The device's interrupt line.
    pub interrupt: Interrupt,
    /// Feature bits the driver accepted, a subset of those offered.
    pub features: u64,
}

/// Why a device could not start.
#[derive(Debug, Error)]
#[error("device {device} cannot be activated: {reason}")]
pub struct ActivateError {
    /// The device's name.
    pub device: &'static str,
    /// What is wrong.
    pub reason: String,
}

/// A virtio device, without its transport.
pub trait VirtioDevice: Send {
    /// Name for logs and errors, such as `blk`.
    fn name(&self) -> &'static str;
    /// Device ID (section 5 of the specification), such as 2 for a block device.
    fn device_id(&self) -> u32;
    /// Feature bits offered. The transport adds VIRTIO_F_VERSION_1; rings with EVENT_IDX are the
    /// device's own choice.
    fn features(&self) -> u64;
    /// Largest size of each queue, a power of two up to 1024; its length is the queue count.
    fn queue_sizes(&self) -> &[u16];
    /// How many queues, from index 0 on, the driver must have made ready before DRIVER_OK when it
    /// accepted `features`. Others are not handed over.
    fn required_queues(&self, features: u64) -> usize {
        let _ = features;
        self.queue_sizes().len()
    }
    /// Reads the configuration space; bytes past its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// Writes the configuration space; writes past its end are ignored.
    fn write_config(&mut self, offset: u64, data: &[u8]);
    /// Takes the queues; from here on events arrive.
    ///
    /// # Errors
    /// The transport then sets DEVICE_NEEDS_RESET.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;
    /// The driver reset the device: drop the queues, close per-connection state, keep the
    /// configuration. [`VirtioDevice::activate`] may come again.
    fn reset(&mut self);
    /// Where the device is in its queues, in index order; nothing when it has none, before an
    /// activation, after a reset or because it gave them up.
    fn queue_positions(&self) -> Option<Vec<QueuePosition>>;
    /// The device's own state: what is neither in the transport's registers, nor in queues and
    /// guest memory, nor in the host files it was made with.
    ///
    /// # Errors
    /// [`StateError::Encode`].
    fn save(&self) -> Result<OwnState, StateError>;
    /// Takes over saved state right after a [`VirtioDevice::reset`], and, if the device had queues
    /// then, queues that go on where those were. `state` may hold anything. Guest memory must not
    /// be touched: it may not be the one that belongs to the state yet. The first
    /// [`VirtioDevice::queue_event`] comes when it is.
    ///
    /// # Errors
    /// [`StateError`]; the device is then reset again.
    fn restore(
        &mut self,
        state: &OwnState,
        activation: Option<Activation>,
    ) -> Result<(), StateError>;
    /// The guest kicked queue `index`. Must tolerate spurious calls and calls before activation.
    fn queue_event(&mut self, index: usize);
    /// One descriptor, fixed for the device's life, that is readable when the host side has work
    /// (a device with many sockets gives an epoll descriptor that holds them).
    fn host_fd(&self) -> Option<RawFd> {
        None
    }
    /// [`VirtioDevice::host_fd`] is readable.
    fn host_event(&mut self) {}
}

/// Reads from a configuration space held as bytes; past its end there are zeroes.
fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let rest = usize::try_from(offset).ok().and_then(|offset| config.get(offset..));
    for (byte, source) in data.iter_mut().zip(rest.unwrap_or_default()) {
        *byte = *source;
    }
}

/// Takes a device's lock, whatever a panic in another thread left: devices check their own state
/// and guest memory on every call anyway.
fn lock(device: &Mutex<dyn VirtioDevice>) -> MutexGuard<'_, dyn VirtioDevice + 'static> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}
