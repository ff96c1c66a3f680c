//! Where a guest was when a triple fault ended it.
//!
//! KVM on AMD, which is what the nested lab has, resets a vCPU that shut down, so its VMM cannot
//! say where that was. The lab's own kernel can: the last exit is in its trace.

use std::fs;
use std::io;
use std::path::Path;
use std::thread;

/// A trace of its own, which nobody else fills or stops.
const TRACE: &str = "/sys/kernel/debug/tracing/instances/coppice-shutdowns";
/// Nothing but exits for a shutdown (AMD APM volume 2, appendix C) is recorded.
const FILTER: &str = "exit_reason == 0x7f";

/// Where Linux puts modules on x86-64 (`Documentation/arch/x86/x86_64/mm.rst`). QEMU 10.0.2 was
/// seen to give a guest the instruction pointer of the lab's `VMRUN`, in `__svm_vcpu_run` of
/// `kvm_amd`, together with an interrupt to deliver; the guest's next step is a triple fault.
const MODULES: u64 = 0xFFFF_FFFF_C000_0000;

/// What is printed for a guest that the lab, not the project, brought down.
pub(crate) const LAB_FAULT: &str = "that is an address of the lab's kernel: the emulator mixed up";

/// Records shutdowns; shows them when it is dropped by a panic, that is by a test that failed.
#[derive(Debug)]
pub(crate) struct Shutdowns {
    /// How many there were before.
    earlier: usize,
}

impl Shutdowns {
    /// Begins to record, or goes on where an earlier test began.
    pub(crate) fn record() -> io::Result<Self> {
        let trace = Path::new(TRACE);
        match fs::create_dir(trace) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        fs::write(trace.join("events/kvm/kvm_exit/filter"), FILTER)?;
        fs::write(trace.join("events/kvm/kvm_exit/enable"), "1")?;
        Ok(Self { earlier: lines().len() })
    }
}

impl Drop for Shutdowns {
    #[allow(clippy::print_stderr, reason = "this is part of a failed test's output")]
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        for line in lines().iter().skip(self.earlier) {
            eprintln!("a guest of this machine shut down: {}", line.trim());
            // Our guests' kernels have no modules and map nothing there.
            if rip(line).is_some_and(|rip| rip >= MODULES) {
                eprintln!("{LAB_FAULT} the guest and the lab");
            }
        }
    }
}

/// The shutdowns recorded so far, the oldest first.
fn lines() -> Vec<String> {
    let text = fs::read_to_string(Path::new(TRACE).join("trace")).unwrap_or_default();
    text.lines().filter(|line| line.contains("kvm_exit:")).map(str::to_owned).collect()
}

/// The guest's instruction pointer in a line of the trace.
fn rip(line: &str) -> Option<u64> {
    let text = line.split_once(" rip 0x")?.1.split(' ').next()?;
    u64::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instruction_pointer_is_found() {
        let line = "vcpu0-147 [000] ..... 33.261136: kvm_exit: vcpu 0 reason shutdown rip \
                    0xffffffffc033320c info1 0x0 info2 0x0";
        assert_eq!(rip(line), Some(0xFFFF_FFFF_C033_320C));
    }
}
