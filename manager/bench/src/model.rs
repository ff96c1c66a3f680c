//! What a benchmark found: the types of `report.json`.
//!
//! A report holds every sample that was taken, in the order of their numbers, those of warm-up
//! rounds and outliers too. What follows from them is computed when it is written or shown.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::statistics::Line;

/// A whole report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this format; 1.
    pub format: u32,
    /// What measured.
    pub coppice: Version,
    /// The exact command.
    pub command: Vec<String>,
    /// When it began (RFC 3339).
    pub started: String,
    /// When it ended (RFC 3339); nothing if it has not, or was broken off.
    pub finished: Option<String>,
    /// Whether everything was measured that was to be. A report of a run that was killed says no.
    pub complete: bool,
    /// Seed of all that is drawn by lot in the statistics.
    pub seed: u64,
    /// The lane: `host`, or where `cargo xtask` took it.
    pub lane: String,
    /// What was measured on.
    pub machine: MachineInfo,
    /// How it was measured.
    pub settings: Settings,
    /// Who was measured, Coppice first.
    pub contenders: Vec<Contender>,
    /// All samples.
    pub series: Vec<Series>,
    /// Samples that could not be taken.
    pub failures: Vec<Failure>,
    /// Contenders that cannot take part in a scenario, or not in all of it, and why.
    #[serde(default)]
    pub left_out: Vec<Failure>,
    /// What the samples say, for programs; never read back, since it follows from them.
    #[serde(default, skip_deserializing)]
    pub summary: Vec<Line>,
}

/// A version of this product.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Its number.
    pub version: String,
    /// The commit, if it is known.
    pub revision: String,
}

/// Facts about a machine by name, as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineInfo(pub BTreeMap<String, String>);

/// Settings by name, as text: those that hold for the whole run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings(pub BTreeMap<String, String>);

/// Somebody who was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contender {
    /// Its name in this report.
    pub name: String,
    /// What it says of its version.
    pub version: String,
    /// Its program or URL.
    pub program: String,
    /// What it is: `coppice`, `firecracker`, `cloud-hypervisor`, `qemu` or `e2b`.
    pub kind: String,
}

/// What a value is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Unit {
    /// Milliseconds.
    Ms,
    /// KiB.
    KiB,
    /// Nothing: a number of things.
    Count,
    /// MiB per second.
    MiBPerS,
    /// Per second.
    PerS,
}

/// Samples of one thing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// The scenario.
    pub scenario: String,
    /// What was measured; its name ends with its unit.
    pub metric: String,
    /// The unit.
    pub unit: Unit,
    /// Whose: a contender's name, or the first one's with ` (again)` where it is measured against
    /// itself.
    pub contender: String,
    /// `memory_mib`, `vcpus`, `cache`, and what else tells series of one metric apart.
    pub parameters: BTreeMap<String, String>,
    /// The samples, in the order they were taken.
    pub samples: Vec<Sample>,
}

/// One sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The round, from 0, warm-up included; samples of one round are pairs.
    pub round: u32,
    /// Running number over the whole run.
    pub order: u64,
    /// When its round was over, in milliseconds since the start of the run.
    pub at_ms: f64,
    /// The value, in the series' unit.
    pub value: f64,
    /// When what was reached, for times.
    pub stages: Vec<Stage>,
    /// Whether it does not count.
    pub warm_up: bool,
}

/// A stage on the way to a sample's end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// What was reached.
    pub name: String,
    /// When, in milliseconds since the request.
    pub ms: f64,
}

/// Why a sample is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Whose.
    pub contender: String,
    /// Of which scenario.
    pub scenario: String,
    /// The round; nothing if it is about all of them.
    pub round: Option<u32>,
    /// Why.
    pub message: String,
}
