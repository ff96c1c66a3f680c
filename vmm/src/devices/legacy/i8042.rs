//! What is left of the keyboard controller: the line that resets the processor.
//!
//! Linux pulses it for `reboot=k`, and as its second choice after ACPI. There is no keyboard, and
//! the ACPI tables say so; a kernel that probes all the same must give up soon. Hence the
//! constant status: "output buffer full" for ever makes the Linux driver stop after a few reads
//! ("No controller found"), while "input buffer empty" lets the reset command through without
//! the waits of half a second that a busy controller costs.

use vm_superio::{I8042Device, Trigger};

use crate::devices::{BusDevice, GuestSignal, GuestSignals};

/// Offset of the status register from port 0x60.
const STATUS: u64 = 4;
/// Output buffer full, input buffer empty.
const STATUS_VALUE: u8 = 0b01;

/// Raises a reset when the controller's reset line is pulsed.
#[derive(Debug)]
struct ResetLine(GuestSignals);

impl Trigger for ResetLine {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.raise(GuestSignal::Reset);
        Ok(())
    }
}

/// The keyboard controller's reset line.
#[derive(Debug)]
pub struct I8042 {
    inner: I8042Device<ResetLine>,
}

impl I8042 {
    /// Number of consecutive ports: 0x60 (data) to 0x64 (command and status).
    pub const PORTS: u16 = 5;

    /// Makes the device; a reset is raised on `signals`.
    pub fn new(signals: GuestSignals) -> Self {
        Self { inner: I8042Device::new(ResetLine(signals)) }
    }
}

impl BusDevice for I8042 {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (STATUS, Some(first)) = (offset, data.first_mut()) {
            *first = STATUS_VALUE;
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let (Ok(offset), [value]) = (u8::try_from(offset), data) {
            let Ok(()) = self.inner.write(offset, *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> (I8042, GuestSignals) {
        let signals = GuestSignals::new().unwrap();
        (I8042::new(signals.clone()), signals)
    }

    #[test]
    fn the_reset_pulse_resets() {
        let (mut i8042, signals) = device();
        i8042.write(STATUS, &[0xFE]);
        assert_eq!(signals.take(), Some(GuestSignal::Reset));
    }

    #[test]
    fn other_commands_and_data_do_nothing() {
        let (mut i8042, signals) = device();
        for value in 0..=u8::MAX {
            i8042.write(0, &[value]);
            if value != 0xFE {
                i8042.write(STATUS, &[value]);
            }
        }
        i8042.write(STATUS, &[0xFE, 0]);
        assert_eq!(signals.take(), None);
    }

    #[test]
    fn the_status_makes_a_probe_give_up_and_a_reset_go_on() {
        let (mut i8042, _) = device();
        let mut status = [0u8];
        i8042.read(STATUS, &mut status);
        assert_eq!(status[0] & 0b01, 0b01, "output buffer full");
        assert_eq!(status[0] & 0b10, 0, "input buffer empty");
    }
}
