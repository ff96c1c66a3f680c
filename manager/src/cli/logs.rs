//! `coppice logs`: all that is known of a sandbox, from outside to inside: what happened to it, what
//! its VMM says, what its guest wrote to the console, and what its agent was asked.

use std::path::PathBuf;

use coppice_manager::api::events::Line;
use coppice_manager::client::Client;
use coppice_manager::failure::{Class, Failure};
use coppice_manager::home::Home;
use coppice_manager::registry::{Event, Wanted};
use coppice_manager::sandbox::{Follower, Guest, LOG_NAME, Transcript};
use coppice_manager::store::{Found, Id, Store};
use serde_json::json;
use tokio::sync::mpsc;

use super::events::{plain, print_all};
use super::when::clock;

/// Shown by `-h`.
pub(super) const HELP: &str = "\
Each line names where it is from:
  event    what happened to the sandbox (those of the daemon only; kept when it is gone)
  vmm      what its VMM says
  console  what its guest wrote to the serial console: of what nobody has looked at, the first 64 KiB
  agent    requests to the agent in the guest with the X-Request-Id they came with, and its warnings";

/// The most bytes of a VMM's log that are shown: its end.
const MAX_VMM_LOG: usize = 256 * 1024;
/// Lines that wait to be printed; who writes more waits.
const AHEAD: usize = 64;

/// Arguments of `coppice logs`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Go on with what comes from now on, until the machine ends
    #[arg(short, long)]
    follow: bool,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// The sandbox: its name, ID, or the beginning of its ID; the whole ID of one that is gone
    #[arg(value_name = "SANDBOX")]
    sandbox: String,
}

/// A line of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    source: &'static str,
    /// When, in milliseconds since 1970, if it is known.
    at_ms: Option<u64>,
    text: String,
}

impl Entry {
    fn told(&self, as_json: bool) -> String {
        let Self { source, at_ms, text } = self;
        if as_json {
            return format!("{}\n", json!({"source": source, "at_ms": at_ms, "text": text}));
        }
        let at = at_ms.map(clock).unwrap_or_default();
        format!("{at:24}  {source:7}  {}\n", plain(text))
    }

    fn of_event(event: Event) -> Self {
        let text = match event.text.as_str() {
            "" => event.kind,
            text => format!("{}: {text}", event.kind),
        };
        Self { source: "event", at_ms: Some(event.at_ms), text }
    }
}

/// The lines of a text that has no times in it.
fn entries(source: &'static str, bytes: &[u8]) -> Vec<Entry> {
    let text = String::from_utf8_lossy(bytes);
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.map(|line| Entry { source, at_ms: None, text: line.to_owned() }).collect()
}

/// Prints the log; 0, or the exit code of the failure.
pub(super) async fn run(args: &Args) -> u8 {
    match attempt(args).await {
        Ok(code) => code,
        Err(failure) => super::fail_as(&failure, args.json),
    }
}

async fn attempt(args: &Args) -> Result<u8, Failure> {
    let store = Store::open(&Home::from_env()).map_err(|error| error.failure())?;
    let (id, here) = match store.find(&args.sandbox) {
        Ok(Found::Sandbox(id)) => (id, true),
        Ok(Found::Checkpoint(id)) => {
            let message = format!("{id} is a checkpoint, not a sandbox");
            return Err(Failure::new(Class::Usage, message, "see `coppice ls` for sandboxes"));
        }
        Err(error) => (Id::parse(&args.sandbox).ok_or_else(|| error.failure())?, false),
    };
    let mut past = Past::read(&store, &id, here).await?;
    if !here && past.entries.is_empty() {
        let message = format!("there is no sandbox {id}, and nothing is known of one");
        return Err(Failure::new(Class::NotFound, message, "see `coppice events`"));
    }
    for entry in past.entries.drain(..) {
        let code = super::print(&entry.told(args.json));
        if code != 0 {
            return Ok(code);
        }
    }
    match args.follow && here {
        true => follow(&store, &id, past, args.json).await,
        false => Ok(0),
    }
}

/// What there is so far, and where to go on.
struct Past {
    entries: Vec<Entry>,
    /// The last event's number.
    event: i64,
    /// The number of the agent's last line.
    line: u64,
}

impl Past {
    async fn read(store: &Store, id: &Id, here: bool) -> Result<Self, Failure> {
        let (mut timed, mut event, mut line) = (Vec::new(), 0, 0);
        let wanted = Wanted { sandbox: Some(id.to_string()), ..Wanted::default() };
        print_all(wanted, |found| {
            event = found.number;
            timed.push(Entry::of_event(found));
            0
        })?;
        let mut entries = Vec::new();
        if here {
            let directory = directory(store, id);
            // What is not there has nothing to say.
            let vmm = std::fs::read(directory.join(LOG_NAME)).unwrap_or_default();
            let end = vmm.len().saturating_sub(MAX_VMM_LOG);
            entries.extend(self::entries("vmm", vmm.get(end..).unwrap_or_default()));
            entries.extend(self::entries("console", &transcript(store, id)?.whole));
            if let Ok(guest) = Guest::open(store, id) {
                for found in guest.agent().log(0, false).await.unwrap_or_default() {
                    line = found.number;
                    timed.push(of_agent(found.unix_ms, found.text));
                }
            }
        }
        timed.sort_by_key(|entry| entry.at_ms);
        entries.extend(timed);
        Ok(Self { entries, event, line })
    }
}

fn of_agent(unix_ms: u64, text: String) -> Entry {
    Entry { source: "agent", at_ms: Some(unix_ms), text }
}

fn directory(store: &Store, id: &Id) -> PathBuf {
    store.path().join("sandboxes").join(id.as_str())
}

fn transcript(store: &Store, id: &Id) -> Result<Transcript, Failure> {
    Transcript::read(&directory(store, id)).map_err(|error| {
        let message = format!("the console of {id} cannot be read: {error}");
        Failure::new(Class::Host, message, "see that COPPICE_HOME can be written")
    })
}

/// Prints what comes, from wherever it comes, until the machine ends.
async fn follow(store: &Store, id: &Id, past: Past, as_json: bool) -> Result<u8, Failure> {
    let Ok(guest) = Guest::open(store, id) else { return Ok(0) };
    let (sender, mut lines) = mpsc::channel(AHEAD);
    let tasks = [
        tokio::spawn(events(id.clone(), past.event, sender.clone())),
        tokio::spawn(console(store.clone(), id.clone(), sender.clone())),
    ];
    let agent = std::sync::Arc::clone(guest.agent());
    let requests = async move {
        let mut after = past.line;
        // An agent of before has no log; one that is gone has no more.
        while let Ok(found) = agent.log(after, true).await {
            for line in found {
                after = line.number;
                if sender.send(of_agent(line.unix_ms, line.text)).await.is_err() {
                    return;
                }
            }
        }
    };
    let requests = tokio::spawn(requests);
    let code = loop {
        tokio::select! {
            biased;
            line = lines.recv() => match line {
                Some(entry) => match super::print(&entry.told(as_json)) {
                    0 => {}
                    code => break code,
                },
                None => break 0,
            },
            _ = guest.ended() => break 0,
        }
    };
    // What the end of the machine is told by comes last.
    lines.close();
    while let (0, Some(entry)) = (code, lines.recv().await) {
        super::print(&entry.told(as_json));
    }
    for task in tasks.into_iter().chain([requests]) {
        task.abort();
    }
    Ok(code)
}

async fn events(id: Id, after: i64, sender: mpsc::Sender<Entry>) {
    // Without a daemon nothing happens.
    let Ok(daemon) = Client::connect(&Home::from_env()).await else { return };
    let wanted = Wanted { after, sandbox: Some(id.to_string()), ..Wanted::default() };
    let Ok(mut lines) = daemon.follow(&wanted).await else { return };
    while let Ok(Some(line)) = lines.next().await {
        if let Line::Event(event) = line
            && sender.send(Entry::of_event(event)).await.is_err()
        {
            return;
        }
    }
}

async fn console(store: Store, id: Id, sender: mpsc::Sender<Entry>) {
    let Ok(mut follower) = Follower::of(&directory(&store, &id)) else { return };
    while let Ok(Some(news)) = follower.next().await {
        for entry in entries("console", &news) {
            if sender.send(entry).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_its_source_and_moves_no_cursor() {
        let entry = Entry { source: "console", at_ms: None, text: "a\x1b[2Jb\r".into() };
        assert_eq!(entry.told(false), format!("{:24}  console  a\u{fffd}[2Jb\n", ""));
        let json: serde_json::Value = serde_json::from_str(&entry.told(true)).unwrap();
        assert_eq!(json["text"], "a\x1b[2Jb\r");
        assert_eq!(entries("vmm", b"one\n\ntwo\xff\n").len(), 2);
    }
}
