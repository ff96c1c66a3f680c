//! What the VMM does natively with a micro-guest, beside the bare system calls that such work
//! cannot do without: machines made, cloned, checkpointed and rolled back.
//!
//! Everything alternates: one round takes one sample of each figure, floors included, so that
//! what the host does meanwhile hits all of them alike.

mod floor;
mod guest;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Context as _;
use serde_json::{Map, Value, json};

use crate::stats::{Micros, micros};

/// Guest RAM in MiB.
pub const MEMORY_MIB: u32 = 256;
/// The pages that a guest with 7 MiB dirty has written: [`RUNS`] runs of [`RUN`] pages, one every
/// [`STRIDE`] pages from [`FIRST`] on, which is all over its RAM.
const RUNS: u32 = 112;
const RUN: u32 = 16;
const STRIDE: u32 = 580;
const FIRST: u32 = 512;

/// Rounds whose figures are dropped; none when a single sample only shows that all works.
const WARM_UP: usize = 2;

/// The first page of each run of the pattern.
fn runs() -> impl Iterator<Item = u32> {
    (0..RUNS).map(|run| FIRST + run * STRIDE)
}

/// Figures by name, in microseconds.
#[derive(Debug, Default)]
pub struct Samples(BTreeMap<&'static str, Vec<f64>>);

impl Samples {
    fn add(&mut self, name: &'static str, value: f64) {
        self.0.entry(name).or_default().push(value);
    }

    /// Summaries by name.
    pub fn summary(&self) -> BTreeMap<&'static str, Micros> {
        self.0.iter().filter_map(|(name, samples)| Some((*name, micros(samples)?))).collect()
    }
}

/// Takes `n` samples of everything.
///
/// # Errors
/// When KVM or the host does not let a floor be measured; machines that misbehave panic.
pub fn measure(n: usize) -> anyhow::Result<Samples> {
    let mut floor = floor::Floor::new().context("the bare system calls cannot be measured")?;
    let mut bench = guest::Bench::new();
    let mut samples = Samples::default();
    let warm_up = if n > 1 { WARM_UP } else { 0 };
    for round in 0..n + warm_up {
        let mut dropped = Samples::default();
        let kept = if round < warm_up { &mut dropped } else { &mut samples };
        floor.create(kept)?;
        bench.clone_cold(kept);
        floor.assign(kept)?;
        bench.clone_warm(kept);
        floor.copy(kept);
        bench.tree(kept);
        floor.copy(kept);
        bench.all_dirty(kept);
    }
    Ok(samples)
}

fn micros_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

/// Figures that are held against others: the name, and how much it may be at most.
const BARS: [(&str, Bar); 7] = [
    ("clone_warm_first_exit", Bar::Limit(500.0)),
    ("clone_warm_first_exit", Bar::Floor("floor_assign", 1.5, 100.0)),
    ("clone_cold_first_exit", Bar::Floor("floor_create", 1.3, 2000.0)),
    ("checkpoint_pause_7mib", Bar::Floor("floor_copy_7mib", 1.3, 300.0)),
    ("checkpoint_pause_256mib_async", Bar::Limit(5000.0)),
    ("rollback_7mib", Bar::Limit(1860.0)),
    ("rollback_7mib", Bar::Floor("floor_copy_7mib", 1.3, 300.0)),
];

enum Bar {
    Limit(f64),
    /// A floor's median, times, plus.
    Floor(&'static str, f64, f64),
}

/// The summary for people: all figures, then the medians against their bars.
pub fn table(summary: &BTreeMap<&'static str, Micros>) -> String {
    let mut text = format!("{:<32}{:>10}{:>10}{:>6}\n", "microseconds", "p50", "p99", "n");
    for (name, Micros { p50, p99, n }) in summary {
        text += &format!("{name:<32}{p50:>10.0}{p99:>10.0}{n:>6}\n");
    }
    for (name, bar) in BARS {
        let Some(found) = summary.get(name) else { continue };
        let (limit, what) = match bar {
            Bar::Limit(limit) => (limit, String::new()),
            Bar::Floor(floor, times, plus) => {
                let Some(below) = summary.get(floor) else { continue };
                (below.p50 * times + plus, format!(" ({times} x {floor} + {plus})"))
            }
        };
        let verdict = if found.p50 <= limit { "within" } else { "over" };
        text += &format!("{name}: {:.0} is {verdict} {limit:.0}{what}\n", found.p50);
    }
    text
}

/// The summary for programs.
pub fn json(summary: &BTreeMap<&'static str, Micros>) -> Value {
    let figures = summary.iter().map(|(name, micros)| ((*name).to_owned(), json!(micros)));
    Value::Object(figures.collect::<Map<_, _>>())
}
