//! `cargo xtask ci-like`: what continuous integration runs.

use std::process::ExitCode;

/// Arguments of `cargo xtask ci-like`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Runs what continuous integration runs.
pub(crate) fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("cargo xtask ci-like is not written yet")
}
