//! Fifty rounds of checkpoint and rollback on one, two and four vCPUs.

use std::time::Duration;

use super::load::{self, Traffic};
use crate::common::on_lane;
use crate::sessions::Session;

/// Rounds on each number of vCPUs.
const ROUNDS: u64 = 50;

/// How far a clock or a timer may be out.
const TOLERANCE: Duration = Duration::from_millis(50);

/// How many of the processes of the time undone are there. And the other end of the traffic, which
/// runs on without anybody to read it, is ended: it would be one more in each round, until there
/// were no time left for the load.
const AFTER_ROLLBACK: &str = "\
    ps -o pid,args > /tmp/ps
    grep '[g]uest-load stream' /tmp/ps | while read -r pid rest; do kill $pid; done
    grep -c '[s]leep 1000' /tmp/ps || true";

/// Checkpoints, goes on, rolls back, and holds the load to what it was; in every other round
/// the checkpoint's memory is copied while the guest runs.
fn rounds(vcpus: usize) {
    let vcpus_text = vcpus.to_string();
    let options = ["--kernel", "micro", "--image", "tiny", "--memory", "192"];
    let session = Session::with(&[options.as_slice(), &["--cpus", &vcpus_text]].concat());
    let pinned = (0..vcpus).map(|cpu| format!("memory={cpu} timer={cpu} "));
    let threads = pinned.collect::<String>() + "disk disk getrandom urandom";
    load::start(&session, "web", &threads);
    let mut before = load::report(&session, "web");
    for round in 0..ROUNDS {
        let what = format!("{vcpus} vCPUs, round {round}");
        let mut traffic = Traffic::start(&session, "web");
        traffic.read(1);
        let marked = load::mark(&session, "web", 2 * round, "true");
        marked.goes_on_from(&before, &format!("{what}, before"));

        let name = format!("round-{round}");
        let mut args = vec!["checkpoint", "web", "--name", &name];
        if round % 2 == 1 {
            args.push("--async");
        }
        session.ok(&args);
        // What came out of the guest while it stood still or was copied is whole.
        traffic.read(20);
        let after = load::mark(&session, "web", 2 * round + 1, "(sleep 1000 >&- 2>&- &)");
        after.goes_on_from(&marked, &format!("{what}, after the checkpoint"));
        assert_eq!(after.get("mark_on_disk"), 2 * round + 1, "{what}");

        session.ok(&["rollback", "web", &name]);
        let back = load::report(&session, "web");
        traffic.cut_off();
        back.goes_on_from(&marked, &format!("{what}, after the rollback"));
        assert_eq!((back.get("mark"), back.get("mark_on_disk")), (2 * round, 2 * round), "{what}");
        let sleeps = session.sh("web", AFTER_ROLLBACK);
        assert_eq!(sleeps, "0\n", "{what}: a process of the time undone is there");
        timers_are_right(&back, &what);
        clock_is_right(&session, &what);
        before = back;
    }
    session.sh("web", "! dmesg | grep -iE 'ext4.*(error|corrupt)|rcu.*stall|soft lockup'");
    session.end();
}

/// A timer may be late by the tolerance and by what the lab's slow, shared processors take: twice
/// as long as a thread that always wants to run did not run, because who wakes first of all may
/// wait for the processor once for the interrupt and once more on the way. Both count from before
/// the checkpoint, so the timers that ran while the machine was stopped are among them.
fn timers_are_right(report: &load::Report, what: &str) {
    let (late, gap) = (report.worst("timer"), report.worst("memory"));
    assert!(late <= TOLERANCE + 2 * gap, "{what}: a timer was {late:?} late, gaps are {gap:?}");
}

/// What cannot be told apart from the way to the guest and back is allowed on top.
fn clock_is_right(session: &Session, what: &str) {
    let (offset, inexact) = load::clock_offset(session, "web");
    let tolerance = i128::try_from(TOLERANCE.as_nanos()).unwrap();
    assert!(
        offset.abs() <= tolerance + inexact,
        "{what}: the clock is {offset} ns ahead, give or take {inexact}"
    );
}

#[test]
fn a_loaded_guest_with_one_vcpu_goes_back_whole() {
    on_lane!({ rounds(1) });
}

#[test]
fn a_loaded_guest_with_two_vcpus_goes_back_whole() {
    on_lane!({ rounds(2) });
}

#[test]
fn a_loaded_guest_with_four_vcpus_goes_back_whole() {
    on_lane!({ rounds(4) });
}
