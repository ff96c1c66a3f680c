//! One kernel build: unpack, configure, check, compile, keep four files.
//!
//! The result depends only on what the cache key covers: no time, user, host or path gets in. The
//! build directory lies inside the source tree because the kernel then names its files relatively.

use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use super::config::Wanted;
use super::{Flavour, Series};
use crate::cache::{Key, check_space};
use crate::packages::Fetched;
use crate::{command, progress};

/// Changes whenever this file builds something else from the same ingredients.
const RECIPE: &str = "2";

/// Symbols that stay in the kernel's file; a kernel may lack some.
const KEPT_SYMBOLS: [&str; 3] = ["base_crng", "sysctl_bootid", "_vdso_rng_data"];

/// Free space that an unpacked source tree and its objects take, in bytes.
const BUILD_SPACE: u64 = 3 << 30;

/// What the kernel writes into itself about its build.
const IDENTITY: [(&str, &str); 5] = [
    ("KBUILD_BUILD_TIMESTAMP", "Thu Jan  1 00:00:00 UTC 2026"),
    ("KBUILD_BUILD_USER", "coppice"),
    ("KBUILD_BUILD_HOST", "coppice"),
    ("KBUILD_BUILD_VERSION", "1"),
    ("SOURCE_DATE_EPOCH", "1767225600"),
];

/// Variables of the caller that would change a kernel or its make.
const DROPPED: [&str; 9] = [
    "ARCH",
    "CROSS_COMPILE",
    "KBUILD_OUTPUT",
    "KCFLAGS",
    "KCONFIG_CONFIG",
    "LDFLAGS",
    "LLVM",
    "MAKEFLAGS",
    "MFLAGS",
];

/// Parts of the tree that no guest kernel compiles; leaving their code packed saves a gigabyte.
/// Kconfig and make files stay, since the whole tree's are read.
const NOT_UNPACKED: [&str; 8] = [
    "*/drivers/gpu/*.[ch]",
    "*/drivers/infiniband/*.[ch]",
    "*/drivers/media/*.[ch]",
    "*/drivers/net/ethernet/*.[ch]",
    "*/drivers/net/wireless/*.[ch]",
    "*/sound/*.[ch]",
    "*/Documentation/*.rst",
    "*/tools/testing/*",
];

/// Everything that goes into one kernel.
pub(super) struct Job<'a> {
    pub(super) flavour: Flavour,
    pub(super) series: Series,
    pub(super) wanted: &'a Wanted,
    pub(super) source: &'a Fetched,
    /// The name in what the user reads.
    pub(super) label: &'a str,
}

/// What is kept beside a kernel about its making.
#[derive(Serialize)]
struct Record<'a> {
    flavour: &'static str,
    series: &'static str,
    source: &'a Fetched,
    compiler: String,
    linker: String,
    recipe: &'static str,
}

fn first_line(program: &str) -> Result<String> {
    let text = command::output(Command::new(program).arg("--version"))?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

impl Job<'_> {
    /// The cache key: everything that the result depends on.
    pub(super) fn key(&self) -> Result<String> {
        let key = Key::default()
            .add("recipe", RECIPE)
            .add("flavour", self.flavour.name())
            .add("source", &self.source.sha256)
            .add("options", self.wanted.to_kconfig())
            .add("compiler", first_line("gcc")?)
            .add("linker", first_line("ld")?);
        Ok(IDENTITY.iter().fold(key, |key, (name, value)| key.add(name, value)).finish())
    }

    /// Builds into `dir`, which ends up with the kernel's files and nothing else.
    pub(super) fn build(&self, dir: &Path) -> Result<()> {
        check_space(dir, BUILD_SPACE, self.label)?;
        let work = dir.join("work");
        let tree = self.unpack(&work)?;
        self.configure(&tree)?;
        self.compile(&tree)?;
        self.keep(&tree.join("build"), dir)?;
        fs::remove_dir_all(&work).context("cannot remove the build directory")
    }

    fn unpack(&self, work: &Path) -> Result<PathBuf> {
        let task = progress::Task::spinner(format!("{}: unpacking the source", self.label));
        let (package, tree) = (work.join("package"), work.join("linux"));
        fs::create_dir_all(tree.join("build")).context("cannot make the build directory")?;
        command::run(Command::new("dpkg-deb").arg("-x").arg(&self.source.file).arg(&package))?;
        let archive = package.join(format!("usr/src/{}.tar.xz", self.source.package));
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(archive).arg("-C").arg(&tree).arg("--strip-components=1");
        tar.args(NOT_UNPACKED.map(|pattern| format!("--exclude={pattern}")));
        command::run(&mut tar)?;
        fs::remove_dir_all(package).context("cannot remove the unpacked package")?;
        task.done();
        Ok(tree)
    }

    fn configure(&self, tree: &Path) -> Result<()> {
        let config = tree.join("build/.config");
        if self.flavour == Flavour::Plain {
            // Later lines win; options that nobody names get Kconfig's defaults.
            command::run(make(tree).arg("tinyconfig"))?;
            let tiny = fs::read_to_string(&config).context("cannot read tinyconfig's result")?;
            fs::write(&config, tiny + &self.wanted.to_kconfig()).context("cannot write .config")?;
            command::run(make(tree).arg("olddefconfig"))?;
        } else {
            let fragment = tree.join("build/wanted.config");
            fs::write(&fragment, self.wanted.to_kconfig()).context("cannot write the fragment")?;
            // Relative to the build directory, which is where Kconfig runs.
            command::run(make(tree).arg("KCONFIG_ALLCONFIG=wanted.config").arg("allnoconfig"))?;
        }
        let text = fs::read_to_string(&config).context("cannot read the configuration")?;
        let lost = self.wanted.lost(&text);
        if lost.is_empty() {
            return Ok(());
        }
        let list: String = lost.iter().map(|option| format!("\n  {option}")).collect();
        bail!(
            "{}: {} options of kernel-config/*.config did not survive; their names or \
             dependencies differ in this series:{list}",
            self.label,
            lost.len()
        )
    }

    fn compile(&self, tree: &Path) -> Result<()> {
        let jobs = std::thread::available_parallelism().map_or(1, NonZero::get);
        let title = format!("{}: compiling with {jobs} jobs", self.label);
        let task = progress::Task::bar(title, self.steps_estimate());
        let mut make = make(tree);
        make.arg(format!("-j{jobs}")).args(["vmlinux", "bzImage"]);
        command::run_lines(&mut make, |line| {
            if is_step(line) {
                task.advance();
            }
        })?;
        task.done();
        Ok(())
    }

    /// About how many steps make prints, from earlier builds; only the progress bar needs it.
    const fn steps_estimate(&self) -> u64 {
        match self.flavour {
            Flavour::Agent => 2570,
            Flavour::Micro => 1590,
            Flavour::Plain => 1450,
        }
    }

    fn keep(&self, build: &Path, dir: &Path) -> Result<()> {
        // Symbols stay beside the kernel in System.map; the file that is loaded has only those by
        // which a VMM gives a clone random numbers of its own.
        let mut strip = Command::new("strip");
        strip.args(KEPT_SYMBOLS.map(|name| format!("--keep-symbol={name}")));
        strip.arg("-o").arg(dir.join("vmlinux")).arg(build.join("vmlinux"));
        command::run(&mut strip)?;
        for (from, to) in [
            ("arch/x86/boot/bzImage", "bzImage"),
            (".config", "config"),
            ("System.map", "System.map"),
        ] {
            fs::rename(build.join(from), dir.join(to))
                .with_context(|| format!("the build left no {from}"))?;
        }
        let record = Record {
            flavour: self.flavour.name(),
            series: self.series.name(),
            source: self.source,
            compiler: first_line("gcc")?,
            linker: first_line("ld")?,
            recipe: RECIPE,
        };
        let text = serde_json::to_string_pretty(&record).context("cannot encode the record")?;
        fs::write(dir.join("build.json"), text + "\n").context("cannot write the record")
    }
}

/// `make` in `tree` with its objects in `tree/build`, independent of the caller's environment.
fn make(tree: &Path) -> Command {
    let mut make = Command::new("make");
    make.current_dir(tree).args(["O=build", "ARCH=x86_64"]).env("LC_ALL", "C").envs(IDENTITY);
    for name in DROPPED {
        make.env_remove(name);
    }
    make
}

/// Whether make's output line tells of one finished step, such as `  CC      init/main.o`.
fn is_step(line: &str) -> bool {
    line.strip_prefix("  ").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_told_from_what_else_make_prints() {
        assert!(is_step("  CC      init/main.o"));
        assert!(is_step("  AR      built-in.a"));
        for line in ["make[1]: Entering directory", "    note: x", "  in function", ""] {
            assert!(!is_step(line), "{line}");
        }
    }

    #[test]
    fn the_key_changes_with_source_options_and_flavour() {
        let source = |sha256: &str| Fetched {
            package: "p".into(),
            version: "1".into(),
            sha256: sha256.into(),
            pinned: true,
            file: PathBuf::new(),
        };
        let wanted = |text: &str| {
            let mut wanted = Wanted::default();
            wanted.add("test", text).unwrap();
            wanted
        };
        let key = |flavour, sha256: &str, options: &str| {
            let (wanted, source) = (wanted(options), source(sha256));
            Job { flavour, series: Series::V6_12, wanted: &wanted, source: &source, label: "" }
                .key()
                .unwrap()
        };
        let base = key(Flavour::Micro, "a", "CONFIG_A=y");
        assert_eq!(base, key(Flavour::Micro, "a", "# a comment\nCONFIG_A=y\n"));
        assert_ne!(base, key(Flavour::Agent, "a", "CONFIG_A=y"));
        assert_ne!(base, key(Flavour::Micro, "b", "CONFIG_A=y"));
        assert_ne!(base, key(Flavour::Micro, "a", "CONFIG_A=m"));
    }
}
