//! `coppice ls`: the sandboxes that outlive their command, and those of the daemon.

use std::collections::BTreeMap;
use std::time::SystemTime;

use coppice_manager::failure::Failure;
use coppice_manager::home::Home;
use coppice_manager::registry::{Row, State, now_ms};
use coppice_manager::store::{Id, Machine, SandboxEntry, Store};
use serde_json::{Value, json};

use super::states::States;
use super::table::{age, columns, size};
use super::tree::sandbox_json;
use super::when::length;
use super::{key, owner};

/// Arguments of `coppice ls`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Prints the sandboxes; 0 unless they cannot be read.
pub(super) async fn run(args: &Args) -> u8 {
    match All::read().await {
        Ok(all) if args.json => super::print(&all.as_json()),
        Ok(all) => super::print(&all.as_text(SystemTime::now(), now_ms())),
        Err(failure) => super::fail_as(&failure, args.json),
    }
}

/// All sandboxes, and what was promised about those of the daemon.
#[derive(Debug, Default)]
pub(super) struct All {
    /// As they are in the store.
    pub(super) entries: Vec<SandboxEntry>,
    states: States,
    rows: BTreeMap<Id, Row>,
}

impl All {
    /// Reads them, and asks their machines what they do.
    pub(super) async fn read() -> Result<Self, Failure> {
        let store = Store::open(&Home::from_env()).map_err(|error| error.failure())?;
        let mut entries = store.sandboxes().map_err(|error| error.failure())?;
        let (mut rows, mut shells) = (BTreeMap::new(), Vec::new());
        if let Some(registry) = owner::registry()? {
            let known = registry.sandboxes().map_err(|error| key::failed(&error))?;
            rows.extend(known.into_iter().map(|row| (row.id.clone(), row)));
            shells = registry.shells().map_err(|error| key::failed(&error))?;
        }
        // There is nothing in them yet.
        entries.retain(|entry| !shells.contains(&entry.id));
        let states = States::ask(&store, &entries).await;
        Ok(Self { entries, states, rows })
    }

    /// What was promised about a sandbox of the daemon.
    pub(super) fn row(&self, entry: &SandboxEntry) -> Option<&Row> {
        self.rows.get(&entry.id)
    }

    /// The state of a sandbox, in a word.
    pub(super) fn state(&self, entry: &SandboxEntry) -> &'static str {
        match (self.row(entry).map(|row| row.state), self.states.of(entry)) {
            // Whatever was promised about a machine, it is the machine that runs.
            (Some(State::Running), found) => found,
            (Some(state), _) => state.name(),
            (None, found) => found,
        }
    }

    fn as_json(&self) -> String {
        let rows: Vec<Value> = self.entries.iter().map(|entry| self.entry_json(entry)).collect();
        format!("{}\n", Value::Array(rows))
    }

    /// A sandbox as an object.
    pub(super) fn entry_json(&self, entry: &SandboxEntry) -> Value {
        let mut value = sandbox_json(entry, parent(entry).as_deref(), &self.states);
        value["state"] = json!(self.state(entry));
        let row = self.row(entry);
        value["tenant"] = json!(row.map(|row| &row.tenant));
        value["template"] = json!(row.map(|row| &row.template));
        value["end_ms"] = json!(row.and_then(end_ms));
        value
    }

    fn as_text(&self, now: SystemTime, now_ms: u64) -> String {
        if self.entries.is_empty() {
            return "There are no sandboxes.\n".into();
        }
        let head = ["SANDBOX", "NAME", "STATE", "CPUS", "MEMORY", "DISK", "CHECKPOINT", "CREATED"];
        let more = ["TENANT", "TEMPLATE", "LEFT"];
        let mut rows = vec![head.iter().chain(&more).map(|head| (*head).to_owned()).collect()];
        for entry in &self.entries {
            let mut row = self.text_row(entry, now).to_vec();
            row.extend(self.promised(entry, now_ms));
            rows.push(row);
        }
        if self.rows.is_empty() {
            rows.iter_mut().for_each(|row: &mut Vec<String>| row.truncate(head.len()));
        }
        columns(&rows, &[3, 4, 5])
    }

    fn text_row(&self, entry: &SandboxEntry, now: SystemTime) -> [String; 8] {
        let record = entry.record.as_ref().ok();
        let of_machine = |text: fn(&Machine) -> String| {
            record.map(|record| text(&record.machine)).unwrap_or_default()
        };
        [
            entry.id.to_string(),
            record.and_then(|r| r.name.as_ref()).map(ToString::to_string).unwrap_or_default(),
            self.state(entry).into(),
            of_machine(|machine| machine.vcpus.to_string()),
            of_machine(|machine| format!("{} MiB", machine.memory_mib)),
            size(entry.disk_bytes),
            parent(entry).unwrap_or_default(),
            record.map(|record| age(record.created(), now)).unwrap_or_default(),
        ]
    }

    /// Tenant, template and time left of a sandbox of the daemon.
    pub(super) fn promised(&self, entry: &SandboxEntry, now_ms: u64) -> [String; 3] {
        let Some(row) = self.row(entry) else { return Default::default() };
        let left = end_ms(row).map(|end| length(end.saturating_sub(now_ms))).unwrap_or_default();
        let template = row.alias.as_ref().unwrap_or(&row.template);
        [row.tenant.as_str().to_owned(), template.clone(), left]
    }
}

/// When the time of a sandbox is over; only one that runs has an end.
fn end_ms(row: &Row) -> Option<u64> {
    (row.state == State::Running).then_some(row.end_ms)
}

fn parent(entry: &SandboxEntry) -> Option<String> {
    let record = entry.record.as_ref().ok()?;
    record.standing.parent.as_ref().map(ToString::to_string)
}
