//! Two reports beside each other, such as of two revisions or two machines.
//!
//! Their samples are not pairs, so the ratio is that of medians, and what the host did to one of
//! them alone is in it: contenders of one run are better compared by that run.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::model::{Report, Series, Unit};
use crate::statistics::{self, Estimate, Interval, Summary, Thing};

/// What one report says beside the other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// What both have.
    pub changes: Vec<Change>,
    /// What only the first one has.
    pub only_first: Vec<Name>,
    /// What only the second one has.
    pub only_second: Vec<Name>,
    /// Whether one of them is of a run that was broken off.
    pub partial: bool,
    /// Facts about the machines and settings that differ, and so may be why: the fact, in the
    /// first, in the second.
    pub differences: Vec<(String, String, String)>,
}

/// Which series it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Name {
    /// The scenario.
    pub scenario: String,
    /// What was measured.
    pub metric: String,
    /// Whose it is.
    pub contender: String,
    /// What else tells it from others.
    pub parameters: BTreeMap<String, String>,
}

/// A series in both reports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Which one.
    pub name: Name,
    /// Its unit.
    pub unit: Unit,
    /// In the first report.
    pub first: Option<Summary>,
    /// In the second one.
    pub second: Option<Summary>,
    /// Median of the second to that of the first.
    pub ratio: Option<Estimate>,
    /// Whether its interval leaves out 1.
    pub differs: Option<bool>,
}

/// Compares two reports.
#[must_use]
pub fn reports(first: &Report, second: &Report) -> Comparison {
    let (ours, theirs) = (by_name(first), by_name(second));
    let lacking = |report: &Report, others: &ByName<'_>| {
        let lacking = report.series.iter().filter(|one| !others.contains_key(&key(one)));
        lacking.map(name).collect()
    };
    let changes = first.series.iter().filter_map(|one| {
        let other = theirs.get(&key(one))?;
        Some(change(one, other, first.seed))
    });
    Comparison {
        changes: changes.collect(),
        only_first: lacking(first, &theirs),
        only_second: lacking(second, &ours),
        partial: !(first.complete && second.complete),
        differences: differences(first, second),
    }
}

fn change(one: &Series, other: &Series, seed: u64) -> Change {
    let (first, second) = (statistics::counted(one), statistics::counted(other));
    let ratio = statistics::ratio_of_medians(&second, &first, seed);
    let apart = |interval: Interval| interval.low > 1.0 || interval.high < 1.0;
    Change {
        name: name(one),
        unit: one.unit,
        first: statistics::summarise(&first, seed),
        second: statistics::summarise(&second, seed),
        ratio,
        differs: ratio.and_then(|ratio| ratio.interval).map(apart),
    }
}

type Key<'a> = (&'a str, Unit, Thing<'a>);
type ByName<'a> = BTreeMap<Key<'a>, &'a Series>;

fn key(series: &Series) -> Key<'_> {
    (&series.contender, series.unit, statistics::thing(series))
}

fn by_name(report: &Report) -> ByName<'_> {
    let mut all = ByName::new();
    for series in &report.series {
        all.entry(key(series)).or_insert(series);
    }
    all
}

fn name(series: &Series) -> Name {
    let owned = |(name, value): (&String, &String)| (name.clone(), value.clone());
    Name {
        scenario: series.scenario.clone(),
        metric: series.metric.clone(),
        contender: series.contender.clone(),
        parameters: statistics::sizes(series).into_iter().map(owned).collect(),
    }
}

fn differences(first: &Report, second: &Report) -> Vec<(String, String, String)> {
    let facts = |report: &Report| {
        let own = [
            ("lane", report.lane.clone()),
            ("coppice", format!("{} ({})", report.coppice.version, report.coppice.revision)),
            ("complete", report.complete.to_string()),
        ];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
        let programs = report.contenders.iter();
        let programs =
            programs.map(|one| (format!("version of {}", one.name), one.version.clone()));
        let mut facts: BTreeMap<String, String> = own.chain(programs).collect();
        facts.extend(report.machine.0.clone());
        facts.extend(report.settings.0.clone());
        facts
    };
    let (first, second) = (facts(first), facts(second));
    let names: std::collections::BTreeSet<_> = first.keys().chain(second.keys()).collect();
    let said = |facts: &BTreeMap<String, String>, name: &String| {
        facts.get(name).cloned().unwrap_or_else(|| "-".into())
    };
    let both =
        names.into_iter().map(|name| (name.clone(), said(&first, name), said(&second, name)));
    both.filter(|(_, first, second)| first != second).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{MachineInfo, Sample, Settings, Version};

    fn series(metric: &str, memory: &str, values: &[f64]) -> Series {
        let sample = |(round, value): (u32, &f64)| Sample {
            round,
            order: 0,
            at_ms: 0.0,
            value: *value,
            stages: Vec::new(),
            warm_up: false,
        };
        Series {
            scenario: "boot".into(),
            metric: metric.into(),
            unit: Unit::Ms,
            contender: "coppice".into(),
            parameters: BTreeMap::from([("memory_mib".into(), memory.into())]),
            samples: (0..).zip(values).map(sample).collect(),
        }
    }

    fn report(series: Vec<Series>) -> Report {
        Report {
            format: 1,
            coppice: Version { version: "1".into(), revision: "a".into() },
            command: Vec::new(),
            started: String::new(),
            finished: None,
            complete: true,
            seed: 1,
            lane: "host".into(),
            machine: MachineInfo(BTreeMap::new()),
            settings: Settings(BTreeMap::new()),
            contenders: Vec::new(),
            series,
            failures: Vec::new(),
            left_out: Vec::new(),
            summary: Vec::new(),
        }
    }

    #[test]
    fn what_got_faster_is_told_with_its_ratio() {
        let values: Vec<f64> = (100..120).map(f64::from).collect();
        let half: Vec<f64> = values.iter().map(|value| value / 2.0).collect();
        let before = report(vec![series("boot_ms", "128", &values)]);
        let after = report(vec![series("boot_ms", "128", &half)]);
        let found = reports(&before, &after);
        let [change] = found.changes.as_slice() else { panic!("{found:?}") };
        assert_eq!(change.ratio.unwrap().value, 0.5);
        assert_eq!(change.differs, Some(true));
        let [same] = reports(&before, &before).changes.try_into().unwrap();
        assert_eq!(same.differs, Some(false));
    }

    #[test]
    fn what_only_one_of_them_has_is_named_and_not_compared() {
        let before =
            report(vec![series("boot_ms", "128", &[1.0]), series("old_ms", "128", &[1.0])]);
        let mut after = report(vec![series("boot_ms", "256", &[1.0])]);
        after.lane = "nested".into();
        let found = reports(&before, &after);
        assert!(found.changes.is_empty());
        assert_eq!((found.only_first.len(), found.only_second.len()), (2, 1));
        let lane = ("lane".to_owned(), "host".to_owned(), "nested".to_owned());
        assert_eq!(found.differences, [lane]);
    }
}
