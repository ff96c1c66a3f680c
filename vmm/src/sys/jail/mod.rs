//! Which system calls the threads of a machine's process may make: any other one kills the process
//! (`Documentation/userspace-api/seccomp_filter.rst`).
//!
//! ```text
//! process start: paths are opened, privileges given up
//! confine_process -> all that any thread needs, threads to come as well (inherited)
//! confine(role)   -> what this thread needs, on top: a call must pass all filters of a thread
//! ```
//!
//! Threads take their role when they begin; the control thread when it has prepared what machines
//! are made of, or, without that, at the first event after the start, because it builds the machine
//! before; the loader, which fills memory, helps. [`calls`] has the lists.

pub mod calls;
mod requests;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter,
};
use thiserror::Error;

use self::calls::{Check, DEBUG_ROWS, ROWS, Row};

/// What a thread is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The main thread of a machine that was prepared or has begun to run, and what it starts.
    Control,
    /// A vCPU.
    Vcpu,
    /// The I/O of disks.
    Disk,
    /// The I/O of all other devices.
    Streams,
    /// Work beside the machine: writing a checkpoint, answering writers to protected pages,
    /// bringing in pages.
    Worker,
}

/// Why a filter could not be made or installed.
#[derive(Debug, Error)]
pub enum JailError {
    /// The table cannot be compiled.
    #[error("the list of system calls cannot be compiled")]
    Compile(#[source] BackendError),
    /// The kernel does not take the filter.
    #[error("the host does not restrict system calls: use a kernel with CONFIG_SECCOMP_FILTER")]
    Install(#[source] seccompiler::Error),
}

/// Set once [`confine_process`] has done its work.
static CONFINED: AtomicBool = AtomicBool::new(false);

/// Confines the calling thread, and all that it will start, to what the whole process needs.
///
/// # Errors
/// [`JailError`]; the process must not go on then.
pub fn confine_process() -> Result<(), JailError> {
    // Starting a thread by clone3 passes its flags in memory, where no filter can see them. Told
    // that there is no such call, the C library uses clone.
    let no_clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let enosys = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    install(&compile(no_clone3, SeccompAction::Allow, enosys).map_err(JailError::Compile)?)?;
    install(&allow_only(|_| true).map_err(JailError::Compile)?)?;
    CONFINED.store(true, Ordering::Release);
    Ok(())
}

/// Confines the calling thread to its role; for good. See [`Filter`].
pub fn confine(role: Role) {
    Filter::of(role).apply();
}

/// A filter that is ready to be installed. There is none where the process is not confined, as in
/// tests of single parts.
pub struct Filter(Option<Result<BpfProgram, BackendError>>);

impl Filter {
    /// Makes the filter of a role.
    pub fn of(role: Role) -> Self {
        let confined = CONFINED.load(Ordering::Acquire);
        Self(confined.then(|| allow_only(|row| row.is_for(role))))
    }

    /// Confines the calling thread to it. If that fails the process ends: a thread that may do more
    /// than it should must not meet a guest.
    pub fn apply(self) {
        let Some(program) = self.0 else { return };
        let done = program.map_err(JailError::Compile).and_then(|program| install(&program));
        if let Err(error) = done {
            tracing::error!(%error, "a thread cannot be confined");
            eprintln!("coppice-vmm: a thread cannot be confined: {error}");
            std::process::abort();
        }
    }
}

fn install(program: &BpfProgram) -> Result<(), JailError> {
    apply_filter(program).map_err(JailError::Install)
}

/// A program that lets the calls of some rows pass and kills the process at any other.
fn allow_only(wanted: impl Fn(&Row) -> bool) -> Result<BpfProgram, BackendError> {
    let process = std::process::id();
    let mut rules: BTreeMap<_, Vec<SeccompRule>> = BTreeMap::new();
    for row in ROWS.iter().chain(DEBUG_ROWS).filter(|row| wanted(row)) {
        let rules = rules.entry(row.call).or_default();
        let conditions: Vec<_> = row
            .checks
            .iter()
            .filter_map(|check| condition(*check, process))
            .collect::<Result<_, _>>()?;
        if !conditions.is_empty() {
            rules.push(SeccompRule::new(conditions)?);
        }
    }
    compile(rules, SeccompAction::KillProcess, SeccompAction::Allow)
}

fn condition(check: Check, process: u32) -> Option<Result<SeccompCondition, BackendError>> {
    let (argument, operator, value) = match check {
        Check::Any => return None,
        Check::Is(argument, value) => (argument, SeccompCmpOp::Eq, value),
        Check::Without(argument, bits) => (argument, SeccompCmpOp::MaskedEq(bits.into()), 0),
        Check::ThisProcess(argument) => (argument, SeccompCmpOp::Eq, process),
    };
    Some(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value.into()))
}

fn compile(
    rules: BTreeMap<libc::c_long, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    action: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules, otherwise, action, TargetArch::x86_64)?.try_into()
}

#[cfg(test)]
mod tests;
