//! `cargo xtask bench`: takes `coppice bench` to the right lane and tells the figures that count.

mod bring;
mod revision;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use coppice_bench::measures;
use coppice_bench::model::Report;
use coppice_lab::{HostKernel, Lab, LaneChoice, Options, paths};

use crate::artifacts;
use crate::kernel::{self, Flavour, Series};

/// Longest wall-clock time of a whole run; a nested machine that hangs ends with it, and what was
/// measured until then is reported as not complete.
const LIMIT: Duration = Duration::from_secs(2 * 3600);

/// Longest time for one answer, by the clock of the lane. One that counts instructions goes slowly.
const ANSWER_SECS: u32 = 60;
const VIRTUAL_ANSWER_SECS: u32 = 10;

/// Scenarios that are measured unless others are named.
const SCENARIOS: [&str; 4] = ["boot", "restore", "rollback", "checkpoint"];

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
                        misses or what a hardware VM exit costs. What is measured, and how, is in \
                        docs/benchmarking.md.")]
pub(crate) struct Args {
    /// Scenarios of `coppice bench` [default: boot restore rollback checkpoint]
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<String>,
    /// Where to measure
    #[arg(long, value_enum, default_value = "virtual")]
    lane: BenchLane,
    /// A peer to measure beside Coppice, as firecracker=PATH (a static binary); QEMU is one wherever
    /// it is installed
    #[arg(long, value_name = "NAME=PATH")]
    peer: Vec<String>,
    /// Measure another revision of this project beside this one, in the same session; both have
    /// this one's guests
    #[arg(long, value_name = "REV")]
    ab: Option<String>,
    /// Have the nested machine run the kernel of Debian's backports, with newer features of KVM
    #[arg(long)]
    backports: bool,
    /// Guest kernel series
    #[arg(long, value_enum, default_value_t)]
    series: Series,
    /// Guest kernel flavour
    #[arg(long, value_enum, default_value = "micro")]
    flavour: Flavour,
    /// Guest memory in MiB; several with commas between
    #[arg(long, default_value = "128")]
    memory: String,
    /// vCPUs of the guest; several with commas between
    #[arg(long, default_value = "1")]
    cpus: String,
    /// Rounds that count [default: 5; micro: 50]
    #[arg(short, value_parser = clap::value_parser!(u16).range(1..))]
    n: Option<u16>,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
    /// Directory for the report, the samples and the page [default: target/coppice/bench]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// More arguments for `coppice bench`
    #[arg(last = true)]
    more: Vec<String>,
}

/// Builds what is measured, measures it, and reports.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.lane == BenchLane::Micro {
        return run_micro(args);
    }
    artifacts::build_binaries()?;
    let kernel = kernel::ensure(args.flavour, args.series)?.join("vmlinux");
    let tiny = artifacts::tiny_image()?;
    let other = args.ab.as_deref().map(revision::build).transpose()?;
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
    let mut wanted = args.peer.clone();
    wanted.extend(other.map(|(name, path)| format!("coppice@{name}={}", path.display())));
    let limit = if args.lane == BenchLane::Virtual { VIRTUAL_ANSWER_SECS } else { ANSWER_SECS };
    let mut common = vec![
        "--kernel".into(),
        text(&kernel),
        "--image".into(),
        text(&tiny),
        "--memory".into(),
        args.memory.clone(),
        "--cpus".into(),
        args.cpus.clone(),
        "--limit".into(),
        limit.to_string(),
    ];
    for peer in bring::peers(&lab, &wanted, &scratch)? {
        common.extend(["--peer".into(), peer]);
    }
    let session = Session { lab: &lab, scratch: &scratch, common };
    let scenarios: Vec<_> = match args.scenarios.is_empty() {
        true => SCENARIOS.map(str::to_owned).to_vec(),
        false => args.scenarios.clone(),
    };
    let report = measure(&session, &scenarios, args)?;
    let out = args.out.clone().unwrap_or_else(|| paths::target_dir().join("coppice/bench"));
    session.keep(&out, &report)?;
    eprintln!("bench: report in {}", out.display());
    let measures = measures::of(&report);
    if args.json {
        println!("{measures}");
    } else {
        println!("{}", serde_json::to_string_pretty(&measures)?);
    }
    let well = report.complete && report.failures.is_empty();
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Measures everything. In the nested machine, what a VMM takes is measured in a pass of its own,
/// with huge pages off, because one page of 2 MiB more or less would hide it; stock kernels have
/// them on, which is what all else is measured with.
fn measure(session: &Session<'_>, scenarios: &[String], args: &Args) -> anyhow::Result<Report> {
    let boots = scenarios.iter().any(|scenario| scenario == "boot" || scenario == "all");
    let rounds = args.n.unwrap_or(5);
    if !session.lab.lane().is_nested() || !boots {
        return session.run(scenarios, rounds, &args.more);
    }
    huge_pages(session.lab, "never")?;
    let few = rounds.min(OVERHEAD_ROUNDS);
    let overhead = session.run(&["boot".into()], few, &["--no-noise".into()])?;
    huge_pages(session.lab, "always")?;
    let mut report = session.run(scenarios, rounds, &args.more)?;
    let small = |metric: &str| metric == OVERHEAD;
    report.series.retain(|series| !small(&series.metric));
    report.series.extend(overhead.series.into_iter().filter(|series| small(&series.metric)));
    report.failures.extend(overhead.failures);
    Ok(report)
}

/// What is measured with huge pages off, and how often: it hardly differs from boot to boot.
const OVERHEAD: &str = "overhead_pss_kib";
const OVERHEAD_ROUNDS: u16 = 3;

/// Runs of `coppice bench` in one lane.
struct Session<'a> {
    lab: &'a Lab,
    scratch: &'a Path,
    common: Vec<String>,
}

impl Session<'_> {
    fn out(&self) -> PathBuf {
        self.scratch.join("bench")
    }

    /// Runs it; a run that was broken off gives the report that it left.
    fn run(&self, scenarios: &[String], rounds: u16, more: &[String]) -> anyhow::Result<Report> {
        let path = self.out().join("report.json");
        let _ = fs::remove_file(&path);
        let mut argv = vec![text(&release("coppice")), "bench".to_owned()];
        argv.extend_from_slice(scenarios);
        argv.extend_from_slice(&self.common);
        argv.extend(["-n".into(), rounds.to_string(), "--out".into(), text(&self.out())]);
        argv.extend_from_slice(more);
        let command = self.lab.command(argv).env("COPPICE_REVISION", this_revision());
        let mut table = Vec::new();
        match command.timeout(LIMIT).run_to(&mut table, &mut std::io::stderr().lock()) {
            Ok(exit) if exit.status.success() => {}
            Ok(exit) => eprintln!("bench: coppice bench ended with {}", exit.status),
            Err(error) => eprintln!("bench: BROKEN OFF: {error}"),
        }
        eprint!("{}", String::from_utf8_lossy(&table));
        let text = fs::read(&path).context("coppice bench left no report; see above")?;
        serde_json::from_slice(&text).context("the report of coppice bench is not understood")
    }

    /// Copies what the last run wrote, and the report with the pass before.
    fn keep(&self, out: &Path, report: &Report) -> anyhow::Result<()> {
        fs::create_dir_all(out).with_context(|| format!("{} cannot be made", out.display()))?;
        for entry in fs::read_dir(self.out()).context("there is no report")? {
            let entry = entry.context("there is no report")?;
            fs::copy(entry.path(), out.join(entry.file_name()))
                .with_context(|| format!("{} cannot be written", out.display()))?;
        }
        let text = serde_json::to_string_pretty(report)?;
        fs::write(out.join("report.json"), text).context("the report cannot be written")
    }
}

/// This checkout's commit, with a plus if files differ from it.
fn this_revision() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(paths::checkout()).args(args).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_default();
    let changed = git(&["status", "--porcelain"]).is_ok_and(|text| !text.is_empty());
    format!("{commit}{}", if changed { "+" } else { "" })
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

fn release(name: &str) -> PathBuf {
    paths::release_dir().join(name)
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
