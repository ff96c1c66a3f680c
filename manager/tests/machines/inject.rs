//! Every system call of a checkpoint that changes a file, one after the other, fails, falls short,
//! or is the last thing that its process does: first in the VMM, then in the command. The store
//! stays whole, what was complete restores bit for bit, and a machine that lives goes on.
//!
//! `coppice-inject` does it; see there which calls count. Nothing here says how many there are: a
//! round in which no call had the number was the last.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use coppice_manager::sandbox::{CheckpointRequest, Kept};
use coppice_manager::store::{Id, Meta};
use coppice_micro::Interpreter;

use crate::common::program;
use crate::scene::{Scene, block_on};

/// How calls of the VMM fail, and whether memory is copied while the machine runs on.
const FAILURES: [(&str, bool); 3] = [("enospc", false), ("eio", true), ("short", false)];
/// More than any checkpoint makes.
const MOST_CALLS: usize = 200;

/// What the guest writes: one word, some pages, and a cluster of its disk through a buffer.
const PLACE: u32 = 0x20_0000;
const PAGES: (u32, u32) = (0x30_0000, 70);
const BUFFER: u32 = 0x60_0000;
const CLUSTER: u32 = 4096;

/// A machine that is written to and checkpointed, and what it has to be like in each checkpoint.
struct Session {
    id: Id,
    guest: Interpreter,
    step: u32,
    /// The record of a checkpoint, what was written before it, and the bytes of its file.
    made: Vec<(Meta, u32, Vec<u8>)>,
}

impl Session {
    /// Boots a machine and takes its first checkpoint.
    async fn new(scene: &Scene) -> Self {
        let (id, mut guest) = scene.boot().await;
        guest.start_disk();
        let mut session = Self { id, guest, step: 0, made: Vec::new() };
        session.write();
        let mut kept = Kept::open(&scene.store, &session.id).await.unwrap();
        let first = kept.checkpoint(CheckpointRequest::default()).await.unwrap().meta;
        session.keep(scene, first);
        session
    }

    /// Has the guest write something new everywhere.
    fn write(&mut self) {
        self.step += 1;
        self.guest.write(PLACE, self.step);
        self.guest.fill(PAGES.0, self.step, PAGES.1);
        self.guest.fill(BUFFER, self.step, 1);
        self.guest.write_disk(0, BUFFER, CLUSTER);
    }

    /// Notes a checkpoint of what is written now.
    fn keep(&mut self, scene: &Scene, meta: Meta) {
        let bytes = std::fs::read(scene.checkpoint_file(&meta)).unwrap();
        self.made.push((meta, self.step, bytes));
    }

    /// Notes checkpoints that are visible though nobody was told: what is visible is complete.
    fn keep_unnoticed(&mut self, scene: &Scene) {
        for checkpoint in scene.store.checkpoints().unwrap().checkpoints {
            let known = |(meta, ..): &(Meta, _, _)| meta.id == checkpoint.meta.id;
            if !self.made.iter().any(known) {
                self.keep(scene, checkpoint.meta);
            }
        }
    }

    /// The machine runs on and can be checkpointed, with all it has written.
    async fn go_on(&mut self, scene: &Scene, what: &str) {
        assert_eq!(self.guest.read(PLACE), self.step, "{what}");
        let mut kept = Kept::open(&scene.store, &self.id).await.unwrap();
        assert_eq!(kept.record().next, None, "{what}");
        let meta = kept.checkpoint(CheckpointRequest::default()).await;
        self.keep(scene, meta.unwrap_or_else(|error| panic!("{what}: {error:?}")).meta);
        // What was left over can be told from what is needed.
        scene.store.check(false, true).unwrap();
        assert_eq!(scene.store.check(false, false).unwrap().findings, [], "{what}");
    }

    /// Every checkpoint is what it was when it was made, and restores to what the guest wrote.
    async fn assert_restores(&self, scene: &Scene) {
        scene.assert_whole();
        for (meta, step, bytes) in &self.made {
            let now = std::fs::read(scene.checkpoint_file(meta)).unwrap();
            assert!(now == *bytes, "the checkpoint of step {step} was changed");
            let (_vmm, mut look) = scene.look_into(meta).await;
            assert_eq!(look.read(PLACE), *step);
            assert_eq!(look.sum(PAGES.0, PAGES.1), step * PAGES.1, "step {step}");
            look.read_disk(0, BUFFER + CLUSTER, CLUSTER);
            assert_eq!(look.read(BUFFER + CLUSTER), *step);
        }
    }

    /// Looks at all checkpoints and removes everything; nothing may be left.
    async fn end(self, scene: &Scene) {
        // A guest that waits for commands polls for them, and would take a processor.
        let kept = Kept::open(&scene.store, &self.id).await.unwrap();
        kept.pause().await.unwrap();
        drop(kept);
        self.assert_restores(scene).await;
        Kept::remove(&scene.store, &self.id).await.unwrap();
        for (meta, ..) in &self.made {
            scene.store.remove_checkpoint(&meta.id).unwrap();
        }
        assert_eq!(scene.files(), Vec::<String>::new());
    }
}

/// Follows a VMM until it is let go.
struct Injector {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Injector {
    fn attach(program: &PathBuf, fault: &str, number: usize, pid: u32) -> Self {
        let mut command = Command::new(program);
        command.args([fault, &number.to_string(), "attach", &pid.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { child, output }
    }

    /// Lets it go; gives the call that was met, if there was one with the number.
    fn release(mut self) -> Option<String> {
        drop(self.child.stdin.take());
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        self.child.wait().unwrap();
        met(&text)
    }
}

/// The call that the last line tells of.
fn met(text: &str) -> Option<String> {
    let last = text.lines().last().unwrap();
    (!last.starts_with("none")).then(|| last.to_owned())
}

/// Runs `coppice checkpoint` with a fault; gives whether it succeeded, what it wrote to its
/// standard error, and the call that was met.
fn command(injector: &PathBuf, scene: &Scene, fault: &str, number: usize, id: &Id) -> Outcome {
    let mut command = Command::new(injector);
    command.args([fault, &number.to_string(), "run", env!("CARGO_BIN_EXE_coppice")]);
    command.args(["checkpoint", id.as_str()]).env("COPPICE_HOME", scene.store.path());
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{stderr}");
    let (said, status) = stderr.trim_end().rsplit_once('\n').unwrap_or(("", stderr.trim_end()));
    Outcome { done: status == "exit status: 0", said: said.to_owned(), met: met(&stdout) }
}

struct Outcome {
    done: bool,
    said: String,
    met: Option<String>,
}

fn assert_has(calls: &BTreeSet<String>, expected: &[&str]) {
    assert!(expected.iter().all(|call| calls.contains(*call)), "only these were met: {calls:?}");
}

#[test]
fn a_checkpoint_fails_cleanly_at_any_call_of_the_vmm() {
    if !coppice_micro::kvm() {
        return;
    }
    let injector = program("coppice-inject");
    let mut calls = BTreeSet::new();
    block_on(async {
        for (fault, background) in FAILURES {
            let scene = Scene::new();
            let mut session = Session::new(&scene).await;
            for number in 1..MOST_CALLS {
                session.write();
                let mut kept = Kept::open(&scene.store, &session.id).await.unwrap();
                let inject = Injector::attach(&injector, fault, number, kept.vmm().pid());
                let request = CheckpointRequest { background, ..CheckpointRequest::default() };
                let result = kept.checkpoint(request).await;
                let call = inject.release();
                drop(kept);
                let what = format!("{fault} at {call:?}, the {number}.");
                // A short write is written on.
                let fails = call.is_some() && fault != "short";
                assert_eq!(result.is_err(), fails, "{what}: {result:?}");
                scene.assert_whole();
                if let Ok(made) = result {
                    session.keep(&scene, made.meta);
                }
                session.go_on(&scene, &what).await;
                match call {
                    Some(call) => calls.insert(call),
                    None => break,
                };
            }
            session.end(&scene).await;
        }
    });
    assert_has(&calls, &["ftruncate", "pwritev", "fsync", "fdatasync"]);
}

#[test]
fn a_vmm_killed_before_any_call_leaves_what_was_complete() {
    if !coppice_micro::kvm() {
        return;
    }
    let injector = program("coppice-inject");
    let mut calls = BTreeSet::new();
    block_on(async {
        for number in 1..MOST_CALLS {
            let scene = Scene::new();
            let mut session = Session::new(&scene).await;
            session.write();
            let mut kept = Kept::open(&scene.store, &session.id).await.unwrap();
            let inject = Injector::attach(&injector, "kill", number, kept.vmm().pid());
            let result = kept.checkpoint(CheckpointRequest::default()).await;
            let call = inject.release();
            drop(kept);
            assert_eq!(result.is_err(), call.is_some(), "killed at {call:?}: {result:?}");
            session.keep_unnoticed(&scene);
            session.assert_restores(&scene).await;
            // Its last words may be about one that is visible.
            let made = session.made.len();
            assert!(made == 2 || made == 1 && result.is_err(), "{made} after {call:?}");
            if call.is_some() {
                scene.store.check(false, true).unwrap();
                assert_eq!(scene.store.check(true, false).unwrap().findings, []);
            }
            match call {
                Some(call) => calls.insert(call),
                None => {
                    session.end(&scene).await;
                    break;
                }
            };
        }
    });
    assert_has(&calls, &["ftruncate", "pwritev", "fsync", "fdatasync", "sendmsg"]);
}

#[test]
fn a_checkpoint_fails_cleanly_at_any_call_of_the_command() {
    if !coppice_micro::kvm() {
        return;
    }
    let injector = program("coppice-inject");
    let mut calls = BTreeSet::new();
    block_on(async {
        for fault in ["enospc", "eio", "short", "kill"] {
            let scene = Scene::new();
            let mut session = Session::new(&scene).await;
            for number in 1..MOST_CALLS {
                session.write();
                let Outcome { done, said, met } =
                    command(&injector, &scene, fault, number, &session.id);
                let what = format!("{fault} at {met:?}, the {number}.");
                let fails = met.is_some() && fault != "short";
                assert_eq!(done, !fails, "{what}: {said}");
                assert!(
                    !fails || fault == "kill" || said.starts_with("coppice: "),
                    "{what}: {said}"
                );
                scene.assert_whole();
                session.keep_unnoticed(&scene);
                if number % 2 == 0 {
                    // Tidied up before the sandbox is opened again, or not.
                    scene.store.check(false, true).unwrap();
                }
                session.go_on(&scene, &what).await;
                match met {
                    Some(call) => calls.insert(call),
                    None => break,
                };
            }
            session.end(&scene).await;
        }
    });
    assert_has(&calls, &["openat", "write", "rename", "fsync", "sendmsg"]);
}
