//! Measures micro-guests on the machine it runs on: clones, checkpoints and rollbacks beside the bare
//! system calls.

use clap::{Parser, Subcommand};
use coppice_benches::micro;

/// Measure micro-guests on this machine.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Clones, checkpoints and rollbacks beside the bare system calls
    Micro {
        /// Samples of each figure
        #[arg(short, default_value_t = 50)]
        n: usize,
    },
}

fn main() -> anyhow::Result<()> {
    let What::Micro { n } = Cli::parse().what;
    let summary = micro::measure(n)?.summary();
    eprint!("{}", micro::table(&summary));
    println!("{}", micro::json(&summary));
    Ok(())
}
