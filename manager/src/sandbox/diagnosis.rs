//! Says why a guest did not come up, from how its machine ended and what its console showed.
//!
//! The console is the guest's own word: it only chooses between explanations, never anything
//! that matters to the host.

use coppice_vmm_protocol::ExitReason;

use crate::vmm::{End, FORBIDDEN_CALL};

/// Why a guest did not come up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// The kernel found no disk: it lacks the drivers.
    NoDisk,
    /// The kernel found the disk but could not mount its file system.
    RootNotMounted(String),
    /// The file system was mounted but init is missing or cannot be executed.
    NoInit(String),
    /// The agent started but the kernel lacks something it needs.
    AgentFailed(String),
    /// Memory ran out.
    OutOfMemory(String),
    /// Any other panic.
    Panic(String),
    /// A vCPU shut down after a triple fault: the kernel crashed without a word.
    Crashed {
        /// Where, in the words of the VMM.
        fault: String,
        /// The last line on the console.
        last_line: String,
    },
    /// The guest powered itself off or reset itself, or its VMM was told to end.
    Ended {
        /// Which of these.
        how: &'static str,
        /// The last line on the console.
        last_line: String,
    },
    /// The VMM failed.
    Vmm(String),
}

/// What a panicking kernel's line starts with.
const PANIC: &str = "Kernel panic - not syncing: ";
/// What each of the agent's own lines on the console starts with.
const AGENT: &str = "coppice-agent: ";

/// Explains the end of a machine whose agent had not reported yet.
pub fn explain(end: &End, console: &str) -> Cause {
    if let Some(ExitReason::Failed { message }) = &end.reason {
        return Cause::Vmm(message.clone());
    }
    if end.is_by_filter() {
        return Cause::Vmm(format!("the VMM died: {FORBIDDEN_CALL}"));
    }
    if end.reason.is_none() {
        let last = end.stderr.lines().last().unwrap_or("it left no message");
        let status = end.status.map_or_else(String::new, |status| format!(" ({status})"));
        return Cause::Vmm(format!("the VMM died{status}: {last}"));
    }
    if let Some(panic) = line_with(console, PANIC) {
        return explain_panic(panic, console);
    }
    if end.panicked || end.reason == Some(ExitReason::Panic) {
        return Cause::Panic("the kernel panicked".into());
    }
    let last_line = last_line(console).unwrap_or_default().into();
    if let Some(ExitReason::TripleFault { message }) = &end.reason {
        return Cause::Crashed { fault: message.clone(), last_line };
    }
    match line_with(console, AGENT) {
        Some(line) => Cause::AgentFailed(line.into()),
        None => Cause::Ended { how: how(end.reason.as_ref()), last_line },
    }
}

/// How a machine ended, in a few words.
pub fn how(reason: Option<&ExitReason>) -> &'static str {
    match reason {
        None => "no reason given",
        Some(ExitReason::PowerOff) => "it powered itself off",
        Some(ExitReason::Reset) => "it reset itself",
        Some(ExitReason::Panic) => "its kernel panicked",
        Some(ExitReason::TripleFault { .. }) => "its kernel crashed",
        Some(ExitReason::Stopped) => "it was stopped",
        Some(ExitReason::Failed { .. }) => "the VMM failed",
    }
}

fn explain_panic(panic: &str, console: &str) -> Cause {
    let says = |text: &str| panic.contains(text);
    if says("Unable to mount root fs") || says("No filesystem could mount root") {
        // Major and minor 0 mean that no driver claimed the disk.
        if says("unknown-block(0,0)") {
            return Cause::NoDisk;
        }
        return Cause::RootNotMounted(panic.into());
    }
    if says("No working init found") || says("Requested init") {
        return Cause::NoInit(panic.into());
    }
    if says("Out of memory") || says("out of memory") || says("System is deadlocked on memory") {
        return Cause::OutOfMemory(panic.into());
    }
    match line_with(console, AGENT) {
        Some(line) if says("Attempted to kill init") => Cause::AgentFailed(line.into()),
        _ => Cause::Panic(panic.into()),
    }
}

/// The part after `marker` of the last line that has it.
fn line_with<'a>(console: &'a str, marker: &str) -> Option<&'a str> {
    console.lines().rev().find_map(|line| line.split_once(marker)).map(|(_, rest)| rest.trim())
}

/// The last line that is not empty.
pub fn last_line(console: &str) -> Option<&str> {
    console.lines().rev().map(str::trim).find(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panicked() -> End {
        End { reason: Some(ExitReason::Panic), panicked: true, ..End::default() }
    }

    #[test]
    fn a_root_device_nobody_drives_is_a_kernel_without_drivers() {
        let console = "[    0.1] Kernel panic - not syncing: VFS: Unable to mount root fs on \
                       unknown-block(0,0)\n[    0.1] CPU: 0 PID: 1\n";
        assert_eq!(explain(&panicked(), console), Cause::NoDisk);
    }

    #[test]
    fn a_root_device_without_a_file_system_is_an_unusable_root() {
        let console = "[    0.1] Kernel panic - not syncing: VFS: Unable to mount root fs on \
                       \"/dev/vda\" or unknown-block(254,0)\n";
        assert!(matches!(explain(&panicked(), console), Cause::RootNotMounted(_)));
    }

    #[test]
    fn the_agents_last_words_explain_the_death_of_init() {
        let console = "coppice-agent: vsock is not available\n\
                       Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100\n";
        let expected = Cause::AgentFailed("vsock is not available".into());
        assert_eq!(explain(&panicked(), console), expected);
    }

    #[test]
    fn memory_that_ran_out_is_told_apart() {
        let console = "Kernel panic - not syncing: System is deadlocked on memory\n";
        assert!(matches!(explain(&panicked(), console), Cause::OutOfMemory(_)));
    }

    #[test]
    fn a_panic_without_a_console_is_still_a_panic() {
        assert!(matches!(explain(&panicked(), ""), Cause::Panic(_)));
    }

    #[test]
    fn a_reset_is_named_and_shows_the_last_line() {
        let end = End { reason: Some(ExitReason::Reset), ..End::default() };
        let expected = Cause::Ended { how: "it reset itself", last_line: "late".into() };
        assert_eq!(explain(&end, "early\nlate\n\n"), expected);
    }

    #[test]
    fn a_triple_fault_is_a_crash_and_tells_where() {
        let message = "triple fault on vCPU 0".to_owned();
        let reason = Some(ExitReason::TripleFault { message: message.clone() });
        let end = End { reason, ..End::default() };
        let expected = Cause::Crashed { fault: message, last_line: "late".into() };
        assert_eq!(explain(&end, "early\nlate\n"), expected);
    }

    #[test]
    fn a_vmm_that_its_filter_killed_is_told_from_one_that_crashed() {
        let killed = |signal| {
            let status = Some(std::os::unix::process::ExitStatusExt::from_raw(signal));
            let end = End { status, stderr: "last words".into(), ..End::default() };
            let Cause::Vmm(text) = explain(&end, "") else { panic!("not a failure of the VMM") };
            text
        };
        assert!(killed(31).contains("system call that it may not make"), "{}", killed(31));
        assert!(killed(11).contains("last words"), "{}", killed(11));
    }

    #[test]
    fn a_vmm_that_died_tells_its_last_words() {
        let end = End { stderr: "warning\nno memory".into(), ..End::default() };
        let Cause::Vmm(text) = explain(&end, "") else { panic!("not a failure of the VMM") };
        assert!(text.contains("no memory"), "{text}");
    }
}
