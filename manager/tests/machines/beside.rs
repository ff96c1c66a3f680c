//! The command line beside a daemon: what the daemon answers for is changed by it, or in its place
//! where none runs. The guests have no agent, so nothing that needs one is done here.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Command, Output, Stdio};

use coppice_manager::registry::{OnTimeout, Registry, Row, State, Tenant, now_ms};
use coppice_manager::store::Id;
use coppice_micro::Interpreter;
use serde_json::Value;

use crate::scene::{Scene, block_on};

/// A home with one sandbox that a daemon answers for.
pub(crate) struct Home {
    pub(crate) scene: Scene,
    pub(crate) id: Id,
    /// Its console stays open.
    _guest: Interpreter,
    daemon: Option<Child>,
}

impl Home {
    pub(crate) fn new() -> Self {
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
        home.serve();
        home
    }

    /// Starts a daemon; it listens when this returns.
    pub(crate) fn serve(&mut self) {
        let mut command = self.command(&["serve", "--listen", "127.0.0.1:0"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        assert!(url.starts_with("http://"), "{url}");
        self.daemon = Some(child);
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
    pub(crate) fn said(&self, args: &[&str]) -> String {
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

/// The words of a daemon's sandbox from all sources that it has, while it is there and after.
#[test]
fn logs_tell_what_happened_also_when_it_is_over() {
    if !coppice_micro::kvm() {
        return;
    }
    let home = Home::served();
    let id = home.id.as_str();
    home.said(&["checkpoint", id]);
    let directory = home.scene.store.path().join("sandboxes").join(id);
    std::fs::write(directory.join("vmm.log"), "of the VMM\n").unwrap();
    std::fs::write(directory.join("console.log"), "of the guest\n").unwrap();
    let said = home.said(&["logs", id]);
    for (source, text) in
        [("vmm", "of the VMM"), ("console", "of the guest"), ("event", "checkpoint: ")]
    {
        let found =
            said.lines().find(|line| line.contains(text)).unwrap_or_else(|| panic!("{said}"));
        assert!(found.contains(source), "{said}");
    }
    let mut follower = home.command(&["logs", "--follow", "--json", id]);
    let mut follower = follower.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("checkpoint: ")));
    home.said(&["kill", id]);
    assert!(lines.any(|line| line.unwrap().contains("killing")));
    assert!(follower.wait().unwrap().success());
    assert!(home.said(&["logs", id]).contains("gone: asked for"));
    let (code, said) = home.refused(&["logs", "0123456789ab"]);
    assert_eq!(code, Some(84), "{said}");
}

#[test]
fn top_shows_what_each_uses() {
    if !coppice_micro::kvm() {
        return;
    }
    let home = Home::served();
    let table = home.said(&["top"]);
    assert!(table.contains("1 sandboxes, 1 running"), "{table}");
    assert!(table.contains("team-a") && table.contains("14m "), "{table}");
    let all: Value = serde_json::from_str(&home.said(&["top", "--json"])).unwrap();
    assert!(all[0]["pss_bytes"].as_u64().unwrap() > 0, "{all}");
    assert!(all[0]["uptime_ms"].as_u64().unwrap() < 600_000, "{all}");

    // On a terminal it has a screen of its own, and gives the old one back.
    let coppice = env!("CARGO_BIN_EXE_coppice");
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &format!("{coppice} top"), "/dev/null"]);
    terminal.env("COPPICE_HOME", home.scene.store.path());
    terminal.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut terminal = terminal.spawn().unwrap();
    let mut shown = BufReader::new(terminal.stdout.take().unwrap());
    let mut line = Vec::new();
    while !String::from_utf8_lossy(&line).contains("running") {
        shown.read_until(b'\n', &mut line).unwrap();
    }
    assert!(line.starts_with(b"\x1b[?1049h"), "{line:?}");
    terminal.stdin.take().unwrap().write_all(b"q").unwrap();
    let mut rest = Vec::new();
    shown.read_to_end(&mut rest).unwrap();
    assert!(rest.ends_with(b"\x1b[?25h\x1b[?1049l"), "{:?}", String::from_utf8_lossy(&rest));
    assert!(terminal.wait().unwrap().success());
    home.said(&["kill", home.id.as_str()]);
}
