//! Commands in the lab: what goes in comes through, and what comes out is exact.
//!
//! The same checks run on the host and in the nested machine. Each says which lane it took.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use coppice_lab::{Error, Lab, Lane, LaneChoice, Options, RemoteError, Status};

/// Wall-clock limit of one command: far above what it takes, so that only a hang meets it.
const LIMIT: Duration = Duration::from_secs(120);

fn lab(choice: LaneChoice) -> Lab {
    let lab = Lab::open(choice, &Options::default()).unwrap();
    println!("lane {} ({})", lab.lane(), lab.reason());
    lab
}

fn shell(lab: &Lab, script: &str) -> coppice_lab::Output {
    lab.command(["sh", "-c", script]).timeout(LIMIT).output().unwrap()
}

/// Makes one test per lane of a function that takes a lab.
macro_rules! in_both_lanes {
    ($($name:ident)*) => {
        mod direct {
            $(#[test] fn $name() { super::$name(&super::lab(coppice_lab::LaneChoice::Direct)); })*
        }
        mod nested {
            $(#[test] fn $name() { super::$name(&super::lab(coppice_lab::LaneChoice::Nested)); })*
        }
    };
}

in_both_lanes! {
    exit_codes_come_through
    a_signal_is_told_from_an_exit_code
    output_and_errors_stay_apart
    input_passes
    much_data_passes_both_ways_unchanged
    unread_input_does_not_hold_the_command_up
    variables_and_directory_pass
    what_a_command_leaves_running_is_ended
    a_timeout_ends_the_command
}

fn exit_codes_come_through(lab: &Lab) {
    assert_eq!(shell(lab, "exit 0").status, Status::Exited(0));
    assert_eq!(shell(lab, "exit 3").status, Status::Exited(3));
}

fn a_signal_is_told_from_an_exit_code(lab: &Lab) {
    assert_eq!(shell(lab, "kill -TERM $$").status, Status::Signalled(15));
    assert_eq!(shell(lab, "exit 143").status, Status::Exited(143));
}

fn output_and_errors_stay_apart(lab: &Lab) {
    let output = shell(lab, "echo out; echo err >&2");
    assert_eq!(
        (output.stdout.as_slice(), output.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
}

fn input_passes(lab: &Lab) {
    let output = lab.command(["cat"]).stdin_bytes("a line\n").timeout(LIMIT).output().unwrap();
    assert_eq!(output.stdout, b"a line\n");
}

fn much_data_passes_both_ways_unchanged(lab: &Lab) {
    let sent: Vec<u8> =
        (0..3_000_000_u32).flat_map(|number| (number % 251).to_le_bytes()).collect();
    let output = lab.command(["cat"]).stdin_bytes(sent.clone()).timeout(LIMIT).output().unwrap();
    assert!(output.stdout == sent, "{} bytes came back", output.stdout.len());
}

fn unread_input_does_not_hold_the_command_up(lab: &Lab) {
    let command = lab.command(["true"]).stdin_bytes(vec![0; 4 << 20]).timeout(LIMIT);
    assert_eq!(command.output().unwrap().status, Status::Exited(0));
}

fn variables_and_directory_pass(lab: &Lab) {
    let output = lab
        .command(["sh", "-c", "echo $COPPICE_TEST; pwd; echo $COPPICE_LAB_LANE"])
        .env("COPPICE_TEST", "a value")
        .cwd(coppice_lab::paths::checkout().join("xtask"))
        .timeout(LIMIT)
        .output()
        .unwrap();
    let expected = format!(
        "a value\n{}/xtask\n{}\n",
        coppice_lab::paths::checkout().display(),
        lab.lane().name()
    );
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}

fn what_a_command_leaves_running_is_ended(lab: &Lab) {
    let output = shell(lab, "sleep 1000 </dev/null >/dev/null 2>&1 & echo $!");
    let pid: u32 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    // A zombie that its new parent has yet to reap has no command line any more.
    let look = format!("[ -s /proc/{pid}/cmdline ] && tr '\\0' ' ' </proc/{pid}/cmdline || true");
    assert!(!String::from_utf8(shell(lab, &look).stdout).unwrap().contains("sleep 1000"));
}

fn a_timeout_ends_the_command(lab: &Lab) {
    let start = Instant::now();
    let outcome =
        lab.command(["sleep", "1000"]).timeout(Duration::from_millis(300)).output().unwrap_err();
    match outcome {
        Error::Remote { source: RemoteError::TimedOut(_), .. }
        | Error::Direct(coppice_lab::DirectError::TimedOut(_)) => {}
        other => panic!("{other}"),
    }
    assert!(start.elapsed() < LIMIT);
}

#[test]
fn commands_share_one_machine_at_the_same_time() {
    let lab = lab(LaneChoice::Nested);
    let boots: Vec<String> = std::thread::scope(|scope| {
        let read = || {
            let output = shell(&lab, "cat /proc/sys/kernel/random/boot_id");
            String::from_utf8(output.stdout).unwrap()
        };
        let running: Vec<_> = (0..8).map(|_| scope.spawn(read)).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(boots.iter().all(|boot| *boot == boots[0] && boot.len() > 30), "{boots:?}");
}

#[test]
fn the_nested_machine_has_what_guests_and_tests_need() {
    let lab = lab(LaneChoice::Nested);
    assert_eq!(lab.lane(), Lane::Nested);
    let script = "test -w /dev/kvm && grep -qw svm /proc/cpuinfo && test -d /sys/kernel/debug/kvm \
                  && test -c /dev/net/tun && grep -qw memory /sys/fs/cgroup/cgroup.controllers \
                  && modprobe nf_tables && test -w /dev/shm && ping -c 1 127.0.0.1 >/dev/null";
    let output = shell(&lab, script);
    assert!(output.status.success(), "{output:?}");
}

/// QEMU mixes up a guest and the nested machine's kernel where guests run on its first processor.
#[test]
fn commands_stay_off_the_nested_machines_first_processor() {
    let lab = lab(LaneChoice::Nested);
    let output = shell(&lab, "grep Cpus_allowed_list /proc/self/status");
    let cpus = Options::default().cpus;
    let allowed = format!("Cpus_allowed_list:\t1-{cpus}\n");
    assert_eq!(String::from_utf8_lossy(&output.stdout), allowed);
}

#[test]
fn host_and_nested_machine_share_the_scratch_directory() {
    let lab = lab(LaneChoice::Nested);
    let directory = tempfile::tempdir_in(lab.scratch().unwrap()).unwrap();
    let path = directory.path().display();
    std::fs::write(directory.path().join("from-host"), "one").unwrap();
    let output = shell(&lab, &format!("cat {path}/from-host; echo two >{path}/from-lab"));
    assert_eq!(output.stdout, b"one");
    assert_eq!(std::fs::read_to_string(directory.path().join("from-lab")).unwrap(), "two\n");
}

#[test]
fn a_program_that_is_not_there_exits_with_127() {
    let lab = lab(LaneChoice::Nested);
    let output = lab.command(["no-such-program"]).timeout(LIMIT).output().unwrap();
    assert_eq!(output.status, Status::Exited(127));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no-such-program"));
}
