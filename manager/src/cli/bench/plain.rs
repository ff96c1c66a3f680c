//! A report as text: a table for people, and all samples as CSV.

use coppice_bench::model::{Report, Series, Unit};
use coppice_bench::{measures, schedule};

use super::super::table::columns;

/// The table: each metric's contenders one below the other, with the ratio of the first one's
/// median to theirs; then who was left out, and what failed.
pub(super) fn text(report: &Report) -> String {
    let head = ["METRIC", "CONTENDER", "PARAMETERS", "P50", "P95", "N", "RATIO"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut series: Vec<&Series> = report.series.iter().collect();
    let place = |series: &Series| report.series.iter().position(|one| one.metric == series.metric);
    series.sort_by_key(|series| (place(series), sizes(series)));
    let first = report.contenders.first().map_or("", |contender| &contender.name);
    for one in &series {
        let values = counted(one);
        let own = series.iter().find(|other| {
            other.contender == first && other.metric == one.metric && sizes(other) == sizes(one)
        });
        let ratio = own.filter(|own| own.contender != one.contender).and_then(|own| {
            Some(format!(
                "{:.3}",
                measures::rank(&counted(own), 50)? / measures::rank(&values, 50)?
            ))
        });
        let figure = |percent| {
            measures::rank(&values, percent).map_or("-".into(), |value| number(value, one.unit))
        };
        let parameters =
            one.parameters.iter().filter(|(name, value)| !(**name == "cache" && *value == "warm"));
        let parameters: Vec<_> =
            parameters.map(|(name, value)| format!("{name}={value}")).collect();
        rows.push(vec![
            one.metric.clone(),
            one.contender.clone(),
            parameters.join(" "),
            figure(50),
            figure(95),
            values.len().to_string(),
            ratio.unwrap_or_default(),
        ]);
    }
    let mut text = columns(&rows, &[3, 4, 5, 6]);
    let again = schedule::AGAIN;
    text +=
        &format!("\nRATIO is {first} over the other, of medians; that of{again} is the noise.\n");
    for one in &report.left_out {
        text += &format!("left out of {}: {} ({})\n", one.scenario, one.contender, one.message);
    }
    for one in &report.failures {
        text += &format!("FAILED: {}, {}: {}\n", one.scenario, one.contender, one.message);
    }
    text
}

/// What has to agree for two series to be compared.
fn sizes(series: &Series) -> Vec<(&String, &String)> {
    let compared = |name: &str| ["memory_mib", "vcpus", "cache", "concurrency"].contains(&name);
    series.parameters.iter().filter(|(name, _)| compared(name)).collect()
}

fn counted(series: &Series) -> Vec<f64> {
    let counted = series.samples.iter().filter(|sample| !sample.warm_up);
    counted.map(|sample| sample.value).collect()
}

fn number(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Ms => format!("{value:.2} ms"),
        Unit::KiB => format!("{value:.0} KiB"),
        Unit::Count => format!("{value:.0}"),
        Unit::MiBPerS => format!("{value:.1} MiB/s"),
        Unit::PerS => format!("{value:.1}/s"),
    }
}

/// All samples, one a line.
pub(super) fn csv(report: &Report) -> String {
    let mut text = String::from(
        "scenario,metric,unit,contender,parameters,round,order,at_ms,warm_up,value,stages\n",
    );
    for series in &report.series {
        let join = |pairs: Vec<String>| quoted(&pairs.join(";"));
        let parameters =
            join(series.parameters.iter().map(|(name, value)| format!("{name}={value}")).collect());
        for sample in &series.samples {
            let stages = join(
                sample.stages.iter().map(|stage| format!("{}={}", stage.name, stage.ms)).collect(),
            );
            text += &format!(
                "{},{},{:?},{},{parameters},{},{},{},{},{},{stages}\n",
                series.scenario,
                series.metric,
                series.unit,
                quoted(&series.contender),
                sample.round,
                sample.order,
                sample.at_ms,
                sample.warm_up,
                sample.value,
            );
        }
    }
    text
}

/// A field of CSV (RFC 4180).
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}
