//! What container tools need of the `agent` kernel, each used for real in the Debian image.

use crate::common::{coppice, finish, on_lane, stdout};

/// Runs a shell script as root in the standard sandbox.
fn as_root(script: &str) -> String {
    stdout(&mut coppice(&["run", "--user", "root", "--", "sh", "-euc", script]))
}

/// Runs a Python program as root in the standard sandbox.
fn python_as_root(program: &str) -> String {
    stdout(&mut coppice(&["run", "--user", "root", "--", "python3", "-c", program]))
}

#[test]
fn an_unprivileged_user_makes_every_kind_of_namespace() {
    on_lane!({
        let inside = "hostname inside; hostname; echo $$; id -u; ip -o link | wc -l";
        let script = format!(
            "unshare --user --map-root-user --pid --fork --mount-proc --net --uts --ipc --cgroup \
             sh -c '{inside}'; test \"$(hostname)\" != inside; id -un"
        );
        let out =
            stdout(&mut coppice(&["run", "--user", "user", "--", "sh", "-euc", script.as_str()]));
        assert_eq!(out, "inside\n1\n0\n1\nuser\n");
    });
}

#[test]
fn overlayfs_keeps_changes_apart() {
    on_lane!({
        let script = "cd $(mktemp -d); mkdir lower upper work merged
            echo base > lower/file; echo base > lower/gone
            mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work none merged
            echo changed > merged/file; rm merged/gone
            ls merged; cat lower/file upper/file; stat -c %F upper/gone";
        assert_eq!(as_root(script), "file\nbase\nchanged\ncharacter special file\n");
    });
}

#[test]
fn a_cgroup_limits_memory() {
    on_lane!({
        let script = "echo +memory > /sys/fs/cgroup/cgroup.subtree_control
            cd /sys/fs/cgroup; mkdir small; echo 32M > small/memory.max
            code=0; sh -c 'echo $$ > small/cgroup.procs; exec python3 -c \"bytearray(64 << 20)\"' \
                || code=$?
            echo $code; grep -x 'oom_kill 1' small/memory.events";
        assert_eq!(as_root(script), "137\noom_kill 1\n");
    });
}

#[test]
fn a_cgroup_limits_processes() {
    on_lane!({
        let script = "echo +pids > /sys/fs/cgroup/cgroup.subtree_control
            cd /sys/fs/cgroup; mkdir few; echo 3 > few/pids.max
            sh -c 'echo $$ > few/cgroup.procs; for i in 1 2 3; do sleep 1000 & done' || true
            cat few/pids.current few/pids.max; grep -c . few/cgroup.procs
            echo 1 > few/cgroup.kill";
        let (code, out, err) =
            finish(&mut coppice(&["run", "--user", "root", "--", "sh", "-euc", script]));
        assert_eq!((code, out.as_str()), (0, "2\n3\n2\n"), "{err}");
        assert!(err.contains("fork"), "{err}");
    });
}

#[test]
fn nftables_drops_what_a_rule_names() {
    on_lane!({
        let out = python_as_root(include_str!("scripts/nftables.py"));
        assert_eq!(out, "4001 dropped\n4002 hello\n");
    });
}

#[test]
fn fuse_serves_a_file_from_user_space() {
    on_lane!({
        let out = python_as_root(include_str!("scripts/fuse.py"));
        assert_eq!(out, "served from user space\n");
    });
}

#[test]
fn a_seccomp_filter_refuses_a_system_call() {
    on_lane!({
        let out = python_as_root(include_str!("scripts/seccomp.py"));
        assert_eq!(out, "refused 122\nbefore\n");
    });
}
