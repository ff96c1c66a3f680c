//! Many clones of one checkpoint alive together: what each takes once its vCPUs run, once its
//! agent has answered, and after a first command.
//!
//! `density COUNT CHECKPOINT` in a `COPPICE_HOME`; the sandboxes are removed at the end. The last
//! line is one JSON object. Turn transparent huge pages off for comparable figures.

#![allow(clippy::print_stdout, reason = "an example")]

use std::fs;

use anyhow::{Context as _, bail};
use coppice_agent_protocol::process::{ProcessConfig, ProcessEvent};
use coppice_manager::agent::Start;
use coppice_manager::home::Home;
use coppice_manager::sandbox::{Kept, Shell};
use coppice_manager::store::{Found, Store};
use coppice_manager::vmm;
use serde_json::{Value, json};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let count: usize = arguments.next().context("how many clones?")?.parse()?;
    let reference = arguments.next().context("of which checkpoint?")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measure(count, &reference))
}

async fn measure(count: usize, reference: &str) -> anyhow::Result<()> {
    let store = Store::open(&Home::from_env())?;
    let Found::Checkpoint(from) = store.find(reference)? else { bail!("not a checkpoint") };
    let machine = store.checkpoint(&from)?.machine;
    let program = vmm::locate(None)?;
    let free = available_kib()?;
    let mut clones = Vec::new();
    for _ in 0..count {
        let shell = Shell::new(&store, &program, machine.clone(), None, None).await?;
        clones.push(shell.start(&from).await?);
    }
    let at_fork = memory(&clones)?;
    for clone in &clones {
        clone.introduce().await?;
    }
    let answered = memory(&clones)?;
    let mut commands = 0;
    for clone in &clones {
        commands += usize::from(echoes(clone).await?);
    }
    let after_exec = memory(&clones)?;
    let total = free.saturating_sub(available_kib()?);
    for clone in clones {
        let id = clone.record().id.clone();
        drop(clone);
        Kept::remove(&store, &id).await?;
    }
    let figures = json!({
        "clones": count,
        "answered_a_command": commands,
        "memory_mib": machine.memory_mib,
        "at_fork": at_fork,
        "after_the_agents_answer": answered,
        "after_the_first_command": after_exec,
        "host_memory_taken_kib": total,
    });
    println!("{figures}");
    Ok(())
}

/// Whether a command in the guest answers what it was told.
async fn echoes(clone: &Kept) -> anyhow::Result<bool> {
    let process = ProcessConfig {
        cmd: "echo".into(),
        args: vec!["here".into()],
        envs: Default::default(),
        cwd: None,
    };
    let start = Start { process, user: None, pty: None, stdin: false, timeout: None };
    let mut stream = clone.agent().start(start).await?;
    let mut output = Vec::new();
    while let Some(event) = stream.next().await? {
        if let ProcessEvent::Data(data) = event
            && let Some(blob) = data.stdout
        {
            output.extend(blob.0);
        }
    }
    Ok(output == b"here\n")
}

/// Pss and private memory of the VMM processes, guest RAM included, in KiB.
fn memory(clones: &[Kept]) -> anyhow::Result<Value> {
    let mut figures = Vec::new();
    for clone in clones {
        let path = format!("/proc/{}/smaps_rollup", clone.vmm().pid());
        let rollup = fs::read_to_string(path)?;
        let field = |name: &str| field(&rollup, name);
        figures.push((field("Private_Clean:") + field("Private_Dirty:"), field("Pss:")));
    }
    figures.sort_unstable();
    let private = |at: usize| figures.get(at).map(|(private, _)| *private);
    let pss: u64 = figures.iter().map(|(_, pss)| pss).sum();
    Ok(json!({
        "private_p50_kib": private(figures.len() / 2),
        "private_max_kib": figures.last().map(|(private, _)| *private),
        "pss_sum_kib": pss,
        "n": figures.len(),
    }))
}

fn available_kib() -> anyhow::Result<u64> {
    Ok(field(&fs::read_to_string("/proc/meminfo")?, "MemAvailable:"))
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(0)
}
