//! Classes of failure and their exit codes: the contract with scripts that call `coppice`.
//!
//! A failure of ours has a code from 64 to 99, so that it collides neither with what shells and
//! `timeout` use (124 to 127, 128 + signal) nor with the small codes most commands return.

use std::fmt;

/// A command ran longer than `--timeout` allows.
pub const EXIT_TIMEOUT: u8 = 124;
/// The command is in the guest but cannot be executed.
pub const EXIT_NOT_EXECUTABLE: u8 = 126;
/// The command is not in the guest.
pub const EXIT_NOT_FOUND: u8 = 127;
/// Added to a signal's number.
pub const EXIT_SIGNAL_BASE: u8 = 128;

/// What kind of failure it is; each has its own exit code, which never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// The command line is not understood.
    Usage,
    /// The kernel is not there or cannot be opened.
    KernelMissing,
    /// The file is not a kernel, or a truncated one.
    KernelInvalid,
    /// The image is not there or cannot be opened.
    ImageMissing,
    /// The image is truncated or of no known format.
    ImageInvalid,
    /// The guest's memory does not hold what has to be loaded, or it ran out while booting.
    MemoryTooSmall,
    /// Coppice itself failed.
    Internal,
    /// The host lacks a resource or refuses one.
    Host,
    /// The kernel command line is too long or not ASCII.
    CmdlineInvalid,
    /// The guest's kernel could not mount the root file system or find init in it.
    RootfsUnusable,
    /// The host's disk is full.
    DiskFull,
    /// The guest's kernel panicked, or crashed before it could.
    GuestPanic,
    /// The guest runs but its agent does not answer.
    AgentUnreachable,
    /// /dev/kvm may not be opened.
    KvmDenied,
    /// There is no /dev/kvm.
    KvmAbsent,
    /// KVM lacks something that is needed, or is in a state that does not permit a machine.
    KvmUnfit,
    /// The guest's kernel lacks a feature that is needed.
    KernelUnfit,
    /// A program of Coppice is not there.
    ProgramMissing,
    /// The guest ended before the command did.
    GuestEnded,
    /// The agent refused the request.
    RequestRefused,
    /// Nothing has the name or ID.
    NotFound,
    /// A name is taken, or a sandbox is in a state that does not permit the request.
    Conflict,
    /// A file of the store is damaged or missing.
    StoreDamaged,
    /// The checkpoint cannot be restored on this host.
    CheckpointUnfit,
}

/// Every class with its exit code, its name for programs, and what it means.
pub const CLASSES: [(Class, u8, &str, &str); 24] = [
    (Class::Usage, 64, "usage", "the command line is not understood"),
    (Class::KernelMissing, 65, "kernel_missing", "the kernel is not there or cannot be opened"),
    (Class::KernelInvalid, 66, "kernel_invalid", "the file is not a kernel, or is truncated"),
    (Class::ImageMissing, 67, "image_missing", "the image is not there or cannot be opened"),
    (Class::ImageInvalid, 68, "image_invalid", "the image is truncated or of no known format"),
    (Class::MemoryTooSmall, 69, "memory_too_small", "the guest has too little memory"),
    (Class::Internal, 70, "internal", "coppice itself failed"),
    (Class::Host, 71, "host", "the host lacks a resource or refuses one"),
    (Class::CmdlineInvalid, 72, "cmdline_invalid", "the kernel command line is too long"),
    (Class::RootfsUnusable, 73, "rootfs_unusable", "the root file system does not mount"),
    (Class::DiskFull, 74, "disk_full", "the host's disk is full"),
    (Class::GuestPanic, 75, "guest_panic", "the guest's kernel panicked or crashed"),
    (Class::AgentUnreachable, 76, "agent_unreachable", "the guest's agent does not answer"),
    (Class::KvmDenied, 77, "kvm_denied", "/dev/kvm may not be opened"),
    (Class::KvmAbsent, 78, "kvm_absent", "there is no /dev/kvm"),
    (Class::KvmUnfit, 79, "kvm_unfit", "KVM lacks something that is needed"),
    (Class::KernelUnfit, 80, "kernel_unfit", "the guest's kernel lacks a feature"),
    (Class::ProgramMissing, 81, "program_missing", "a program of Coppice is not there"),
    (Class::GuestEnded, 82, "guest_ended", "the guest ended before the command did"),
    (Class::RequestRefused, 83, "request_refused", "the agent refused the request"),
    (Class::NotFound, 84, "not_found", "there is no such checkpoint or sandbox"),
    (Class::Conflict, 85, "conflict", "the name is taken, or the sandbox's state forbids it"),
    (Class::StoreDamaged, 86, "store_damaged", "a file of the store is damaged or missing"),
    (Class::CheckpointUnfit, 87, "checkpoint_unfit", "this host cannot restore the checkpoint"),
];

impl Class {
    fn row(self) -> (u8, &'static str) {
        let found = CLASSES.iter().find(|(class, ..)| *class == self);
        found.map_or((70, "internal"), |(_, code, name, _)| (*code, *name))
    }

    /// Exit code of a `coppice` that fails this way.
    pub fn exit_code(self) -> u8 {
        self.row().0
    }

    /// Name for programs, as in `--json` events.
    pub fn name(self) -> &'static str {
        self.row().1
    }
}

/// A failure as it is shown: what is wrong with which thing, and what to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Its class.
    pub class: Class,
    /// One line that names the thing.
    pub message: String,
    /// One line that says what to do next.
    pub remedy: String,
}

impl Failure {
    /// Puts a failure together; line breaks become spaces.
    pub fn new(class: Class, message: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self { class, message: one_line(&message), remedy: one_line(&remedy) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.message, self.remedy)
    }
}

impl std::error::Error for Failure {}

/// An error and all its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// The text without control characters, which a hostile guest could send to a terminal.
pub fn one_line(text: &impl fmt::Display) -> String {
    let text = text.to_string();
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    plain.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_class_has_a_code_and_a_name_of_its_own() {
        let codes: HashSet<u8> = CLASSES.iter().map(|row| row.1).collect();
        let names: HashSet<&str> = CLASSES.iter().map(|row| row.2).collect();
        let classes: HashSet<Class> = CLASSES.iter().map(|row| row.0).collect();
        assert_eq!((codes.len(), names.len(), classes.len()), (24, 24, 24));
        assert!(codes.iter().all(|code| (64..100).contains(code)));
    }

    #[test]
    fn the_documented_table_is_this_table() {
        let documented = include_str!("../../docs/cli.md");
        for (_, code, name, meaning) in CLASSES {
            let row = format!("| {code} | `{name}` | {meaning} |");
            assert!(documented.contains(&row), "docs/cli.md lacks: {row}");
        }
    }

    #[test]
    fn a_guest_cannot_send_escapes_to_the_terminal() {
        let failure = Failure::new(Class::GuestPanic, "a\x1b[2J\nb", "c");
        assert_eq!(failure.to_string(), "a [2J b; c");
    }
}
