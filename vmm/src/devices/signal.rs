//! How a device tells the machine's owner that the guest wants to end: the only way from a
//! device upwards, so that devices need not know who owns them.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// What a guest asks for, or tells, through a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestSignal {
    /// The guest powered itself off (ACPI S5).
    PowerOff,
    /// The guest asked for a reset (ACPI reset register, keyboard controller).
    Reset,
    /// The guest's kernel announced a panic.
    Panic,
}

impl GuestSignal {
    /// From the one that decides to the one that yields: a panic that is followed by a reset is
    /// a panic, and a reset that races with a power-off is a power-off.
    const BY_WEIGHT: [Self; 3] = [Self::Panic, Self::PowerOff, Self::Reset];

    fn bit(self) -> u8 {
        match self {
            Self::PowerOff => 1,
            Self::Reset => 2,
            Self::Panic => 4,
        }
    }
}

/// A handle to raise and take guest signals; clones share one state.
#[derive(Debug, Clone)]
pub struct GuestSignals {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    raised: AtomicU8,
    event: EventFd,
}

impl GuestSignals {
    /// Makes a handle with nothing raised.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        Ok(Self { shared: Arc::new(Shared { raised: AtomicU8::new(0), event }) })
    }

    /// Raises a signal; never blocks.
    pub fn raise(&self, signal: GuestSignal) {
        self.shared.raised.fetch_or(signal.bit(), Ordering::AcqRel);
        self.ring();
    }

    /// Wakes the owner without raising a signal, for a vCPU thread that ended by itself.
    pub fn ring(&self) {
        // A full counter means that the owner has yet to look, so nothing is lost.
        let _ = self.shared.event.write(1);
    }

    /// Takes what was raised since the last call, the heaviest first, and quiets the event.
    pub fn take(&self) -> Option<GuestSignal> {
        // Nothing to read only means that nobody rang.
        let _ = self.shared.event.read();
        let raised = self.shared.raised.swap(0, Ordering::AcqRel);
        GuestSignal::BY_WEIGHT.into_iter().find(|signal| raised & signal.bit() != 0)
    }
}

impl AsRawFd for GuestSignals {
    /// The descriptor that is readable when [`GuestSignals::take`] has something to look at.
    fn as_raw_fd(&self) -> RawFd {
        self.shared.event.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_outweighs_the_reset_that_follows_it() {
        let signals = GuestSignals::new().unwrap();
        signals.clone().raise(GuestSignal::Reset);
        signals.raise(GuestSignal::Panic);
        assert_eq!(signals.take(), Some(GuestSignal::Panic));
        assert_eq!(signals.take(), None);
    }

    #[test]
    fn ringing_raises_nothing() {
        let signals = GuestSignals::new().unwrap();
        signals.ring();
        assert_eq!(signals.take(), None);
    }
}
