//! The agent as init, in namespaces of its own with an empty root. Needs root.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use common::{Agent, binary, run};
use http::{Method, StatusCode};
use nix::unistd::geteuid;
use serde_json::json;

/// Makes a root on a tmpfs with the host's programs, and becomes the agent in it.
const ENTER: &str = r#"
set -e
root=$1/root
mkdir "$root"
mount -t tmpfs root "$root"
mkdir "$root/usr" "$root/etc" "$root/srv" "$root/root"
mount --rbind /usr "$root/usr"
for name in bin sbin lib lib64; do
    if [ -L /$name ]; then cp -a /$name "$root/$name"
    elif [ -d /$name ]; then mkdir "$root/$name"; mount --bind /$name "$root/$name"; fi
done
cp /etc/passwd /etc/group "$root/etc/"
echo test-host >"$root/etc/hostname"
cp "$2" "$root/init"
mount --bind "$1" "$root/srv"
exec chroot "$root" /init left over --listen unix:/srv/envd --control unix:/srv/control \
    --ready unix:/srv/ready
"#;

/// Runs a test with an agent that is init, unless that is impossible here.
fn as_init<F: Future<Output = ()>>(test: impl FnOnce(Agent) -> F) {
    if !geteuid().is_root() {
        println!("not root: no namespaces can be made, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::launch(|dir| {
            let mut command = Command::new("unshare");
            command
                .args(["--pid", "--fork", "--kill-child", "--mount", "--uts", "--net", "--ipc"])
                .args(["sh", "-c", ENTER, "sh"])
                .arg(dir)
                .arg(binary());
            command
        })
        .await;
        test(agent).await;
    });
}

async fn output(agent: &Agent, script: &str) -> String {
    let transcript = agent.shell(script).await.all().await;
    let end = transcript.end.clone().unwrap();
    assert_eq!(end.exit_code, 0, "{script}: {transcript:?}");
    String::from_utf8(transcript.stdout).unwrap()
}

#[test]
fn init_is_process_1_and_says_so() {
    as_init(async |agent| {
        assert_eq!(output(&agent, "cat /proc/1/comm").await, "init\n");
        let (_, info) = agent.control(Method::GET, "/info", "").await;
        assert_eq!(info["init"], true);
    });
}

#[test]
fn init_mounts_what_a_userland_needs() {
    as_init(async |agent| {
        let mounts = output(&agent, "cut -d' ' -f2,3 /proc/mounts").await;
        let expected = [
            "/proc proc",
            "/sys sysfs",
            "/dev devtmpfs",
            "/dev/pts devpts",
            "/dev/shm tmpfs",
            "/run tmpfs",
            "/sys/fs/cgroup cgroup2",
        ];
        for mount in expected {
            assert!(mounts.lines().any(|line| line == mount), "{mount} is not among\n{mounts}");
        }
    });
}

#[test]
fn init_makes_devices_and_directories_usable() {
    as_init(async |agent| {
        assert_eq!(output(&agent, "stat -c %a /tmp /dev/shm").await, "1777\n1777\n");
        assert_eq!(output(&agent, "echo x >/dev/null; readlink /dev/fd").await, "/proc/self/fd\n");
        let limits = output(&agent, "ulimit -Sn; ulimit -Hn").await;
        let limits: Vec<u64> = limits.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(limits[0], limits[1].min(65_536));
    });
}

#[test]
fn init_sets_the_host_name_and_loopback() {
    as_init(async |agent| {
        assert_eq!(output(&agent, "cat /proc/sys/kernel/hostname").await, "test-host\n");
        // IFF_UP is the lowest bit.
        assert_eq!(output(&agent, "echo $(($(cat /sys/class/net/lo/flags) & 1))").await, "1\n");
    });
}

#[test]
fn a_terminal_works_under_init() {
    as_init(async |agent| {
        let mut request = common::shell("tty; stty size </dev/tty");
        let size = Some(coppice_agent_protocol::process::PtySize { cols: 80, rows: 24 });
        request.pty = Some(coppice_agent_protocol::process::Pty { size });
        let transcript = agent.start_with(&request, &[]).await.all().await;
        let text = String::from_utf8(transcript.pty).unwrap();
        assert_eq!(text, "/dev/pts/0\r\n24 80\r\n");
    });
}

#[test]
fn init_reaps_orphans() {
    as_init(async |agent| {
        // Each inner shell is orphaned at once; the loop ends only when none is left as a zombie.
        let script = "for i in $(seq 50); do (sh -c 'exit 7' &); done; \
                      while cat /proc/[0-9]*/stat 2>/dev/null | grep -q ') Z'; do :; done; echo ok";
        assert_eq!(output(&agent, script).await, "ok\n");
    });
}

#[test]
fn exits_are_right_while_orphans_are_reaped() {
    as_init(async |agent| {
        for code in 0..40 {
            let script = format!("(sh -c 'exit 7' &); (exit 8) & exit {code}");
            let end = agent.shell(&script).await.all().await.end.unwrap();
            assert_eq!(end.exit_code, code);
        }
    });
}

#[test]
fn an_identity_takes_effect() {
    as_init(async |agent| {
        let machine_id = "00112233445566778899aabbccddeeff";
        let identity = json!({
            "hostname": "clone-7",
            "machine_id": machine_id,
            "entropy": "c2VjcmV0IHJhbmRvbSBieXRlcyBmb3IgdGhlIHBvb2w=",
        });
        let (status, body) = agent.control(Method::POST, "/identity", identity.to_string()).await;
        assert_eq!(status, StatusCode::NO_CONTENT, "{body}");
        let found = output(&agent, "cat /proc/sys/kernel/hostname /etc/machine-id").await;
        assert_eq!(found, format!("clone-7\n{machine_id}\n"));
    });
}

/// In a PID namespace, `reboot` ends its init with SIGHUP and `power off` with SIGINT; `unshare`
/// passes that on as a signal or as its exit code.
fn ended_by(agent: &mut Agent, signal: i32) -> bool {
    let status = agent.child.wait().unwrap();
    status.signal() == Some(signal) || status.code() == Some(128 + signal)
}

#[test]
fn powering_off_lets_processes_finish() {
    as_init(async |mut agent| {
        let script =
            "trap 'echo bye >/srv/last; exit' TERM; while :; do (echo up; exec sleep 1000); done";
        let mut events = agent.shell(script).await;
        events.pid().await;
        events.until("up").await;
        let (status, _) = agent.control(Method::POST, "/shutdown", r#"{"mode":"poweroff"}"#).await;
        assert_eq!(status, StatusCode::ACCEPTED);
        assert!(ended_by(&mut agent, 2));
        assert_eq!(std::fs::read_to_string(agent.path("last")).unwrap(), "bye\n");
    });
}

#[test]
fn processes_that_ignore_the_end_are_killed() {
    as_init(async |mut agent| {
        let mut events = agent.shell("trap '' TERM HUP; echo up; while :; do sleep 1; done").await;
        events.pid().await;
        events.until("up").await;
        let shutdown = r#"{"mode":"reboot","grace_ms":100}"#;
        assert_eq!(
            agent.control(Method::POST, "/shutdown", shutdown).await.0,
            StatusCode::ACCEPTED
        );
        assert!(ended_by(&mut agent, 1));
    });
}

#[test]
fn nothing_starts_while_the_machine_goes_down() {
    as_init(async |agent| {
        let mut events = agent.shell("trap '' TERM HUP; echo up; while :; do sleep 1; done").await;
        events.pid().await;
        events.until("up").await;
        let shutdown = r#"{"mode":"reboot","grace_ms":5000}"#;
        agent.control(Method::POST, "/shutdown", shutdown).await;
        let error = agent.shell("true").await.rest().await.error.unwrap();
        assert_eq!(error.code, coppice_agent_protocol::Code::Unavailable);
    });
}

#[test]
fn a_shell_on_a_terminal_does_not_delay_the_end() {
    as_init(async |mut agent| {
        // Like an interactive shell: deaf to SIGTERM, but not to its terminal's end.
        let mut request = common::shell("trap '' TERM; echo up; while :; do read line; done");
        request.pty = Some(coppice_agent_protocol::process::Pty { size: None });
        let mut events = agent.start_with(&request, &[]).await;
        events.pid().await;
        events.until("up").await;
        let begin = std::time::Instant::now();
        let shutdown = r#"{"mode":"poweroff","grace_ms":50000}"#;
        agent.control(Method::POST, "/shutdown", shutdown).await;
        assert!(ended_by(&mut agent, 2));
        assert!(begin.elapsed().as_secs() < 25);
    });
}
