//! `cargo xtask kernel`: builds the guest kernels.

use std::process::ExitCode;

/// Arguments of `cargo xtask kernel`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Builds the guest kernels.
pub(crate) fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("cargo xtask kernel is not written yet")
}
