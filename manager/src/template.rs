//! Templates: a machine booted once, brought to where it is useful, and kept as a checkpoint, so
//! that a new sandbox is a clone of it.

use std::collections::BTreeMap;
use std::future::pending;
use std::time::Duration;

use coppice_agent_protocol::process::{ProcessConfig, ProcessEvent};
use thiserror::Error;
use tokio::time::{sleep, timeout};

use crate::agent::{self, Agent, Outcome, ProcessStream, Start};
use crate::sandbox::{self, CheckpointRequest, Config, Kept};
use crate::store::{Id, Store};

/// Time between two runs of the ready command.
const READY_PAUSE: Duration = Duration::from_millis(500);
/// The most bytes of a command's output that are kept for an error.
const MAX_SAID: usize = 2000;

/// How a template is made.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// The machine.
    pub config: Config,
    /// What is run in it.
    pub commands: Commands,
    /// Labels of the checkpoint.
    pub labels: BTreeMap<String, String>,
}

/// What brings a template's machine to where it is useful.
#[derive(Debug, Clone, Default)]
pub struct Commands {
    /// A shell command that is started and runs on in every sandbox.
    pub start: Option<String>,
    /// A shell command that is run until it succeeds; the checkpoint is made then.
    pub ready: Option<String>,
    /// How long the ready command may fail.
    pub ready_timeout: Duration,
}

/// Why a template cannot be made.
#[derive(Debug, Error)]
pub enum Error {
    /// The machine or its checkpoint failed.
    #[error("the template's machine failed")]
    Sandbox(#[from] sandbox::Error),
    /// The agent failed.
    #[error("the template's agent failed")]
    Agent(#[from] agent::Error),
    /// The start command has ended with a failure.
    #[error("the start command ended with code {code}{}", said(output))]
    Start {
        /// Its exit code, as a shell has it.
        code: u8,
        /// The last of its output.
        output: String,
    },
    /// The ready command did not succeed in time.
    #[error("the ready command did not succeed within {} s{}", after.as_secs(), said(output))]
    NotReady {
        /// The time it had.
        after: Duration,
        /// The last of what it said.
        output: String,
    },
}

/// The last words of a process at the end of an error.
pub(crate) fn said(output: &str) -> String {
    match output.trim() {
        "" => String::new(),
        output => format!(": {output}"),
    }
}

/// Boots a machine, brings it to where it is useful, keeps its state, and removes it.
///
/// # Errors
/// What went wrong; nothing is left of it then.
pub async fn build(store: &Store, recipe: &Recipe) -> Result<Id, Error> {
    let (mut kept, _time) = Kept::boot(store, &recipe.config, None, None, pending()).await?;
    let request = CheckpointRequest { labels: recipe.labels.clone(), ..Default::default() };
    let made = match bring_up(kept.agent(), &recipe.commands).await {
        Ok(_started) => kept.checkpoint(request).await.map_err(Error::from),
        Err(error) => Err(error),
    };
    let id = kept.record().id.clone();
    drop(kept);
    Kept::remove(store, &id).await?;
    Ok(made?.meta.id)
}

/// Starts what is to run and waits until it is ready. What is started runs on, whether its stream
/// is read or not.
///
/// # Errors
/// [`Error::Start`], [`Error::NotReady`] or [`Error::Agent`].
pub async fn bring_up(agent: &Agent, commands: &Commands) -> Result<Option<ProcessStream>, Error> {
    let Some(command) = &commands.start else {
        ready(agent, commands).await?;
        write_back(agent).await;
        return Ok(None);
    };
    let mut stream = agent.start(shell(command)).await?;
    let mut output = Vec::new();
    tokio::select! {
        ready = ready(agent, commands) => ready?,
        ended = follow(&mut stream, |_, piece| keep(&mut output, piece)) => {
            let code = ended?;
            if code != 0 {
                return Err(Error::Start { code, output: tail(&output) });
            }
            // It has done what it had to.
            ready(agent, commands).await?;
        }
    }
    write_back(agent).await;
    Ok(Some(stream))
}

/// Has the guest write to its disk what it has only in memory. Sandboxes would go on without it,
/// but the disk by itself is more useful then: its journal was begun, so that it can be read and
/// compared. An image may lack the program.
async fn write_back(agent: &Agent) {
    let process = ProcessConfig { cmd: "sync".into(), ..ProcessConfig::default() };
    let written = async {
        let mut stream = agent.start(Start { process, ..Start::default() }).await?;
        follow(&mut stream, |_, _| {}).await
    };
    if let Err(error) = written.await {
        tracing::debug!(%error, "a template's disk is kept as it is");
    }
}

async fn ready(agent: &Agent, commands: &Commands) -> Result<(), Error> {
    let Some(command) = &commands.ready else { return Ok(()) };
    // Of the last run that said something: the time may be over before the next one does.
    let (mut output, mut now) = (Vec::new(), Vec::new());
    let until = async {
        loop {
            let mut stream = agent.start(shell(command)).await?;
            if follow(&mut stream, |_, piece| keep(&mut now, piece)).await? == 0 {
                return Ok(());
            }
            output = std::mem::take(&mut now);
            sleep(READY_PAUSE).await;
        }
    };
    match timeout(commands.ready_timeout, until).await {
        Ok(done) => done,
        Err(_) => {
            let output = tail(if now.is_empty() { &output } else { &now });
            Err(Error::NotReady { after: commands.ready_timeout, output })
        }
    }
}

/// Where a process said something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    /// Its standard output.
    Out,
    /// Its standard error.
    Err,
}

/// Reads what a process says to its end; its exit code.
///
/// # Errors
/// The agent's.
pub(crate) async fn follow(
    stream: &mut ProcessStream,
    mut each: impl FnMut(Channel, &[u8]),
) -> Result<u8, agent::Error> {
    while let Some(event) = stream.next().await? {
        match event {
            ProcessEvent::Data(data) => {
                for (channel, blob) in [(Channel::Out, data.stdout), (Channel::Err, data.stderr)] {
                    if let Some(blob) = blob {
                        each(channel, &blob.0);
                    }
                }
            }
            ProcessEvent::End(end) => return Ok(Outcome::of(&end).shell_code()),
            _ => {}
        }
    }
    Err(agent::Error::Protocol("a process without its end".into()))
}

/// Adds to what is kept of a process' output, which is its end.
pub(crate) fn keep(output: &mut Vec<u8>, piece: &[u8]) {
    output.extend(piece);
    output.drain(..output.len().saturating_sub(MAX_SAID));
}

/// What was kept of a process' output, as text.
pub(crate) fn tail(output: &[u8]) -> String {
    String::from_utf8_lossy(output).trim().to_owned()
}

/// A command as a login shell runs it.
pub(crate) fn shell(command: &str) -> Start {
    let process = ProcessConfig {
        cmd: "/bin/bash".into(),
        args: vec!["-l".into(), "-c".into(), command.into()],
        ..ProcessConfig::default()
    };
    Start { process, ..Start::default() }
}
