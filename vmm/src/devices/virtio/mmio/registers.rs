//! The state machine of the transport's registers: status, features and queue set-up.
//!
//! It touches nothing outside itself. A write returns what the transport has to do, so that every
//! order of accesses can be tested without a device. Writes that come at the wrong moment (the
//! specification calls them driver errors) change nothing.

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio as reg;
use virtio_queue::{Queue, QueueT as _};
use vm_memory::GuestAddress;

use crate::memory::GuestRam;

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// The register layout of virtio 1.0 and later.
const VERSION: u32 = 2;
/// Ours ("CPCE"); drivers only show it.
const VENDOR: u32 = 0x4543_5043;
/// What a shared memory region that does not exist reads as (section 4.2.2).
const NO_SHM: u32 = u32::MAX;

/// What a register write asks of the transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing beyond the registers.
    None,
    /// The driver reset the device.
    Reset,
    /// DRIVER_OK was set: hand the queues over.
    Activate,
    /// A running queue was stopped.
    StopQueue,
    /// The queue with this index was kicked.
    Notify(usize),
    /// These interrupt status bits were acknowledged.
    Acknowledge(u32),
}

/// One queue as the driver sets it up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueSetup {
    #[serde(skip)]
    max_size: u16,
    size: u32,
    ready: bool,
    descriptors: u64,
    available: u64,
    used: u64,
}

impl QueueSetup {
    fn new(max_size: u16) -> Self {
        let size = u32::from(max_size);
        Self { max_size, size, ready: false, descriptors: 0, available: 0, used: 0 }
    }

    /// The queue, if its size is a power of two within the limit and its rings are aligned and
    /// inside guest memory. Address 0 counts as not set.
    fn build(&self, ram: &GuestRam) -> Option<Queue> {
        let mut queue = Queue::new(self.max_size).ok()?;
        queue.try_set_size(u16::try_from(self.size).ok()?).ok()?;
        queue.try_set_desc_table_address(GuestAddress(self.descriptors)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(self.available)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(self.used)).ok()?;
        queue.set_ready(true);
        (self.available != 0 && queue.is_valid(ram)).then_some(queue)
    }
}

/// The registers a driver can change. Serialized, they are a part of the transport's saved state;
/// what the device itself says is left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Registers {
    device_id: u32,
    #[serde(skip)]
    offered: u64,
    status: u32,
    offered_select: u32,
    wanted_select: u32,
    wanted: u64,
    queue_select: u32,
    queues: Vec<QueueSetup>,
}

impl Registers {
    /// The state after reset. `offered` are all feature bits the driver may accept.
    pub(super) fn new(device_id: u32, offered: u64, queue_sizes: &[u16]) -> Self {
        let queues = queue_sizes.iter().map(|&max| QueueSetup::new(max)).collect();
        Self {
            device_id,
            offered,
            status: 0,
            offered_select: 0,
            wanted_select: 0,
            wanted: 0,
            queue_select: 0,
            queues,
        }
    }

    /// Back to the state after reset.
    pub(super) fn reset(&mut self) {
        let sizes: Vec<u16> = self.queues.iter().map(|q| q.max_size).collect();
        *self = Self::new(self.device_id, self.offered, &sizes);
    }

    pub(super) fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// The status register; `needs_reset` is the device's wish.
    pub(super) fn status(&self, needs_reset: bool) -> u32 {
        self.status | if needs_reset { VIRTIO_CONFIG_S_NEEDS_RESET } else { 0 }
    }

    /// Features both sides agreed on; none before FEATURES_OK.
    pub(super) fn accepted(&self) -> u64 {
        if self.has(VIRTIO_CONFIG_S_FEATURES_OK) { self.wanted } else { 0 }
    }

    /// Saved registers for the same device as these, if a driver could have brought these there.
    ///
    /// # Errors
    /// What does not fit.
    pub(super) fn restored(&self, mut saved: Self, ram: &GuestRam) -> Result<Self, &'static str> {
        if saved.device_id != self.device_id {
            return Err("it belongs to a device of another kind");
        }
        if saved.queues.len() != self.queues.len() {
            return Err("it has another number of queues");
        }
        saved.offered = self.offered;
        for (queue, own) in saved.queues.iter_mut().zip(&self.queues) {
            queue.max_size = own.max_size;
        }
        // Without FAILED, the bits of the status are the first so many of their order.
        let steps = [
            0,
            VIRTIO_CONFIG_S_ACKNOWLEDGE,
            VIRTIO_CONFIG_S_DRIVER,
            VIRTIO_CONFIG_S_FEATURES_OK,
            VIRTIO_CONFIG_S_DRIVER_OK,
        ];
        let mut bits = 0;
        let reached = steps.map(|step| {
            bits |= step;
            bits
        });
        if !reached.contains(&(saved.status & !VIRTIO_CONFIG_S_FAILED)) {
            return Err("its status is none that a driver can reach");
        }
        let negotiated = saved.has(VIRTIO_CONFIG_S_FEATURES_OK);
        if negotiated && !saved.features_fit() {
            return Err("its driver accepted features that the device does not offer");
        }
        let ready = |queue: &QueueSetup| queue.ready;
        let valid = |queue: &QueueSetup| !queue.ready || queue.build(ram).is_some();
        if saved.queues.iter().any(ready) && !negotiated || !saved.queues.iter().all(valid) {
            return Err("a queue is ready that cannot be");
        }
        Ok(saved)
    }

    /// The first `count` queues, if all of them are ready and valid.
    pub(super) fn ready_queues(&self, count: usize, ram: &GuestRam) -> Option<Vec<Queue>> {
        let event_idx = self.accepted() & super::super::EVENT_IDX != 0;
        let build = |setup: &QueueSetup| {
            let mut queue = setup.build(ram).filter(|_| setup.ready)?;
            queue.set_event_idx(event_idx);
            Some(queue)
        };
        self.queues.get(..count)?.iter().map(build).collect()
    }

    /// What a register reads as. Those that live elsewhere are not known here and read as 0.
    pub(super) fn read(&self, offset: u32) -> u32 {
        match offset {
            reg::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            reg::VIRTIO_MMIO_VERSION => VERSION,
            reg::VIRTIO_MMIO_DEVICE_ID => self.device_id,
            reg::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            reg::VIRTIO_MMIO_DEVICE_FEATURES => half(self.offered, self.offered_select),
            reg::VIRTIO_MMIO_QUEUE_NUM_MAX => self.queue().map_or(0, |q| u32::from(q.max_size)),
            reg::VIRTIO_MMIO_QUEUE_READY => self.queue().map_or(0, |q| u32::from(q.ready)),
            reg::VIRTIO_MMIO_SHM_LEN_LOW
            | reg::VIRTIO_MMIO_SHM_LEN_HIGH
            | reg::VIRTIO_MMIO_SHM_BASE_LOW
            | reg::VIRTIO_MMIO_SHM_BASE_HIGH => NO_SHM,
            _ => 0,
        }
    }

    /// Takes a write and says what follows from it.
    pub(super) fn write(&mut self, offset: u32, value: u32, ram: &GuestRam) -> Effect {
        match offset {
            reg::VIRTIO_MMIO_STATUS => return self.write_status(value),
            reg::VIRTIO_MMIO_INTERRUPT_ACK => return Effect::Acknowledge(value),
            reg::VIRTIO_MMIO_QUEUE_NOTIFY => return self.notify(value),
            reg::VIRTIO_MMIO_QUEUE_READY => return self.write_ready(value, ram),
            reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.offered_select = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.wanted_select = value,
            reg::VIRTIO_MMIO_QUEUE_SEL => self.queue_select = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES if self.negotiating() => {
                set_half(&mut self.wanted, self.wanted_select, value);
            }
            _ => self.write_queue(offset, value),
        }
        Effect::None
    }

    /// Bits can only be added, in the order of section 3.1.1; 0 resets. FEATURES_OK sticks only
    /// when the features are ones we offered and include VERSION_1.
    fn write_status(&mut self, value: u32) -> Effect {
        if value == 0 {
            self.reset();
            return Effect::Reset;
        }
        if self.has(VIRTIO_CONFIG_S_FAILED) || value & self.status != self.status {
            return Effect::None;
        }
        if value & VIRTIO_CONFIG_S_FAILED != 0 {
            self.status |= VIRTIO_CONFIG_S_FAILED;
            return Effect::None;
        }
        let was_running = self.has(VIRTIO_CONFIG_S_DRIVER_OK);
        let features_fit = self.features_fit();
        let steps = [
            (VIRTIO_CONFIG_S_ACKNOWLEDGE, true),
            (VIRTIO_CONFIG_S_DRIVER, true),
            (VIRTIO_CONFIG_S_FEATURES_OK, features_fit),
            (VIRTIO_CONFIG_S_DRIVER_OK, true),
        ];
        for (bit, allowed) in steps {
            if value & bit == 0 || !(allowed || self.has(bit)) {
                break;
            }
            self.status |= bit;
        }
        let runs = self.has(VIRTIO_CONFIG_S_DRIVER_OK);
        if runs && !was_running { Effect::Activate } else { Effect::None }
    }

    fn features_fit(&self) -> bool {
        self.wanted & !self.offered == 0 && self.wanted & 1 << VIRTIO_F_VERSION_1 != 0
    }

    /// Whether the driver got as far as DRIVER_OK.
    pub(super) fn was_started(&self) -> bool {
        self.has(VIRTIO_CONFIG_S_DRIVER_OK)
    }

    fn notify(&self, value: u32) -> Effect {
        match usize::try_from(value) {
            Ok(index) if self.running() && index < self.queues.len() => Effect::Notify(index),
            _ => Effect::None,
        }
    }

    fn write_ready(&mut self, value: u32, ram: &GuestRam) -> Effect {
        let (configuring, running) = (self.configuring(), self.running());
        let Some(queue) = self.queue_mut() else { return Effect::None };
        match value {
            1 if configuring => queue.ready = queue.build(ram).is_some(),
            0 if configuring => queue.ready = false,
            0 if running && queue.ready => {
                queue.ready = false;
                return Effect::StopQueue;
            }
            _ => {}
        }
        Effect::None
    }

    fn write_queue(&mut self, offset: u32, value: u32) {
        if !self.configuring() {
            return;
        }
        let Some(queue) = self.queue_mut().filter(|queue| !queue.ready) else { return };
        match offset {
            reg::VIRTIO_MMIO_QUEUE_NUM => queue.size = value,
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW => set_half(&mut queue.descriptors, 0, value),
            reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => set_half(&mut queue.descriptors, 1, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_half(&mut queue.available, 0, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_half(&mut queue.available, 1, value),
            reg::VIRTIO_MMIO_QUEUE_USED_LOW => set_half(&mut queue.used, 0, value),
            reg::VIRTIO_MMIO_QUEUE_USED_HIGH => set_half(&mut queue.used, 1, value),
            _ => {}
        }
    }

    fn queue(&self) -> Option<&QueueSetup> {
        self.queues.get(usize::try_from(self.queue_select).ok()?)
    }

    fn queue_mut(&mut self) -> Option<&mut QueueSetup> {
        self.queues.get_mut(usize::try_from(self.queue_select).ok()?)
    }

    fn has(&self, bit: u32) -> bool {
        self.status & bit != 0
    }

    /// Features may be chosen now.
    fn negotiating(&self) -> bool {
        self.has(VIRTIO_CONFIG_S_DRIVER)
            && !self.has(VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_FAILED)
    }

    /// Queues may be set up now.
    fn configuring(&self) -> bool {
        self.has(VIRTIO_CONFIG_S_FEATURES_OK)
            && !self.has(VIRTIO_CONFIG_S_DRIVER_OK | VIRTIO_CONFIG_S_FAILED)
    }

    /// The driver drives.
    fn running(&self) -> bool {
        self.has(VIRTIO_CONFIG_S_DRIVER_OK) && !self.has(VIRTIO_CONFIG_S_FAILED)
    }
}

/// The low (0) or high (1) word of a 64-bit register; there is nothing behind others.
fn half(value: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

/// Sets the low (0) or high (1) word of a 64-bit register.
fn set_half(target: &mut u64, select: u32, value: u32) {
    let (low, high) = (half(*target, 0), half(*target, 1));
    let (low, high) = match select {
        0 => (value, high),
        1 => (low, value),
        _ => (low, high),
    };
    *target = u64::from(high) << 32 | u64::from(low);
}
