//! One command in a booted sandbox, from its start to its end: output, input, signals, time.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use coppice_agent_protocol::ConnectError;
use coppice_agent_protocol::process::{DataEvent, ProcessConfig, ProcessEvent, Signal};
use coppice_manager::agent::{self, Agent, Outcome, ProcessStream, Start};
use coppice_manager::failure::{
    Class, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_SIGNAL_BASE, EXIT_TIMEOUT, Failure, chain,
};
use coppice_manager::sandbox::{Error, Guest, Sandbox};
use tokio::time::{Instant, sleep_until, timeout};

use super::input;
use super::output::{Exit, Output, Stream};
use super::terminal::{self, Raw, Signals};

/// How long a command may take to end after it was asked to.
const END_GRACE: Duration = Duration::from_secs(5);
/// How long to wait for the reason when the connection to a guest breaks.
const REASON_GRACE: Duration = Duration::from_secs(2);
/// Exit code of a program whose output nobody reads any more: 128 + SIGPIPE.
const EXIT_BROKEN_PIPE: u8 = EXIT_SIGNAL_BASE + 13;

/// What to run.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) program: String,
    pub(super) args: Vec<String>,
    pub(super) envs: BTreeMap<String, String>,
    pub(super) cwd: Option<String>,
    pub(super) user: Option<String>,
    pub(super) timeout: Option<Duration>,
    pub(super) interactive: bool,
    pub(super) tty: bool,
}

/// Where it is run.
pub(super) enum Host<'a> {
    /// In a sandbox that ends with it.
    Own(&'a mut Sandbox),
    /// In one that stays; this was begun at that time.
    Kept(&'a Guest, Instant),
}

impl Host<'_> {
    fn agent(&self) -> &Arc<Agent> {
        match self {
            Self::Own(sandbox) => sandbox.agent(),
            Self::Kept(guest, _) => guest.agent(),
        }
    }

    /// What the time to the first output is counted from.
    fn started(&self) -> Instant {
        match self {
            Self::Own(sandbox) => sandbox.started().into(),
            Self::Kept(_, began) => *began,
        }
    }

    async fn ended(&mut self) -> Error {
        match self {
            Self::Own(sandbox) => sandbox.ended().await,
            Self::Kept(guest, _) => guest.ended().await,
        }
    }
}

/// Runs the command and returns the exit code of `coppice`.
///
/// # Errors
/// When the agent refuses, or the guest ends before the command.
pub(super) async fn run(
    mut sandbox: Host<'_>,
    request: &Request,
    signals: &mut Signals,
    output: &mut Output,
) -> Result<u8, Failure> {
    let stream = match start(sandbox.agent(), request).await {
        Ok(stream) => stream,
        Err(agent::Error::Refused(error)) => return refused(&error, output).await,
        Err(error) => return Err(lost(&mut sandbox, error).await),
    };
    // From here on the terminal is raw, if it is to be; every return restores it.
    let raw = match request.tty && request.interactive {
        true => Raw::enter()
            .map_err(|error| Failure::new(Class::Host, chain(&error), "run it without -t"))?,
        false => None,
    };
    let feed = feed(sandbox.agent(), &stream, request);
    let session = Session {
        agent: Arc::clone(sandbox.agent()),
        began: Instant::now(),
        vmm_started: sandbox.started(),
        first_output: None,
        asked_to_end: None,
        outcome: None,
    };
    let ended = session.follow(stream, feed, request.timeout, signals, output).await;
    drop(raw);
    match ended {
        Ok(Ended { exit, timed_out_after }) => {
            if let Some(after) = timed_out_after {
                let secs = after.as_secs_f64();
                let text = format!("the command ran longer than {secs} s and was ended");
                output.note(&text).await;
            }
            output.exit(exit).await;
            Ok(exit.code)
        }
        Err(Broken::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            Ok(EXIT_BROKEN_PIPE)
        }
        Err(Broken::Output(error)) => {
            let class = match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Class::DiskFull,
                _ => Class::Host,
            };
            let message = format!("the command's output cannot be written: {error}");
            Err(Failure::new(class, message, "see where standard output goes"))
        }
        Err(Broken::Agent(error)) => Err(lost(&mut sandbox, error).await),
    }
}

async fn start(agent: &Agent, request: &Request) -> Result<ProcessStream, agent::Error> {
    let process = ProcessConfig {
        cmd: request.program.clone(),
        args: request.args.clone(),
        envs: request.envs.clone(),
        cwd: request.cwd.clone(),
    };
    let start = Start {
        process,
        user: request.user.clone(),
        pty: request.tty.then(terminal::size),
        stdin: request.interactive,
        timeout: None,
    };
    agent.start(start).await
}

/// Exit code of a shell for a program the guest's kernel did not execute; nothing for any other
/// error. The agent passes the kernel's reason on in words.
fn not_started(error: &ConnectError) -> Option<u8> {
    let reason = error.message.strip_prefix("error starting process ")?;
    let missing = reason.ends_with("no such file or directory");
    Some(if missing { EXIT_NOT_FOUND } else { EXIT_NOT_EXECUTABLE })
}

/// The end of a run whose command cannot be started.
async fn refused(error: &ConnectError, output: &mut Output) -> Result<u8, Failure> {
    let Some(code) = not_started(error) else {
        let remedy = "check the command, --user and --cwd";
        return Err(Failure::new(Class::RequestRefused, &error.message, remedy));
    };
    output.note(&error.message).await;
    let ran = Duration::ZERO;
    let exit = Exit { code, outcome: None, timed_out: false, first_output: None, ran };
    output.exit(exit).await;
    Ok(code)
}

/// The failure behind a broken connection: usually the guest's end.
async fn lost(sandbox: &mut Host<'_>, error: agent::Error) -> Failure {
    match timeout(REASON_GRACE, sandbox.ended()).await {
        Ok(reason) => reason.failure(),
        Err(_) => Error::from(error).failure(),
    }
}

type Feed = Pin<Box<dyn Future<Output = Result<(), agent::Error>>>>;

fn feed(agent: &Arc<Agent>, stream: &ProcessStream, request: &Request) -> Option<Feed> {
    let agent = Arc::clone(agent);
    let (pid, tty) = (stream.pid(), request.tty);
    request.interactive.then(|| Box::pin(input::forward(agent, pid, tty)) as Feed)
}

/// Why a session could not be followed to its end.
enum Broken {
    Output(io::Error),
    Agent(agent::Error),
}

struct Ended {
    exit: Exit,
    timed_out_after: Option<Duration>,
}

struct Session {
    agent: Arc<Agent>,
    began: Instant,
    vmm_started: Instant,
    first_output: Option<Duration>,
    /// The first signal that asked us to end.
    asked_to_end: Option<u8>,
    outcome: Option<Outcome>,
}

impl Session {
    async fn follow(
        mut self,
        mut stream: ProcessStream,
        mut feed: Option<Feed>,
        limit: Option<Duration>,
        signals: &mut Signals,
        output: &mut Output,
    ) -> Result<Ended, Broken> {
        let never = self.began + Duration::from_secs(u32::MAX.into());
        let due = limit.and_then(|limit| self.began.checked_add(limit)).unwrap_or(never);
        let mut forced = never;
        loop {
            tokio::select! {
                event = stream.next() => match event.map_err(Broken::Agent)? {
                    Some(event) => self.take(event, output).await.map_err(Broken::Output)?,
                    None => return Ok(self.ended(None)),
                },
                // What the command does not read is no failure of ours.
                _ = async { if let Some(feed) = &mut feed { feed.await.ok(); } },
                    if feed.is_some() => feed = None,
                signal = signals.next_or_resize() => match signal {
                    None => self.resize(stream.pid()),
                    Some(number) if self.asked_to_end.is_some() => {
                        return Ok(self.ended_by_signal(number));
                    }
                    Some(number) => {
                        self.ask_to_end(stream.pid(), number);
                        forced = Instant::now() + END_GRACE;
                    }
                },
                () = sleep_until(due) => return Ok(self.ended(limit)),
                () = sleep_until(forced) => {
                    let number = self.asked_to_end.unwrap_or(15);
                    return Ok(self.ended_by_signal(number));
                }
            }
        }
    }

    async fn take(&mut self, event: ProcessEvent, output: &mut Output) -> io::Result<()> {
        match event {
            ProcessEvent::Data(DataEvent { stdout, stderr, pty }) => {
                self.first_output.get_or_insert_with(|| self.vmm_started.elapsed());
                for blob in [stdout, pty].into_iter().flatten() {
                    output.data(Stream::Out, &blob.0).await?;
                }
                if let Some(blob) = stderr {
                    output.data(Stream::Err, &blob.0).await?;
                }
            }
            ProcessEvent::End(end) => self.outcome = Some(Outcome::of(&end)),
            ProcessEvent::Start(_) | ProcessEvent::Keepalive | ProcessEvent::Unknown => {}
        }
        Ok(())
    }

    /// Tells the command of the terminal's new size; a failure shows in its stream.
    fn resize(&self, pid: u32) {
        let agent = Arc::clone(&self.agent);
        tokio::spawn(async move { agent.resize(pid, terminal::size()).await.ok() });
    }

    /// Asks the command to end; when that does not arrive, the grace runs out.
    fn ask_to_end(&mut self, pid: u32, number: u8) {
        self.asked_to_end = Some(number);
        let agent = Arc::clone(&self.agent);
        tokio::spawn(async move { agent.send_signal(pid, Signal::Term).await.ok() });
    }

    fn ended_by_signal(&self, number: u8) -> Ended {
        let code = EXIT_SIGNAL_BASE.saturating_add(number);
        Ended { exit: self.exit(code, false), timed_out_after: None }
    }

    fn ended(&self, timed_out_after: Option<Duration>) -> Ended {
        let code = match (timed_out_after, self.outcome, self.asked_to_end) {
            (Some(_), ..) => EXIT_TIMEOUT,
            // It ended by the signal we passed on: report the one we were sent.
            (None, Some(Outcome::Signaled(15)), Some(number)) => {
                EXIT_SIGNAL_BASE.saturating_add(number)
            }
            (None, Some(outcome), _) => outcome.shell_code(),
            (None, None, _) => Class::Internal.exit_code(),
        };
        Ended { exit: self.exit(code, timed_out_after.is_some()), timed_out_after }
    }

    fn exit(&self, code: u8, timed_out: bool) -> Exit {
        Exit {
            code,
            outcome: self.outcome,
            timed_out,
            first_output: self.first_output,
            ran: self.began.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use coppice_agent_protocol::Code;

    use super::*;

    fn code(message: &str) -> Option<u8> {
        not_started(&ConnectError::new(Code::InvalidArgument, message))
    }

    #[test]
    fn programs_that_cannot_be_executed_get_a_shells_codes() {
        let start = "error starting process 'x': ";
        assert_eq!(code(&format!("{start}no such file or directory")), Some(127));
        assert_eq!(code(&format!("{start}permission denied")), Some(126));
        assert_eq!(code("cwd '/x' does not exist"), None);
    }
}
