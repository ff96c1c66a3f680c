//! The process of a running machine as the kernel shows it.

use std::fs;

use coppice_micro::tree::Machine;
use coppice_micro::{Code, Vmm, command_with_socket, kvm, vmm};
use coppice_vmm_protocol::{ControlSocket, Op, VmState};

/// The value of a field in each thread's status.
fn of_threads(pid: u32, field: &str) -> Vec<(String, String)> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // KVM has a thread of its own in the process, which is the kernel's and never leaves it.
    let of_kernel = |(name, _): &(String, String)| name.starts_with("kvm-");
    let value = |entry: std::io::Result<fs::DirEntry>| {
        let directory = entry.unwrap().path();
        let name = fs::read_to_string(directory.join("comm")).unwrap().trim().to_owned();
        let status = fs::read_to_string(directory.join("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        (name, line.unwrap().trim_start_matches(':').trim().to_owned())
    };
    let mut all: Vec<_> = threads.map(value).filter(|thread| !of_kernel(thread)).collect();
    all.sort();
    all
}

fn is_root() -> bool {
    fs::read_to_string("/proc/self/status").unwrap().contains("\nUid:\t0\t0\t0\t0")
}

fn running() -> (Vmm, coppice_micro::Console) {
    let (vmm, mut console) = Vmm::boot(&Code::new().print_for_ever(b'x'), |spec| spec.rng = true);
    console.byte();
    (vmm, console)
}

#[test]
fn every_thread_of_a_running_machine_is_confined_and_without_privileges() {
    if !kvm() {
        return;
    }
    let (mut vmm, _console) = running();
    assert_eq!(vmm.status().state, VmState::Running);
    let pid = vmm.child.id();
    let names: Vec<_> = of_threads(pid, "Name").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["coppice-vmm", "disk-io", "io", "vcpu0"]);
    let all_are = |field: &str, value: &str| {
        for (name, found) in of_threads(pid, field) {
            assert_eq!(found, value, "{field} of {name}");
        }
    };
    all_are("NoNewPrivs", "1");
    all_are("Seccomp", "2");
    // That against clone3, that of the process, that of the role.
    all_are("Seccomp_filters", "3");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        all_are(set, "0000000000000000");
    }
    if is_root() {
        all_are("CapBnd", "0000000000000000");
    }
}

#[test]
fn a_process_that_waits_with_a_prepared_machine_is_confined_already() {
    if !kvm() {
        return;
    }
    let mut vmm = Vmm::start();
    vmm.done(Op::Prepare { vcpus: 2, memory_mib: 64 });
    let filters = of_threads(vmm.child.id(), "Seccomp_filters");
    let filters: Vec<_> = filters.iter().map(|(n, f)| (n.as_str(), f.as_str())).collect();
    // The loader, which may not have its name yet, brings in what the machine will be made of, and
    // ends then.
    let (ready, loader): (Vec<_>, Vec<_>) = filters.into_iter().partition(|(_, of)| *of == "3");
    let expected = ["coppice-vmm", "disk-io", "io", "vcpu0", "vcpu1"].map(|name| (name, "3"));
    assert_eq!(ready, expected);
    assert!(matches!(loader.as_slice(), [("loader" | "coppice-vmm", "2")]), "{loader:?}");
}

#[test]
fn a_process_that_was_asked_nothing_yet_is_confined_already() {
    let mut vmm = Vmm::start();
    assert_eq!(vmm.status().state, VmState::Empty);
    let pid = vmm.child.id();
    assert_eq!(of_threads(pid, "Seccomp")[0].1, "2");
    assert_eq!(of_threads(pid, "NoNewPrivs")[0].1, "1");
    assert_eq!(of_threads(pid, "CapEff")[0].1, "0000000000000000");
}

#[test]
fn a_process_leaves_no_core_and_is_closed_to_its_user_where_it_is_root() {
    let mut vmm = Vmm::start();
    assert_eq!(vmm.status().state, VmState::Empty);
    let pid = vmm.child.id();
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().collect::<Vec<_>>()[4..6], ["0", "0"], "{core}");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.contains("\nUmask:\t0077\n"), "{status}");
    if is_root() {
        // One that is as privileged as the process itself, by user and capabilities, may not look.
        let look = format!("cat /proc/{pid}/maps");
        let output = std::process::Command::new("setpriv")
            .args(["--bounding-set=-all", "--inh-caps=-all", "sh", "-c", &look])
            .output()
            .unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        // The manager may.
        assert!(!fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap().is_empty());
    }
}

#[test]
fn another_user_may_still_see_what_its_own_process_takes() {
    if !is_root() {
        return;
    }
    let as_nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all";
    let (ours, theirs) = ControlSocket::pair().unwrap();
    let program = format!("{as_nobody} '{}' --control-fd 3", vmm());
    let child = command_with_socket(&program, theirs.into_fd()).spawn().unwrap();
    let mut vmm = Vmm::with(child, ours);
    assert_eq!(vmm.status().state, VmState::Empty);
    let pid = vmm.child.id();
    for (field, value) in [("NoNewPrivs", "1"), ("Seccomp", "2"), ("CapPrm", "0000000000000000")] {
        assert_eq!(of_threads(pid, field)[0].1, value, "{field}");
    }
    let look = format!("{as_nobody} cat /proc/{pid}/smaps_rollup");
    let output = std::process::Command::new("sh").args(["-c", &look]).output().unwrap();
    assert!(output.status.success() && !output.stdout.is_empty(), "{output:?}");
}

#[test]
fn a_machine_has_the_descriptors_it_was_passed_and_those_it_made() {
    if !kvm() {
        return;
    }
    let machine = Machine::boot(64);
    let pid = machine.vmm.child.id();
    let links = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let paths: Vec<_> = links.map(|link| fs::read_link(link.unwrap().path()).unwrap()).collect();
    for path in paths {
        let name = path.to_str().unwrap();
        let kind = name.split('[').next().unwrap();
        let known = ["/dev/kvm", "/dev/null", "socket:", "pipe:", "/proc/"].iter();
        let inherited = name.starts_with("/dev/pts") || name.ends_with(".log");
        let made = name.starts_with("anon_inode:");
        let deleted = name.ends_with(" (deleted)");
        let ours = known.into_iter().any(|known| kind.starts_with(known));
        assert!(ours || made || inherited || deleted, "{name}");
    }
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    assert_eq!(program, fs::canonicalize(vmm()).unwrap());
}
