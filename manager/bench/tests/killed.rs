//! Machines end with the benchmark, however that ends.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};

use coppice_bench::process::Group;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Set in the process that is killed.
const INSIDE: &str = "COPPICE_BENCH_TEST_INSIDE";

#[test]
fn nothing_outlives_a_process_that_is_killed() {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    let mut benchmark = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "nothing_outlives_a_process_that_is_killed", "--nocapture"])
        .env(INSIDE, "1")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(benchmark.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let machine = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
    let handle = pidfd_open(machine, PidfdFlags::empty()).unwrap();
    benchmark.kill().unwrap();
    benchmark.wait().unwrap();
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ended, 1, "process {machine:?} outlived the one that started it");
}

/// Starts a machine, tells of it, and waits to be killed.
#[allow(clippy::print_stderr)]
fn inside() {
    let group = Group::new().unwrap();
    let mut sleep = Command::new("sleep");
    sleep.arg("600").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let machine = group.start(sleep, Path::new("/"), None).unwrap();
    eprintln!("{}", machine.id());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

#[test]
fn what_is_started_is_killed_when_it_is_dropped() {
    let group = Group::new().unwrap();
    let mut sleep = Command::new("sleep");
    sleep.arg("600");
    let machine = group.start(sleep, Path::new("/"), None).unwrap();
    let pid = Pid::from_raw(i32::try_from(machine.id()).unwrap()).unwrap();
    let handle = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    drop(machine);
    let ended =
        poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    assert_eq!(ended.unwrap(), 1);
}
