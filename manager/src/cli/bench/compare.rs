//! `coppice bench compare`: two reports beside each other.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use coppice_bench::compare::{self, Comparison, Name};
use coppice_bench::model::Report;
use coppice_manager::failure::{Class, Failure, one_line};

use super::super::table::columns;
use super::journal::FORMAT;
use super::plain;

/// The most bytes of a report: far more than a run of days leaves.
const MOST_BYTES: u64 = 256 << 20;

/// Arguments of `coppice bench compare`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// report.json of the run to compare with
    first: PathBuf,
    /// report.json of the other run
    second: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the comparison.
pub(super) fn run(args: &Args) -> Result<u8, Failure> {
    let comparison = compare::reports(&read(&args.first)?, &read(&args.second)?);
    let text = match args.json {
        true => serde_json::to_string(&comparison)
            .map(|text| text + "\n")
            .map_err(|error| Failure::new(Class::Internal, error, "report it"))?,
        false => text(&comparison),
    };
    Ok(super::super::print(&text))
}

fn read(path: &Path) -> Result<Report, Failure> {
    let refused = |why: &dyn std::fmt::Display| {
        let message = format!("{} is no report: {why}", path.display());
        Failure::new(Class::Usage, message, "name the report.json of a `coppice bench --out DIR`")
    };
    let file = File::open(path).map_err(|error| refused(&error))?;
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text).map_err(|error| refused(&error))?;
    let report: Report = serde_json::from_str(&text).map_err(|error| refused(&error))?;
    if report.format != FORMAT {
        let why = format!("its format is {}, and this program knows {FORMAT}", report.format);
        return Err(refused(&why));
    }
    Ok(report)
}

fn text(comparison: &Comparison) -> String {
    let head = ["METRIC", "CONTENDER", "PARAMETERS", "FIRST", "SECOND", "SECOND/FIRST"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for change in &comparison.changes {
        let median = |summary: Option<&coppice_bench::statistics::Summary>| {
            summary.map_or("-".into(), |found| plain::number(found.p50.value, change.unit))
        };
        let ratio = change.ratio.map(|ratio| plain::ratio_text(ratio, change.differs));
        rows.push(vec![
            change.name.metric.clone(),
            change.name.contender.clone(),
            parameters(&change.name),
            median(change.first.as_ref()),
            median(change.second.as_ref()),
            ratio.unwrap_or_else(|| "-".into()),
        ]);
    }
    let mut text = columns(&rows, &[3, 4, 5]);
    text += "\nMedians, and their ratio with where it lies (95 %); * it is not 1. Samples of two \
             runs are\nnot pairs: what the host did to one of them is in it.\n";
    if comparison.partial {
        text +=
            "At least one run was broken off: its report is a part of what was to be measured.\n";
    }
    for (which, names) in [("first", &comparison.only_first), ("second", &comparison.only_second)] {
        for name in names {
            let Name { metric, contender, .. } = name;
            let line = format!("only in the {which}: {metric}, {contender} {}", parameters(name));
            text += &(one_line(&line) + "\n");
        }
    }
    for (fact, first, second) in &comparison.differences {
        text += &(one_line(&format!("differs: {fact}: {first} | {second}")) + "\n");
    }
    text
}

fn parameters(name: &Name) -> String {
    let shown = name.parameters.iter().map(|(name, value)| format!("{name}={value}"));
    shown.collect::<Vec<_>>().join(" ")
}
