//! Save and restore of the console: the UART's registers and the input in its FIFO.
//!
//! What belongs to the host stays as it is: bytes that wait for the reader of the output were
//! written by the guest before, and input that the guest has not been given yet is still to come.

use serde::{Deserialize, Serialize};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial as Uart, Trigger as _};

use super::output::Output;
use super::{FIFO, Serial};
use crate::devices::{Saved, StateError, ensure};

const NAME: &str = "serial";
const VERSION: u16 = 1;

/// Bit of the interrupt identification register that says that none is pending.
const NO_INTERRUPT: u8 = 1 << 0;

/// The registers of a 16550, by their names in its data sheet.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    divisor_low: u8,
    divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    input: Vec<u8>,
}

impl Serial {
    /// The console's state. To be called when no vCPU runs; nothing changes by it.
    ///
    /// # Errors
    /// [`StateError::Encode`].
    pub fn save(&self) -> Result<Saved, StateError> {
        let uart = self.uart.state();
        let state = State {
            divisor_low: uart.baud_divisor_low,
            divisor_high: uart.baud_divisor_high,
            interrupt_enable: uart.interrupt_enable,
            interrupt_identification: uart.interrupt_identification,
            line_control: uart.line_control,
            line_status: uart.line_status,
            modem_control: uart.modem_control,
            modem_status: uart.modem_status,
            scratch: uart.scratch,
            input: uart.in_buffer,
        };
        Saved::encode(NAME, VERSION, &state)
    }

    /// Brings the console to a saved state, with its host's side as it is; an announced panic is
    /// forgotten. To be called when no vCPU runs; [`Serial::revive`] has to follow.
    ///
    /// # Errors
    /// [`StateError`]; the console is then unchanged.
    pub fn restore(&mut self, saved: &Saved) -> Result<(), StateError> {
        let state: State = saved.decode(NAME, VERSION)?;
        ensure(state.input.len() <= FIFO, NAME, "its FIFO holds more than it can")?;
        let state = SerialState {
            baud_divisor_low: state.divisor_low,
            baud_divisor_high: state.divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.input,
        };
        let unfit = |reason: String| StateError::Unfit { device: NAME, reason };
        let nowhere = Output::new(None).map_err(|error| unfit(error.to_string()))?;
        let line = self.uart.interrupt_evt().clone();
        let mut uart = Uart::from_state(&state, line, NoEvents, nowhere)
            .map_err(|error| unfit(error.to_string()))?;
        std::mem::swap(uart.writer_mut(), self.uart.writer_mut());
        uart.writer_mut().forget_panic();
        self.uart = uart;
        Ok(())
    }

    /// Raises an interrupt that was pending in the saved state, and gives the guest input that
    /// waits for it. To be called once the interrupt controllers are restored and before the
    /// vCPUs run.
    pub fn revive(&mut self) {
        if self.uart.state().interrupt_identification & NO_INTERRUPT == 0 {
            let Ok(()) = self.uart.interrupt_evt().trigger();
        }
        self.refill();
    }
}
