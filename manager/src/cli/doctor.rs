//! `coppice doctor`: what this host can do, in plain words.

use std::fmt::Write as _;
use std::path::PathBuf;

use coppice_manager::doctor::{self, Report, Status};
use coppice_manager::failure::{Class, Failure, chain};
use coppice_manager::home::Home;
use coppice_manager::{vmm, workdir};

/// Arguments of `coppice doctor`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// The coppice-vmm program [default: COPPICE_VMM, else the one next to this program]
    #[arg(long, value_name = "PATH")]
    vmm: Option<PathBuf>,
}

/// Prints what was found; 0 when sandboxes can run here.
pub(super) async fn run(args: &Args) -> u8 {
    let vmm = match vmm::locate(args.vmm.clone()) {
        Ok(vmm) => vmm,
        Err(error) => {
            let remedy = "name coppice-vmm with --vmm";
            return super::fail(&Failure::new(Class::ProgramMissing, chain(&error), remedy));
        }
    };
    let report = doctor::examine(&vmm, &Home::from_env(), &workdir::base()).await;
    let text = if args.json { json(&report) } else { plain(&report) };
    match super::print(&text) {
        0 => report.code,
        failed => failed,
    }
}

fn json(report: &Report) -> String {
    // A report holds nothing that has no JSON form.
    serde_json::to_string(report).unwrap_or_default() + "\n"
}

fn plain(report: &Report) -> String {
    let width = report.checks.iter().map(|check| check.name.len()).max().unwrap_or_default();
    let mut text = String::new();
    for check in &report.checks {
        let mark = match check.status {
            Status::Ok => "ok     ",
            Status::Note => "note   ",
            Status::Missing => "MISSING",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{mark}  {:width$}  {}", check.name, check.found);
        if let Some(remedy) = &check.remedy {
            let _ = writeln!(text, "         {:width$}  -> {remedy}", "");
        }
    }
    text.push_str(match report.ok {
        true => "\nSandboxes can run here.\n",
        false => "\nSandboxes cannot run here: see MISSING above.\n",
    });
    text
}

#[cfg(test)]
mod tests {
    use coppice_manager::doctor::Check;

    use super::*;

    #[test]
    fn a_lack_is_shown_with_its_remedy_and_the_verdict_follows() {
        let check = Check {
            name: "kvm",
            status: Status::Missing,
            found: "there is no /dev/kvm".into(),
            remedy: Some("load kvm_amd".into()),
            class: Some(Class::KvmAbsent),
        };
        let text = plain(&Report { ok: false, code: 78, checks: vec![check], probe: None });
        assert_eq!(
            text,
            "MISSING  kvm  there is no /dev/kvm\n              -> load kvm_amd\n\n\
             Sandboxes cannot run here: see MISSING above.\n"
        );
    }
}
