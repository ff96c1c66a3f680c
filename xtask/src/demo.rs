//! `cargo xtask demo`: boots a microVM and shows what it can do.

use std::process::ExitCode;

/// Arguments of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Boots a microVM and shows what it can do.
pub(crate) fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("cargo xtask demo is not written yet")
}
