//! A command on this host, for the lanes that need no nested machine.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal::SIGKILL;
use nix::sys::signal::{kill, killpg};
use nix::unistd::Pid;
use thiserror::Error;

use crate::remote::Input;
use crate::wire::{Exit, Status};

/// Why a command on this host has no exit status.
#[derive(Debug, Error)]
pub enum Error {
    /// No command was given.
    #[error("no command given")]
    Empty,
    /// It could not be started.
    #[error("cannot start {program}")]
    Start {
        /// The program.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// It ran longer than its caller allows, and was killed.
    #[error("the command ran longer than {} seconds and was killed", .0.as_secs_f64())]
    TimedOut(Duration),
    /// Its streams or its end could not be followed.
    #[error("cannot follow the command")]
    Follow(#[source] io::Error),
}

/// What to run.
pub(crate) struct Request {
    pub(crate) argv: Vec<String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) cwd: PathBuf,
}

/// Where the command's output goes.
pub(crate) enum Sink<'a> {
    /// To the caller's own standard output and error, without a detour.
    Inherited,
    /// To these writers.
    To(&'a mut dyn Write, &'a mut dyn Write),
}

enum Event {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    StreamEnd,
    End(ExitStatus),
}

/// Runs a command to its end.
///
/// Unless it shares the caller's standard input, which may be a terminal, it gets a process group
/// of its own, and what is left of that group when it ends is killed, as in the nested machine.
pub(crate) fn run(
    request: &Request,
    input: Input,
    mut sink: Sink<'_>,
    timeout: Option<Duration>,
) -> Result<Exit, Error> {
    let (program, arguments) = request.argv.split_first().ok_or(Error::Empty)?;
    let output = || match sink {
        Sink::Inherited => Stdio::inherit(),
        Sink::To(..) => Stdio::piped(),
    };
    let mut command = Command::new(program);
    command.args(arguments).envs(&request.env).current_dir(&request.cwd);
    command.stdout(output()).stderr(output());
    let own_group = !matches!(input, Input::Inherited);
    if own_group {
        command.process_group(0);
    }
    command.stdin(match input {
        Input::Nothing => Stdio::null(),
        Input::Inherited => Stdio::inherit(),
        Input::From(_) => Stdio::piped(),
    });
    let mut child =
        command.spawn().map_err(|source| Error::Start { program: program.clone(), source })?;
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX));
    // It may have ended by itself: then there is nothing to kill.
    let end = || {
        let _ = if own_group { killpg(pid, SIGKILL) } else { kill(pid, SIGKILL) };
    };
    let received = attach(&mut child, input);
    let waiting = received.1;
    let mut open_streams = received.2;
    thread::spawn(move || {
        if let Ok(status) = child.wait() {
            drop(waiting.send(Event::End(status)));
        }
    });
    let deadline = timeout.and_then(|limit| Instant::now().checked_add(limit));
    let mut expired = false;
    let mut ended = None;
    loop {
        if let (Some(status), 0) = (ended, open_streams) {
            return match timeout.filter(|_| expired) {
                Some(limit) => Err(Error::TimedOut(limit)),
                None => Ok(Exit { status, leftovers: 0 }),
            };
        }
        let Some(event) = next(&received.0, deadline.filter(|_| !expired))? else {
            expired = true;
            end();
            continue;
        };
        match (event, &mut sink) {
            (Event::Stdout(bytes), Sink::To(stdout, _)) => {
                stdout.write_all(&bytes).map_err(Error::Follow)?;
            }
            (Event::Stderr(bytes), Sink::To(_, stderr)) => {
                stderr.write_all(&bytes).map_err(Error::Follow)?;
            }
            (Event::Stdout(_) | Event::Stderr(_), Sink::Inherited) => {}
            (Event::StreamEnd, _) => open_streams = open_streams.saturating_sub(1),
            (Event::End(status), _) => {
                ended = Some(status_of(status));
                if own_group {
                    end();
                }
            }
        }
    }
}

/// The next event; `None` at the deadline.
fn next(events: &Receiver<Event>, deadline: Option<Instant>) -> Result<Option<Event>, Error> {
    let broken = || Error::Follow(io::ErrorKind::BrokenPipe.into());
    let Some(deadline) = deadline else { return events.recv().map(Some).map_err(|_| broken()) };
    match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(event) => Ok(Some(event)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(broken()),
    }
}

/// Starts the threads that move the command's streams; returns how many outputs there are.
fn attach(child: &mut Child, input: Input) -> (Receiver<Event>, SyncSender<Event>, usize) {
    let (events, received) = sync_channel(16);
    let mut outputs = 0;
    if let Some(stdout) = child.stdout.take() {
        outputs += 1;
        let events = events.clone();
        thread::spawn(move || pump(stdout, &events, Event::Stdout));
    }
    if let Some(stderr) = child.stderr.take() {
        outputs += 1;
        let events = events.clone();
        thread::spawn(move || pump(stderr, &events, Event::Stderr));
    }
    if let (Some(mut stdin), Input::From(mut reader)) = (child.stdin.take(), input) {
        // A command that does not read all of its input breaks the pipe, which is its right.
        thread::spawn(move || drop(io::copy(&mut reader, &mut stdin)));
    }
    (received, events, outputs)
}

fn pump(mut output: impl Read, events: &SyncSender<Event>, event: fn(Vec<u8>) -> Event) {
    let mut buffer = vec![0; 32 * 1024];
    loop {
        match output.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => break,
            Ok(count) => {
                let chunk = buffer.get(..count).unwrap_or_default().to_vec();
                if events.send(event(chunk)).is_err() {
                    return;
                }
            }
        }
    }
    drop(events.send(Event::StreamEnd));
}

fn status_of(status: ExitStatus) -> Status {
    match (status.code(), status.signal()) {
        (Some(code), _) => Status::Exited(code),
        (None, signal) => Status::Signalled(signal.unwrap_or_default()),
    }
}
