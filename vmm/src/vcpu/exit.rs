//! What an exit from the guest means, apart from the loop that takes it.

use kvm_bindings::{
    KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN, kvm_regs, kvm_sregs,
};
use kvm_ioctls::VcpuExit;

use crate::devices::{Bus, GuestSignal};

/// Instruction pointer of an x86 processor after INIT (Intel SDM volume 3, table 11-1).
const AFTER_INIT: u64 = 0xFFF0;

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
    /// The vCPU shut down after a triple fault; one line that says where.
    TripleFault(String),
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
        // Where it happened is known only after this exit has been taken; see `locate`.
        VcpuExit::Shutdown => return Err(Ending::TripleFault(String::new())),
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

/// Says where a vCPU that shut down was.
///
/// KVM on AMD puts such a vCPU in its state after INIT (Linux `shutdown_interception`), because
/// the architecture leaves the state undefined: then there is nothing to tell.
pub fn locate(index: u8, regs: &kvm_regs, sregs: &kvm_sregs) -> String {
    if regs.rip == AFTER_INIT && sregs.cr3 == 0 {
        return format!("triple fault on vCPU {index}, whose registers KVM did not keep");
    }
    let (rip, cr2, cr3) = (regs.rip, sregs.cr2, sregs.cr3);
    format!("triple fault on vCPU {index} at RIP {rip:#x}, CR2 {cr2:#x}, CR3 {cr3:#x}")
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
        assert!(matches!(end(VcpuExit::Shutdown), Ending::TripleFault(_)));
        assert_eq!(event(KVM_SYSTEM_EVENT_SHUTDOWN), Ending::Guest(GuestSignal::PowerOff));
        assert_eq!(event(KVM_SYSTEM_EVENT_RESET), Ending::Guest(GuestSignal::Reset));
        assert_eq!(event(KVM_SYSTEM_EVENT_CRASH), Ending::Guest(GuestSignal::Panic));
        assert!(matches!(event(77), Ending::Failed(_)));
    }

    #[test]
    fn a_triple_fault_is_located() {
        let regs = kvm_regs { rip: 0xFFFF_FFFF_8100_1234, ..kvm_regs::default() };
        let sregs = kvm_sregs { cr2: 0x10, cr3: 0x9000, ..kvm_sregs::default() };
        let text = "triple fault on vCPU 2 at RIP 0xffffffff81001234, CR2 0x10, CR3 0x9000";
        assert_eq!(locate(2, &regs, &sregs), text);
    }

    #[test]
    fn registers_that_kvm_reset_are_not_passed_off_as_the_place() {
        let regs = kvm_regs { rip: 0xFFF0, ..kvm_regs::default() };
        let text = locate(0, &regs, &kvm_sregs::default());
        assert_eq!(text, "triple fault on vCPU 0, whose registers KVM did not keep");
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
