//! `cargo xtask rootfs`: builds the guest root file systems.

use std::process::ExitCode;

/// Arguments of `cargo xtask rootfs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Builds the guest root file systems.
pub(crate) fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("cargo xtask rootfs is not written yet")
}
