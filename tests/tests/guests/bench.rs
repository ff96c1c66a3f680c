//! `coppice bench` at its smallest size, and what is left when it is killed.

use std::collections::BTreeSet;
use std::fs;
use std::mem::MaybeUninit;
use std::path::Path;
use std::process::{Child, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use crate::common::{coppice, on_lane, stdout};

/// The smallest work of every kind.
const SMALLEST: &[&str] = &[
    "-n=1",
    "--warm-up=0",
    "-c=2",
    "--most-vms=2",
    "--io=1",
    "--dirty=1",
    "--age=0.1",
    "--no-noise",
];

#[test]
fn every_scenario_is_measured() {
    on_lane!({
        let out = tempfile::tempdir().unwrap();
        let mut args = vec!["bench", "all", "--json", "--out", out.path().to_str().unwrap()];
        args.extend(SMALLEST);
        let printed: Value = serde_json::from_str(&stdout(&mut coppice(&args))).unwrap();
        assert_eq!(printed, report(out.path()));
        assert_eq!(printed["complete"], true);
        assert_eq!(printed["failures"].as_array().unwrap().len(), 0, "{printed:#}");
        let metrics: BTreeSet<_> = printed["series"]
            .as_array()
            .unwrap()
            .iter()
            .map(|series| {
                assert!(series["samples"][0]["value"].as_f64().unwrap() > 0.0, "{series}");
                series["metric"].as_str().unwrap()
            })
            .collect();
        for metric in [
            "boot_ms",
            "boot_first_output_ms",
            "overhead_pss_kib",
            "restore_first_output_ms",
            "restore_prepared_first_output_ms",
            "rollback_first_output_ms",
            "kill_restore_first_output_ms",
            "snapshot_full_ms",
            "snapshot_diff_ms",
            "clone_all_ms",
            "clone_fork_pss_kib",
            "clone_exec_private_kib",
            "fanout_first_output_ms",
            "exec_first_output_ms",
            "exec_per_s",
            "io_write_mib_per_s",
            "io_stream_mib_per_s",
            "density_vms",
            "density_pss_kib_per_vm",
        ] {
            assert!(metrics.contains(metric), "no {metric} in {metrics:?}");
        }
        let csv = fs::read_to_string(out.path().join("samples.csv")).unwrap();
        assert!(csv.lines().count() > metrics.len(), "{csv}");
    });
}

#[test]
fn a_run_that_is_killed_leaves_no_machine_and_a_report_that_says_so() {
    on_lane!({ broken_off_by(Signal::KILL) });
}

#[test]
fn a_run_that_is_interrupted_leaves_no_machine_and_a_report_that_says_so() {
    on_lane!({ broken_off_by(Signal::INT) });
}

/// Ends a run while it has a machine, and looks at what is left.
fn broken_off_by(signal: Signal) {
    let (out, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(&watch, out.path(), inotify::WatchFlags::MOVED_TO).unwrap();
    let mut args = vec!["bench", "exec", "--out", out.path().to_str().unwrap()];
    args.extend(["--dir", work.path().to_str().unwrap()]);
    args.extend(SMALLEST.iter().filter(|argument| !argument.starts_with("-n")));
    args.extend(["-n", "100000"]);
    let mut bench = coppice(&args).stdout(Stdio::null()).spawn().unwrap();
    // The machine of `exec` lives from its first round to its last. The report is written before
    // the first round, and after each one.
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut written = inotify::Reader::new(&watch, &mut buffer);
    while !out.path().join("report.json").exists() || series(out.path()) == 0 {
        written.next().unwrap();
    }
    let machines = processes_of(work.path());
    assert!(!machines.is_empty(), "the benchmark has no machine");
    let handles: Vec<_> =
        machines.iter().map(|&pid| pidfd_open(pid, PidfdFlags::empty())).collect();
    kill_process(Pid::from_child(&bench), signal).unwrap();
    let code = end(&mut bench);
    assert_eq!(code, (signal == Signal::INT).then_some(130));
    for handle in handles.into_iter().flatten() {
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(ended, 1, "a machine outlived the benchmark");
    }
    assert_eq!(processes_of(work.path()), []);
    let report = report(out.path());
    assert_eq!(report["complete"], false);
    assert_eq!(report["finished"], Value::Null);
    assert!(!report["series"].as_array().unwrap().is_empty());
    if signal == Signal::INT {
        let left: Vec<_> = fs::read_dir(work.path().join("coppice-bench-0")).unwrap().collect();
        assert!(left.is_empty(), "files are left: {left:?}");
    }
}

fn end(bench: &mut Child) -> Option<i32> {
    bench.wait().unwrap().code()
}

fn report(out: &Path) -> Value {
    serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap()
}

fn series(out: &Path) -> usize {
    report(out)["series"].as_array().unwrap().len()
}

/// Processes whose program lies in this directory.
fn processes_of(directory: &Path) -> Vec<Pid> {
    let of = |entry: fs::DirEntry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let program = fs::read_link(entry.path().join("exe")).ok()?;
        program.starts_with(directory).then(|| Pid::from_raw(pid))?
    };
    fs::read_dir("/proc").unwrap().filter_map(|entry| of(entry.unwrap())).collect()
}
