//! `cargo xtask kernel`: builds the guest kernels from Debian's kernel source.
//!
//! A flavour is a list of configuration fragments in `kernel-config/`. What is built is cached by
//! everything it is made from, and linked into `target/coppice/home/kernels/`.

mod build;
mod config;
mod source;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use crate::{cache, command, packages, progress};
use config::Wanted;

/// Debian packages that building a kernel takes.
const BUILD_PACKAGES: &[&str] = &[
    "bc",
    "binutils",
    "bison",
    "cpio",
    "flex",
    "gcc",
    "libc6-dev",
    "libelf-dev",
    "libssl-dev",
    "lz4",
    "make",
    "perl",
    "xz-utils",
];

/// The files of a cache entry that a home directory links to.
const FILES: [&str; 4] = ["vmlinux", "bzImage", "config", "System.map"];

/// Arguments of `cargo xtask kernel`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Without options this builds `agent` and `micro` of the default series, or finds them in the cache
(~/.cache/coppice/kernel). They appear as target/coppice/home/kernels/FLAVOUR/vmlinux; kernels of
another series as FLAVOUR-SERIES. A first build takes some minutes per flavour.

Fragments: kernel-config/*.config. Source pins: kernel-config/sources.toml.")]
pub(crate) struct Args {
    /// Build only this flavour
    #[arg(long, value_enum)]
    flavour: Option<Flavour>,
    /// The kernel series to build
    #[arg(long, value_enum, default_value_t)]
    series: Series,
    /// Pin the newest source packages of the archive and end
    #[arg(long, conflicts_with_all = ["flavour", "series"])]
    update_pins: bool,
}

/// What a guest kernel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Flavour {
    /// Real agent work: containers, networks, file systems, eBPF
    Agent,
    /// The smallest and fastest boot
    Micro,
    /// The kernel's own tinyconfig plus virtio: what `micro` is measured against
    Plain,
}

impl Flavour {
    /// The name in paths and on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Micro => "micro",
            Self::Plain => "plain",
        }
    }

    /// Fragments in the order they apply. Those marked with a series may be absent.
    fn fragments(self, series: Series) -> Vec<(String, bool)> {
        let own = self.name();
        let shared: &[&str] = if self == Self::Plain { &[] } else { &["guest"] };
        shared
            .iter()
            .chain([&own])
            .flat_map(|name| {
                [
                    (format!("{name}.config"), true),
                    (format!("{name}.{}.config", series.name()), false),
                ]
            })
            .collect()
    }
}

/// A kernel series that Debian maintains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Series {
    /// The preferred series
    #[default]
    #[value(name = "6.12")]
    V6_12,
    /// The series of Debian 12
    #[value(name = "6.1")]
    V6_1,
}

impl Series {
    /// The name in paths and on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::V6_12 => "6.12",
            Self::V6_1 => "6.1",
        }
    }
}

/// Builds the kernels that the arguments ask for and says where they are.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    command::watch_interrupts();
    if args.update_pins {
        source::update_pins()?;
        return Ok(ExitCode::SUCCESS);
    }
    let flavours = match args.flavour {
        Some(flavour) => vec![flavour],
        None => vec![Flavour::Micro, Flavour::Agent],
    };
    for flavour in flavours {
        println!("{}", ensure(flavour, args.series)?.join("vmlinux").display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes sure that a kernel is built and linked into the home directory; returns the directory
/// there, which holds `vmlinux`, `bzImage`, `config` and `System.map`.
///
/// # Errors
/// When the source cannot be had, an option is lost or the build fails.
pub(crate) fn ensure(flavour: Flavour, series: Series) -> Result<PathBuf> {
    command::watch_interrupts();
    let label = format!("kernel {} {}", flavour.name(), series.name());
    let wanted = wanted(flavour, series)?;
    packages::require("building kernels", BUILD_PACKAGES)?;
    let source = source::fetch(series)?;
    let job = build::Job { flavour, series, wanted: &wanted, source: &source, label: &label };
    let entry = cache::entry("kernel", &job.key()?, &label, |dir| job.build(dir))?;
    let home = cache::home().join("kernels").join(home_name(flavour, series));
    for file in FILES {
        cache::link(&entry.join(file), &home.join(file))?;
    }
    let size = fs::metadata(entry.join("vmlinux")).map_or(0, |data| data.len());
    progress::step(format_args!(
        "{label}: {} {}, vmlinux {}",
        source.package,
        source.version,
        progress::size(size)
    ));
    Ok(home)
}

fn home_name(flavour: Flavour, series: Series) -> String {
    if series == Series::default() {
        flavour.name().to_owned()
    } else {
        format!("{}-{}", flavour.name(), series.name())
    }
}

fn wanted(flavour: Flavour, series: Series) -> Result<Wanted> {
    let dir = cache::workspace().join("kernel-config");
    let mut wanted = Wanted::default();
    for (name, required) in flavour.fragments(series) {
        let path = dir.join(&name);
        if required || path.exists() {
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            wanted.add(&name, &text)?;
        }
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_default_series_has_the_plain_name() {
        assert_eq!(home_name(Flavour::Agent, Series::V6_12), "agent");
        assert_eq!(home_name(Flavour::Micro, Series::V6_1), "micro-6.1");
    }

    #[test]
    fn a_flavour_builds_on_the_shared_fragment_and_the_baseline_does_not() {
        let names = |flavour: Flavour| -> Vec<String> {
            flavour.fragments(Series::V6_1).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(
            names(Flavour::Micro),
            ["guest.config", "guest.6.1.config", "micro.config", "micro.6.1.config"]
        );
        assert_eq!(names(Flavour::Plain), ["plain.config", "plain.6.1.config"]);
    }

    #[test]
    fn both_flavours_keep_what_the_machine_needs() {
        for flavour in [Flavour::Agent, Flavour::Micro] {
            let options = wanted(flavour, Series::V6_12).unwrap().to_kconfig();
            for option in ["PVH", "VMGENID", "PARAVIRT_CLOCK", "VIRTIO_MMIO", "VIRTIO_VSOCKETS"] {
                let line = format!("CONFIG_{option}=y\n");
                assert!(options.contains(&line), "{} lacks {option}", flavour.name());
            }
            assert!(options.contains("# CONFIG_MODULES is not set\n"));
        }
    }
}
