//! The memory-mapped transport (virtio 1.2 section 4.2): one window of registers in front of one
//! device.
//!
//! [`registers::Registers`] decides what each access means; this module carries it out on the
//! device, the queues and the interrupt line. Kicks normally reach an I/O thread through an
//! ioeventfd and never come here.

mod registers;
mod state;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_mmio as reg;

use self::registers::{Effect, Registers};
use super::{Activation, Interrupt, VirtioDevice, lock};
use crate::devices::BusDevice;
use crate::memory::GuestRam;

/// Offset of the register that a driver writes a queue's index to (32 bits): where the ioeventfd
/// of each queue belongs.
pub const QUEUE_NOTIFY: u64 = reg::VIRTIO_MMIO_QUEUE_NOTIFY as u64;

/// Start of the device's configuration space in the window.
const CONFIG: u64 = reg::VIRTIO_MMIO_CONFIG as u64;

/// The registers of one device.
pub struct MmioTransport {
    device: Arc<Mutex<dyn VirtioDevice>>,
    ram: Arc<GuestRam>,
    interrupt: Interrupt,
    registers: Registers,
    active: bool,
}

impl MmioTransport {
    /// Puts a device behind a window. `interrupt` is handed on to the device when the driver is
    /// ready.
    pub fn new(
        device: Arc<Mutex<dyn VirtioDevice>>,
        ram: Arc<GuestRam>,
        interrupt: Interrupt,
    ) -> Self {
        let registers = {
            let device = lock(&device);
            let offered = device.features() | 1 << VIRTIO_F_VERSION_1;
            Registers::new(device.device_id(), offered, device.queue_sizes())
        };
        Self { device, ram, interrupt, registers, active: false }
    }

    /// How many queues the device has, and so how many ioeventfds it needs.
    pub fn queue_count(&self) -> usize {
        self.registers.queue_count()
    }

    fn read_register(&self, offset: u32) -> u32 {
        match offset {
            reg::VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt.status(),
            reg::VIRTIO_MMIO_CONFIG_GENERATION => self.interrupt.config_generation(),
            reg::VIRTIO_MMIO_STATUS => self.registers.status(self.interrupt.needs_reset()),
            _ => self.registers.read(offset),
        }
    }

    fn apply(&mut self, effect: Effect) {
        match effect {
            Effect::None => {}
            Effect::Acknowledge(bits) => self.interrupt.acknowledge(bits),
            Effect::Notify(index) => {
                if self.active {
                    lock(&self.device).queue_event(index);
                }
            }
            Effect::Activate => self.activate(),
            Effect::Reset => {
                lock(&self.device).reset();
                self.active = false;
                self.interrupt.reset();
            }
            Effect::StopQueue => {
                // One queue of a running device cannot be taken out, so all of them stop before
                // the driver sees QueueReady at zero.
                lock(&self.device).reset();
                self.active = false;
                self.interrupt.signal_needs_reset();
            }
        }
    }

    fn activate(&mut self) {
        let mut device = lock(&self.device);
        let features = self.registers.accepted();
        let required = device.required_queues(features);
        let activated = match self.registers.ready_queues(required, &self.ram) {
            Some(queues) => device.activate(Activation {
                ram: Arc::clone(&self.ram),
                queues,
                interrupt: self.interrupt.clone(),
                features,
            }),
            None => Err(super::ActivateError {
                device: device.name(),
                reason: format!("its driver did not set up all {required} queues"),
            }),
        };
        self.active = activated.is_ok();
        if let Err(error) = activated {
            tracing::debug!(%error, "a virtio device needs a reset");
            device.reset();
            self.interrupt.signal_needs_reset();
        }
    }
}

impl BusDevice for MmioTransport {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(offset) = offset.checked_sub(CONFIG) {
            lock(&self.device).read_config(offset, data);
        } else if let (Some(offset), Ok(word)) = (register(offset), <&mut [u8; 4]>::try_from(data))
        {
            *word = self.read_register(offset).to_le_bytes();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            lock(&self.device).write_config(offset, data);
        } else if let (Some(offset), Ok(word)) = (register(offset), <[u8; 4]>::try_from(data)) {
            let effect = self.registers.write(offset, u32::from_le_bytes(word), &self.ram);
            self.apply(effect);
        }
    }
}

/// The registers are 32 bits wide and aligned (section 4.2.2.2); other accesses do nothing.
fn register(offset: u64) -> Option<u32> {
    u32::try_from(offset).ok().filter(|offset| offset.is_multiple_of(4))
}
