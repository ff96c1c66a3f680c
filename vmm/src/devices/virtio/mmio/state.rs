//! Save and restore: the registers, the interrupt's, the positions in the queues and the device's
//! own state, as one.
//!
//! Kicks and interrupts that are under way when a machine stops are not saved; reviving a restored
//! device makes up for them. One too many is harmless: a device finds nothing in its queue, a
//! driver nothing used.

use std::sync::{Arc, PoisonError};

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueT as _};
use vmm_sys_util::eventfd::EventFd;

use super::registers::Registers;
use super::{MmioTransport, lock};
use crate::devices::virtio::{
    Activation, INTERRUPT_CONFIG, INTERRUPT_USED_RING, InterruptState, QueuePosition, VirtioDevice,
};
use crate::devices::{OwnState, Saved, StateError, ensure};

const VERSION: u16 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    registers: Registers,
    interrupt: InterruptState,
    /// The device was handed its queues.
    active: bool,
    /// What it is doing with them, unless it gave them up.
    queues: Option<Vec<QueuePosition>>,
    device: OwnState,
}

impl MmioTransport {
    /// The name of the device behind the window, such as `blk`.
    pub fn device_name(&self) -> &'static str {
        lock(&self.device).name()
    }

    /// The state of transport and device. To be called when neither vCPUs nor I/O threads run;
    /// nothing changes by it.
    ///
    /// # Errors
    /// [`StateError::Encode`].
    pub fn save(&self) -> Result<Saved, StateError> {
        let device = lock(&self.device);
        let state = State {
            registers: self.registers.clone(),
            interrupt: self.interrupt.save(),
            active: self.active,
            queues: device.queue_positions(),
            device: device.save()?,
        };
        Saved::encode(device.name(), VERSION, &state)
    }

    /// Brings transport and device, whatever they did before, to a saved state. To be called when
    /// neither vCPUs nor I/O threads run. Guest memory is not touched and need not be restored yet;
    /// before the vCPUs run, and after memory and interrupt controllers have been restored,
    /// [`MmioTransport::revive`] has to follow.
    ///
    /// # Errors
    /// [`StateError`] when the state is malformed or does not fit this device and this memory.
    pub fn restore(&mut self, saved: &Saved) -> Result<(), StateError> {
        self.reset_all();
        let restored = self.try_restore(saved);
        if restored.is_err() {
            self.reset_all();
        }
        restored
    }

    /// Makes up for interrupts and kicks that were under way when the state was saved: raises the
    /// line if the driver has something to acknowledge, and writes `kicks`, the events of the
    /// queues in index order, so that the I/O thread looks at each queue once it runs.
    pub fn revive(&self, kicks: &[Arc<EventFd>]) {
        if self.active {
            self.interrupt.raise_pending();
            for kick in kicks {
                // A full counter is a kick as well.
                let _ = kick.write(1);
            }
        }
    }

    fn reset_all(&mut self) {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        device.reset();
        self.registers.reset();
        self.interrupt.reset();
        self.active = false;
    }

    fn try_restore(&mut self, saved: &Saved) -> Result<(), StateError> {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let name = device.name();
        let state: State = saved.decode(name, VERSION)?;
        let known = INTERRUPT_USED_RING | INTERRUPT_CONFIG;
        ensure(state.interrupt.status & !known == 0, name, "an unknown interrupt is pending")?;
        let registers = self
            .registers
            .restored(state.registers, &self.ram)
            .map_err(|reason| StateError::Unfit { device: name, reason: reason.to_owned() })?;
        ensure(
            registers.was_started() || !state.active,
            name,
            "the device runs without its driver's word",
        )?;
        self.interrupt.restore(&state.interrupt);
        let activation = match state.queues {
            Some(positions) => {
                ensure(state.active, name, "a device that does not run has queues")?;
                Some(self.activation(&*device, &registers, &positions)?)
            }
            None => None,
        };
        device.restore(&state.device, activation)?;
        self.registers = registers;
        self.active = state.active;
        Ok(())
    }

    /// The queues of the registers, at their positions.
    fn activation(
        &self,
        device: &dyn VirtioDevice,
        registers: &Registers,
        positions: &[QueuePosition],
    ) -> Result<Activation, StateError> {
        let name = device.name();
        let features = registers.accepted();
        let required = device.required_queues(features);
        ensure(positions.len() == required, name, "the device runs with another set of queues")?;
        let mut queues: Vec<Queue> =
            registers.ready_queues(required, &self.ram).ok_or_else(|| StateError::Unfit {
                device: name,
                reason: "the device runs with queues that are not ready".to_owned(),
            })?;
        for (queue, position) in queues.iter_mut().zip(positions) {
            // Chains that the device took and did not give back yet.
            let kept = position.next_avail.wrapping_sub(position.next_used);
            ensure(kept <= queue.size(), name, "more chains are under way than a queue has")?;
            queue.set_next_avail(position.next_avail);
            queue.set_next_used(position.next_used);
        }
        Ok(Activation {
            ram: Arc::clone(&self.ram),
            queues,
            interrupt: self.interrupt.clone(),
            features,
        })
    }
}
