//! The events between KVM and the devices: interrupt lines that a device raises (irqfd) and kicks
//! that the guest gives a queue (ioeventfd).
//!
//! Binding one to the machine waits for a grace period of the host's kernel, so a shell that waits
//! for a machine binds those that its devices will most likely want, by address alone. One that no
//! device takes does nothing: the guest is not told of the address.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use kvm_ioctls::IoEventAddress;
use vm_memory::bitmap::AtomicBitmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::devices::DeviceError;
use crate::devices::virtio::mmio::QUEUE_NOTIFY;
use crate::memory::layout;
use crate::sys::kvm::VmWithRam;

/// Virtio windows that a shell makes ready: a disk, vsock, entropy and one more.
const READY_WINDOWS: u32 = 4;
/// Queues of each that it makes ready; vsock has three.
const READY_QUEUES: u32 = 3;

/// Events bound to a machine.
pub(super) struct Wires {
    vm: Arc<VmWithRam<AtomicBitmap>>,
    /// By interrupt.
    lines: BTreeMap<u32, Arc<EventFd>>,
    /// By window and queue.
    kicks: BTreeMap<(u32, u32), Arc<EventFd>>,
}

impl Wires {
    /// None yet: each is made when it is asked for.
    pub(super) fn new(vm: Arc<VmWithRam<AtomicBitmap>>) -> Self {
        Self { vm, lines: BTreeMap::new(), kicks: BTreeMap::new() }
    }

    /// Makes those that a usual machine will ask for.
    ///
    /// # Errors
    /// [`DeviceError::Event`].
    pub(super) fn make_ready(&mut self) -> Result<(), DeviceError> {
        const NAME: &str = "to come";
        let windows = (0..READY_WINDOWS).map(|window| layout::VIRTIO_GSI_BASE + window);
        for gsi in [layout::SERIAL_GSI, layout::GED_GSI].into_iter().chain(windows) {
            let line = self.line(NAME, gsi)?;
            self.lines.insert(gsi, line);
        }
        for window in 0..READY_WINDOWS {
            for queue in 0..READY_QUEUES {
                let kick = self.kick(NAME, window, queue)?;
                self.kicks.insert((window, queue), kick);
            }
        }
        Ok(())
    }

    /// An event that raises interrupt `gsi`.
    ///
    /// # Errors
    /// [`DeviceError::Event`] with the name of `device`.
    pub(super) fn line(
        &mut self,
        device: &'static str,
        gsi: u32,
    ) -> Result<Arc<EventFd>, DeviceError> {
        if let Some(line) = self.lines.remove(&gsi) {
            return Ok(line);
        }
        let failed = |source| DeviceError::Event { what: "interrupt", device, source };
        let line = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let bound = self.vm.vm().register_irqfd(&line, gsi);
        bound.map_err(|e| failed(io::Error::from_raw_os_error(e.errno())))?;
        Ok(Arc::new(line))
    }

    /// An event that KVM signals when the guest kicks `queue` of the device in `window`.
    ///
    /// # Errors
    /// [`DeviceError::Event`] with the name of `device`.
    pub(super) fn kick(
        &mut self,
        device: &'static str,
        window: u32,
        queue: u32,
    ) -> Result<Arc<EventFd>, DeviceError> {
        if let Some(kick) = self.kicks.remove(&(window, queue)) {
            return Ok(kick);
        }
        let failed = |source| DeviceError::Event { what: "kick", device, source };
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let address = IoEventAddress::Mmio(layout::virtio_window(window) + QUEUE_NOTIFY);
        let bound = self.vm.vm().register_ioevent(&event, &address, queue);
        bound.map_err(|e| failed(io::Error::from_raw_os_error(e.errno())))?;
        Ok(Arc::new(event))
    }
}
