//! `coppice ls`: the sandboxes that outlive their command.

use std::time::SystemTime;

use coppice_manager::home::Home;
use coppice_manager::store::{SandboxEntry, Store};
use serde_json::Value;

use super::table::{age, columns, size};
use super::tree::{sandbox_json, state};

/// Arguments of `coppice ls`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Prints the sandboxes; 0 unless they cannot be read.
pub(super) fn run(args: &Args) -> u8 {
    let entries = Store::open(&Home::from_env()).and_then(|store| store.sandboxes());
    let entries = match entries {
        Ok(entries) => entries,
        Err(error) => return super::fail_as(&error.failure(), args.json),
    };
    super::print(&if args.json { as_json(&entries) } else { as_text(&entries, SystemTime::now()) })
}

fn parent(entry: &SandboxEntry) -> Option<String> {
    let record = entry.record.as_ref().ok()?;
    record.standing.parent.as_ref().map(ToString::to_string)
}

fn as_json(entries: &[SandboxEntry]) -> String {
    let rows: Vec<Value> =
        entries.iter().map(|entry| sandbox_json(entry, parent(entry).as_deref())).collect();
    format!("{}\n", Value::Array(rows))
}

fn as_text(entries: &[SandboxEntry], now: SystemTime) -> String {
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
            state(entry).into(),
            of_machine(|machine| machine.vcpus.to_string()),
            of_machine(|machine| format!("{} MiB", machine.memory_mib)),
            size(entry.disk_bytes),
            parent(entry).unwrap_or_default(),
            record.map(|record| age(record.created(), now)).unwrap_or_default(),
        ]);
    }
    columns(&rows, &[3, 4, 5])
}
