//! What KVM traced of a failed test's guests: where triple faults ended them, and what those that
//! live on are doing.
//!
//! KVM on AMD, which is what the nested lab has, resets a vCPU that shut down, so its VMM cannot
//! say where that was. The lab's own kernel can: the last exit is in its trace.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Traces of their own, which nobody else fills or stops.
const INSTANCES: &str = "/sys/kernel/debug/tracing/instances";
/// Nothing but exits for a shutdown (AMD APM volume 2, appendix C) is recorded all the time.
const SHUTDOWNS: &str = "exit_reason == 0x7f";

/// How long guests are watched when a test has failed, and how much of that is shown.
const MOMENT: Duration = Duration::from_millis(200);
const MOMENT_LINES: usize = 300;

/// Records shutdowns; shows them, and what guests do, when it is dropped by a panic, that is by a
/// test that failed.
#[derive(Debug)]
pub(crate) struct KvmTrace {
    shutdowns: PathBuf,
    /// How many there were before.
    earlier: usize,
}

impl KvmTrace {
    /// Begins to record, or goes on where an earlier test began.
    pub(crate) fn record() -> io::Result<Self> {
        let shutdowns = instance("coppice-shutdowns")?;
        fs::write(shutdowns.join("events/kvm/kvm_exit/filter"), SHUTDOWNS)?;
        fs::write(shutdowns.join("events/kvm/kvm_exit/enable"), "1")?;
        let earlier = events(&shutdowns)?.len();
        Ok(Self { shutdowns, earlier })
    }
}

impl Drop for KvmTrace {
    #[allow(clippy::print_stderr, reason = "this is part of a failed test's output")]
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        for line in events(&self.shutdowns).unwrap_or_default().iter().skip(self.earlier) {
            eprintln!("a guest of this machine shut down: {line}");
        }
        match moment() {
            Ok(lines) => {
                let shown = lines.len().saturating_sub(MOMENT_LINES);
                eprintln!("what the guests of this machine do now ({} events):", lines.len());
                lines.iter().skip(shown).for_each(|line| eprintln!("{line}"));
            }
            Err(error) => eprintln!("what guests do cannot be told: {error}"),
        }
    }
}

/// The trace with this name, made if there is none.
fn instance(name: &str) -> io::Result<PathBuf> {
    let trace = Path::new(INSTANCES).join(name);
    match fs::create_dir(&trace) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(trace),
    }
}

/// All of KVM's events of a moment from now on.
fn moment() -> io::Result<Vec<String>> {
    let trace = instance("coppice-moment")?;
    fs::write(trace.join("trace"), "")?;
    fs::write(trace.join("events/kvm/enable"), "1")?;
    thread::sleep(MOMENT);
    fs::write(trace.join("events/kvm/enable"), "0")?;
    events(&trace)
}

/// The events recorded so far, the oldest first.
fn events(trace: &Path) -> io::Result<Vec<String>> {
    let text = fs::read_to_string(trace.join("trace"))?;
    let events = text.lines().map(str::trim).filter(|line| line.contains(": kvm_"));
    Ok(events.map(str::to_owned).collect())
}
