//! `coppice ls`: the sandboxes that outlive their command.

use std::time::SystemTime;

use coppice_manager::home::Home;
use coppice_manager::store::{SandboxEntry, Store};
use serde_json::Value;

use super::states::States;
use super::table::{age, columns, size};
use super::tree::sandbox_json;

/// Arguments of `coppice ls`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Prints the sandboxes; 0 unless they cannot be read.
pub(super) async fn run(args: &Args) -> u8 {
    let store = Store::open(&Home::from_env());
    let (store, entries) = match store.and_then(|store| store.sandboxes().map(|e| (store, e))) {
        Ok(read) => read,
        Err(error) => return super::fail_as(&error.failure(), args.json),
    };
    let states = States::ask(&store, &entries).await;
    super::print(&if args.json {
        as_json(&entries, &states)
    } else {
        as_text(&entries, &states, SystemTime::now())
    })
}

fn parent(entry: &SandboxEntry) -> Option<String> {
    let record = entry.record.as_ref().ok()?;
    record.standing.parent.as_ref().map(ToString::to_string)
}

fn as_json(entries: &[SandboxEntry], states: &States) -> String {
    let rows: Vec<Value> =
        entries.iter().map(|entry| sandbox_json(entry, parent(entry).as_deref(), states)).collect();
    format!("{}\n", Value::Array(rows))
}

fn as_text(entries: &[SandboxEntry], states: &States, now: SystemTime) -> String {
    if entries.is_empty() {
        return "There are no sandboxes.\n".into();
    }
    let head = ["SANDBOX", "NAME", "STATE", "CPUS", "MEMORY", "DISK", "CHECKPOINT", "CREATED"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for entry in entries {
        let record = entry.record.as_ref().ok();
        let of_machine = |text: fn(&coppice_manager::store::Machine) -> String| {
            record.map(|record| text(&record.machine)).unwrap_or_default()
        };
        rows.push(vec![
            entry.id.to_string(),
            record.and_then(|r| r.name.as_ref()).map(ToString::to_string).unwrap_or_default(),
            states.of(entry).into(),
            of_machine(|machine| machine.vcpus.to_string()),
            of_machine(|machine| format!("{} MiB", machine.memory_mib)),
            size(entry.disk_bytes),
            parent(entry).unwrap_or_default(),
            record.map(|record| age(record.created(), now)).unwrap_or_default(),
        ]);
    }
    columns(&rows, &[3, 4, 5])
}
