//! The `tiny` images: the agent and busybox, as ext4 and as an initramfs. They boot in
//! milliseconds and are what benchmarks start.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::ext4::{self, Layout};
use super::lock::Packages;
use super::tree::{Kind, Node, write_cpio};
use crate::packages::{self, Fetched, Pin};
use crate::{cache, command};

/// The package that the shell and all tools come from.
pub(super) const PACKAGE: &str = "busybox-static";

const LAYOUT: Layout = Layout {
    size: "16M",
    label: "coppice-tiny",
    // Without a journal and checksums a mount reads less, and nothing here has to survive. Blocks
    // of a page, though mke2fs would take smaller ones for this size: programs and what leads to
    // them are then read in fewer, larger pieces.
    options: &["-b", "4096", "-N", "1024", "-O", "^has_journal,^metadata_csum,^resize_inode"],
};

/// Gets the busybox package in the locked version, else in the newest.
pub(super) fn fetch(locked: &Packages) -> Result<Fetched> {
    let pin = match locked.get(PACKAGE) {
        Some(package) => Pin {
            package: PACKAGE.to_owned(),
            version: package.version.clone(),
            sha256: package.sha256.clone(),
        },
        None => packages::newest(PACKAGE)?,
    };
    packages::fetch(&pin, "cargo xtask rootfs --update-lock")
}

/// Unpacks busybox from its package into the cache and returns the binary's path.
pub(super) fn unpack(package: &Fetched) -> Result<PathBuf> {
    let key: String = package.sha256.chars().take(32).collect();
    let entry = cache::entry("busybox", &key, PACKAGE, |dir| {
        let tree = dir.join("tree");
        command::run(Command::new("dpkg-deb").arg("-x").arg(&package.file).arg(&tree))?;
        // /bin is a directory of its own in packages of older releases.
        let binary = ["bin/busybox", "usr/bin/busybox"].map(|path| tree.join(path));
        let binary = binary.iter().find(|path| path.is_file()).context("there is no busybox")?;
        fs::rename(binary, dir.join("busybox")).context("cannot keep busybox")?;
        fs::remove_dir_all(&tree).context("cannot remove the unpacked package")
    })?;
    Ok(entry.join("busybox"))
}

/// Makes the ext4 image.
pub(super) fn ext4(image: &Path, nodes: &[Node], scratch: &Path) -> Result<()> {
    ext4::create(image, &LAYOUT)?;
    ext4::add(image, nodes, scratch)
}

/// Makes the initramfs.
pub(super) fn cpio(archive: &Path, nodes: &[Node]) -> Result<()> {
    let file = File::create(archive).context("cannot make the archive")?;
    let mut out = BufWriter::new(file);
    write_cpio(nodes, &mut out)?;
    out.flush().context("cannot write the archive")
}

/// The whole tree, directories before their contents.
pub(super) fn tree(agent: &Path, busybox: &Path) -> Result<Vec<Node>> {
    let applets = command::output(Command::new(busybox).arg("--list-full"))?;
    let directory = |path: &&str| Node::new(path, Kind::Directory, 0o755);
    let directories = [
        "bin", "dev", "etc", "home", "mnt", "proc", "run", "sbin", "sys", "usr", "usr/bin",
        "usr/sbin", "var", "var/log",
    ];
    let mut nodes: Vec<Node> = directories.iter().map(directory).collect();
    for path in ["tmp", "var/tmp"] {
        nodes.push(Node::new(path, Kind::Directory, 0o1777));
    }
    nodes.push(Node::new("root", Kind::Directory, 0o700));
    let mut home = Node::new("home/user", Kind::Directory, 0o755);
    home.owner = 1000;
    nodes.push(home);
    // The kernel opens the console before anything could mount /dev.
    nodes.push(Node::new("dev/console", Kind::Device(5, 1), 0o600));
    nodes.push(Node::new("dev/null", Kind::Device(1, 3), 0o666));
    let file = |path, text, mode| Node::new(path, Kind::Text(text), mode);
    nodes.extend([
        file(
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
            0o644,
        ),
        file("etc/group", "root:x:0:\nuser:x:1000:\n", 0o644),
        file("etc/shadow", "root:*:20454:0:99999:7:::\nuser:*:20454:0:99999:7:::\n", 0o640),
        file("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n", 0o644),
        file("etc/hostname", "localhost\n", 0o644),
        file("etc/resolv.conf", super::RESOLV_CONF, 0o644),
        file("etc/machine-id", "", 0o644),
    ]);
    nodes.push(Node::new("bin/busybox", Kind::File(busybox.to_owned()), 0o755));
    // init is the agent's.
    let applets = applets.lines().filter(|path| !matches!(*path, "bin/busybox" | "sbin/init"));
    nodes.extend(applets.map(|path| Node::new(path, Kind::Link("/bin/busybox".into()), 0o777)));
    nodes.extend(super::agent_nodes(agent, "sbin/init"));
    nodes.push(Node::new("init", Kind::Link(super::AGENT_PATH.into()), 0o777));
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_directory_comes_before_its_contents_and_no_path_twice() {
        let dir = tempfile::tempdir().unwrap();
        let busybox = dir.path().join("busybox");
        fs::write(&busybox, "#!/bin/sh\nprintf 'bin/sh\\nsbin/init\\nusr/bin/env\\n'\n").unwrap();
        command::run(Command::new("chmod").arg("+x").arg(&busybox)).unwrap();
        let mut seen = BTreeSet::from([String::new()]);
        for node in tree(Path::new("agent"), &busybox).unwrap() {
            let parent = node.path.rsplit_once('/').map_or("", |(parent, _)| parent);
            assert!(seen.contains(parent), "{} comes before {parent}", node.path);
            assert!(seen.insert(node.path.clone()), "{} is there twice", node.path);
        }
        for path in ["bin/sh", "usr/bin/env", "sbin/init", "init", "usr/bin/coppice-agent"] {
            assert!(seen.contains(path), "{path} is missing");
        }
    }
}
