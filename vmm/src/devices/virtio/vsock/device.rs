//! The virtio device: its queues, features and configuration space.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Error, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::Bytes as _;

use super::muxer::Muxer;
use super::packet::{RxPacket, TxPacket};
use super::{LIMITS, Limits, NAME_MAX, VsockConfig, VsockError};
use crate::devices::virtio::queue::next_chain;
use crate::devices::virtio::{
    ActivateError, Activation, Interrupt, QueuePosition, VirtioDevice, read_config_bytes,
};
use crate::devices::{OwnState, StateError};
use crate::memory::GuestRam;

const NAME: &str = "vsock";
const STATE_VERSION: u16 = 1;

/// Queue indices (section 5.10.2).
const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;
const QUEUE_SIZES: [u16; 3] = [256, 256, 16];

/// The event VIRTIO_VSOCK_EVENT_TRANSPORT_RESET (section 5.10.6.7).
const TRANSPORT_RESET: u32 = 0;
/// Length of an event in bytes.
const EVENT_SIZE: u32 = 4;
/// How long streams wait for a driver to handle that event. One that handles it later breaks the
/// streams made meanwhile; on a host with far more guests than processors that takes seconds.
const RESET_TIMEOUT: Duration = Duration::from_secs(20);

/// Packets handled per call, so that no guest keeps the I/O thread from its other devices.
const BUDGET: u32 = 512;

/// The vsock device.
pub struct Vsock {
    cid: u64,
    muxer: Muxer,
    queues: Option<Queues>,
    reset: Reset,
}

/// How far the driver is with a transport reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reset {
    None,
    /// The device was restored, and has not looked at its queues since.
    Due,
    /// It is to be told as soon as it gives an event buffer.
    Pending,
    /// It was told, and gives the buffer back when it has closed its streams: then the available
    /// index moves on from this one.
    Told(u16),
}

struct Queues {
    ram: Arc<GuestRam>,
    rx: Queue,
    tx: Queue,
    event: Queue,
    interrupt: Interrupt,
}

impl Vsock {
    /// Makes the device. Host clients are served from its first
    /// [`host_event`](VirtioDevice::host_event) on.
    ///
    /// # Errors
    /// [`VsockError`] when the CID or the name is unfit, or descriptors run out.
    pub fn new(config: VsockConfig) -> Result<Self, VsockError> {
        Self::with_limits(config, LIMITS)
    }

    pub(super) fn with_limits(config: VsockConfig, limits: Limits) -> Result<Self, VsockError> {
        let VsockConfig { cid, listener, directory, name } = config;
        check_cid(cid)?;
        let fits = (1..=NAME_MAX).contains(&name.len());
        if !fits || name.contains(['/', '\0']) {
            return Err(VsockError::Name(name));
        }
        let cid = u64::from(cid);
        let muxer =
            Muxer::new(cid, listener, directory, name, limits).map_err(VsockError::Descriptors)?;
        Ok(Self { cid, muxer, queues: None, reset: Reset::None })
    }

    /// Gives the guest another address, for use between a restore and the first run of the vCPUs:
    /// the driver reads its address again on the transport reset that follows a restore.
    ///
    /// # Errors
    /// [`VsockError::Cid`] for a reserved address.
    pub fn set_cid(&mut self, cid: u32) -> Result<(), VsockError> {
        check_cid(cid)?;
        self.cid = u64::from(cid);
        self.muxer.set_cid(self.cid);
        Ok(())
    }

    /// Closes all streams and tells the driver so, for use after guest memory was restored to an
    /// earlier point: sockets that listen survive on both sides. Until the driver has handled the
    /// event, for at most twenty seconds, nothing else goes to the guest.
    pub fn reset_streams(&mut self) {
        self.muxer.close_streams();
        self.reset = Reset::Due;
        self.work();
    }

    /// Bytes of memory held for slow readers.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn buffered(&self) -> usize {
        self.muxer.buffered()
    }

    /// Number of places in the line for receive buffers.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn queued(&self) -> usize {
        self.muxer.queued()
    }

    /// Number of connections in any state.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn connections(&self) -> usize {
        self.muxer.connections()
    }

    /// Moves packets until both sides have nothing left, or the budget is spent.
    fn work(&mut self) {
        let Some(queues) = &mut self.queues else { return };
        let mut budget = BUDGET;
        if let Err(error) = queues.work(&mut self.muxer, &mut self.reset, &mut budget) {
            // The guest can bring this about at will, so it must not fill anybody's log.
            tracing::debug!(%error, "the driver broke a vsock queue");
            queues.interrupt.signal_needs_reset();
            self.queues = None;
            self.muxer.set_active(false);
            self.muxer.close_streams();
        } else if budget == 0 {
            self.muxer.resume_later();
        }
    }
}

fn check_cid(cid: u32) -> Result<(), VsockError> {
    if (3..u32::MAX).contains(&cid) { Ok(()) } else { Err(VsockError::Cid(cid)) }
}

/// Streams are not saved, and the guest's address is the machine's to give: nothing is left.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {}

impl Queues {
    fn new(activation: Activation) -> Result<Self, ActivateError> {
        let Activation { ram, queues, interrupt, features } = activation;
        let [mut rx, mut tx, mut event] = <[Queue; 3]>::try_from(queues).map_err(|queues| {
            let reason = format!("it has 3 queues, and {} were given", queues.len());
            ActivateError { device: NAME, reason }
        })?;
        let event_idx = features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        for queue in [&mut rx, &mut tx, &mut event] {
            queue.set_event_idx(event_idx);
        }
        Ok(Self { ram, rx, tx, event, interrupt })
    }

    fn work(
        &mut self,
        muxer: &mut Muxer,
        reset: &mut Reset,
        budget: &mut u32,
    ) -> Result<(), Error> {
        let mut used = self.events(muxer, reset)?;
        loop {
            let sent = self.transmit(muxer, budget)?;
            let received = self.receive(muxer, budget)?;
            used |= sent | received;
            if !sent && !received {
                break;
            }
        }
        if used {
            self.interrupt()?;
        }
        Ok(())
    }

    /// Takes packets from the guest; says whether there were any.
    fn transmit(&mut self, muxer: &mut Muxer, budget: &mut u32) -> Result<bool, Error> {
        let ram = &*self.ram;
        let mut progress = false;
        self.tx.disable_notification(ram)?;
        while *budget > 0 && muxer.can_transmit() {
            let Some(chain) = next_chain(&mut self.tx, ram)? else {
                // A packet may have come before notifications were on again.
                if self.tx.enable_notification(ram)? {
                    continue;
                }
                break;
            };
            let head = chain.head_index();
            match TxPacket::parse(ram, chain) {
                Ok(packet) => muxer.transmit(&packet),
                Err(error) => tracing::debug!(%error, "a vsock packet of the guest is dropped"),
            }
            self.tx.add_used(ram, head, 0)?;
            *budget -= 1;
            progress = true;
        }
        Ok(progress)
    }

    /// Fills the guest's receive buffers; says whether there were any.
    fn receive(&mut self, muxer: &mut Muxer, budget: &mut u32) -> Result<bool, Error> {
        let ram = &*self.ram;
        let mut progress = false;
        while *budget > 0 && muxer.has_packets() {
            let Some(chain) = next_chain(&mut self.rx, ram)? else {
                // Only now is a kick of interest.
                if self.rx.enable_notification(ram)? {
                    continue;
                }
                return Ok(progress);
            };
            let head = chain.head_index();
            let len = match RxPacket::parse(ram, chain) {
                Ok(buffer) => muxer.receive(&buffer),
                Err(error) => {
                    tracing::debug!(%error, "a vsock receive buffer of the guest is dropped");
                    Some(0)
                }
            };
            let Some(len) = len else {
                self.rx.go_to_previous_position();
                break;
            };
            self.rx.add_used(ram, head, len)?;
            *budget -= 1;
            progress = true;
        }
        self.rx.disable_notification(ram)?;
        Ok(progress)
    }

    /// Tells the driver about a reset, and sees whether it has handled it.
    fn events(&mut self, muxer: &mut Muxer, reset: &mut Reset) -> Result<bool, Error> {
        let ram = &*self.ram;
        let mut used = false;
        if *reset == Reset::Due {
            muxer.hold(RESET_TIMEOUT);
            *reset = Reset::Pending;
        }
        if *reset == Reset::Pending {
            self.event.enable_notification(ram)?;
            if let Some(mut chain) = next_chain(&mut self.event, ram)? {
                let written = chain.next().is_some_and(|descriptor| {
                    descriptor.is_write_only()
                        && descriptor.len() >= EVENT_SIZE
                        && ram.write_obj(TRANSPORT_RESET.to_le(), descriptor.addr()).is_ok()
                });
                let len = if written { EVENT_SIZE } else { 0 };
                self.event.add_used(ram, chain.head_index(), len)?;
                used = true;
                if written {
                    *reset = Reset::Told(await_buffer(&mut self.event, ram)?);
                }
            }
        }
        if let Reset::Told(index) = *reset
            && self.event.avail_idx(ram, Ordering::Acquire)?.0 != index
        {
            self.event.disable_notification(ram)?;
            *reset = Reset::None;
        }
        if *reset == Reset::None {
            muxer.release();
        }
        Ok(used)
    }

    /// Interrupts the driver if it wants to know of what was used since the last time.
    fn interrupt(&mut self) -> Result<(), Error> {
        let mut wanted = false;
        // Each queue keeps its own account, so all are asked.
        for queue in [&mut self.rx, &mut self.tx, &mut self.event] {
            wanted |= queue.needs_notification(&*self.ram)?;
        }
        if wanted {
            self.interrupt.signal_used_ring();
        }
        Ok(())
    }
}

/// Has the driver kick when it gives the next buffer, however many it has given already; returns
/// the available index that this moves on from.
fn await_buffer(queue: &mut Queue, ram: &GuestRam) -> Result<u16, Error> {
    let next = queue.next_avail();
    let index = queue.avail_idx(ram, Ordering::Acquire)?.0;
    // The kick asked for is always the one for the buffer after those that were taken.
    queue.set_next_avail(index);
    let asked = queue.enable_notification(ram);
    queue.set_next_avail(next);
    asked.map(|_| index)
}

impl VirtioDevice for Vsock {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.cid.to_le_bytes(), offset, data);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {
        // The one field is read-only.
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut queues = Queues::new(activation)?;
        let ram = &*queues.ram;
        // Kicks of these are of interest only when something waits for a buffer. A ring that
        // cannot be written fails again, and for good, at the first packet.
        let _ = queues.rx.disable_notification(ram);
        let _ = queues.event.disable_notification(ram);
        self.queues = Some(queues);
        self.muxer.set_active(true);
        self.work();
        Ok(())
    }

    fn reset(&mut self) {
        self.queues = None;
        self.reset = Reset::None;
        self.muxer.set_active(false);
        self.muxer.release();
        self.muxer.close_streams();
        self.muxer.close_clients();
    }

    fn queue_positions(&self) -> Option<Vec<QueuePosition>> {
        let Queues { rx, tx, event, .. } = self.queues.as_ref()?;
        Some([rx, tx, event].map(QueuePosition::from).to_vec())
    }

    fn save(&self) -> Result<OwnState, StateError> {
        OwnState::encode(NAME, STATE_VERSION, &State {})
    }

    /// The guest may have streams, and the host has none any more: the first work with the queues
    /// tells the driver.
    fn restore(
        &mut self,
        state: &OwnState,
        activation: Option<Activation>,
    ) -> Result<(), StateError> {
        let State {} = state.decode(NAME, STATE_VERSION)?;
        if let Some(activation) = activation {
            let queues = Queues::new(activation)
                .map_err(|error| StateError::Unfit { device: NAME, reason: error.reason })?;
            self.queues = Some(queues);
            self.reset = Reset::Due;
            self.muxer.set_active(true);
        }
        Ok(())
    }

    fn queue_event(&mut self, index: usize) {
        if matches!(index, RX | TX | EVENT) {
            self.work();
        }
    }

    fn host_fd(&self) -> Option<RawFd> {
        Some(self.muxer.fd())
    }

    fn host_event(&mut self) {
        self.muxer.host_event();
        self.work();
    }
}
