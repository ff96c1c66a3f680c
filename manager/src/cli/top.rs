//! `coppice top`: what the sandboxes use now.
//!
//! All of it is what the host knows of the machines' processes, so no guest is woken, and no daemon
//! is needed.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use coppice_manager::failure::{Class, Failure};
use coppice_manager::registry::now_ms;
use coppice_manager::store::{Id, SandboxEntry};
use coppice_manager::vmm::WholeMemory;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;

use super::command::seconds;
use super::ls::All;
use super::table::{columns, size};
use super::terminal::{Raw, Screen, Signals};
use super::when::length;

/// Shown by `-h`.
pub(super) const HELP: &str = "\
CPU is the share of one processor since the last time it was looked at, or since the machine was
started; PRIVATE is memory that only this machine has, SHARED what it shares with others, and PSS
the former with its share of the latter. On a terminal, q ends it.";

/// Ctrl-C, which a raw terminal passes on as a key.
const INTERRUPT: u8 = 3;

/// Arguments of `coppice top`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print one table, as without a terminal
    #[arg(long)]
    once: bool,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
    /// Seconds between two looks
    #[arg(short, long, value_name = "SECS", value_parser = seconds, default_value = "2")]
    delay: Duration,
}

/// Shows the table; 0, or the exit code of the failure.
pub(super) async fn run(args: &Args) -> u8 {
    let terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    let shown = match args.once || args.json || !terminal {
        true => Look::new(None).await.map(|look| match args.json {
            true => super::print(&look.as_json()),
            false => super::print(&look.as_text(now_ms())),
        }),
        false => live(args.delay).await,
    };
    shown.unwrap_or_else(|failure| super::fail_as(&failure, args.json))
}

/// Shows the table again and again until a key or a signal ends it.
async fn live(delay: Duration) -> Result<u8, Failure> {
    let failed = |error: std::io::Error| Failure::new(Class::Host, error, "use --once");
    let mut signals = Signals::listen().map_err(failed)?;
    let _raw = Raw::enter().map_err(failed)?;
    let screen = Screen::enter().map_err(failed)?;
    let mut keys = tokio::io::stdin();
    let mut ticks = tokio::time::interval(delay);
    let mut look: Option<Look> = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => look = Some(Look::new(look.as_ref()).await?),
            key = keys.read_u8() => match key {
                Ok(b'q' | b'Q' | INTERRUPT) | Err(_) => return Ok(0),
                Ok(_) => {}
            },
            signal = signals.next_or_resize() => if signal.is_some() { return Ok(0) },
        }
        if let Some(look) = &look {
            screen.show(&look.as_text(now_ms())).map_err(failed)?;
        }
    }
}

/// What a machine's process uses.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Use {
    /// Processor time since its start.
    cpu: Duration,
    /// Share of one processor lately, in percent.
    percent: f64,
    memory: WholeMemory,
    /// How long it has run.
    age: Duration,
}

/// All sandboxes at a moment.
struct Look {
    at: Instant,
    all: All,
    uses: BTreeMap<Id, Use>,
}

impl Look {
    /// Looks at all, and compares with an earlier look.
    async fn new(before: Option<&Self>) -> Result<Self, Failure> {
        let all = All::read().await?;
        let at = Instant::now();
        let mut uses = BTreeMap::new();
        for entry in all.entries.iter().filter(|entry| entry.alive) {
            let Some(mut now) = measure(entry) else { continue };
            let earlier = before.and_then(|before| {
                let earlier = before.uses.get(&entry.id)?;
                // A machine that was started anew begins anew.
                let used = now.cpu.checked_sub(earlier.cpu)?;
                Some((used, at.duration_since(before.at)))
            });
            let (used, span) = earlier.unwrap_or((now.cpu, now.age));
            now.percent = percent(used, span);
            uses.insert(entry.id.clone(), now);
        }
        Ok(Self { at, all, uses })
    }

    fn as_json(&self) -> String {
        let rows = self.all.entries.iter().map(|entry| {
            let mut value = self.all.entry_json(entry);
            let found = self.uses.get(&entry.id);
            value["cpu_percent"] = json!(found.map(|found| found.percent));
            value["cpu_ms"] = json!(found.map(|found| found.cpu.as_millis()));
            value["uptime_ms"] = json!(found.map(|found| found.age.as_millis()));
            value["private_bytes"] = json!(found.map(|found| found.memory.private));
            value["shared_bytes"] = json!(found.map(|found| found.memory.shared));
            value["pss_bytes"] = json!(found.map(|found| found.memory.pss));
            value
        });
        format!("{}\n", Value::Array(rows.collect()))
    }

    fn as_text(&self, now_ms: u64) -> String {
        let head = [
            "SANDBOX", "NAME", "STATE", "TENANT", "TEMPLATE", "CPU%", "PRIVATE", "SHARED", "PSS",
            "UPTIME", "LEFT",
        ];
        let mut entries: Vec<_> = self.all.entries.iter().collect();
        // The busiest first.
        let busy =
            |entry: &SandboxEntry| self.uses.get(&entry.id).map_or(-1.0, |found| found.percent);
        entries.sort_by(|a, b| busy(b).total_cmp(&busy(a)).then_with(|| a.id.cmp(&b.id)));
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for entry in entries {
            let record = entry.record.as_ref().ok();
            let name = record.and_then(|record| record.name.as_ref()).map(ToString::to_string);
            let [tenant, template, left] = self.all.promised(entry, now_ms);
            let state = self.all.state(entry).to_owned();
            let mut row =
                vec![entry.id.to_string(), name.unwrap_or_default(), state, tenant, template];
            row.extend(match self.uses.get(&entry.id) {
                Some(found) => [
                    format!("{:.1}", found.percent),
                    size(found.memory.private),
                    size(found.memory.shared),
                    size(found.memory.pss),
                    length(u64::try_from(found.age.as_millis()).unwrap_or(u64::MAX)),
                ],
                None => Default::default(),
            });
            row.push(left);
            rows.push(row);
        }
        format!("{}{}", self.summary(), columns(&rows, &[5, 6, 7, 8, 9, 10]))
    }

    fn summary(&self) -> String {
        let sum = |part: fn(&Use) -> u64| self.uses.values().map(part).fold(0, u64::saturating_add);
        let percent: f64 = self.uses.values().map(|found| found.percent).sum();
        format!(
            "{} sandboxes, {} running; CPU {percent:.1} %; private {}, in all {}\n\n",
            self.all.entries.len(),
            self.uses.len(),
            size(sum(|found| found.memory.private)),
            size(sum(|found| found.memory.pss)),
        )
    }
}

/// What the process of a sandbox uses; nothing if it is gone.
fn measure(entry: &SandboxEntry) -> Option<Use> {
    let pid = entry.record.as_ref().ok()?.process?.pid;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let (cpu, age) = times(&stat, &uptime, rustix::param::clock_ticks_per_second())?;
    let memory = WholeMemory::of(pid).ok()?;
    Some(Use { cpu, percent: 0.0, memory, age })
}

/// Processor time and age of a process: fields 14, 15 and 22 of proc_pid_stat(5), in ticks.
fn times(stat: &str, uptime: &str, per_second: u64) -> Option<(Duration, Duration)> {
    // The name before may have spaces and parentheses in it.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<u64>().ok();
    let time =
        |ticks: u64| Some(Duration::from_millis(ticks.checked_mul(1000)?.checked_div(per_second)?));
    let cpu = time(ticks(11)?.checked_add(ticks(12)?)?)?;
    let up: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    let up = Duration::try_from_secs_f64(up).ok()?;
    Some((cpu, up.saturating_sub(time(ticks(19)?)?)))
}

fn percent(used: Duration, span: Duration) -> f64 {
    match span.is_zero() {
        true => 0.0,
        false => used.as_secs_f64() / span.as_secs_f64() * 100.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_after_the_name_whatever_it_is() {
        let stat = "7 (a b) 1 2) S 1 7 7 0 -1 0 0 0 0 0 150 50 0 0 20 0 3 0 1000 0 0";
        let found = times(stat, "25.00 50.00", 100);
        assert_eq!(found, Some((Duration::from_secs(2), Duration::from_secs(15))));
        for wrong in ["", "7 (x", "7 (x) S 1"] {
            assert_eq!(times(wrong, "25.00 50.00", 100), None);
        }
        let own = std::fs::read_to_string("/proc/self/stat").unwrap();
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let ticks = rustix::param::clock_ticks_per_second();
        assert!(times(&own, &uptime, ticks).unwrap().1 < Duration::from_secs(3600));
    }

    #[test]
    fn a_share_is_of_one_processor() {
        assert!((percent(Duration::from_secs(3), Duration::from_secs(2)) - 150.0).abs() < 0.01);
        assert!(percent(Duration::from_secs(3), Duration::ZERO).abs() < 0.01);
    }
}
