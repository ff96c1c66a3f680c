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

/// Records shutdowns; shows them when it is dropped by a panic, that is by a test that failed.
#[derive(Debug)]
pub(crate) struct Shutdowns(());

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
        Ok(Self(()))
    }
}

impl Drop for Shutdowns {
    #[allow(clippy::print_stderr, reason = "this is part of a failed test's output")]
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        let text = fs::read_to_string(Path::new(TRACE).join("trace")).unwrap_or_default();
        for line in text.lines().filter(|line| line.contains("kvm_exit:")) {
            eprintln!("a guest of this machine shut down: {}", line.trim());
        }
    }
}
