//! The few figures of a report that the project holds itself to, as one JSON object.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::model::Report;
use crate::schedule::AGAIN;

/// What is told, by metric.
const METRICS: [&str; 10] = [
    "boot_ms",
    "boot_first_output_ms",
    "restore_first_output_ms",
    "restore_prepared_first_output_ms",
    "rollback_first_output_ms",
    "kill_restore_first_output_ms",
    "snapshot_full_ms",
    "snapshot_diff_ms",
    "snapshot_full_pause_ms",
    "overhead_pss_kib",
];

/// The figures of every contender, each with `p50`, `p95` and `n`; the ratios of the first
/// contender's medians to the others'; and those of its two halves, which are the noise. Warm-up
/// samples are left out. Of several parameters the first are taken.
#[must_use]
pub fn of(report: &Report) -> Value {
    let mut values: BTreeMap<&str, BTreeMap<&str, Vec<f64>>> = BTreeMap::new();
    for series in report.series.iter().filter(|series| METRICS.contains(&&*series.metric)) {
        let own = values.entry(&series.contender).or_default();
        own.entry(&series.metric).or_insert_with(|| {
            let counted = series.samples.iter().filter(|sample| !sample.warm_up);
            counted.map(|sample| sample.value).collect()
        });
    }
    let mut told = Map::new();
    for (contender, metrics) in &values {
        if contender.ends_with(AGAIN) {
            continue;
        }
        let figures = metrics.iter().filter_map(|(metric, values)| {
            let figure =
                json!({ "p50": rank(values, 50)?, "p95": rank(values, 95)?, "n": values.len() });
            Some(((*metric).to_owned(), figure))
        });
        told.insert((*contender).to_owned(), Value::Object(figures.collect()));
    }
    let (mut ratios, mut noise) = (Map::new(), Map::new());
    if let Some(first) = report.contenders.first()
        && let Some(own) = values.get(&*first.name)
    {
        for (contender, theirs) in &values {
            let compared = compare(own, theirs);
            if *contender == first.name {
            } else if contender.ends_with(AGAIN) {
                noise = compared;
            } else {
                ratios.insert(format!("{}/{contender}", first.name), Value::Object(compared));
            }
        }
    }
    told.insert("ratios".into(), Value::Object(ratios));
    told.insert("a_a".into(), Value::Object(noise));
    told.insert("lane".into(), json!(report.lane));
    told.insert("complete".into(), json!(report.complete));
    told.insert("failed".into(), json!(report.failures.len()));
    Value::Object(told)
}

/// Ratios of medians, for what both have.
fn compare(
    own: &BTreeMap<&str, Vec<f64>>,
    theirs: &BTreeMap<&str, Vec<f64>>,
) -> Map<String, Value> {
    let ratios = own.iter().filter_map(|(metric, ours)| {
        let (ours, theirs) = (rank(ours, 50)?, rank(theirs.get(metric)?, 50)?);
        (theirs > 0.0).then(|| ((*metric).to_owned(), json!(ours / theirs)))
    });
    ratios.collect()
}

/// Nearest-rank percentile, `percent` from 1 to 100; nothing of nothing.
#[must_use]
pub fn rank(values: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}
