//! `coppice fsck`: checks the store and sets right what can be.

use std::fmt::Write as _;

use coppice_manager::failure::Class;
use coppice_manager::home::Home;
use coppice_manager::store::{Finding, Report, Store};
use serde_json::{Value, json};

/// Arguments of `coppice fsck`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Also read all page data and check its checksums
    #[arg(long)]
    deep: bool,
    /// Set damaged checkpoints aside, remove what belongs to nothing and sandboxes that ended
    #[arg(long)]
    repair: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints what was found; 0 when nothing is lost and nothing is left to do.
pub(super) fn run(args: &Args) -> u8 {
    let report =
        Store::open(&Home::from_env()).and_then(|store| store.check(args.deep, args.repair));
    let report = match report {
        Ok(report) => report,
        Err(error) => return super::fail_as(&error.failure(), args.json),
    };
    let text = if args.json { as_json(&report) } else { as_text(&report, args.repair) };
    match super::print(&text) {
        0 => code(&report, args.repair),
        failed => failed,
    }
}

fn code(report: &Report, repair: bool) -> u8 {
    let left = |finding: &Finding| {
        finding.is_loss() || !repair && !matches!(finding, Finding::Foreign { .. })
    };
    if report.findings.iter().any(left) { Class::StoreDamaged.exit_code() } else { 0 }
}

fn as_json(report: &Report) -> String {
    let findings: Vec<Value> = report
        .findings
        .iter()
        .map(|finding| {
            let kind = match finding {
                Finding::Damaged { .. } => "damaged",
                Finding::Base { .. } => "base",
                Finding::Orphan { .. } => "orphan",
                Finding::Ended { .. } => "ended",
                Finding::Sandbox { .. } => "sandbox",
                Finding::Foreign { .. } => "foreign",
            };
            json!({ "kind": kind, "loss": finding.is_loss(), "message": finding.to_string() })
        })
        .collect();
    let all = json!({
        "checkpoints": report.checkpoints,
        "findings": findings,
        "repaired": report.repaired,
    });
    format!("{all}\n")
}

fn as_text(report: &Report, repair: bool) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        let mark = if finding.is_loss() { "LOSS  " } else { "tidy  " };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{mark}{finding}");
    }
    let count = report.checkpoints;
    let _ = match (report.findings.is_empty(), repair) {
        (true, _) => writeln!(text, "{count} checkpoints looked at; all is well."),
        (false, true) => {
            writeln!(text, "{count} checkpoints looked at; {} things set right.", report.repaired)
        }
        (false, false) => {
            writeln!(text, "{count} checkpoints looked at; see `coppice fsck --repair`.")
        }
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(finding: Finding) -> Report {
        Report { checkpoints: 1, findings: vec![finding], repaired: 0 }
    }

    #[test]
    fn a_loss_is_told_to_scripts_even_after_a_repair() {
        let damaged = report(Finding::Damaged { path: "/x".into(), reason: "y".into() });
        assert_eq!((code(&damaged, false), code(&damaged, true)), (86, 86));
    }

    #[test]
    fn what_was_tidied_up_is_no_failure() {
        let orphan = report(Finding::Orphan { path: "/x".into(), bytes: 1 });
        assert_eq!((code(&orphan, false), code(&orphan, true)), (86, 0));
    }
}
