//! A hundred clones of a loaded guest: each has what was before, and nothing of what the others do.

use std::collections::BTreeSet;

use super::load::{self, Report};
use crate::common::on_lane;
use crate::sessions::Session;

/// Clones alive together here, beside their parent (the bench holds a hundred), and how often
/// so many are made.
const CLONES: u64 = 5;
const BATCHES: u64 = 20;

/// Who a machine is, and whether its file system is clean: the kernel has found nothing wrong, and
/// can bring the disk to rest and read all of it anew.
const LAST_LOOK: &str = "\
    cat /shared; hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id
    test $(cat /sys/fs/ext4/vda/errors_count) = 0
    killall guest-load; while killall -0 guest-load 2> /dev/null; do sleep 0.05; done
    mount -o remount,ro /; echo 3 > /proc/sys/vm/drop_caches
    find / -xdev -type f -exec cat {} + > /dev/null
    ! dmesg | grep -iE 'ext4.*(error|corrupt)|I/O error'";

/// Makes a batch of clones, has each of them and then the parent write, and looks at all when all
/// have written; what is printed for each.
fn batch(session: &Session, number: u64, before: &Report, parent: &mut Report) -> Vec<Vec<String>> {
    let base = format!("b{number}");
    session.ok(&["clone", "base", "-n", &CLONES.to_string(), "--name", &base]);
    let clones: Vec<String> = (1..=CLONES).map(|clone| format!("{base}-{clone}")).collect();
    let mut marked = Vec::new();
    for (mark, name) in (0..).zip(&clones) {
        let script = format!("grep -qx 'of all' /shared && echo {name} > /shared");
        let report = load::mark(session, name, mark, &script);
        report.goes_on_from(before, name);
        marked.push(report);
    }
    let own = 2000 + number;
    *parent = mark_parent(session, own, parent);
    // By now all have written, and still do.
    let mut seen = Vec::new();
    for ((mark, name), earlier) in (0..).zip(&clones).zip(&marked) {
        let (report, answer) = load::report_and(session, name, LAST_LOOK);
        report.goes_on_from(earlier, name);
        assert_eq!((report.get("mark"), report.get("mark_on_disk")), (mark, mark), "{name}");
        let lines: Vec<String> = answer.lines().map(str::to_owned).collect();
        assert_eq!(lines[..2], [name.clone(), name.clone()]);
        seen.push(lines);
    }
    let report = load::report(session, "web");
    report.goes_on_from(parent, "web");
    assert_eq!((report.get("mark"), report.get("mark_on_disk")), (own, own), "web");
    *parent = report;
    let clones = clones.iter().map(String::as_str);
    session.ok(&["kill"].into_iter().chain(clones).collect::<Vec<_>>());
    seen
}

fn mark_parent(session: &Session, mark: u64, earlier: &Report) -> Report {
    let report = load::mark(session, "web", mark, &format!("echo web-{mark} > /shared"));
    report.goes_on_from(earlier, "web");
    report
}

#[test]
fn a_hundred_clones_and_their_parent_write_on_apart_from_each_other() {
    on_lane!({
        let options = ["--kernel", "micro", "--image", "tiny", "--memory", "128", "--cpus", "2"];
        let session = Session::with(&options);
        // Rests between steps: all of them share the lab's processors.
        load::start(&session, "web", "pace=500 memory memory disk disk");
        session.sh("web", "echo of all > /shared; sync");
        let before = load::mark(&session, "web", 1000, "true");
        session.ok(&["checkpoint", "web", "--name", "base"]);
        let mut parent = mark_parent(&session, 1001, &before);
        let mut seen = Vec::new();
        for number in 0..BATCHES {
            seen.extend(batch(&session, number, &before, &mut parent));
        }
        let (last, answer) = load::report_and(&session, "web", LAST_LOOK);
        last.goes_on_from(&parent, "web");
        seen.push(answer.lines().map(str::to_owned).collect());
        // What each wrote, its host name, machine-id and boot ID.
        for line in 0..4 {
            let different: BTreeSet<&String> = seen.iter().map(|lines| &lines[line]).collect();
            assert_eq!(different.len(), seen.len(), "line {line}: {seen:?}");
        }
        session.end();
    });
}
