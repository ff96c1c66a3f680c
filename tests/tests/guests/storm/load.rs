//! The load in a guest (`guest-load`), started and asked from outside.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::common::stdout;
use crate::sessions::{Session, number};

/// Where the load is in the guest: its socket and its disk files, on the root disk.
const DIR: &str = "/var/load";
const PROGRAM: &str = "/tmp/guest-load";

/// What a load says of itself.
#[derive(Debug)]
pub(super) struct Report {
    figures: BTreeMap<String, u64>,
    pub(super) failures: Vec<String>,
}

impl Report {
    fn parse(text: &str) -> Self {
        let mut report = Self { figures: BTreeMap::new(), failures: Vec::new() };
        for line in text.lines() {
            let (key, value) = line.split_once('=').unwrap_or(("failure", line));
            match key {
                "failure" => report.failures.push(value.to_owned()),
                key => drop(report.figures.insert(key.to_owned(), number(value))),
            }
        }
        report
    }

    /// The figure with this name.
    pub(super) fn get(&self, key: &str) -> u64 {
        self.figures.get(key).copied().unwrap_or_else(|| panic!("no {key} in {self:?}"))
    }

    /// The worst figure of all threads of a kind, as a time.
    pub(super) fn worst(&self, kind: &str) -> Duration {
        let of_kind = |key: &&String| key.starts_with(kind) && key.ends_with(".worst_us");
        let figures = self.figures.keys().filter(of_kind).map(|key| self.get(key));
        Duration::from_micros(figures.max().unwrap())
    }

    /// Fails where a thread found something wrong, stood still when all were to check what they
    /// have, or did fewer steps than in `before`, which was asked earlier on the same time line.
    pub(super) fn goes_on_from(&self, before: &Report, what: &str) {
        assert_eq!(self.failures, Vec::<String>::new(), "{what}");
        assert_eq!(self.get("pid"), before.get("pid"), "{what}");
        for (key, steps) in before.figures.iter().filter(|(key, _)| key.ends_with(".steps")) {
            assert!(self.get(key) >= *steps, "{what}: {key} was {steps} and is {}", self.get(key));
        }
    }
}

/// Puts the program into a sandbox and starts it with these threads.
pub(super) fn start(session: &Session, sandbox: &str, threads: &str) {
    bring(session, sandbox);
    let run = format!("{PROGRAM} run {DIR} {threads} > /dev/console 2>&1 < /dev/null & load=$!");
    let wait = format!("while ! [ -S {DIR}/socket ]; do kill -0 $load || exit 1; sleep 0.05; done");
    session.sh(sandbox, &format!("{run}; {wait}"));
}

/// Puts the program into a sandbox.
pub(super) fn bring(session: &Session, sandbox: &str) {
    let script = format!("cat > {PROGRAM}; chmod +x {PROGRAM}");
    let args = ["exec", "-i", "--user", "root", sandbox, "--", "sh", "-c", &script];
    let program = File::open(env!("CARGO_BIN_EXE_guest-load")).unwrap();
    stdout(session.command(&args).stdin(program));
}

/// Has the load check everything and tell.
pub(super) fn report(session: &Session, sandbox: &str) -> Report {
    Report::parse(&session.sh(sandbox, &format!("{PROGRAM} ask {DIR} report")))
}

/// The same, and then what a script prints.
pub(super) fn report_and(session: &Session, sandbox: &str, script: &str) -> (Report, String) {
    let script = format!("set -e; {PROGRAM} ask {DIR} report; echo --; {script}");
    let text = session.sh(sandbox, &script);
    let (report, printed) = text.split_once("--\n").unwrap();
    (Report::parse(report), printed.to_owned())
}

/// Marks the load's time line, in memory and on disk; what it tells then. A shell command comes
/// before that.
pub(super) fn mark(session: &Session, sandbox: &str, mark: u64, script: &str) -> Report {
    let script = format!("{script} && {PROGRAM} ask {DIR} mark {mark}");
    Report::parse(&session.sh(sandbox, &script))
}

/// Has the load draw no more random numbers.
pub(super) fn stop_drawing(session: &Session, sandbox: &str) {
    session.sh(sandbox, &format!("{PROGRAM} ask {DIR} stop"));
}

/// The random numbers that a load drew last, each with the nanosecond at which it began to be
/// drawn.
pub(super) fn draws(session: &Session, sandbox: &str) -> Vec<(u64, i64)> {
    let args = ["exec", "--user", "root", sandbox, "--", PROGRAM, "ask", DIR, "draws"];
    let output = session.command(&args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let draw = |bytes: &[u8]| {
        let (began, value) = bytes.split_at(8);
        (
            u64::from_le_bytes(value.try_into().unwrap()),
            i64::from_le_bytes(began.try_into().unwrap()),
        )
    };
    output.stdout.chunks_exact(16).map(draw).collect()
}

fn unix_ns() -> i128 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i128::try_from(now.as_nanos()).unwrap()
}

/// By how much the guest's clock is ahead of the host's, and how inexact that is, in nanoseconds:
/// half of the shortest round trip of a question to a process that waits for it in the guest.
pub(super) fn clock_offset(session: &Session, sandbox: &str) -> (i128, i128) {
    let args = ["exec", "-i", "--user", "root", sandbox, "--", PROGRAM, "clock"];
    let mut child =
        session.command(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut questions = child.stdin.take().unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap());
    let mut best = (0, i128::MAX);
    for _ in 0..12 {
        let before = unix_ns();
        questions.write_all(b"?\n").unwrap();
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        let after = unix_ns();
        let inexact = (after - before) / 2;
        if inexact < best.1 {
            best = (i128::from(number(&answer)) - (before + inexact), inexact);
        }
    }
    drop(questions);
    assert!(child.wait().unwrap().success());
    best
}

/// A command whose numbered lines come out of a sandbox as long as it runs.
pub(super) struct Traffic {
    child: Child,
    lines: BufReader<ChildStdout>,
    next: u64,
}

impl Traffic {
    pub(super) fn start(session: &Session, sandbox: &str) -> Self {
        let args = ["exec", "--user", "root", sandbox, "--", PROGRAM, "stream"];
        let mut command: Command = session.command(&args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines, next: 0 }
    }

    /// Reads so many lines, none of which may be missing or damaged.
    pub(super) fn read(&mut self, count: u64) {
        for _ in 0..count {
            let mut line = String::new();
            self.lines.read_line(&mut line).unwrap();
            assert_eq!(line, format!("{} {}\n", self.next, "=".repeat(200)));
            self.next += 1;
        }
    }

    /// Reads the rest; the command must have been cut off.
    pub(super) fn cut_off(mut self) {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if line.ends_with('\n') {
                assert_eq!(line, format!("{} {}\n", self.next, "=".repeat(200)));
                self.next += 1;
            }
            line.clear();
        }
        assert!(!self.child.wait().unwrap().success());
    }
}
