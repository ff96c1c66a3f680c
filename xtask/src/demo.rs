//! `cargo xtask demo`: boots a microVM and shows what it can do.
//!
//! The work in the microVM is `manager/examples/demo.rs`, on the manager's library. This command
//! builds what it needs, finds the lane, runs it there and shows its figures.

use std::io;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use coppice_lab::{Lab, LaneChoice, Options};
use serde::{Deserialize, Serialize};

use crate::cache;
use crate::kernel::{self, Flavour, Series};
use crate::rootfs::{self, Image};

/// Longest time for the demo's program, in wall time; emulation on a busy machine is slow.
const LIMIT: Duration = Duration::from_secs(600);

/// Arguments of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The first run installs what is missing (root) or says what to install, and builds the programs, a
guest kernel and a Debian root file system; that takes some minutes. Later runs find all of it in
the cache. Everything but the result goes to standard error.")]
pub(crate) struct Args {
    /// Print the result as one line of JSON
    #[arg(long)]
    json: bool,
    /// Use the nested lab even where this host has hardware KVM
    #[arg(long)]
    nested: bool,
}

/// What the demo's program prints, and what is passed on.
#[derive(Debug, Deserialize, Serialize)]
struct Shown {
    boot_ms: f64,
    first_output_ms: f64,
    vmm_pss_kib: u64,
    kernel: String,
    guest_python: String,
}

/// The last line of `--json`.
#[derive(Debug, Serialize)]
struct Line<'a> {
    ok: bool,
    lane: &'a str,
    #[serde(flatten)]
    shown: &'a Shown,
}

/// Boots a microVM and shows what it can do.
///
/// # Errors
/// When something cannot be built, no lane can be had, or the program fails.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let program = build()?;
    let choice = if args.nested { LaneChoice::Nested } else { LaneChoice::Best };
    step("finding a lane that boots Linux guests");
    let lab = Lab::open(choice, &Options::default())?;
    let lane = if lab.lane().is_nested() { "nested" } else { "hardware" };
    step(&format!("booting a microVM: lane {lane} ({})", lab.reason()));
    let argv = [program.to_str().context("the checkout's path is not UTF-8")?];
    let output = lab.command(argv).env("COPPICE_HOME", home()?).timeout(LIMIT).output()?;
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "the demo failed in the lane {lane}: {}", output.status);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let line = stdout.lines().last().context("the demo printed nothing")?;
    let shown: Shown = serde_json::from_str(line).context("the demo printed something else")?;
    if args.json {
        println!("{}", json(lane, &shown)?);
    } else {
        print!("{}", table(lane, lab.reason(), &shown));
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the programs, the kernel and the root file system; returns the demo's program.
fn build() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let build = |args: &[&str]| {
        child(Command::new(&cargo).args(["build", "--release"]).args(args), "the release build")
    };
    step("building coppice and coppice-vmm");
    build(&["-p", "coppice-vmm"])?;
    build(&["-p", "coppice", "--bins", "--example", "demo"])?;
    step("building the guest kernel, unless it is cached");
    kernel::ensure(Flavour::Agent, Series::default())?;
    step("building the root file system, unless it is cached");
    rootfs::ensure(Some(Image::Base))?;
    let release = "target/x86_64-unknown-linux-gnu/release/examples/demo";
    Ok(cache::workspace().join(release))
}

/// Where the kernels and images of this checkout are.
fn home() -> Result<String> {
    let home = cache::home();
    Ok(home.to_str().context("the checkout's path is not UTF-8")?.to_owned())
}

fn step(what: &str) {
    eprintln!("demo: {what}");
}

/// Runs a step whose output is for people, on standard error: standard output is the result's.
fn child(command: &mut Command, what: &str) -> Result<()> {
    command.current_dir(cache::workspace()).stdout(Stdio::from(io::stderr()));
    let status = command.status().with_context(|| format!("{what} cannot start"))?;
    if !status.success() {
        bail!("{what} failed ({status}); see its output above");
    }
    Ok(())
}

fn json(lane: &str, shown: &Shown) -> Result<String> {
    Ok(serde_json::to_string(&Line { ok: true, lane, shown })?)
}

fn table(lane: &str, reason: &str, shown: &Shown) -> String {
    let rows = [
        ("lane", format!("{lane} ({reason})")),
        ("guest kernel", shown.kernel.clone()),
        ("guest Python", shown.guest_python.clone()),
        ("boot to init", format!("{:.1} ms", shown.boot_ms)),
        ("first command's output", format!("{:.1} ms", shown.first_output_ms)),
        ("VMM memory without guest RAM", format!("{} KiB", shown.vmm_pss_kib)),
    ];
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    let lines = rows.iter().map(|(name, value)| format!("{name:width$}  {value}\n"));
    let note = match lane {
        "nested" => "Times in the nested lab are those of an emulated processor.\n",
        _ => "",
    };
    lines.chain([note.to_owned()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_has_the_documented_form() {
        let shown = Shown {
            boot_ms: 123.4,
            first_output_ms: 150.0,
            vmm_pss_kib: 2900,
            kernel: "6.12.1".into(),
            guest_python: "3.11.2".into(),
        };
        assert_eq!(
            json("nested", &shown).unwrap(),
            r#"{"ok":true,"lane":"nested","boot_ms":123.4,"first_output_ms":150.0,"vmm_pss_kib":2900,"kernel":"6.12.1","guest_python":"3.11.2"}"#
        );
    }
}
