//! Machines that come and go leave nothing behind.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::process::Stdio;

use crate::common::{on_lane, tiny};

/// Process IDs of every `coppice-vmm` of this test: a nested lane gives each test a control group
/// of its own, and on the host one test runs at a time.
pub(crate) fn vmm_processes() -> Vec<u32> {
    let group = fs::read_to_string("/proc/self/cgroup").unwrap();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
        // A process may be gone by now.
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let of = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        if name.trim() == "coppice-vmm" && of == group {
            found.push(pid);
        }
    }
    found
}

/// Waits for the end of a process that is not our child.
pub(crate) struct ProcessEnd(OwnedFd);

impl ProcessEnd {
    /// Begins to watch a process.
    pub(crate) fn watch(pid: u32) -> Self {
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        let flags = rustix::process::PidfdFlags::empty();
        Self(rustix::process::pidfd_open(pid, flags).unwrap())
    }

    /// Returns once the process has ended.
    pub(crate) fn wait(self) {
        assert!(self.0.as_raw_fd() >= 0);
        let mut fds = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&limit)).unwrap(), 1, "it lives on");
    }
}

/// What a machine could leave behind.
fn traces(runtime: &Path) -> BTreeSet<String> {
    let mut traces: BTreeSet<String> =
        vmm_processes().iter().map(|pid| format!("process {pid}")).collect();
    for entry in fs::read_dir(runtime).into_iter().flatten().flatten() {
        traces.insert(format!("file {}", entry.path().display()));
    }
    traces
}

#[test]
fn twenty_machines_a_third_of_them_killed_leave_nothing() {
    on_lane!({
        let runtime = tempfile::tempdir().unwrap();
        let before = traces(runtime.path());
        let mut seed = 0x5EED_u32;
        for round in 0..20 {
            let mut command = tiny(&[], &["echo", "up"]);
            command.env("XDG_RUNTIME_DIR", runtime.path());
            let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
            if round % 3 == 0 {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                kill_at_random(&mut child, seed);
            } else {
                let mut out = String::new();
                child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
                assert!(child.wait().unwrap().success(), "round {round}");
                assert_eq!(out, "up\n", "round {round}");
            }
        }
        // A killed manager's directory is swept by the next run; its machine ends by itself.
        for pid in vmm_processes() {
            ProcessEnd::watch(pid).wait();
        }
        let mut last = tiny(&[], &["true"]);
        last.env("XDG_RUNTIME_DIR", runtime.path());
        assert!(last.status().unwrap().success());
        let after = traces(runtime.path());
        let left: Vec<_> = after.difference(&before).filter(|t| !is_parent_dir(t)).collect();
        assert!(left.is_empty(), "{left:?}");
    });
}

/// The directory that private directories are made in stays, empty.
fn is_parent_dir(trace: &str) -> bool {
    let Some(path) = trace.strip_prefix("file ") else { return false };
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

/// Kills a manager after some share of a boot's time.
fn kill_at_random(child: &mut std::process::Child, seed: u32) {
    let pid = child.id();
    let watched = ProcessEnd::watch(pid);
    let delay = rustix::event::Timespec {
        tv_sec: i64::from(seed >> 30),
        tv_nsec: i64::from(seed % 1_000_000_000),
    };
    let mut fds = [rustix::event::PollFd::new(&watched.0, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&delay)).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
}
