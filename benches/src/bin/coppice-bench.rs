//! Measures on the machine it runs on; `cargo xtask bench` takes it to the right one.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};
use coppice_benches::boot::{FirstCommand, boot_once, first_output_once};
use coppice_benches::machine::{Contender, Guest};
use coppice_benches::micro;
use coppice_benches::restore::{self, Setup};
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
    /// One boot of each contender: exec of the VMM to the guest's init
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
    },
    /// One run: exec of `coppice run` to the first byte of the command's output
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
    },
    /// One pass of each contender: checkpoint, restore, rollback, each to a command's first output
    Restore {
        /// The coppice-vmm binary
        #[arg(long)]
        vmm: PathBuf,
        /// A peer, as firecracker=PATH
        #[arg(long)]
        peer: Vec<String>,
        /// ELF kernel
        #[arg(long)]
        kernel: PathBuf,
        /// Image with the agent
        #[arg(long)]
        image: PathBuf,
        /// Guest memory in MiB
        #[arg(long, default_value_t = 128)]
        memory: u32,
        /// vCPUs
        #[arg(long, default_value_t = 1)]
        cpus: u8,
    },
    /// Micro-guests: clones, checkpoints and rollbacks beside the bare system calls
    Micro {
        /// Samples of each figure
        #[arg(short, default_value_t = 50)]
        n: usize,
    },
    /// Summarise samples, one JSON object a line on standard input
    Report,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().what {
        What::Boot { vmm, peer, kernel, root, memory, cpus } => {
            let local = Local::new()?;
            let guest = Guest {
                kernel: local.copy(&kernel)?,
                root: local.copy(&root)?,
                memory_mib: memory,
                vcpus: cpus,
            };
            for contender in contenders(&local, &vmm, &peer)? {
                let sample = boot_once(&contender, &guest, local.0.path())
                    .with_context(|| format!("{} did not boot", contender.name()))?;
                println!("{}", json!(sample));
            }
        }
        What::FirstOutput { coppice, kernel, image, memory } => {
            let local = Local::new()?;
            // The command line finds its VMM beside itself.
            local.copy(&coppice.with_file_name("coppice-vmm"))?;
            let run = FirstCommand {
                coppice: local.copy(&coppice)?,
                kernel: local.copy(&kernel)?,
                image: local.copy(&image)?,
                memory_mib: memory,
            };
            let ms = first_output_once(&run)?;
            println!("{}", json!({"contender": "coppice", "first_output_ms": ms}));
        }
        What::Restore { vmm, peer, kernel, image, memory, cpus } => {
            let local = Local::new()?;
            let setup = Setup {
                kernel: local.copy(&kernel)?,
                image: local.copy(&image)?,
                memory_mib: memory,
                vcpus: cpus,
                scratch: local.0.path().to_owned(),
            };
            for contender in contenders(&local, &vmm, &peer)? {
                let sample = restore::once(&contender, &setup)
                    .with_context(|| format!("{} failed", contender.name()))?;
                println!("{}", json!(sample));
            }
        }
        What::Micro { n } => {
            let summary = micro::measure(n)?.summary();
            eprint!("{}", micro::table(&summary));
            println!("{}", micro::json(&summary));
        }
        What::Report => println!("{}", report(std::io::stdin().lock())?),
    }
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

/// Coppice and the peers, each copied.
fn contenders(local: &Local, vmm: &Path, peers: &[String]) -> anyhow::Result<Vec<Contender>> {
    let mut contenders = vec![Contender::Coppice(local.copy(vmm)?)];
    for peer in peers {
        contenders.push(match parse_peer(peer)? {
            Contender::Firecracker(path) => Contender::Firecracker(local.copy(&path)?),
            other @ Contender::Coppice(_) => other,
        });
    }
    Ok(contenders)
}

fn parse_peer(text: &str) -> anyhow::Result<Contender> {
    match text.split_once('=') {
        Some(("firecracker", path)) => Ok(Contender::Firecracker(path.into())),
        _ => bail!("--peer {text} is not known; give firecracker=PATH"),
    }
}

/// Summary of every quantity of every contender, and the ratios of medians to Coppice's.
fn report(samples: impl BufRead) -> anyhow::Result<Value> {
    let mut quantities: BTreeMap<String, BTreeMap<String, Vec<f64>>> = BTreeMap::new();
    for line in samples.lines() {
        let line = line.context("the samples cannot be read")?;
        let sample: Map<String, Value> =
            serde_json::from_str(&line).with_context(|| format!("not a sample: {line}"))?;
        let contender = sample.get("contender").and_then(Value::as_str).unwrap_or("unnamed");
        let own = quantities.entry(contender.to_owned()).or_default();
        for (name, value) in &sample {
            if let Some(value) = value.as_f64() {
                own.entry(name.clone()).or_default().push(value);
            }
        }
    }
    let mut report = Map::new();
    for (contender, values) in &quantities {
        let summaries = values.iter().map(|(name, all)| (name.clone(), json!(summarise(all))));
        report.insert(contender.clone(), Value::Object(summaries.collect()));
    }
    let ratios = ratios(&quantities);
    if !ratios.is_empty() {
        report.insert("ratios".into(), Value::Object(ratios));
    }
    Ok(Value::Object(report))
}

/// Quantities of Coppice that a peer has no like of, and what they stand in for.
const STAND_INS: [(&str, &str); 2] =
    [("warm_ms", "restore_ms"), ("rollback_ms", "kill_restore_ms")];

/// Coppice's median over each peer's, for every quantity that both have, and of those that stand
/// in for one.
fn ratios(quantities: &BTreeMap<String, BTreeMap<String, Vec<f64>>>) -> Map<String, Value> {
    let Some(own) = quantities.get("coppice") else { return Map::new() };
    let mut ratios = Map::new();
    for (peer, values) in quantities.iter().filter(|(name, _)| *name != "coppice") {
        let pairs = values.iter().filter_map(|(name, theirs)| {
            let ours = summarise(own.get(name)?)?.p50;
            let theirs = summarise(theirs)?.p50;
            (theirs > 0.0).then(|| (name.clone(), json!(ours / theirs)))
        });
        let stand_ins = STAND_INS.iter().filter_map(|(ours, theirs)| {
            let ratio = summarise(own.get(*ours)?)?.p50 / summarise(values.get(*theirs)?)?.p50;
            Some((format!("{ours}/{theirs}"), json!(ratio)))
        });
        ratios.insert(format!("coppice/{peer}"), Value::Object(pairs.chain(stand_ins).collect()));
    }
    let (Some(rollback), Some(again)) = (own.get("rollback_ms"), own.get("kill_restore_ms")) else {
        return ratios;
    };
    if let (Some(rollback), Some(again)) = (summarise(rollback), summarise(again)) {
        let ratio = json!({ "rollback_ms/kill_restore_ms": rollback.p50 / again.p50 });
        ratios.insert("coppice/coppice".into(), ratio);
    }
    ratios
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_medians_and_their_ratio() {
        let samples = r#"{"contender":"coppice","boot_ms":10.0,"exits":100}
{"contender":"firecracker","boot_ms":20.0,"exits":null}
{"contender":"coppice","boot_ms":12.0,"exits":100}
{"contender":"coppice","boot_ms":11.0,"exits":102}"#;
        let report = report(samples.as_bytes()).unwrap();
        assert_eq!(report["coppice"]["boot_ms"]["p50"], 11.0);
        assert_eq!(report["coppice"]["boot_ms"]["n"], 3);
        assert_eq!(report["ratios"]["coppice/firecracker"]["boot_ms"], 0.55);
        assert!(report["ratios"]["coppice/firecracker"].get("exits").is_none());
    }
}
