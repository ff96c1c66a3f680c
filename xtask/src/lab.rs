//! `cargo xtask lab`: runs a command on the best lane this machine has.

use std::process::ExitCode;

/// Arguments of `cargo xtask lab`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Runs a command on the best lane this machine has.
pub(crate) fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("cargo xtask lab is not written yet")
}
