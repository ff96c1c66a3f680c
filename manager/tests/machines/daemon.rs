//! The command line beside a daemon: what the daemon answers for is changed by it, or in its place
//! where none runs. The guests have no agent, so nothing that needs one is done here.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};

use coppice_manager::registry::{OnTimeout, Registry, Row, State, Tenant, now_ms};
use coppice_manager::sandbox::{CheckpointRequest, Kept};
use coppice_manager::store::Id;
use coppice_micro::Interpreter;
use serde_json::Value;

use crate::scene::{Scene, block_on};

/// A home with one sandbox that a daemon answers for.
struct Home {
    scene: Scene,
    id: Id,
    /// Its console stays open.
    _guest: Interpreter,
    daemon: Option<Child>,
}

impl Home {
    fn new() -> Self {
        let scene = Scene::new();
        let (id, guest) = block_on(scene.boot());
        let row = Row {
            id: id.clone(),
            tenant: Tenant::new("team-a").unwrap(),
            state: State::Running,
            template: "web".into(),
            alias: None,
            started_ms: now_ms(),
            end_ms: now_ms() + 900_000,
            on_timeout: OnTimeout::Kill,
            auto_resume: false,
            metadata: BTreeMap::new(),
            pause: None,
        };
        Registry::open(scene.store.path()).unwrap().put_sandbox(&row).unwrap();
        Self { scene, id, _guest: guest, daemon: None }
    }

    fn served() -> Self {
        let mut home = Self::new();
        let mut command = home.command(&["serve", "--listen", "127.0.0.1:0"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        assert!(url.starts_with("http://"), "{url}");
        home.daemon = Some(child);
        home
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coppice"));
        command
            .args(args)
            .env("COPPICE_HOME", self.scene.store.path())
            .env("COPPICE_VMM", &self.scene.program)
            .stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// What a command prints, which has to succeed.
    fn said(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The exit code and the words of a command that has to fail.
    fn refused(&self, args: &[&str]) -> (Option<i32>, String) {
        let output = self.run(args);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }

    /// What happened to the sandbox, by kind and text.
    fn events(&self) -> Vec<(String, String)> {
        let said = self.said(&["events", "--json", "--sandbox", self.id.as_str()]);
        let of = |line| {
            let event: Value = serde_json::from_str(line).unwrap();
            let text = |key: &str| event[key].as_str().unwrap().to_owned();
            (text("kind"), text("text"))
        };
        said.lines().map(of).collect()
    }

    fn kinds(&self) -> Vec<String> {
        self.events().into_iter().map(|(kind, _)| kind).collect()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// A kill is asked for, with a daemon and without: it is no machine that ended by itself.
#[test]
fn a_kill_is_the_daemons() {
    if !coppice_micro::kvm() {
        return;
    }
    for home in [Home::served(), Home::new()] {
        home.said(&["kill", home.id.as_str()]);
        let gone = ("gone".to_owned(), "asked for".to_owned());
        assert_eq!(home.events().last(), Some(&gone));
        assert_eq!(home.kinds(), ["running", "killing", "gone"]);
        assert_eq!(home.said(&["ls", "--json"]).trim(), "[]");
    }
}

#[test]
fn a_pause_suspends_and_what_it_stands_on_stays() {
    if !coppice_micro::kvm() {
        return;
    }
    for home in [Home::served(), Home::new()] {
        let id = home.id.as_str();
        assert!(home.said(&["pause", id]).contains("suspended"));
        assert_eq!(home.kinds(), ["running", "pausing", "paused"]);
        let listed: Value = serde_json::from_str(&home.said(&["ls", "--json"])).unwrap();
        assert_eq!(listed[0]["state"], "paused");
        assert_eq!(
            (&listed[0]["tenant"], &listed[0]["template"]),
            (&"team-a".into(), &"web".into())
        );

        let pause = listed[0]["checkpoint"].as_str().unwrap();
        let (code, said) = home.refused(&["rm", pause]);
        assert_eq!(code, Some(85), "{said}");
        let (code, said) = home.refused(&["exec", id, "--", "true"]);
        assert!(code == Some(85) && said.contains("is paused"), "{code:?}: {said}");
        let (code, said) = home.refused(&["pause", id]);
        assert!(code == Some(85) && said.contains("is paused"), "{code:?}: {said}");

        // It never has to go on to be removed.
        home.said(&["rm", id]);
        assert_eq!(home.events().last().unwrap().1, "asked for");
        assert_eq!(home.scene.files(), Vec::<String>::new());
    }
}

#[test]
fn a_checkpoint_is_made_in_the_sandboxs_turn_and_noted() {
    if !coppice_micro::kvm() {
        return;
    }
    for home in [Home::served(), Home::new()] {
        let made =
            home.said(&["checkpoint", home.id.as_str(), "--name", "ready", "-l", "a=b", "--json"]);
        let made: Value = serde_json::from_str(&made).unwrap();
        assert_eq!((&made["name"], &made["labels"]["a"]), (&"ready".into(), &"b".into()));
        let noted = ("checkpoint".to_owned(), made["id"].as_str().unwrap().to_owned());
        assert_eq!(home.events().last(), Some(&noted));
        assert!(home.said(&["tree"]).contains("ready"));
        home.said(&["kill", home.id.as_str()]);
    }
}

/// The row says whose the sandbox is; one that it does not know is the command's own.
#[test]
fn a_commands_own_sandbox_is_not_the_daemons() {
    if !coppice_micro::kvm() {
        return;
    }
    let home = Home::served();
    let (own, _guest) = block_on(home.scene.boot());
    home.said(&["pause", own.as_str()]);
    let listed: Value = serde_json::from_str(&home.said(&["ls", "--json"])).unwrap();
    let row = |id: &Id| {
        let mut rows = listed.as_array().unwrap().iter();
        rows.find(|row| row["id"] == id.as_str()).unwrap()
    };
    assert_eq!((&row(&own)["state"], &row(&own)["tenant"]), (&"paused".into(), &Value::Null));
    assert_eq!(row(&home.id)["state"], "running");
    home.said(&["resume", own.as_str()]);
    home.said(&["kill", own.as_str(), home.id.as_str()]);
    assert!(home.said(&["events", "--sandbox", own.as_str()]).is_empty());
}

#[test]
fn events_are_followed_to_the_end_of_the_daemon() {
    if !coppice_micro::kvm() {
        return;
    }
    let mut home = Home::served();
    let mut command = home.command(&["events", "--follow", "--json"]);
    let mut follower = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    let mut kind = || {
        let event: Value = serde_json::from_str(&lines.next()?.unwrap()).unwrap();
        Some(event["kind"].as_str().unwrap().to_owned())
    };
    assert_eq!(kind().unwrap(), "running");
    home.said(&["kill", home.id.as_str()]);
    assert_eq!([kind().unwrap(), kind().unwrap()], ["killing", "gone"]);
    let daemon = home.daemon.take().unwrap();
    let pid = rustix::process::Pid::from_child(&daemon);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(kind(), None);
    assert!(follower.wait().unwrap().success());
    let mut daemon = daemon;
    assert!(daemon.wait().unwrap().success());
    let (code, said) = home.refused(&["events", "--follow"]);
    assert!(code == Some(71) && said.contains("no daemon serves"), "{code:?}: {said}");
}

#[test]
fn there_is_one_daemon_in_a_home() {
    if !coppice_micro::kvm() {
        return;
    }
    let home = Home::served();
    let (code, said) = home.refused(&["serve", "--listen", "127.0.0.1:0"]);
    assert!(code == Some(85) && said.contains("a daemon serves"), "{code:?}: {said}");
    home.said(&["kill", home.id.as_str()]);
}

/// Label of checkpoints that daemons make.
const LABEL: &str = "coppice.snapshot";

#[test]
fn a_checkpoint_that_a_dead_daemon_promised_to_nobody_is_removed_and_no_other() {
    if !coppice_micro::kvm() {
        return;
    }
    block_on(async {
        let scene = Scene::new();
        let (id, _guest) = scene.boot().await;
        let mut kept = Kept::open(&scene.store, &id).await.unwrap();
        let of_daemon = BTreeMap::from([(LABEL.to_owned(), id.to_string())]);
        for labels in [of_daemon, BTreeMap::from([("mine".to_owned(), String::new())])] {
            let request = CheckpointRequest { labels, ..CheckpointRequest::default() };
            kept.checkpoint(request).await.unwrap();
        }
        drop(kept);

        let mut daemon = Command::new(env!("CARGO_BIN_EXE_coppice"))
            .args(["serve", "--listen", "127.0.0.1:0"])
            .env("COPPICE_HOME", scene.store.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        let left = scene.store.checkpoints().unwrap().checkpoints;
        let left: Vec<_> = left.iter().flat_map(|found| found.meta.labels.keys()).collect();
        assert_eq!(left, ["mine"]);
        Kept::remove(&scene.store, &id).await.unwrap();
    });
}
