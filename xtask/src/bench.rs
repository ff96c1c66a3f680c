//! `cargo xtask bench`: takes the measuring program to the right lane and reports what it saw.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use coppice_lab::{Lab, LaneChoice, Options, paths};
use serde_json::{Map, Value};

use crate::kernel::{self, Flavour, Series};
use crate::{artifacts, command};

/// Longest wall-clock time of one measuring program.
const LIMIT: Duration = Duration::from_secs(1800);

/// Memory of the nested machine. Machines are shared by configuration: a size of its own keeps
/// other users of the lab off the benchmark's machine.
const BENCH_MEMORY_MIB: u32 = 3000;

/// Kernel command line that every contender of the boot benchmark gets, besides its root device:
/// the options that Firecracker's documents recommend, with a console that says nothing itself.
const OPTIONS: &str = "console=ttyS0 quiet loglevel=0 reboot=k panic=-1 8250.nr_uarts=1 \
                       i8042.noaux i8042.nomux i8042.dumbkbd";

/// Where to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchLane {
    /// The nested lab, counting instructions instead of seconds: repeatable, for ratios
    Virtual,
    /// The nested lab in ordinary time
    Lab,
    /// This host
    Direct,
}

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Times of the virtual lane count one nanosecond for each instruction of \
                        the host kernel, the VMM and the guest together. They do not see cache \
                        misses or what a hardware VM exit costs.")]
pub(crate) struct Args {
    /// Where to measure
    #[arg(long, value_enum, default_value = "virtual")]
    lane: BenchLane,
    /// A peer to measure beside Coppice, as firecracker=PATH (a static binary)
    #[arg(long, value_name = "NAME=PATH")]
    peer: Vec<String>,
    /// Guest kernel series
    #[arg(long, value_enum, default_value_t)]
    series: Series,
    /// Guest kernel flavour
    #[arg(long, value_enum, default_value = "micro")]
    flavour: Flavour,
    /// Guest memory in MiB
    #[arg(long, default_value_t = 128)]
    memory: u32,
    /// vCPUs of the guest
    #[arg(long, default_value_t = 1)]
    cpus: u8,
    /// Samples of each contender; one more is taken first and dropped
    #[arg(short, default_value_t = 5)]
    n: usize,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
}

/// Builds what is measured, measures it, and reports.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    artifacts::build_binaries()?;
    build_benches()?;
    let kernel = kernel::ensure(args.flavour, args.series)?.join("vmlinux");
    let tiny = artifacts::tiny_image()?;
    let options = Options {
        virtual_time: args.lane == BenchLane::Virtual,
        memory_mib: BENCH_MEMORY_MIB,
        ..Options::default()
    };
    let choice =
        if args.lane == BenchLane::Direct { LaneChoice::Direct } else { LaneChoice::Nested };
    let lab = Lab::open(choice, &options)?;
    eprintln!("bench: lane {} ({})", lab.lane(), lab.reason());
    let scratch = lab.scratch()?;
    let root = boot_root(&scratch)?;
    let mut boot = vec!["boot".to_owned(), "--vmm".into(), text(&release("coppice-vmm"))];
    boot.extend(["--kernel".into(), text(&kernel), "--root".into(), text(&root)]);
    boot.extend(["--memory".into(), args.memory.to_string(), "--cpus".into()]);
    boot.extend([args.cpus.to_string(), "--options".into(), OPTIONS.into()]);
    boot.extend(["-n".into(), args.n.to_string()]);
    for peer in &args.peer {
        boot.extend(["--peer".into(), bring_peer(peer, &scratch)?]);
    }
    let mut report = measure(&lab, boot)?;
    let mut first = vec!["first-output".to_owned(), "--coppice".into(), text(&release("coppice"))];
    first.extend(["--kernel".into(), text(&kernel), "--image".into(), text(&tiny)]);
    first.extend(["--memory".into(), args.memory.to_string(), "-n".into(), args.n.to_string()]);
    merge(&mut report, measure(&lab, first)?);
    ratios(&mut report);
    if args.json {
        println!("{}", Value::Object(report));
    } else {
        println!("{}", serde_json::to_string_pretty(&report)?);
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the measuring program in the lane; its last line of output is a JSON object.
fn measure(lab: &Lab, args: Vec<String>) -> anyhow::Result<Map<String, Value>> {
    let mut argv = vec![text(&release("coppice-bench"))];
    argv.extend(args);
    let output = lab.command(argv).timeout(LIMIT).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    eprint!("{errors}");
    if !output.status.success() {
        bail!("the measuring program failed: {}", output.status);
    }
    let stdout = String::from_utf8(output.stdout).context("the report is not text")?;
    let line = stdout.lines().last().context("the measuring program reported nothing")?;
    serde_json::from_str(line).context("the report cannot be read")
}

/// Adds what `more` measured, contender by contender.
fn merge(report: &mut Map<String, Value>, more: Map<String, Value>) {
    for (contender, values) in more {
        match (report.get_mut(&contender).and_then(Value::as_object_mut), values) {
            (Some(known), Value::Object(values)) => known.extend(values),
            (_, values) => {
                report.insert(contender, values);
            }
        }
    }
}

/// Adds `ratios`: Coppice's median over each peer's, for every quantity that both have.
fn ratios(report: &mut Map<String, Value>) {
    let median = |values: &Value| values.get("p50").and_then(Value::as_f64);
    let Some(own) = report.get("coppice").and_then(Value::as_object).cloned() else { return };
    let mut all = Map::new();
    for (peer, values) in report.iter().filter(|(name, _)| *name != "coppice") {
        let mut ratios = Map::new();
        for (name, value) in &own {
            let theirs = values.get(name).and_then(median);
            if let (Some(ours), Some(theirs)) = (median(value), theirs)
                && theirs > 0.0
            {
                ratios.insert(name.clone(), (ours / theirs).into());
            }
        }
        all.insert(format!("coppice/{peer}"), Value::Object(ratios));
    }
    if !all.is_empty() {
        report.insert("ratios".into(), Value::Object(all));
    }
}

fn build_benches() -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--release", "-p", "coppice-benches"]).current_dir(paths::checkout());
    command::run(&mut build)
}

/// A small read-only root file system whose init is the benchmark's.
fn boot_root(scratch: &Path) -> anyhow::Result<PathBuf> {
    let tree = tempfile::tempdir().context("no temporary directory")?;
    for dir in ["dev", "proc", "sys"] {
        fs::create_dir(tree.path().join(dir)).context("the root cannot be filled")?;
    }
    fs::copy(release("bench-init"), tree.path().join("bench-init"))
        .context("the benchmark's init cannot be copied")?;
    let image = scratch.join("bench-root.ext4");
    let _ = fs::remove_file(&image);
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-O", "^has_journal", "-d"]).arg(tree.path());
    mke2fs.arg(&image).arg("8M");
    command::run(&mut mke2fs)?;
    Ok(image)
}

/// Copies a peer's binary to where the lane sees it.
fn bring_peer(peer: &str, scratch: &Path) -> anyhow::Result<String> {
    let (name, path) = peer.split_once('=').context("--peer wants NAME=PATH")?;
    let copy = scratch.join(format!("peer-{name}"));
    fs::copy(path, &copy).with_context(|| format!("{path} cannot be copied"))?;
    Ok(format!("{name}={}", copy.display()))
}

fn release(name: &str) -> PathBuf {
    paths::release_dir().join(name)
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
