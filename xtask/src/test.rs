//! `cargo xtask test`: every check of the project, in the order in which a failure is cheapest.
//!
//! Each step is a command that is run as a person would run it, with its output shown. The steps
//! that run tests have their counts read off and added up, so that the last line says how many
//! tests ran; a step that cannot run fails, it is never passed over in silence.

mod steps;
mod tally;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;

use self::steps::Step;
use self::tally::Tally;

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Without names every step runs. The Linux-guest tests need guest kernels \
                        and root file systems; they are built first when they are missing, which \
                        takes some minutes on a fresh machine.")]
pub(crate) struct Args {
    /// Run only these steps, in their usual order
    #[arg(value_enum, value_name = "STEP")]
    steps: Vec<Step>,
}

/// Runs every check, goes on after a failed one, and ends with one summary line.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let chosen = Step::in_order(&args.steps);
    let mut tally = Tally::default();
    for step in &chosen {
        println!("== {}: {}", step.name(), step.purpose());
        let started = Instant::now();
        let passed =
            step.run(&mut tally).with_context(|| format!("step {} broke off", step.name()));
        let passed = passed.unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            false
        });
        tally.step(passed);
        println!(
            "== {}: {} in {:.0} s",
            step.name(),
            if passed { "passed" } else { "FAILED" },
            started.elapsed().as_secs_f64()
        );
        if !passed {
            tally.failed_step(step.name());
        }
    }
    for step in Step::left_out(&chosen) {
        println!("== {}: not asked for", step.name());
    }
    println!("{}", tally.summary());
    Ok(if tally.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
