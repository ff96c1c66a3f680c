//! `cargo xtask bench`: takes the measuring program to the right lane and reports what it saw.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use coppice_lab::{HostKernel, Lab, LaneChoice, Options, paths};
use serde_json::{Map, Value};

use crate::kernel::{self, Flavour, Series};
use crate::{artifacts, command};

/// Longest wall-clock time of one round; a guest that hangs ends with it.
const LIMIT: Duration = Duration::from_secs(180);

/// Memory of the nested machine. Machines are shared by configuration: a size of its own keeps
/// other users of the lab off the benchmark's machine.
const BENCH_MEMORY_MIB: u32 = 3000;

/// Where to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchLane {
    /// The nested lab, counting instructions instead of seconds: repeatable, for ratios
    Virtual,
    /// The nested lab in ordinary time
    Lab,
    /// This host
    Direct,
    /// This host's /dev/kvm, whether it boots Linux or not: clones, checkpoints and rollbacks of
    /// micro-guests beside the bare system calls
    Micro,
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
    /// Have the nested machine run the kernel of Debian's backports, with newer features of KVM
    #[arg(long)]
    backports: bool,
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
    /// Samples of each contender; more are taken first and dropped [default: 5; micro: 50]
    #[arg(short, value_parser = clap::value_parser!(u16).range(1..))]
    n: Option<u16>,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
}

/// Builds what is measured, measures it, and reports.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.lane == BenchLane::Micro {
        return run_micro(args);
    }
    artifacts::build_binaries()?;
    let kernel = kernel::ensure(args.flavour, args.series)?.join("vmlinux");
    let tiny = artifacts::tiny_image()?;
    let options = Options {
        virtual_time: args.lane == BenchLane::Virtual,
        memory_mib: BENCH_MEMORY_MIB,
        kernel: if args.backports { HostKernel::Backports } else { HostKernel::Stable },
        ..Options::default()
    };
    let choice =
        if args.lane == BenchLane::Direct { LaneChoice::Direct } else { LaneChoice::Nested };
    let lab = Lab::open(choice, &options)?;
    eprintln!("bench: lane {} ({})", lab.lane(), lab.reason());
    let scratch = lab.scratch()?;
    let root = boot_root(&scratch)?;
    let memory = args.memory.to_string();
    let mut common = vec!["--kernel".to_owned(), text(&kernel)];
    common.extend(["--memory".into(), memory]);
    let mut machine = vec!["--vmm".to_owned(), text(&release("coppice-vmm"))];
    machine.extend(["--cpus".into(), args.cpus.to_string()]);
    for peer in &args.peer {
        machine.extend(["--peer".into(), bring_peer(peer, &scratch)?]);
    }
    let all = |what: &str, own: &[String], parts: &[&[String]]| {
        let mut argv = vec![what.to_owned()];
        argv.extend_from_slice(own);
        parts.iter().for_each(|part| argv.extend_from_slice(part));
        argv
    };
    let image = ["--image".to_owned(), text(&tiny)];
    let boot = all("boot", &["--root".into(), text(&root)], &[&common, &machine]);
    let coppice = ["--coppice".to_owned(), text(&release("coppice"))];
    let first = all("first-output", &coppice, &[&common, &image]);
    let restore = all("restore", &image, &[&common, &machine]);
    let mut series = Samples::new(&lab, args.n.unwrap_or(5).into());
    if lab.lane().is_nested() {
        huge_pages(&lab, "never")?;
        series.take(&boot, "overhead with huge pages off", |sample| {
            sample.retain(|name, _| name == "contender" || name == "pss_kib");
        })?;
        huge_pages(&lab, "always")?;
        series.take(&boot, "boot", |sample| {
            sample.remove("pss_kib");
        })?;
    } else {
        series.take(&boot, "boot", |_| ())?;
    }
    series.take(&first, "first output", |_| ())?;
    series.take(&restore, "restore", |_| ())?;
    let report = series.report()?;
    if args.json {
        println!("{report}");
    } else {
        println!("{}", serde_json::to_string_pretty(&report)?);
    }
    Ok(if series.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Measures micro-guests on this host. The table goes to standard error.
fn run_micro(args: &Args) -> anyhow::Result<ExitCode> {
    artifacts::build_micro()?;
    let mut bench = Command::new(release("coppice-bench"));
    bench.args(["micro", "-n", &args.n.unwrap_or(50).to_string()]);
    let output = bench.stderr(std::process::Stdio::inherit()).output();
    let output = output.context("the measuring program does not start")?;
    if !output.status.success() {
        bail!("micro-guests could not be measured ({}); see the output above", output.status);
    }
    if args.json {
        print!("{}", String::from_utf8(output.stdout).context("the report is not text")?);
    }
    Ok(ExitCode::SUCCESS)
}

/// Sets the nested machine's transparent huge pages. Stock kernels have them on, which is what
/// boots are measured with; what a VMM itself takes is measured with them off, because one huge
/// page more or less would hide it.
fn huge_pages(lab: &Lab, mode: &str) -> anyhow::Result<()> {
    let script = format!("echo {mode} > /sys/kernel/mm/transparent_hugepage/enabled");
    let exit = lab.command(["sh", "-c", &script]).run()?;
    if !exit.status.success() {
        bail!("transparent huge pages cannot be set to {mode}: {}", exit.status);
    }
    Ok(())
}

/// Samples taken so far, raw.
struct Samples<'lab> {
    lab: &'lab Lab,
    rounds: usize,
    raw: String,
    failed: usize,
}

impl<'lab> Samples<'lab> {
    fn new(lab: &'lab Lab, rounds: usize) -> Self {
        Self { lab, rounds, raw: String::new(), failed: 0 }
    }

    /// Runs the measuring program once for each round and once before, whose figures are dropped.
    /// A round that fails or hangs is reported and counted, never replaced.
    fn take(
        &mut self,
        args: &[String],
        what: &str,
        mut trim: impl FnMut(&mut Map<String, Value>),
    ) -> anyhow::Result<()> {
        for round in 0..=self.rounds {
            let mut argv = vec![text(&release("coppice-bench"))];
            argv.extend(args.iter().cloned());
            let mut out = Vec::new();
            let errors = &mut std::io::stderr().lock();
            match self.lab.command(argv).timeout(LIMIT).run_to(&mut out, errors) {
                Ok(exit) if exit.status.success() => {}
                Ok(exit) => self.fail(what, round, &exit.status.to_string()),
                Err(error) => self.fail(what, round, &error.to_string()),
            }
            for line in String::from_utf8_lossy(&out).lines() {
                let mut sample: Map<String, Value> =
                    serde_json::from_str(line).with_context(|| format!("not a sample: {line}"))?;
                eprintln!("bench: {what}, round {round}: {line}");
                trim(&mut sample);
                if round > 0 {
                    self.raw.push_str(&serde_json::to_string(&sample)?);
                    self.raw.push('\n');
                }
            }
        }
        Ok(())
    }

    fn fail(&mut self, what: &str, round: usize, why: &str) {
        eprintln!("bench: {what}, round {round} FAILED: {why}");
        self.failed += 1;
    }

    /// Keeps the raw samples and has them summarised.
    fn report(&self) -> anyhow::Result<Value> {
        let raw = paths::target_dir().join("coppice/bench.jsonl");
        fs::write(&raw, &self.raw)
            .with_context(|| format!("{} cannot be written", raw.display()))?;
        eprintln!("bench: raw samples in {}", raw.display());
        let input = fs::File::open(&raw).context("the raw samples cannot be read")?;
        let output = Command::new(release("coppice-bench"))
            .arg("report")
            .stdin(input)
            .output()
            .context("the measuring program does not start")?;
        if !output.status.success() {
            bail!("no report: {}", String::from_utf8_lossy(&output.stderr));
        }
        let mut report: Map<String, Value> = serde_json::from_slice(&output.stdout)?;
        report.insert("lane".into(), self.lab.lane().name().into());
        report.insert("failed_rounds".into(), self.failed.into());
        Ok(Value::Object(report))
    }
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
