//! Sandboxes that stay: checkpoints, rollback, clones, and commands that die in between.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coppice_manager::failure::Class;
use serde_json::Value;

use crate::common::{coppice, finish, home, on_lane, stdout};
use crate::cycles::vmm_processes;

/// A store of its own with the kernels and images of this checkout.
pub(crate) struct Session {
    dir: tempfile::TempDir,
}

impl Session {
    /// With a small sandbox `web` in it.
    fn with_web() -> Self {
        Self::with(&["--kernel", "micro", "--image", "tiny", "--memory", "128"])
    }

    /// With a sandbox `web` of these options in it.
    pub(crate) fn with(options: &[&str]) -> Self {
        let session = Self { dir: tempfile::tempdir().unwrap() };
        for part in ["kernels", "images"] {
            symlink(home().path().join(part), session.dir.path().join(part)).unwrap();
        }
        session.ok(&[["run", "--detach", "--name", "web"].as_slice(), options].concat());
        session
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = coppice(args);
        command.env("COPPICE_HOME", self.dir.path());
        command
    }

    /// What a command prints that must succeed.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        stdout(&mut self.command(args))
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(args)).unwrap()
    }

    /// What a script prints in a sandbox.
    pub(crate) fn sh(&self, sandbox: &str, script: &str) -> String {
        self.ok(&["exec", "--user", "root", sandbox, "--", "sh", "-c", script])
    }

    /// All files of the store that hold memory or disks, or are half written.
    fn files(&self) -> BTreeSet<String> {
        let names = |part: &str| {
            let entries = fs::read_dir(self.dir.path().join(part)).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap())
        };
        names("checkpoints").chain(names("layers")).chain(names("sandboxes")).collect()
    }

    /// Ends everything and sees that nothing is left.
    pub(crate) fn end(self) {
        let tree = self.json(&["tree", "--json"]);
        for (kind, verb) in [("sandboxes", "kill"), ("checkpoints", "rm")] {
            for entry in tree[kind].as_array().unwrap() {
                self.ok(&[verb, entry["id"].as_str().unwrap()]);
            }
        }
        assert_eq!(self.files(), BTreeSet::new());
        assert_eq!(vmm_processes(), Vec::<u32>::new());
    }
}

/// Counts in memory, four times a second, for ever.
const COUNTER: &str = "(i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.25; done) \
                       > /dev/null 2>&1 & echo up";

/// The number that a text is.
pub(crate) fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or_else(|_| panic!("no number: {text:?}"))
}

#[test]
fn a_rollback_brings_back_memory_disk_and_processes_on_any_branch() {
    on_lane!({
        let session = Session::with_web();
        session.sh("web", "echo one > /file; mkdir -p /run/t; echo one > /run/t/file");
        session.sh("web", COUNTER);
        session.ok(&["checkpoint", "web", "--name", "first"]);
        session.sh("web", "echo two > /file; echo two > /run/t/file; (sleep 1000 &) >&- 2>&-");
        session.ok(&["checkpoint", "web", "--name", "second", "--async"]);

        session.ok(&["rollback", "web", "first"]);
        assert_eq!(session.sh("web", "cat /file /run/t/file"), "one\none\n");
        let count = "cat /tmp/count; sleep 1; cat /tmp/count";
        let counts: Vec<u64> = session.sh("web", count).lines().map(number).collect();
        assert!(counts[1] > counts[0], "the counter runs on: {counts:?}");
        let sleeps = "ps | grep -c '[s]leep 1000' || true";
        assert_eq!(session.sh("web", sleeps), "0\n", "what was started later is gone");

        session.sh("web", "echo three > /file");
        session.ok(&["checkpoint", "web", "--name", "third"]);
        session.ok(&["rollback", "web", "second"]);
        assert_eq!(session.sh("web", "cat /file /run/t/file"), "two\ntwo\n");
        assert_eq!(session.sh("web", sleeps), "1\n");
        session.ok(&["rollback", "web", "third"]);
        assert_eq!(session.sh("web", "cat /file /run/t/file"), "three\none\n");
        session.end();
    });
}

#[test]
fn clones_are_their_own_and_know_it() {
    on_lane!({
        let session = Session::with_web();
        session.sh("web", "echo base > /file");
        session.ok(&["checkpoint", "web", "--name", "base"]);
        session.ok(&["clone", "base", "-n", "3", "--name", "c"]);
        session.ok(&["clone", "web", "--name", "live"]);
        let all = ["web", "c-1", "c-2", "c-3", "live"];
        let ask = "hostname; cat /etc/machine-id; head -c 16 /dev/urandom | md5sum";
        let answers: Vec<String> = all.iter().map(|name| session.sh(name, ask)).collect();
        for line in 0..3 {
            let different: BTreeSet<&str> =
                answers.iter().map(|answer| answer.lines().nth(line).unwrap()).collect();
            assert_eq!(different.len(), all.len(), "line {line}: {answers:?}");
        }
        for name in all {
            session.sh(name, &format!("echo {name} >> /file; sync"));
        }
        for name in all {
            assert_eq!(session.sh(name, "cat /file"), format!("base\n{name}\n"));
        }
        session.end();
    });
}

#[test]
fn an_inner_checkpoint_goes_and_what_stands_on_it_stays() {
    on_lane!({
        let session = Session::with_web();
        for step in ["one", "two", "three"] {
            session.sh("web", &format!("echo {step} >> /file; echo {step} >> /run/file"));
            session.ok(&["checkpoint", "web", "--name", step]);
        }
        session.ok(&["kill", "web"]);
        session.ok(&["rm", "two"]);
        session.ok(&["clone", "three", "--name", "leaf"]);
        let all = "one\ntwo\nthree\n";
        assert_eq!(session.sh("leaf", "cat /file /run/file"), format!("{all}{all}"));
        session.ok(&["fsck", "--deep"]);
        let gone = finish(&mut session.command(&["clone", "two"])).0;
        assert_eq!(gone, i32::from(Class::NotFound.exit_code()));
        session.end();
    });
}

#[test]
fn a_paused_sandbox_stands_still() {
    on_lane!({
        let session = Session::with_web();
        let state = || session.json(&["ls", "--json"])[0]["state"].clone();
        assert_eq!(state(), "running");
        session.ok(&["pause", "web"]);
        assert_eq!(state(), "paused");
        let again = finish(&mut session.command(&["pause", "web"])).0;
        assert_eq!(again, i32::from(Class::Conflict.exit_code()));
        session.ok(&["checkpoint", "web", "--name", "still"]);
        session.ok(&["resume", "web"]);
        assert_eq!(state(), "running");
        assert_eq!(session.sh("web", "echo on"), "on\n");
        session.ok(&["clone", "still", "--name", "copy"]);
        assert_eq!(session.sh("copy", "echo on"), "on\n");
        session.end();
    });
}

/// Runs `coppice` and kills it after a while; whether it was still at work then.
fn killed(session: &Session, args: &[&str], after: Duration) -> bool {
    let mut command = session.command(args);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // The moment is what the test is about, so it is drawn, not waited for.
    std::thread::sleep(after);
    let at_work = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    at_work
}

#[test]
fn commands_killed_at_any_moment_lose_nothing() {
    on_lane!({
        let session = Session::with_web();
        session.ok(&["checkpoint", "web", "--name", "base"]);
        let commands: [&[&str]; 2] = [&["checkpoint", "web"], &["rollback", "web", "base"]];
        // What they take here and now, so that the kills fall within them on any host.
        let taken = commands.map(|args| {
            let started = Instant::now();
            session.ok(args);
            started.elapsed()
        });
        let mut hits = 0;
        for round in 0..12u32 {
            session.sh("web", &format!("echo {round} >> /file; echo {round} >> /run/file"));
            let rolls_back = round % 4 == 3;
            let which = usize::from(rolls_back);
            // Twelve moments, evenly apart and in no order: 5 shares no factor with 12.
            let after = taken[which] * (round * 5 % 12) / 12;
            hits += u32::from(killed(&session, commands[which], after));
            // The machine goes on, from where it was or from where it was to go.
            let files = session.sh("web", "cat /file /run/file; echo end");
            if !rolls_back {
                assert_eq!(files.matches(&format!("{round}\n")).count() % 2, 0, "{files}");
                assert!(files.contains(&format!("{round}\n")), "{files}");
            }
            // The next checkpoint is whole, whatever the last one came to.
            let name = format!("after-{round}");
            session.ok(&["checkpoint", "web", "--name", &name]);
            session.ok(&["clone", &name, "--name", "copy"]);
            assert_eq!(session.sh("copy", "cat /file /run/file; echo end"), files, "round {round}");
            session.ok(&["kill", "copy"]);
            session.ok(&["fsck", "--deep"]);
        }
        assert!(hits > 5, "too few commands were killed at work to tell anything: {hits}");
        session.end();
    });
}

#[test]
fn a_machine_that_dies_leaves_its_checkpoints() {
    on_lane!({
        let session = Session::with_web();
        session.sh("web", "echo kept > /file");
        session.ok(&["checkpoint", "web", "--name", "kept"]);
        let pids = vmm_processes();
        let pid = rustix::process::Pid::from_raw(i32::try_from(pids[0]).unwrap()).unwrap();
        let end = crate::cycles::ProcessEnd::watch(pids[0]);
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        end.wait();

        let (code, _, stderr) = finish(&mut session.command(&["exec", "web", "--", "true"]));
        assert_eq!(code, i32::from(Class::GuestEnded.exit_code()), "{stderr}");
        session.ok(&["rm", "web"]);
        session.ok(&["clone", "kept", "--name", "again"]);
        assert_eq!(session.sh("again", "cat /file"), "kept\n");
        session.end();
    });
}

#[test]
fn clones_that_come_and_go_leave_nothing() {
    on_lane!({
        let session = Session::with_web();
        session.ok(&["checkpoint", "web", "--name", "base"]);
        let pass = || {
            session.ok(&["clone", "base", "--name", "passing"]);
            session.ok(&["kill", "passing"]);
        };
        // The first one leaves the checkpoint a record of the memory it used.
        pass();
        let (files, vmms) = (session.files(), vmm_processes().len());
        (0..20).for_each(|_| pass());
        assert_eq!(session.files(), files);
        assert_eq!(vmm_processes().len(), vmms);
        session.end();
    });
}
