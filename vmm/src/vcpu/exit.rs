//! What an exit from the guest means, apart from the loop that takes it.

use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::VcpuExit;

use crate::devices::{Bus, GuestSignal};

/// What the vCPUs can reach.
#[derive(Debug, Default)]
pub struct Buses {
    /// Devices by port.
    pub port: Bus,
    /// Devices by guest-physical address.
    pub memory: Bus,
}

/// Why a vCPU will not run again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The guest ended the machine without a device's help.
    Guest(GuestSignal),
    /// KVM cannot go on with this guest; one line that says why.
    Failed(String),
}

/// Serves one exit: dispatches it to a device, or says why the vCPU ends.
///
/// `io_size` is the size of each transfer of a port access; a repeated string instruction brings
/// several in one exit.
///
/// # Errors
/// [`Ending`] when the vCPU must not run again.
pub fn handle(exit: VcpuExit<'_>, io_size: usize, buses: &Buses) -> Result<(), Ending> {
    // A size of zero cannot come from KVM; one at a time is always safe.
    let io_size = io_size.max(1);
    match exit {
        VcpuExit::IoIn(port, data) => {
            for unit in data.chunks_mut(io_size) {
                buses.port.read(u64::from(port), unit);
            }
        }
        VcpuExit::IoOut(port, data) => {
            for unit in data.chunks(io_size) {
                buses.port.write(u64::from(port), unit);
            }
        }
        VcpuExit::MmioRead(address, data) => buses.memory.read(address, data),
        VcpuExit::MmioWrite(address, data) => buses.memory.write(address, data),
        // A signal came; the loop looks at its commands when KVM_RUN says so.
        VcpuExit::Intr | VcpuExit::IrqWindowOpen => {}
        // A triple fault, which is also how Linux resets when asked to (`reboot=t`).
        VcpuExit::Shutdown => return Err(Ending::Guest(GuestSignal::Reset)),
        VcpuExit::SystemEvent(kind, _) => return Err(system_event(kind)),
        VcpuExit::FailEntry(reason, cpu) => {
            return Err(Ending::Failed(format!(
                "the processor refused to enter the guest (reason {reason:#x}, cpu {cpu})"
            )));
        }
        VcpuExit::InternalError => {
            return Err(Ending::Failed(
                "KVM met an internal error: the guest did something this host cannot emulate"
                    .to_owned(),
            ));
        }
        VcpuExit::MemoryFault { gpa, size, .. } => {
            return Err(Ending::Failed(format!(
                "KVM cannot reach {size} bytes of guest memory at {gpa:#x}"
            )));
        }
        other => {
            return Err(Ending::Failed(format!("KVM returned an exit not asked for: {other:?}")));
        }
    }
    Ok(())
}

fn system_event(kind: u32) -> Ending {
    match kind {
        KVM_SYSTEM_EVENT_SHUTDOWN => Ending::Guest(GuestSignal::PowerOff),
        KVM_SYSTEM_EVENT_RESET => Ending::Guest(GuestSignal::Reset),
        KVM_SYSTEM_EVENT_CRASH => Ending::Guest(GuestSignal::Panic),
        other => Ending::Failed(format!("KVM reported an unknown system event ({other})")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::devices::BusDevice;

    /// Counts up on reads and records writes.
    #[derive(Default)]
    struct Recorder {
        next: u8,
        written: Vec<(u64, Vec<u8>)>,
    }

    impl BusDevice for Recorder {
        fn read(&mut self, _offset: u64, data: &mut [u8]) {
            self.next += 1;
            data.fill(self.next);
        }
        fn write(&mut self, offset: u64, data: &[u8]) {
            self.written.push((offset, data.to_vec()));
        }
    }

    fn machine() -> (Buses, Arc<Mutex<Recorder>>) {
        let device = Arc::new(Mutex::new(Recorder::default()));
        let mut buses = Buses::default();
        buses.port.insert(0x100, 8, device.clone()).unwrap();
        buses.memory.insert(0xC000_0000, 0x1000, device.clone()).unwrap();
        (buses, device)
    }

    #[test]
    fn a_repeated_string_output_is_one_write_per_unit() {
        let (buses, device) = machine();
        handle(VcpuExit::IoOut(0x102, &[1, 2, 3, 4]), 2, &buses).unwrap();
        assert_eq!(device.lock().unwrap().written, [(2, vec![1, 2]), (2, vec![3, 4])]);
    }

    #[test]
    fn a_repeated_string_input_is_one_read_per_unit() {
        let (buses, _device) = machine();
        let mut data = [0; 4];
        handle(VcpuExit::IoIn(0x100, &mut data), 1, &buses).unwrap();
        assert_eq!(data, [1, 2, 3, 4]);
    }

    #[test]
    fn memory_accesses_reach_the_memory_bus() {
        let (buses, device) = machine();
        handle(VcpuExit::MmioWrite(0xC000_0050, &[9, 0, 0, 0]), 0, &buses).unwrap();
        assert_eq!(device.lock().unwrap().written, [(0x50, vec![9, 0, 0, 0])]);
        let mut data = [0; 4];
        handle(VcpuExit::MmioRead(0xC000_0000, &mut data), 0, &buses).unwrap();
        assert_eq!(data, [1; 4]);
    }

    #[test]
    fn a_port_access_does_not_reach_the_memory_bus() {
        let (buses, device) = machine();
        handle(VcpuExit::MmioWrite(0x100, &[1]), 0, &buses).unwrap();
        assert!(device.lock().unwrap().written.is_empty());
    }

    #[test]
    fn ends_asked_for_by_the_guest_are_told_apart() {
        let buses = Buses::default();
        let end = |exit| handle(exit, 0, &buses).unwrap_err();
        let event = |kind| end(VcpuExit::SystemEvent(kind, &[]));
        assert_eq!(end(VcpuExit::Shutdown), Ending::Guest(GuestSignal::Reset));
        assert_eq!(event(KVM_SYSTEM_EVENT_SHUTDOWN), Ending::Guest(GuestSignal::PowerOff));
        assert_eq!(event(KVM_SYSTEM_EVENT_RESET), Ending::Guest(GuestSignal::Reset));
        assert_eq!(event(KVM_SYSTEM_EVENT_CRASH), Ending::Guest(GuestSignal::Panic));
        assert!(matches!(event(77), Ending::Failed(_)));
    }

    #[test]
    fn failures_say_what_failed() {
        let buses = Buses::default();
        let text = |exit| match handle(exit, 0, &buses) {
            Err(Ending::Failed(text)) => text,
            other => panic!("not a failure: {other:?}"),
        };
        assert!(text(VcpuExit::FailEntry(0x21, 3)).contains("0x21"));
        assert!(text(VcpuExit::InternalError).contains("internal error"));
        assert!(text(VcpuExit::MemoryFault { flags: 0, gpa: 0x9000, size: 1 }).contains("0x9000"));
        assert!(text(VcpuExit::Hlt).contains("Hlt"));
    }

    #[test]
    fn a_signal_is_no_end() {
        assert_eq!(handle(VcpuExit::Intr, 0, &Buses::default()), Ok(()));
    }
}
