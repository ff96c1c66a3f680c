//! The steps of a full check and the commands behind them.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use clap::ValueEnum;

use super::tally::Tally;

/// Manifest of the fuzz targets.
const FUZZ: &str = "tests/fuzz/Cargo.toml";

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Step {
    /// Formatting of the whole tree
    Format,
    /// Compiler and clippy warnings, denied
    Lint,
    /// Fuzz target bodies over their seeds
    Fuzz,
    /// Unit, property and micro-guest tests of every crate
    Unit,
    /// Linux guests on the best lane
    Guests,
}

impl Step {
    const ALL: &[Self] = &[Self::Format, Self::Lint, Self::Fuzz, Self::Unit, Self::Guests];

    /// The chosen steps in their usual order; all when none was chosen.
    pub(crate) fn in_order(chosen: &[Self]) -> Vec<Self> {
        let wanted = |step: &&Self| chosen.is_empty() || chosen.contains(step);
        Self::ALL.iter().filter(wanted).copied().collect()
    }

    /// The steps that are not among `chosen`.
    pub(crate) fn left_out(chosen: &[Self]) -> Vec<Self> {
        Self::ALL.iter().filter(|step| !chosen.contains(step)).copied().collect()
    }

    /// Name on the command line and in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Format => "format",
            Self::Lint => "lint",
            Self::Fuzz => "fuzz",
            Self::Unit => "unit",
            Self::Guests => "guests",
        }
    }

    /// What the step looks at.
    pub(crate) fn purpose(self) -> &'static str {
        match self {
            Self::Format => "formatting of the whole tree",
            Self::Lint => "warnings of the compiler and of clippy, all denied",
            Self::Fuzz => "the bodies of the fuzz targets over their seeds",
            Self::Unit => "unit, property and micro-guest tests of every crate",
            Self::Guests => "Linux guests on the best lane of this machine",
        }
    }

    /// Runs the step; `false` when it found something.
    pub(crate) fn run(self, tally: &mut Tally) -> anyhow::Result<bool> {
        match self {
            Self::Format => {
                let workspace = cargo(&["fmt", "--all", "--check"], tally)?;
                // The fuzz targets are a workspace of their own.
                let fuzz = cargo(&["fmt", "--manifest-path", FUZZ, "--check"], tally)?;
                Ok(workspace && fuzz)
            }
            Self::Lint => {
                let workspace = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
                cargo(&workspace, tally)
            }
            Self::Fuzz => cargo(&["test", "--manifest-path", FUZZ, "--lib"], tally),
            Self::Unit => {
                crate::packages::require("opening the page of a benchmark", &["chromium"])?;
                let tests = ["test", "--workspace", "--exclude", "coppice-tests", "--no-fail-fast"];
                let crates = cargo(&tests, tally)?;
                // Each bench once: one that does not run here does not exist.
                let benches = cargo(&["test", "-p", "coppice-benches", "--bench", "pure"], tally)?;
                let tidy =
                    cargo(&["test", "-p", "coppice-tests", "--lib", "--test", "tidy"], tally)?;
                Ok(crates && benches && tidy)
            }
            Self::Guests => {
                crate::artifacts::build_all()?;
                crate::sdk::ensure_all()?;
                // One after the other: both measure time in places.
                let run =
                    |target| ["test", "-p", "coppice-tests", "--no-fail-fast", "--test", target];
                let guests = cargo(&run("guests"), tally)?;
                let clients = cargo(&run("sdk"), tally)?;
                Ok(guests && clients)
            }
        }
    }
}

/// Top of the checkout.
fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs cargo at the top of the checkout, shows its output and counts the tests in it.
fn cargo(args: &[&str], tally: &mut Tally) -> anyhow::Result<bool> {
    println!("$ cargo {}", args.join(" "));
    let mut child = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(args)
        .current_dir(top())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo does not start")?;
    let output = child.stdout.take().context("cargo has no output")?;
    for line in BufReader::new(output).lines() {
        let line = line.context("cargo's output cannot be read")?;
        println!("{line}");
        tally.read_line(&line);
    }
    Ok(child.wait().context("cargo cannot be waited for")?.success())
}
