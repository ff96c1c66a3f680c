//! `cargo xtask bench`: runs the benchmarks.

use std::process::ExitCode;

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Runs the benchmarks.
pub(crate) fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("cargo xtask bench is not written yet")
}
