//! The VM generation ID: 16 random bytes in guest memory that change whenever the guest's time
//! line forks, so that its kernel reseeds its random numbers (Linux: `drivers/virt/vmgenid.c`).
//!
//! The DSDT gives the address and has the generic event device announce a change.

use std::io;
use std::sync::Arc;

use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};
use vmm_sys_util::eventfd::EventFd;

use crate::memory::GuestRam;
use crate::memory::layout::VMGENID_PAGE;
use crate::sys::random;

/// Length of a generation ID.
const LEN: usize = 16;

/// Why the generation ID could not be written.
#[derive(Debug, Error)]
pub enum VmGenIdError {
    /// The host's random number generator failed.
    #[error("the host gives no random bytes for the VM generation ID")]
    Random(#[source] io::Error),
    /// The page is not in guest memory.
    #[error("the VM generation ID cannot be written to guest memory")]
    Memory(#[source] GuestMemoryError),
}

/// The generation ID and the interrupt line that announces its changes.
#[derive(Debug)]
pub struct VmGenId {
    line: Arc<EventFd>,
}

impl VmGenId {
    /// There is no ID yet. `line` is the irqfd of [`crate::memory::layout::GED_GSI`].
    pub fn new(line: Arc<EventFd>) -> Self {
        Self { line }
    }

    /// Writes the first ID of a machine that boots, which is no news to its guest.
    ///
    /// # Errors
    /// When the host has no random bytes or guest memory lacks the page.
    pub fn begin(&self, ram: &GuestRam) -> Result<(), VmGenIdError> {
        write_id(ram)
    }

    /// Writes a new ID and tells the guest. To be called before the vCPUs of a clone or of a
    /// rolled-back machine run, so that the guest handles the change first.
    ///
    /// # Errors
    /// As for [`VmGenId::begin`]; the guest was then not told.
    pub fn regenerate(&self, ram: &GuestRam) -> Result<(), VmGenIdError> {
        write_id(ram)?;
        // A full counter means that the interrupt is already pending.
        let _ = self.line.write(1);
        Ok(())
    }
}

fn write_id(ram: &GuestRam) -> Result<(), VmGenIdError> {
    let mut id = [0u8; LEN];
    random::fill(&mut id).map_err(VmGenIdError::Random)?;
    ram.write_slice(&id, GuestAddress(VMGENID_PAGE)).map_err(VmGenIdError::Memory)
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    fn ram(len: usize) -> GuestRam {
        GuestRam::from_ranges(&[(GuestAddress(0), len)]).unwrap()
    }

    fn line() -> Arc<EventFd> {
        Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())
    }

    fn id(ram: &GuestRam) -> [u8; LEN] {
        ram.read_obj(GuestAddress(VMGENID_PAGE)).unwrap()
    }

    #[test]
    fn a_new_machine_has_an_id_and_no_interrupt() {
        let (ram, line) = (ram(0x10_0000), line());
        VmGenId::new(Arc::clone(&line)).begin(&ram).unwrap();
        assert_ne!(id(&ram), [0; LEN]);
        assert!(line.read().is_err());
    }

    #[test]
    fn a_new_generation_differs_and_is_announced() {
        let (ram, line) = (ram(0x10_0000), line());
        let vmgenid = VmGenId::new(Arc::clone(&line));
        vmgenid.begin(&ram).unwrap();
        let before = id(&ram);
        vmgenid.regenerate(&ram).unwrap();
        assert_ne!(id(&ram), before);
        assert_eq!(line.read().unwrap(), 1);
    }

    #[test]
    fn memory_without_the_page_is_an_error() {
        let begun = VmGenId::new(line()).begin(&ram(0x1000));
        assert!(matches!(begun, Err(VmGenIdError::Memory(_))));
    }
}
