//! Save and restore of all devices of a machine.
//!
//! To bring a machine, new or running, to a checkpoint: pause it; give the disks what the
//! checkpoint has; [`Devices::restore`]; the same for guest memory, vCPUs and interrupt
//! controllers, before or after that; [`Devices::new_generation`]; [`Devices::revive`]; run.

use std::sync::MutexGuard;

use super::{Devices, lock};
use crate::devices::legacy::VmGenIdError;
use crate::devices::virtio::blk::Blk;
use crate::devices::{Saved, StateError};
use crate::memory::GuestRam;

/// Instance number of the console; the virtio device in window N has N plus [`FIRST_WINDOW`].
const SERIAL: u32 = 0;
const FIRST_WINDOW: u32 = 1;

impl Devices {
    /// The state of every device that has any, by instance number: the same number for the same
    /// device in every machine of one spec. To be called between [`Devices::pause`] and
    /// [`Devices::resume`].
    ///
    /// # Errors
    /// [`StateError::Encode`].
    pub(in crate::vm) fn save(&self) -> Result<Vec<(u32, Saved)>, StateError> {
        let mut states = vec![(SERIAL, lock(&self.serial).save()?)];
        for (instance, window) in (FIRST_WINDOW..).zip(&self.windows) {
            states.push((instance, lock(&window.transport).save()?));
        }
        Ok(states)
    }

    /// Brings every device to its saved state, whatever it did before. To be called between
    /// [`Devices::pause`] and [`Devices::resume`]; guest memory is not touched.
    ///
    /// # Errors
    /// [`StateError`] when there is not exactly one state for each device, or one does not fit.
    /// Some devices may then be restored and others not, so the machine must not run any more.
    pub(in crate::vm) fn restore(&self, states: &[(u32, Saved)]) -> Result<(), StateError> {
        let known = self.windows.len() + 1;
        if states.len() != known {
            let reason = format!("{} states were saved for {known} devices", states.len());
            return Err(StateError::Unfit { device: "machine", reason });
        }
        lock(&self.serial).restore(find(states, SERIAL, "serial")?)?;
        for (instance, window) in (FIRST_WINDOW..).zip(&self.windows) {
            let mut transport = lock(&window.transport);
            let state = find(states, instance, transport.device_name())?;
            transport.restore(state)?;
        }
        Ok(())
    }

    /// Gives a machine that boots its first generation ID. To be called when its memory is filled.
    ///
    /// # Errors
    /// [`VmGenIdError`] when the host has no random bytes.
    pub(in crate::vm) fn first_generation(&self, ram: &GuestRam) -> Result<(), VmGenIdError> {
        self.generation.begin(ram)
    }

    /// Gives the machine a new generation ID and announces it, for a clone or a rollback. To be
    /// called when memory and interrupt controllers are restored and before the vCPUs run.
    ///
    /// # Errors
    /// [`VmGenIdError`] when the host has no random bytes.
    pub(in crate::vm) fn new_generation(&self, ram: &GuestRam) -> Result<(), VmGenIdError> {
        self.generation.regenerate(ram)
    }

    /// Makes up for interrupts and kicks that were under way at the checkpoint, and has streams
    /// of the guest reset. To be called after [`Devices::restore`], when memory and interrupt
    /// controllers are restored, and before [`Devices::resume`] and the vCPUs: the I/O threads do
    /// the work once they run.
    pub(in crate::vm) fn revive(&self) {
        lock(&self.serial).revive();
        for window in &self.windows {
            lock(&window.transport).revive(&window.kicks);
        }
    }

    /// The disks in the order of the spec, to seal or replace their layers while the machine is
    /// paused.
    pub(in crate::vm) fn disks(&self) -> impl Iterator<Item = MutexGuard<'_, Blk>> {
        self.disks.iter().map(|disk| lock(disk))
    }
}

fn find<'a>(
    states: &'a [(u32, Saved)],
    instance: u32,
    device: &'static str,
) -> Result<&'a Saved, StateError> {
    let found = states.iter().find(|(other, _)| *other == instance).map(|(_, state)| state);
    found.ok_or_else(|| StateError::Unfit { device, reason: "it has none".to_owned() })
}
