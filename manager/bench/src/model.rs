//! What a benchmark found: the types of `report.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A whole report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub format: u32,
    pub coppice: Version,
    pub command: Vec<String>,
    pub started: String,
    pub finished: Option<String>,
    pub complete: bool,
    pub seed: u64,
    pub lane: String,
    pub machine: MachineInfo,
    pub settings: Settings,
    pub contenders: Vec<Contender>,
    pub series: Vec<Series>,
    pub failures: Vec<Failure>,
}
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Version { pub version: String, pub revision: String }
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineInfo(pub BTreeMap<String, String>);
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {}
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Contender { pub name: String, pub version: String, pub program: String, pub kind: String }
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit { Ms, KiB, Count, MiBPerS, PerS }
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    pub scenario: String, pub metric: String, pub unit: Unit, pub contender: String,
    pub parameters: BTreeMap<String, String>, pub samples: Vec<Sample>,
}
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample { pub round: u32, pub order: u64, pub at_ms: f64, pub value: f64, pub stages: Vec<Stage>, pub warm_up: bool }
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stage { pub name: String, pub ms: f64 }
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure { pub contender: String, pub scenario: String, pub round: Option<u32>, pub message: String }
