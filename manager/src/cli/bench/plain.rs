//! A report as text: a table for people, and all samples as CSV.

use coppice_bench::model::{Report, Unit};
use coppice_bench::statistics::{Estimate, Interval, Line, Summary};
use coppice_bench::{schedule, statistics};
use coppice_manager::failure::one_line;

use super::super::table::columns;

/// The table: each metric's contenders one below the other, each with the ratio of the first one's
/// samples to its own; then who was left out, and what failed.
pub(super) fn text(report: &Report) -> String {
    let head =
        ["METRIC", "CONTENDER", "PARAMETERS", "P50", "95 %", "P95", "P99", "N", "OUT", "RATIO"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut lines: Vec<_> = report.series.iter().zip(statistics::compared(report)).collect();
    let place = |metric: &str| report.series.iter().position(|one| one.metric == metric);
    lines.sort_by_key(|(series, _)| (place(&series.metric), statistics::sizes(series)));
    rows.extend(lines.into_iter().map(|(_, line)| row(&line)));
    let mut text = columns(&rows, &[3, 4, 5, 6, 7, 8, 9]);
    let first = report.contenders.first().map_or("", |contender| &contender.name);
    let again = schedule::AGAIN;
    text += &format!(
        "\nRATIO: {first} to the other, median over the rounds; * it differs by more than {first} \
         does from itself,\nwhich the ratio of{again} shows. 95 %: where the median lies. OUT: \
         outliers, which count.\n"
    );
    if !report.complete {
        text += "The run was broken off: this is a part of what was to be measured.\n";
    }
    for one in &report.left_out {
        let line = format!("left out of {}: {} ({})", one.scenario, one.contender, one.message);
        text += &(one_line(&line) + "\n");
    }
    for one in &report.failures {
        let line = format!("FAILED: {}, {}: {}", one.scenario, one.contender, one.message);
        text += &(one_line(&line) + "\n");
    }
    text
}

fn row(line: &Line) -> Vec<String> {
    let shown = |(name, value): &(&String, &String)| !(*name == "cache" && *value == "warm");
    let parameters = line.parameters.iter().filter(shown);
    let parameters: Vec<_> = parameters.map(|(name, value)| format!("{name}={value}")).collect();
    let told = |what: &dyn Fn(&Summary) -> String| line.summary.as_ref().map_or("-".into(), what);
    let figure = |value: f64| number(value, line.unit);
    vec![
        line.metric.clone(),
        line.contender.clone(),
        parameters.join(" "),
        told(&|summary| figure(summary.p50.value)),
        told(&|summary| between(summary.p50.interval)),
        told(&|summary| figure(summary.p95.value)),
        told(&|summary| figure(summary.p99.value)),
        told(&|summary| summary.n.to_string()),
        told(&|summary| {
            if summary.outliers > 0 { summary.outliers.to_string() } else { String::new() }
        }),
        line.ratio.map_or(String::new(), |ratio| ratio_text(ratio, line.beyond_noise)),
    ]
}

/// A ratio with its interval, marked when it tells a difference.
pub(super) fn ratio_text(ratio: Estimate, beyond_noise: Option<bool>) -> String {
    let mark = if beyond_noise == Some(true) { "*" } else { "" };
    match ratio.interval {
        Some(_) => format!("{:.3} [{}]{mark}", ratio.value, between(ratio.interval)),
        None => format!("{:.3}{mark}", ratio.value),
    }
}

fn between(interval: Option<Interval>) -> String {
    interval.map_or("-".into(), |Interval { low, high }| match low.abs().max(high.abs()) {
        huge if huge >= 1e12 => format!("{low:.3e}..{high:.3e}"),
        large if large >= 1000.0 => format!("{low:.0}..{high:.0}"),
        large if large >= 10.0 => format!("{low:.2}..{high:.2}"),
        _ => format!("{low:.3}..{high:.3}"),
    })
}

pub(super) fn number(value: f64, unit: Unit) -> String {
    match unit {
        _ if value.abs() >= 1e12 => format!("{value:.3e}"),
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
