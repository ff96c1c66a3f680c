//! The nested machine's initramfs: a `newc` cpio archive written by hand.
//!
//! The format (kernel `Documentation/driver-api/early-userspace/buffer-format.rst`): per file a
//! header of thirteen eight-digit hexadecimal fields, the name, the contents, each padded to four
//! bytes; a `TRAILER!!!` entry ends it. It stays uncompressed: unpacking costs the emulated CPU
//! more than reading.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::packages::Kernel;
use crate::plan::{GUEST_PLAN_PATH, GuestPlan};

/// Modules the machine's init loads, before their dependencies are resolved.
pub(crate) const MODULES: [&str; 11] = [
    "irqbypass",
    "kvm",
    "kvm-amd",
    "virtio_pci",
    "virtio_net",
    "virtio-rng",
    "9pnet_virtio",
    "9p",
    "overlay",
    "tun",
    "ext4",
];

/// Where the modules lie in the machine.
const EARLY_MODULES: &str = "/lib/early-modules";

/// End of a module's name in packages that have them compressed. In the initramfs the name stays,
/// but the contents are plain.
const PACKED: &str = ".xz";

/// Why the initramfs could not be made.
#[derive(Debug, Error)]
pub enum Error {
    /// A file that goes into it is missing or unreadable, or the archive cannot be written.
    #[error("{path}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel package does not have a module the lab needs.
    #[error("the kernel {release} has no module {module}: remove it from the lab's cache")]
    NoModule {
        /// The kernel's release.
        release: String,
        /// The module.
        module: &'static str,
    },
    /// The plan for init cannot be encoded.
    #[error("cannot encode the machine's plan")]
    Plan(#[from] serde_json::Error),
}

/// Paths of `wanted` modules and all they depend on, each after its dependencies, relative to the
/// module directory. `dependencies` is the text of `modules.dep`, `builtin` that of
/// `modules.builtin`: what is part of the kernel need not be loaded.
fn load_order(
    dependencies: &str,
    builtin: &str,
    wanted: &[&'static str],
) -> Result<Vec<String>, &'static str> {
    let lines: Vec<(&str, Vec<&str>)> = dependencies
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, needs)| (path, needs.split_whitespace().collect()))
        .collect();
    let mut seen = BTreeSet::new();
    let mut order = Vec::new();
    for name in wanted {
        let file = format!("/{name}.ko");
        let named = |path: &str| path.strip_suffix(PACKED).unwrap_or(path).ends_with(&file);
        let Some((path, needs)) = lines.iter().find(|(path, _)| named(path)) else {
            if builtin.lines().any(named) {
                continue;
            }
            return Err(*name);
        };
        // modules.dep lists all dependencies, the innermost last.
        for module in needs.iter().rev().chain([path]) {
            if seen.insert(*module) {
                order.push((*module).to_owned());
            }
        }
    }
    Ok(order)
}

/// The paths, in the machine, of the modules its init loads, in order.
pub(crate) fn modules(kernel: &Kernel) -> Result<Vec<String>, Error> {
    let index = |name| {
        let path = kernel.modules().join(name);
        fs::read_to_string(&path).map_err(|source| Error::File { path, source })
    };
    let order = load_order(&index("modules.dep")?, &index("modules.builtin")?, &MODULES)
        .map_err(|module| Error::NoModule { release: kernel.release.clone(), module })?;
    Ok(order.into_iter().map(|module| format!("{EARLY_MODULES}/{module}")).collect())
}

/// Writes the initramfs to `path`.
pub(crate) fn write(
    path: &Path,
    kernel: &Kernel,
    helper: &Path,
    busybox: &Path,
    plan: &GuestPlan,
) -> Result<(), Error> {
    let mut archive = Archive { bytes: Vec::new(), next_inode: 1, directories: BTreeSet::new() };
    archive.node("dev/console", 0o020_600, &[], (5, 1));
    archive.file("init", 0o755, &read(helper)?);
    archive.file("bin/busybox", 0o755, &read(busybox)?);
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n");
    archive.file("etc/group", 0o644, b"root:x:0:\nkvm:x:106:\n");
    archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n");
    archive.file(GUEST_PLAN_PATH.trim_start_matches('/'), 0o600, &serde_json::to_vec(plan)?);
    for module in &plan.modules {
        let relative = module.trim_start_matches(EARLY_MODULES).trim_start_matches('/');
        let plain = unpacked(&kernel.modules().join(relative))?;
        archive.file(module.trim_start_matches('/'), 0o644, &plain);
    }
    let bytes = archive.finish();
    fs::File::create(path)
        .and_then(|mut file| file.write_all(&bytes))
        .map_err(|source| Error::File { path: path.to_path_buf(), source })
}

/// A module as the kernel takes it without help.
fn unpacked(path: &Path) -> Result<Vec<u8>, Error> {
    if !path.to_string_lossy().ends_with(PACKED) {
        return read(path);
    }
    let failed = |source| Error::File { path: path.to_path_buf(), source };
    let output = Command::new("xz").args(["--decompress", "--stdout"]).arg(path).output();
    let output = output.map_err(failed)?;
    if !output.status.success() {
        return Err(failed(io::Error::other(format!("xz failed: {}", output.status))));
    }
    Ok(output.stdout)
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|source| Error::File { path: path.to_path_buf(), source })
}

struct Archive {
    bytes: Vec<u8>,
    next_inode: u32,
    directories: BTreeSet<String>,
}

impl Archive {
    fn file(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.node(name, 0o100_000 | mode, contents, (0, 0));
    }

    /// Adds an entry and, before it, the directories it lies in.
    fn node(&mut self, name: &str, mode: u32, contents: &[u8], device: (u32, u32)) {
        let parents: Vec<&str> = Path::new(name)
            .ancestors()
            .skip(1)
            .filter_map(Path::to_str)
            .filter(|parent| !parent.is_empty())
            .collect();
        for parent in parents.into_iter().rev() {
            if self.directories.insert(parent.to_owned()) {
                self.entry(parent, 0o040_755, &[], (0, 0));
            }
        }
        self.entry(name, mode, contents, device);
    }

    fn entry(&mut self, name: &str, mode: u32, contents: &[u8], device: (u32, u32)) {
        let inode = self.next_inode;
        self.next_inode = inode.saturating_add(1);
        let size = u32::try_from(contents.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(name.len().saturating_add(1)).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(b"070701");
        let links = 1;
        for field in [inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0] {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        let padded = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(padded, 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[], (0, 0));
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_load_after_what_they_need() {
        let index =
            "kernel/a.ko: kernel/b.ko kernel/c.ko\nkernel/b.ko: kernel/c.ko\nkernel/c.ko:\n";
        let order = load_order(index, "", &["a", "c"]).unwrap();
        assert_eq!(order, ["kernel/c.ko", "kernel/b.ko", "kernel/a.ko"]);
        assert_eq!(load_order(index, "kernel/e.ko\n", &["d"]).unwrap_err(), "d");
        let index = "kernel/a.ko.xz: kernel/b.ko.xz\nkernel/b.ko.xz:\n";
        let order = load_order(index, "kernel/e.ko\n", &["a", "e"]);
        assert_eq!(order.unwrap(), ["kernel/b.ko.xz", "kernel/a.ko.xz"]);
    }

    #[test]
    fn an_archive_lists_directories_before_their_files() {
        let mut archive = Archive { bytes: vec![], next_inode: 1, directories: BTreeSet::new() };
        archive.file("a/b/c", 0o644, b"hello");
        let text = String::from_utf8(archive.finish()).unwrap();
        let at = |needle: &str| text.find(needle).unwrap();
        assert!(at("a\0") < at("a/b\0") && at("a/b\0") < at("a/b/c\0"));
        assert!(at("hello") < at("TRAILER!!!"));
        assert_eq!(text.len() % 4, 0);
    }
}
