//! pvpanic: one port through which a kernel tells that it panicked.
//!
//! The DSDT lists it as `QEMU0001`, to which Linux binds `pvpanic`. Reading gives the events the
//! device knows; the driver reports only those.

use crate::devices::{BusDevice, GuestSignal, GuestSignals};

/// The kernel panicked and nothing in the guest will handle it.
const PANICKED: u8 = 1 << 0;
/// The kernel panicked, and a crash kernel will take over and write its dump.
const CRASH_LOADED: u8 = 1 << 1;

/// The pvpanic port.
#[derive(Debug)]
pub struct PvPanic {
    signals: GuestSignals,
}

impl PvPanic {
    /// Number of ports, at [`crate::memory::layout::PVPANIC_PORT`].
    pub const PORTS: u16 = 1;

    /// Makes the device; a panic is raised on `signals`.
    pub fn new(signals: GuestSignals) -> Self {
        Self { signals }
    }
}

impl BusDevice for PvPanic {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(first) = data.first_mut() {
            *first = PANICKED | CRASH_LOADED;
        }
    }

    /// A crash kernel must be left to do its work, so only `PANICKED` is raised.
    fn write(&mut self, _offset: u64, data: &[u8]) {
        if data.first().is_some_and(|value| value & PANICKED != 0) {
            self.signals.raise(GuestSignal::Panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> (PvPanic, GuestSignals) {
        let signals = GuestSignals::new().unwrap();
        (PvPanic::new(signals.clone()), signals)
    }

    #[test]
    fn a_panic_is_raised() {
        let (mut pvpanic, signals) = device();
        pvpanic.write(0, &[PANICKED]);
        assert_eq!(signals.take(), Some(GuestSignal::Panic));
    }

    #[test]
    fn a_crash_kernel_is_left_to_its_work() {
        let (mut pvpanic, signals) = device();
        pvpanic.write(0, &[CRASH_LOADED]);
        assert_eq!(signals.take(), None);
    }

    #[test]
    fn the_driver_finds_both_events() {
        let (mut pvpanic, _) = device();
        let mut events = [0u8];
        pvpanic.read(0, &mut events);
        assert_eq!(events, [PANICKED | CRASH_LOADED]);
    }
}
