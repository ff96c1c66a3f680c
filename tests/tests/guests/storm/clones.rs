//! Many clones of a loaded guest: each has what was before, and nothing of what the others do.

use std::collections::BTreeSet;

use super::load;
use crate::common::on_lane;
use crate::sessions::Session;

/// Clones alive together here; the bench holds a hundred.
const CLONES: u64 = 6;

/// Who a machine is, and whether its file system is clean: the kernel has found nothing wrong, and
/// can bring the disk to rest and read all of it anew.
const LAST_LOOK: &str = "\
    cat /shared; hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id
    test $(cat /sys/fs/ext4/vda/errors_count) = 0
    killall guest-load; while killall -0 guest-load 2> /dev/null; do sleep 0.05; done
    mount -o remount,ro /; echo 3 > /proc/sys/vm/drop_caches
    find / -xdev -type f -exec cat {} + > /dev/null
    ! dmesg | grep -iE 'ext4.*(error|corrupt)|I/O error'";

#[test]
fn clones_and_their_parent_write_on_apart_from_each_other() {
    on_lane!({
        let options = ["--kernel", "micro", "--image", "tiny", "--memory", "128", "--cpus", "2"];
        let session = Session::with(&options);
        // Rests between steps: all of them share the lab's processors.
        load::start(&session, "web", "pace=500 memory memory disk disk");
        session.sh("web", "echo of all > /shared; sync");
        let before = load::mark(&session, "web", 1000, "true");
        session.ok(&["checkpoint", "web", "--name", "base"]);
        session.ok(&["clone", "base", "-n", &CLONES.to_string(), "--name", "c"]);

        let mut all: Vec<String> = (1..=CLONES).map(|clone| format!("c-{clone}")).collect();
        all.push("web".to_owned());
        let mut marked = Vec::new();
        for (mark, name) in (0..).zip(&all) {
            let script = format!("grep -qx 'of all' /shared && echo {name} > /shared");
            let report = load::mark(&session, name, mark, &script);
            report.goes_on_from(&before, name);
            marked.push(report);
        }
        // By now all have written, and still do.
        let mut identities = Vec::new();
        for ((mark, name), earlier) in (0..).zip(&all).zip(&marked) {
            let (report, answer) = load::report_and(&session, name, LAST_LOOK);
            report.goes_on_from(earlier, name);
            assert_eq!((report.get("mark"), report.get("mark_on_disk")), (mark, mark), "{name}");
            let lines: Vec<String> = answer.lines().map(str::to_owned).collect();
            assert_eq!(lines[..2], [name.clone(), name.clone()]);
            identities.push(lines);
        }
        for line in 0..4 {
            let different: BTreeSet<&String> =
                identities.iter().map(|lines| &lines[line]).collect();
            assert_eq!(different.len(), all.len(), "line {line}: {identities:?}");
        }
        session.end();
    });
}
