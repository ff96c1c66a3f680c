//! ext4 images that come out the same on every run.
//!
//! mke2fs and debugfs draw a random UUID and hash seed and write the current time; both are given
//! here. What mke2fs copies from a directory keeps the change and access times of the copying, so
//! these are set afterwards.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::EPOCH;
use super::tree::{Node, debugfs_script};
use crate::command;

/// Identifies the file systems; fixed, since an image is known by its content.
const UUID: &str = "c0991ce0-0000-4000-8000-00000000c0de";

/// The first inode that a file system gives to files.
const FIRST_INODE: u64 = 11;

/// How a file system is laid out.
pub(super) struct Layout {
    /// Its virtual size, in mke2fs's notation.
    pub(super) size: &'static str,
    pub(super) label: &'static str,
    /// Further arguments of mke2fs.
    pub(super) options: &'static [&'static str],
}

/// Makes an empty file system at `image`.
pub(super) fn create(image: &Path, layout: &Layout) -> Result<()> {
    command::run(mke2fs(layout).arg(image).arg(layout.size))
}

/// Makes a file system at `image` out of an archive that has owners and device files.
///
/// `scratch` is a directory for the unpacked tree. When not run by root, fakeroot keeps the owners.
pub(super) fn create_from_tar(
    image: &Path,
    layout: &Layout,
    archive: &Path,
    scratch: &Path,
) -> Result<()> {
    let tree = scratch.join("tree");
    fs::create_dir(&tree).context("cannot make a directory for the tree")?;
    let script = "set -e; archive=$1 tree=$2; shift 2; \
                  tar --extract --file \"$archive\" --directory \"$tree\" --numeric-owner \
                  --xattrs --xattrs-include='*'; exec mke2fs -d \"$tree\" \"$@\"";
    let mke2fs = mke2fs(layout);
    let mut shell = if nix::unistd::geteuid().is_root() {
        Command::new("sh")
    } else {
        let mut fakeroot = Command::new("fakeroot");
        fakeroot.arg("sh");
        fakeroot
    };
    shell.args(["-c", script, "sh"]).arg(archive).arg(&tree).args(mke2fs.get_args());
    command::run(shell.arg(image).arg(layout.size).envs(fixed_time()))?;
    fs::remove_dir_all(&tree).context("cannot remove the unpacked tree")?;
    fix_times(image, scratch)
}

fn mke2fs(layout: &Layout) -> Command {
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-F", "-t", "ext4", "-m", "0", "-L", layout.label, "-U", UUID]);
    // The inode tables are holes already: the guest need not zero them in the background.
    command.args(["-E", &format!("hash_seed={UUID},lazy_itable_init=0,root_owner=0:0")]);
    command.args(layout.options).envs(fixed_time());
    command
}

fn fixed_time() -> [(&'static str, String); 2] {
    ["E2FSPROGS_FAKE_TIME", "SOURCE_DATE_EPOCH"].map(|name| (name, EPOCH.to_string()))
}

fn fix_times(image: &Path, scratch: &Path) -> Result<()> {
    let text = command::output(Command::new("dumpe2fs").arg("-h").arg(image))?;
    let used = used_inodes(&text)?;
    let mut script = String::new();
    for inode in (FIRST_INODE..=used).chain([2]) {
        for field in ["atime", "ctime", "crtime"] {
            // Writing to a String cannot fail.
            let _ = writeln!(script, "sif <{inode}> {field} @{EPOCH}");
        }
    }
    run_script(image, &script, scratch)
}

/// How many inodes are in use, which a fresh file system hands out in order.
fn used_inodes(dumpe2fs: &str) -> Result<u64> {
    let field = |name: &str| -> Result<u64> {
        let value = dumpe2fs.lines().find_map(|line| line.strip_prefix(name));
        let value = value.with_context(|| format!("dumpe2fs tells no `{name}`"))?;
        value.trim().parse().with_context(|| format!("dumpe2fs tells an odd `{name}`"))
    };
    field("Inode count:")?
        .checked_sub(field("Free inodes:")?)
        .context("dumpe2fs contradicts itself")
}

/// Adds `nodes` to the file system at `image` and checks that it is still sound.
pub(super) fn add(image: &Path, nodes: &[Node], scratch: &Path) -> Result<()> {
    let script = debugfs_script(nodes, scratch)?;
    run_script(image, &script, scratch)?;
    command::run(Command::new("e2fsck").arg("-fn").arg(image).envs(fixed_time()))
        .context("the image is not sound")
}

fn run_script(image: &Path, script: &str, scratch: &Path) -> Result<()> {
    let path = scratch.join("script");
    fs::write(&path, script).context("cannot write the script for debugfs")?;
    let mut debugfs = Command::new("debugfs");
    debugfs.arg("-w").arg("-f").arg(&path).arg(image).envs(fixed_time());
    let mut complaint = None;
    command::run_lines(&mut debugfs, |line| {
        if complaint.is_none() && is_complaint(line) {
            complaint = Some(line.to_owned());
        }
    })?;
    match complaint {
        Some(line) => bail!("debugfs: {line}"),
        None => Ok(()),
    }
}

/// debugfs echoes commands and names new inodes; whatever else it says is a failure, which its
/// exit code does not tell.
fn is_complaint(line: &str) -> bool {
    !(line.is_empty()
        || line.starts_with("debugfs: ")
        || line.starts_with("debugfs 1.")
        || line.starts_with("Allocated inode: "))
}

#[cfg(test)]
mod tests {
    use super::super::tree::Kind;
    use super::*;

    const LAYOUT: Layout = Layout { size: "2M", label: "test", options: &["-O", "^has_journal"] };

    fn debugfs(image: &Path, request: &str) -> String {
        command::output(Command::new("debugfs").args(["-R", request]).arg(image)).unwrap()
    }

    #[test]
    fn two_builds_of_one_tree_are_equal_and_hold_what_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let mut owned = Node::new("home", Kind::Directory, 0o750);
        owned.owner = 1000;
        let nodes = [
            owned,
            Node::new("home/note", Kind::Text("hello\n"), 0o4755),
            Node::new("console", Kind::Device(5, 1), 0o600),
            Node::new("link", Kind::Link("home/note".into()), 0o777),
        ];
        let build = |name: &str| {
            let image = dir.path().join(name);
            create(&image, &LAYOUT).unwrap();
            add(&image, &nodes, dir.path()).unwrap();
            image
        };
        let first = build("first");
        assert!(fs::read(&first).unwrap() == fs::read(build("second")).unwrap());
        assert_eq!(debugfs(&first, "cat /home/note"), "hello\n");
        let stat = debugfs(&first, "stat /home/note");
        assert!(stat.contains("Mode:  04755"), "{stat}");
        let stat = debugfs(&first, "stat /home");
        assert!(stat.contains("User:  1000   Group:  1000"), "{stat}");
        assert!(debugfs(&first, "stat /link").contains("home/note"));
        assert!(debugfs(&first, "stat /console").contains("05:01"));
    }

    #[test]
    fn a_command_that_debugfs_cannot_carry_out_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        create(&image, &LAYOUT).unwrap();
        let node = Node::new("no/such/directory/file", Kind::Text(""), 0o644);
        let error = add(&image, &[node], dir.path()).unwrap_err().to_string();
        assert!(error.contains("File not found"), "{error}");
    }

    #[test]
    fn used_inodes_are_counted() {
        assert_eq!(used_inodes("Inode count:   100\nFree inodes:  58\n").unwrap(), 42);
        assert!(used_inodes("Inode count: 1\n").is_err());
    }
}
