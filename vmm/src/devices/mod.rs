//! Devices: the registers a guest sees and the work behind them.
//!
//! Devices know guest memory and their own host files and sockets. They never import each other
//! and never call the machine above them: what they must tell it goes through an eventfd or a
//! channel handed to them when they are made.
//!
//! Two traits meet here. [`BusDevice`] is anything that answers to port or memory accesses of a
//! vCPU. [`virtio::VirtioDevice`] is what stands behind the virtio-mmio transport, which is
//! itself a [`BusDevice`].

mod bus;
pub mod legacy;
mod signal;
mod state;
pub mod virtio;

pub use bus::{Bus, RangeError, SharedDevice};
pub use signal::{GuestSignal, GuestSignals};
use state::ensure;
pub use state::{OwnState, Saved, StateError};

/// A device on the port bus or the memory bus.
///
/// Calls come from vCPU threads with the device's lock held, so they must not block. `offset` is
/// relative to the range the device was placed at and lies inside it; `data` has 1 to 8 bytes.
pub trait BusDevice: Send {
    /// Fills `data` with what the guest reads. Unclaimed bytes must be set too.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Takes what the guest writes.
    fn write(&mut self, offset: u64, data: &[u8]);
}
