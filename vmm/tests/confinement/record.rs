//! Each call in the lists is needed: whole lives of machines are followed call by call, and what
//! none of them makes has no place there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use coppice_micro::{kvm, vmm};
use coppice_vmm::sys::jail::Role;
use coppice_vmm::sys::jail::calls::{Check, DEBUG_ROWS, ROWS, Row};

/// Calls that errors, races and large machines lead to, each with the test that needs it: here, or
/// those beside the lists, which have each role make it.
const RARE: &[(i64, &str)] = &[
    (libc::SYS_sched_yield, "a_channel_may_yield_in_every_place"),
    (libc::SYS_restart_syscall, "a_wait_goes_on_after_a_stop"),
    (libc::SYS_rt_sigaction, "a_memory_fault_ends_the_process_by_its_own_signal"),
    (libc::SYS_rt_sigreturn, "a_memory_fault_ends_the_process_by_its_own_signal"),
    (libc::SYS_tgkill, "a_panic_is_told_and_ends_the_process_in_every_place"),
    (libc::SYS_getpid, "a_panic_is_told_and_ends_the_process_in_every_place"),
    (libc::SYS_gettid, "a_panic_is_told_and_ends_the_process_in_every_place"),
    (libc::SYS_brk, "the_heap_grows_in_every_place"),
    (libc::SYS_mmap, "the_heap_grows_in_every_place"),
    (libc::SYS_mremap, "the_heap_grows_in_every_place"),
    (libc::SYS_clock_gettime, "clocks_are_read_by_a_call_in_every_place"),
    (libc::SYS_getppid, "the_end_of_the_thread_that_started_it_does_not_end_a_machine"),
];

/// The same for single requests and operations: the call, and a check of its row.
const RARE_CHECKS: &[(i64, Check, &str)] = &[
    // The allocator's lock.
    (libc::SYS_futex, Check::Is(1, 128), "locks_of_the_c_library_are_waited_for_in_every_place"),
    // A checkpoint of a host with another clock rate, which takes a processor that scales it.
    (libc::SYS_ioctl, Check::Is(1, 0xAEA2), "a_vcpu_is_set_to_the_rate_and_features_it_had"),
    // A rollback over a change of features: CR4 of the guest shows in CPUID.
    (libc::SYS_ioctl, Check::Is(1, 0x4008_AE90), "a_vcpu_is_set_to_the_rate_and_features_it_had"),
    // Pages that a clone will use are not in memory, or there is time to fill page tables.
    (libc::SYS_madvise, Check::Is(2, 3), "pages_are_brought_in"),
    (libc::SYS_madvise, Check::Is(2, 22), "pages_are_brought_in"),
];

/// Whose calls they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Whose {
    /// Of all that builds a machine, or a thread that starts.
    Building,
    Control,
    Vcpu,
    Disk,
    Streams,
    Worker,
}

const ROLES: [(Whose, Role); 5] = [
    (Whose::Control, Role::Control),
    (Whose::Vcpu, Role::Vcpu),
    (Whose::Disk, Role::Disk),
    (Whose::Streams, Role::Streams),
    (Whose::Worker, Role::Worker),
];

type Call = (i64, [u32; 6]);

/// By a thread's name and how many filters it installed itself; nothing for what is before the
/// process is confined.
fn whose(name: &str, filters: usize) -> Option<Whose> {
    if name == "coppice-vmm" && filters > 0 {
        // The main thread installs two for the process, then that of its role. Threads that were
        // not named yet have none.
        return Some(if filters > 2 { Whose::Control } else { Whose::Building });
    }
    let role = match name.trim_end_matches(|c: char| c.is_ascii_digit()) {
        "vcpu" => Whose::Vcpu,
        "disk-io" => Whose::Disk,
        "io" => Whose::Streams,
        "checkpoint" | "write-faults" | "prefetch" => Whose::Worker,
        _ => Whose::Building,
    };
    Some(if filters > 0 { role } else { Whose::Building })
}

fn calls_of(directory: &Path) -> BTreeMap<Whose, Vec<Call>> {
    let mut calls: BTreeMap<_, Vec<Call>> = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        for line in text.lines() {
            let mut fields = line.split(' ');
            let name = fields.next().unwrap();
            let mut numbers = fields.map(|field| field.parse::<u64>().unwrap());
            let filters = usize::try_from(numbers.next().unwrap()).unwrap();
            let call = i64::try_from(numbers.next().unwrap()).unwrap();
            let arguments = [(); 6].map(|()| u32::try_from(numbers.next().unwrap()).unwrap());
            if let Some(whose) = whose(name, filters) {
                calls.entry(whose).or_default().push((call, arguments));
            }
        }
    }
    calls
}

fn passes(row: &Row, (number, arguments): &Call) -> bool {
    *number == row.call
        && row.checks.iter().all(|check| match *check {
            Check::Any | Check::ThisProcess(_) => true,
            Check::Is(at, value) => arguments[usize::from(at)] == value,
            Check::Without(at, bits) => arguments[usize::from(at)] & bits == 0,
        })
}

/// A program that has the machine's recorded, to be used in its place.
fn recorder(directory: &Path) -> PathBuf {
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "coppice-inject"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .unwrap();
    assert!(built.success());
    let program = vmm();
    let target = Path::new(&program).ancestors().nth(2).unwrap();
    let recorder = target.join("debug/coppice-inject");
    let wrapper = directory.join("coppice-vmm");
    let calls = directory.join("calls");
    fs::create_dir(&calls).unwrap();
    let (recorder, calls) = (recorder.display(), calls.display());
    let script = format!("#!/bin/sh\nexec '{recorder}' record '{calls}'/$$ '{program}' \"$@\"\n");
    fs::write(&wrapper, script).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o700)).unwrap();
    wrapper
}

#[test]
fn every_call_of_the_lists_is_needed_by_some_machine() {
    if !kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let wrapper = recorder(directory.path());
    for level in [None, Some("trace")] {
        let lives = Command::new(std::env::current_exe().unwrap())
            .args(["life::", "--test-threads", "2"])
            .env("COPPICE_VMM", &wrapper)
            .envs(level.map(|level| ("COPPICE_LOG", level)))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&lives.stdout);
        assert!(lives.status.success(), "{said}\n{}", String::from_utf8_lossy(&lives.stderr));
    }
    let calls = calls_of(&directory.path().join("calls"));
    let made = |row: &Row, by: Whose| {
        calls.get(&by).is_some_and(|calls| calls.iter().any(|call| passes(row, call)))
    };
    let rare = |row: &Row| {
        let checked =
            |(call, check, _): &(i64, Check, &str)| *call == row.call && row.checks.contains(check);
        RARE.iter().any(|(call, _)| *call == row.call) || RARE_CHECKS.iter().any(checked)
    };
    let mut unneeded = Vec::new();
    for row in ROWS.iter().chain(DEBUG_ROWS).filter(|row| !rare(row)) {
        for (whose, role) in ROLES {
            if row.is_of(role) && !made(row, whose) {
                unneeded.push(format!("{whose:?} does not make {row:?}"));
            }
        }
        if row.is_of_building() && !made(row, Whose::Building) {
            unneeded.push(format!("building does not make {row:?}"));
        }
    }
    assert!(unneeded.is_empty(), "calls that nothing makes:\n{}", unneeded.join("\n"));
}
