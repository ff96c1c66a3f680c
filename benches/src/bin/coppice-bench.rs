//! Measures on the machine it runs on; `cargo xtask bench` takes it to the right one.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};
use coppice_benches::boot::{FirstCommand, Sample, boot_once, first_output_once};
use coppice_benches::machine::{Contender, Guest};
use coppice_benches::stats::summarise;
use serde_json::{Map, Value, json};

/// Measure boots on this machine.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Exec of the VMM to the guest's init; contenders alternate sample by sample
    Boot {
        /// The coppice-vmm binary
        #[arg(long)]
        vmm: PathBuf,
        /// A peer, as firecracker=PATH
        #[arg(long)]
        peer: Vec<String>,
        /// ELF kernel
        #[arg(long)]
        kernel: PathBuf,
        /// Root file system with the benchmark's init at /bench-init
        #[arg(long)]
        root: PathBuf,
        /// Guest memory in MiB
        #[arg(long, default_value_t = 128)]
        memory: u32,
        /// vCPUs
        #[arg(long, default_value_t = 1)]
        cpus: u8,
        /// Kernel command line of every contender
        #[arg(long)]
        options: String,
        /// Samples of each contender, one more is taken first and dropped
        #[arg(short, default_value_t = 5)]
        n: usize,
    },
    /// Exec of `coppice run` to the first byte of the command's output
    FirstOutput {
        /// The coppice binary
        #[arg(long)]
        coppice: PathBuf,
        /// Kernel
        #[arg(long)]
        kernel: PathBuf,
        /// Image
        #[arg(long)]
        image: PathBuf,
        /// Guest memory in MiB
        #[arg(long, default_value_t = 128)]
        memory: u32,
        /// Samples, one more is taken first and dropped
        #[arg(short, default_value_t = 5)]
        n: usize,
    },
}

fn main() -> anyhow::Result<()> {
    let report = match Cli::parse().what {
        What::Boot { vmm, peer, kernel, root, memory, cpus, options, n } => {
            let local = Local::new()?;
            let guest = Guest {
                kernel: local.copy(&kernel)?,
                root: local.copy(&root)?,
                memory_mib: memory,
                vcpus: cpus,
            };
            let mut contenders = vec![Contender::Coppice(local.copy(&vmm)?)];
            for peer in peer {
                contenders.push(match parse_peer(&peer)? {
                    Contender::Firecracker(path) => Contender::Firecracker(local.copy(&path)?),
                    other @ Contender::Coppice(_) => other,
                });
            }
            boot(&contenders, &guest, &options, n, local.0.path())?
        }
        What::FirstOutput { coppice, kernel, image, memory, n } => {
            let local = Local::new()?;
            // The command line finds its VMM beside itself.
            local.copy(&coppice.with_file_name("coppice-vmm"))?;
            let run = FirstCommand {
                coppice: local.copy(&coppice)?,
                kernel: local.copy(&kernel)?,
                image: local.copy(&image)?,
                memory_mib: memory,
            };
            first_output(&run, n)?
        }
    };
    println!("{report}");
    Ok(())
}

/// A private directory in the temporary file system, so that no sample waits for a slow disk.
struct Local(tempfile::TempDir);

impl Local {
    fn new() -> anyhow::Result<Self> {
        Ok(Self(tempfile::tempdir().context("no temporary directory")?))
    }

    fn copy(&self, path: &Path) -> anyhow::Result<PathBuf> {
        let name = path.file_name().context("a file has no name")?;
        let copy = self.0.path().join(name);
        std::fs::copy(path, &copy)
            .with_context(|| format!("{} cannot be copied", path.display()))?;
        Ok(copy)
    }
}

fn parse_peer(text: &str) -> anyhow::Result<Contender> {
    match text.split_once('=') {
        Some(("firecracker", path)) => Ok(Contender::Firecracker(path.into())),
        _ => bail!("--peer {text} is not known; give firecracker=PATH"),
    }
}

fn boot(
    contenders: &[Contender],
    guest: &Guest,
    options: &str,
    n: usize,
    scratch: &Path,
) -> anyhow::Result<Value> {
    let options = format!("{options} init=/bench-init");
    let mut samples: Vec<Sample> = Vec::new();
    for round in 0..=n {
        for contender in contenders {
            let sample = boot_once(contender, guest, &options, scratch)
                .with_context(|| format!("{} did not boot", contender.name()))?;
            eprintln!("{}", json!({"round": round, "sample": sample}));
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    let mut report = Map::new();
    for contender in contenders {
        let of = |value: fn(&Sample) -> Option<f64>| {
            let own = samples.iter().filter(|s| s.contender == contender.name());
            summarise(&own.filter_map(value).collect::<Vec<_>>())
        };
        let summary = json!({
            "boot_ms": of(|s| Some(s.boot_ms)),
            "kvm_exits": of(|s| s.exits.and_then(to_f64)),
            "overhead_pss_kib": of(|s| to_f64(s.pss_kib)),
            "guest_rss_kib": of(|s| to_f64(s.guest_rss_kib)),
        });
        report.insert(contender.name().to_owned(), summary);
    }
    Ok(Value::Object(report))
}

fn first_output(run: &FirstCommand, n: usize) -> anyhow::Result<Value> {
    let mut samples = Vec::new();
    for round in 0..=n {
        let ms = first_output_once(run)?;
        eprintln!("{}", json!({"round": round, "first_output_ms": ms}));
        if round > 0 {
            samples.push(ms);
        }
    }
    Ok(json!({"coppice": {"first_output_ms": summarise(&samples)}}))
}

/// Counters are far below the point where a float loses integers.
fn to_f64(value: u64) -> Option<f64> {
    u32::try_from(value).ok().map(f64::from)
}
