//! `cargo xtask test`: runs every check of the project.

use std::process::ExitCode;

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Runs every check of the project.
pub(crate) fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("cargo xtask test is not written yet")
}
