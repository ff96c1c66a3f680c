//! `coppice tree`: all checkpoints, what grew from which, and where each sandbox stands.

use std::time::SystemTime;

use coppice_manager::home::Home;
use coppice_manager::store::{Checkpoint, Error, Node, SandboxEntry, Store, Tree};
use serde_json::{Value, json};

use super::states::States;
use super::table::{age, columns, size};

/// Arguments of `coppice tree`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the tree; 0 unless it cannot be read.
pub(super) async fn run(args: &Args) -> u8 {
    let store = Store::open(&Home::from_env());
    let read = store.and_then(|store| Ok((store.tree()?, store.sandboxes()?, store)));
    let (tree, entries, store) = match read {
        Ok(read) => read,
        Err(error) => return super::fail_as(&error.failure(), args.json),
    };
    let states = States::ask(&store, &entries).await;
    super::print(&if args.json {
        as_json(&tree, &states)
    } else {
        as_text(&tree, &states, SystemTime::now())
    })
}

/// How a sandbox is marked, so that it is not taken for a checkpoint.
const SANDBOX: &str = "*";

fn as_text(tree: &Tree, states: &States, now: SystemTime) -> String {
    let mut rows = Vec::new();
    for root in &tree.roots {
        branch(root, states, now, &mut rows);
    }
    for entry in &tree.sandboxes {
        rows.push(sandbox_row(entry, "", states, now));
    }
    let mut text = match rows.is_empty() {
        true => "There are no checkpoints and no sandboxes.\n".to_owned(),
        false => columns(&rows, &[2, 3]),
    };
    for damaged in &tree.damaged {
        text.push_str(&format!("! {damaged}; see `coppice fsck`\n"));
    }
    text
}

/// The rows of a root and of what grew from it. Each item has what its own row starts with, and
/// what those of its children start with.
fn branch(root: &Node, states: &States, now: SystemTime, rows: &mut Vec<Vec<String>>) {
    // A stack of its own instead of recursion: sessions grow deep.
    let mut left = vec![(Item::Checkpoint(root), String::new(), String::new())];
    while let Some((item, lead, below)) = left.pop() {
        let node = match item {
            Item::Sandbox(entry) => {
                rows.push(sandbox_row(entry, &lead, states, now));
                continue;
            }
            Item::Checkpoint(node) => node,
        };
        rows.push(checkpoint_row(&node.checkpoint, &lead, now));
        let mut items: Vec<Item<'_>> = node.sandboxes.iter().map(Item::Sandbox).collect();
        items.extend(node.children.iter().map(Item::Checkpoint));
        // An only child goes on straight down, so that a line of checkpoints stays a line.
        let only = items.len() == 1;
        let count = items.len();
        for (number, item) in items.into_iter().enumerate().rev() {
            let last = number + 1 == count;
            let (lead, below) = match (only, last) {
                (true, _) => (below.clone(), below.clone()),
                (false, true) => (format!("{below}`- "), format!("{below}   ")),
                (false, false) => (format!("{below}|- "), format!("{below}|  ")),
            };
            left.push((item, lead, below));
        }
    }
}

enum Item<'a> {
    Checkpoint(&'a Node),
    Sandbox(&'a SandboxEntry),
}

fn checkpoint_row(checkpoint: &Checkpoint, lead: &str, now: SystemTime) -> Vec<String> {
    let meta = &checkpoint.meta;
    let labels: Vec<String> = meta.labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
    vec![
        format!("{lead}{}", meta.id),
        meta.name.as_ref().map(ToString::to_string).unwrap_or_default(),
        size(checkpoint.memory_bytes),
        size(checkpoint.disk_bytes),
        age(meta.created(), now),
        labels.join(" "),
    ]
}

fn sandbox_row(entry: &SandboxEntry, lead: &str, states: &States, now: SystemTime) -> Vec<String> {
    let (name, age) = match &entry.record {
        Ok(record) => (record.name.as_ref().map(ToString::to_string), age(record.created(), now)),
        Err(_) => (Some("(record unreadable)".into()), String::new()),
    };
    vec![
        format!("{lead}{SANDBOX} {}", entry.id),
        name.unwrap_or_default(),
        states.of(entry).into(),
        size(entry.disk_bytes),
        age,
    ]
}

fn as_json(tree: &Tree, states: &States) -> String {
    let mut checkpoints = Vec::new();
    let mut sandboxes: Vec<Value> =
        tree.sandboxes.iter().map(|e| sandbox_json(e, None, states)).collect();
    let mut left: Vec<(&Node, Option<String>)> =
        tree.roots.iter().rev().map(|root| (root, None)).collect();
    while let Some((node, parent)) = left.pop() {
        let id = node.checkpoint.meta.id.to_string();
        checkpoints.push(checkpoint_json(&node.checkpoint, parent.as_deref()));
        sandboxes.extend(node.sandboxes.iter().map(|entry| sandbox_json(entry, Some(&id), states)));
        left.extend(node.children.iter().rev().map(|child| (child, Some(id.clone()))));
    }
    let damaged: Vec<String> = tree.damaged.iter().map(Error::to_string).collect();
    let all = json!({ "checkpoints": checkpoints, "sandboxes": sandboxes, "damaged": damaged });
    format!("{all}\n")
}

/// One checkpoint; `parent` is its nearest ancestor that is visible.
pub(super) fn checkpoint_json(checkpoint: &Checkpoint, parent: Option<&str>) -> Value {
    let meta = &checkpoint.meta;
    json!({
        "id": meta.id,
        "name": meta.name,
        "labels": meta.labels,
        "parent": parent,
        "created_ms": meta.created_ms,
        "sandbox": meta.sandbox,
        "memory_mib": meta.machine.memory_mib,
        "vcpus": meta.machine.vcpus,
        "memory_bytes": checkpoint.memory_bytes,
        "disk_bytes": checkpoint.disk_bytes,
    })
}

/// One sandbox; `stands_on` is the checkpoint it stands on, if it is visible.
pub(super) fn sandbox_json(
    entry: &SandboxEntry,
    stands_on: Option<&str>,
    states: &States,
) -> Value {
    let record = entry.record.as_ref().ok();
    json!({
        "id": entry.id,
        "name": record.and_then(|record| record.name.as_ref()),
        "state": states.of(entry),
        "checkpoint": stands_on,
        "created_ms": record.map(|record| record.created_ms),
        "memory_mib": record.map(|record| record.machine.memory_mib),
        "vcpus": record.map(|record| record.machine.vcpus),
        "disk_bytes": entry.disk_bytes,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use coppice_manager::store::{GuestSettings, Id, Machine, Meta, SandboxRecord, Standing};

    use super::*;

    fn id(text: &str) -> Id {
        Id::parse(&format!("{text:0>12}")).unwrap()
    }

    fn machine() -> Machine {
        let (kernel, cmdline) = ("/vmlinux".into(), String::new());
        let (initrd, balloon) = (None, None);
        Machine { vcpus: 1, memory_mib: 64, kernel, cmdline, initrd, cid: 3, rng: true, balloon }
    }

    fn node(name: &str, children: Vec<Node>, sandboxes: Vec<SandboxEntry>) -> Node {
        let meta = Meta {
            id: id(name),
            name: Some(format!("name-{name}").parse().unwrap()),
            labels: BTreeMap::new(),
            created_ms: 0,
            sandbox: id("5"),
            machine: machine(),
            standing: Standing::default(),
        };
        let checkpoint = Checkpoint { meta, memory_bytes: 1 << 20, disk_bytes: 0 };
        Node { checkpoint, children, sandboxes }
    }

    fn sandbox(name: &str) -> SandboxEntry {
        let record = SandboxRecord {
            id: id(name),
            name: None,
            created_ms: 0,
            machine: machine(),
            machine_id: String::new(),
            process: None,
            suspended: false,
            guest: GuestSettings::default(),
            standing: Standing::default(),
            next: None,
        };
        SandboxEntry { id: id(name), record: Ok(record), alive: true, disk_bytes: 0 }
    }

    #[test]
    fn branches_are_drawn_and_a_line_stays_a_line() {
        let leaf = node("d", vec![], vec![sandbox("e")]);
        let fork = node("b", vec![node("c", vec![], vec![]), leaf], vec![]);
        let tree = Tree { roots: vec![node("a", vec![fork], vec![])], ..Tree::default() };
        let text = as_text(&tree, &States::default(), SystemTime::UNIX_EPOCH);
        let starts: Vec<&str> =
            text.lines().map(|line| line.split("  name-").next().unwrap().trim_end()).collect();
        assert_eq!(
            starts,
            [
                "00000000000a",
                "00000000000b",
                "|- 00000000000c",
                "`- 00000000000d",
                "   * 00000000000e          running  0 B  0 s ago"
            ],
            "{text}"
        );
    }

    #[test]
    fn json_names_each_parent() {
        let tree = Tree {
            roots: vec![node("a", vec![node("b", vec![], vec![sandbox("c")])], vec![])],
            sandboxes: vec![sandbox("d")],
            damaged: Vec::new(),
        };
        let all: Value = serde_json::from_str(&as_json(&tree, &States::default())).unwrap();
        assert_eq!(all["checkpoints"][0]["parent"], Value::Null);
        assert_eq!(all["checkpoints"][1]["parent"], "00000000000a");
        let standing: Vec<&Value> =
            all["sandboxes"].as_array().unwrap().iter().map(|s| &s["checkpoint"]).collect();
        assert_eq!(standing, [&Value::Null, &json!("00000000000b")]);
    }
}
