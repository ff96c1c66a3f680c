//! `coppice bench`: measures Coppice, and peers beside it.
//!
//! Arguments are here, what they mean for the schedule in [`setup`], what is shown and written while
//! it runs in [`journal`], and how in [`plain`]. What is measured, and how, is in the crate `coppice_bench`.

mod compare;
mod journal;
mod plain;
mod setup;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::ValueEnum;
use coppice_bench::scenario::Kind;
use coppice_bench::schedule;
use coppice_manager::failure::{Class, EXIT_SIGNAL_BASE, Failure};

use self::journal::Writer;
use self::setup::Setup;
use super::command::seconds;
use super::terminal::Signals;

/// Shown by `-h`.
pub(super) const EXAMPLES: &str = "\
Examples:
  coppice bench restore -n 20
  coppice bench boot restore --peer firecracker=/usr/bin/firecracker --out results
  coppice bench all --peer qemu=/usr/bin/qemu-system-x86_64 --memory 128,512 --cpus 1,2
  coppice bench clone -c 16 --cache cold --dir /var/tmp
  E2B_API_KEY=... coppice bench restore exec --peer e2b=http://127.0.0.1:49380
  coppice bench compare before/report.json after/report.json";

/// Shown by `--help`.
pub(super) fn long_help() -> String {
    format!("{HELP}\n\n{EXAMPLES}")
}

const HELP: &str = "\
What is timed:
  The clock starts when the request is issued and stops at the first byte of the first command's
  output. The command prints a token that was drawn for this very sample: an answer without it is
  a failure. A boot is exec of the VMM to the guest's init, which prints such a token, too.

How:
  Contenders take turns within each round (A B A B), all with the same kernel, root file system,
  memory and vCPUs, and the first one is measured against itself for the noise of the machine.
  Warm-up rounds are in the report and marked, outliers and failures are in it and never replaced.

Before you believe a figure:
  Measure on a quiet host with hardware virtualization (`coppice doctor`), a fixed clock rate, at
  least 20 rounds (-n), and read docs/benchmarking.md.

Scenarios:
  boot        exec of the VMM to the guest's init, with what the VMM takes; and to first output
  restore     a saved machine to first output: in a new process, and in a prepared one
  rollback    back to what was saved, in place or else by kill and restore, to first output
  checkpoint  saving a whole running machine, then what it wrote since
  clone       -c machines of one saved state at a time, each to first output, and their memory
  fanout      -c machines of a running one, each to first output
  exec        a command in a running machine, and -c at a time
  io          the guest's disk, and bytes out of the guest
  density     machines until memory or --most-vms ends it, all of which still answer

Peers are driven by their public interfaces; see docs/benchmarking.md for how, and for what each
of them lacks. A contender that cannot take part in a scenario is named with the reason.";

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    Boot,
    Restore,
    Clone,
    Fanout,
    Rollback,
    Checkpoint,
    Density,
    Exec,
    Io,
    All,
}

/// Page cache before a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CacheArg {
    /// Files that were read before are in it
    Warm,
    /// Dropped before every sample: all of it as root, else the guest's files
    Cold,
}

/// What else there is to do than to measure.
#[derive(Debug, clap::Subcommand)]
enum What {
    /// Put two reports beside each other
    Compare(compare::Args),
}

/// Arguments of `coppice bench`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Args {
    #[command(subcommand)]
    what: Option<What>,
    /// What to measure
    #[arg(value_enum, value_name = "SCENARIO", default_value = "all", hide_possible_values = true)]
    scenarios: Vec<Scenario>,
    /// A peer beside Coppice: firecracker=PATH, qemu=PATH, e2b=URL, or coppice=PATH, another
    /// coppice-vmm; qemu@old=PATH gives one a name of its own
    #[arg(long = "peer", value_name = "NAME=PATH|URL")]
    peers: Vec<String>,
    /// Measure the peers alone
    #[arg(long, requires = "peers")]
    peers_only: bool,
    /// Rounds that count
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    samples: u32,
    /// Rounds before them, which are kept and marked
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(..=1000))]
    warm_up: u32,
    /// Machines or commands at a time, where there are several
    #[arg(short = 'c', long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    concurrency: u32,
    /// Page cache before each sample
    #[arg(long, value_enum, value_delimiter = ',', default_value = "warm")]
    cache: Vec<CacheArg>,
    /// Sizes of the guests' memory in MiB
    #[arg(long, value_name = "MIB", value_delimiter = ',', default_value = "128")]
    memory: Vec<u32>,
    /// Numbers of the guests' vCPUs
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u8).range(1..=8))]
    cpus: Vec<u8>,
    /// Kernel: a name in COPPICE_HOME/kernels, or a path with a slash
    #[arg(long, value_name = "NAME|PATH", default_value = "micro")]
    kernel: String,
    /// Root file system, as ext4: a name in COPPICE_HOME/images, or a path with a slash
    #[arg(long, value_name = "NAME|PATH", default_value = "tiny")]
    image: String,
    /// Template of the sandboxes of an E2B service
    #[arg(long, value_name = "ID", default_value = "base")]
    template: String,
    /// How many seconds a guest has been up when it is saved
    #[arg(long, value_name = "SECS", value_parser = seconds, default_value = "3")]
    age: Duration,
    /// MiB that a guest writes between two checkpoints
    #[arg(long, value_name = "MIB", default_value_t = 8)]
    dirty: u32,
    /// MiB that `io` writes, reads and streams
    #[arg(long, value_name = "MIB", default_value_t = 8)]
    io: u32,
    /// Most machines at a time in `density`
    #[arg(long, value_name = "N", default_value_t = 100)]
    most_vms: u32,
    /// MiB of the host's memory that `density` leaves free
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    reserve: u32,
    /// Milliseconds of rest before every sample, which ends on a whole multiple of them
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pause: u32,
    /// Longest time for one answer; what takes longer failed
    #[arg(long, value_name = "SECS", value_parser = seconds, default_value = "60")]
    limit: Duration,
    /// Seed of all that is drawn by lot in the statistics
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Do not measure the first contender against itself
    #[arg(long)]
    no_noise: bool,
    /// Where copies of all files lie while it is measured [default: the temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Directory for report.json, samples.csv and report.html
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// The coppice-vmm program [default: COPPICE_VMM, else the one next to this program]
    #[arg(long, value_name = "PATH")]
    vmm: Option<PathBuf>,
}

impl Args {
    fn kinds(&self) -> Vec<Kind> {
        let wanted = |kind: &Kind| {
            self.scenarios.iter().any(|scenario| match scenario {
                Scenario::Boot => *kind == Kind::Boot,
                Scenario::Restore => *kind == Kind::Restore,
                Scenario::Clone => *kind == Kind::Clone,
                Scenario::Fanout => *kind == Kind::Fanout,
                Scenario::Rollback => *kind == Kind::Rollback,
                Scenario::Checkpoint => *kind == Kind::Checkpoint,
                Scenario::Density => *kind == Kind::Density,
                Scenario::Exec => *kind == Kind::Exec,
                Scenario::Io => *kind == Kind::Io,
                Scenario::All => true,
            })
        };
        Kind::ALL.into_iter().filter(wanted).collect()
    }
}

/// Measures; 0, or the code of the failure.
pub(super) async fn run(args: Args) -> u8 {
    match attempt(args).await {
        Ok(code) => code,
        Err(failure) => super::fail(&failure),
    }
}

/// How long a run that is broken off may take to end.
const PATIENCE: Duration = Duration::from_secs(5);

async fn attempt(args: Args) -> Result<u8, Failure> {
    if let Some(What::Compare(args)) = &args.what {
        return compare::run(args);
    }
    let mut signals = Signals::listen()
        .map_err(|e| Failure::new(Class::Host, e, "see what `coppice doctor` says"))?;
    let json = args.json;
    let setup = Setup::new(&args)?;
    let Setup { work, plan, contenders, host, paper } = setup;
    let contenders = Arc::new(contenders);
    let stop = Arc::new(AtomicBool::new(false));
    let mut writer = Writer::new(paper, args.out.clone(), stop.clone())?;
    writer.begin()?;
    let measure = {
        let contenders = contenders.clone();
        move || {
            let results = schedule::run(&plan, &contenders, &mut writer);
            (writer, results)
        }
    };
    let mut measured = tokio::task::spawn_blocking(measure);
    let signal = tokio::select! {
        measured = &mut measured => {
            drop(work);
            return match measured {
                Ok((writer, results)) => writer.conclude(&results, json),
                Err(error) => {
                    Err(Failure::new(Class::Internal, error, "report it, with the command line"))
                }
            };
        }
        signal = signals.next() => signal,
    };
    // The report on disk says that it is not complete. Without machines the schedule gets stuck
    // nowhere for long; should it, the directory goes all the same.
    stop.store(true, Ordering::Relaxed);
    host.group.end();
    let abandon = move || contenders.iter().for_each(|contender| contender.abandon());
    let _ = tokio::time::timeout(PATIENCE, tokio::task::spawn_blocking(abandon)).await;
    let _ = tokio::time::timeout(PATIENCE, measured).await;
    drop(work);
    Ok(EXIT_SIGNAL_BASE.saturating_add(signal))
}
