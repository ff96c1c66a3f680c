//! `coppice events`: what happened to the daemon's sandboxes, and what happens now.

use coppice_manager::api::events::Line;
use coppice_manager::client::Client;
use coppice_manager::failure::Failure;
use coppice_manager::home::Home;
use coppice_manager::registry::{Event, Wanted};
use serde_json::json;

use super::owner;
use super::when::{clock, moment};

/// Shown by `-h`.
pub(super) const HELP: &str = "\
The last 10,000 events are kept. They are read without a daemon; it takes one to follow them. Each
has a number, and --after goes on where an earlier command stopped.

Examples:
  coppice events --since 1h
  coppice events --follow --json | jq 'select(.kind == \"gone\")'";

/// The most events read at a time.
const BATCH: usize = 1024;

/// Arguments of `coppice events`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Go on with what happens from now on
    #[arg(short, long)]
    follow: bool,
    /// Only of this sandbox, which may be gone: its whole ID
    #[arg(long, value_name = "ID")]
    sandbox: Option<String>,
    /// Only since then: a time as in RFC 3339, or so long ago, as 10m
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<u64>,
    /// Only after the event with this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    after: i64,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// Prints the events; 0, or the exit code of the failure.
pub(super) async fn run(args: &Args) -> u8 {
    match attempt(args).await {
        Ok(code) => code,
        Err(failure) => super::fail_as(&failure, args.json),
    }
}

async fn attempt(args: &Args) -> Result<u8, Failure> {
    let wanted = Wanted {
        after: args.after,
        since_ms: args.since.unwrap_or_default(),
        sandbox: args.sandbox.clone(),
    };
    if args.follow {
        return follow(wanted, args.json).await;
    }
    print_all(wanted, |event| super::print(&told(&Line::Event(event), args.json)))
}

/// Hands all events that are wanted to `show`, until it fails; its code.
pub(super) fn print_all(
    mut wanted: Wanted,
    mut show: impl FnMut(Event) -> u8,
) -> Result<u8, Failure> {
    let Some(registry) = owner::registry()? else { return Ok(0) };
    loop {
        let page = registry.events(&wanted, BATCH).map_err(|error| super::key::failed(&error))?;
        if page.events.is_empty() {
            return Ok(0);
        }
        wanted.after = page.read_to;
        for event in page.events {
            let code = show(event);
            if code != 0 {
                return Ok(code);
            }
        }
    }
}

async fn follow(wanted: Wanted, json: bool) -> Result<u8, Failure> {
    let failed = |error: coppice_manager::client::Error| error.failure();
    let daemon = Client::connect(&Home::from_env()).await.map_err(failed)?;
    let mut lines = daemon.follow(&wanted).await.map_err(failed)?;
    while let Some(line) = lines.next().await.map_err(failed)? {
        let code = super::print(&told(&line, json));
        if code != 0 {
            return Ok(code);
        }
    }
    // The daemon ended in order.
    Ok(0)
}

/// A line of output.
fn told(line: &Line, as_json: bool) -> String {
    match line {
        line if as_json => format!("{}\n", json!(line)),
        Line::Lost { lost } => format!("({lost} events were dropped before they were read)\n"),
        Line::Event(event) => text(event),
    }
}

/// An event for people.
fn text(event: &Event) -> String {
    let Event { at_ms, tenant, sandbox, kind, text, .. } = event;
    let line = format!("{}  {sandbox}  {:12}  {kind:10}  {text}", clock(*at_ms), tenant.as_str());
    format!("{}\n", plain(&line))
}

/// Text that a guest may have a part in, without what would move a terminal's cursor.
pub(super) fn plain(text: &str) -> String {
    let shown = |c: char| if c.is_control() && c != '\t' { '\u{fffd}' } else { c };
    text.trim_end().chars().map(shown).collect()
}
