//! The ACPI registers of a hardware-reduced platform: sleep control, sleep status and reset.
//!
//! The FADT names the ports (ACPI 6.5, sections 4.8.3.6 to 4.8.3.8). The only sleep state is S5;
//! the `\_S5` package says which type value stands for it.

use crate::devices::{BusDevice, GuestSignal, GuestSignals};
use crate::memory::layout::{ACPI_RESET_PORT, ACPI_RESET_VALUE, ACPI_S5_TYPE, ACPI_SLEEP_PORT};

/// Number of ports, from [`ACPI_SLEEP_PORT`] on.
const PORTS: u16 = ACPI_RESET_PORT - ACPI_SLEEP_PORT + 1;
/// SLP_EN in the sleep control register.
const SLEEP_ENABLE: u8 = 1 << 5;
/// Position of the three bits of SLP_TYP.
const SLEEP_TYPE_SHIFT: u8 = 2;

/// Sleep control, sleep status and reset registers.
#[derive(Debug)]
pub struct AcpiRegisters {
    signals: GuestSignals,
}

impl AcpiRegisters {
    /// Number of consecutive ports, from [`ACPI_SLEEP_PORT`] on.
    pub const PORTS: u16 = PORTS;

    /// Makes the registers; power-off and reset are raised on `signals`.
    pub fn new(signals: GuestSignals) -> Self {
        Self { signals }
    }

    fn write_byte(&self, port: u64, value: u8) {
        if port == u64::from(ACPI_SLEEP_PORT) {
            let sleep_type = (value >> SLEEP_TYPE_SHIFT) & 0b111;
            if value & SLEEP_ENABLE != 0 && sleep_type == ACPI_S5_TYPE {
                self.signals.raise(GuestSignal::PowerOff);
            }
        } else if port == u64::from(ACPI_RESET_PORT) && value == ACPI_RESET_VALUE {
            self.signals.raise(GuestSignal::Reset);
        }
        // What is left is the sleep status register: a write clears the wake bit, never set here.
    }
}

impl BusDevice for AcpiRegisters {
    /// All registers read as zero: no machine of ours ever wakes from a sleep.
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (port, value) in (u64::from(ACPI_SLEEP_PORT) + offset..).zip(data) {
            self.write_byte(port, *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn registers() -> (AcpiRegisters, GuestSignals) {
        let signals = GuestSignals::new().unwrap();
        (AcpiRegisters::new(signals.clone()), signals)
    }

    #[test]
    fn entering_s5_powers_off() {
        let (mut acpi, signals) = registers();
        acpi.write(0, &[SLEEP_ENABLE | (ACPI_S5_TYPE << SLEEP_TYPE_SHIFT)]);
        assert_eq!(signals.take(), Some(GuestSignal::PowerOff));
    }

    #[test]
    fn a_write_to_the_reset_register_resets() {
        let (mut acpi, signals) = registers();
        acpi.write(u64::from(ACPI_RESET_PORT - ACPI_SLEEP_PORT), &[ACPI_RESET_VALUE]);
        assert_eq!(signals.take(), Some(GuestSignal::Reset));
    }

    proptest! {
        #[test]
        fn only_s5_with_sleep_enable_ends_the_machine(value: u8) {
            let (mut acpi, signals) = registers();
            acpi.write(0, &[value]);
            let wanted = value & 0b0011_1100 == 0b0011_0100;
            prop_assert_eq!(signals.take().is_some(), wanted);
        }

        #[test]
        fn reads_are_zero_and_have_no_effect(offset in 0..u64::from(PORTS), len in 1..=8usize) {
            let (mut acpi, signals) = registers();
            let mut data = vec![0xA5; len];
            acpi.read(offset, &mut data);
            prop_assert!(data.iter().all(|b| *b == 0));
            prop_assert_eq!(signals.take(), None);
        }
    }
}
