//! `cargo xtask`: the project's own commands, from a fresh checkout to a booted microVM.
//!
//! This file holds the command line only. Each command lives in the module of its name and
//! exposes its arguments and one `run` function, which returns the exit code of the process.

mod artifacts;
mod bench;
mod cache;
mod command;
mod demo;
mod kernel;
mod lab;
mod packages;
mod progress;
mod rootfs;
mod sdk;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Build, run and test Coppice from this checkout.
///
/// On a fresh machine start with `cargo xtask demo`: it installs what is missing, builds
/// everything, boots a microVM and runs a few programs in it.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a microVM on this machine and show what it can do
    Demo(demo::Args),
    /// Run every check: formatting, lints, unit and property tests, micro-guests, Linux guests
    Test(test::Args),
    /// Run a command on the best lane: hardware KVM, else the nested lab
    Lab(lab::Args),
    /// Build the guest kernels from Debian's kernel source
    Kernel(kernel::Args),
    /// Build the guest root file systems
    Rootfs(rootfs::Args),
    /// Install the E2B clients that `coppice serve` is tested with
    Sdk,
    /// Run the benchmarks and keep their raw figures
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Lab(args) => lab::run(&args),
        Command::Kernel(args) => kernel::run(&args),
        Command::Rootfs(args) => rootfs::run(&args),
        Command::Sdk => sdk::run(),
        Command::Bench(args) => bench::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
