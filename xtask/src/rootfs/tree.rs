//! A file tree as a list, and its two forms: a cpio archive and a script for debugfs.
//!
//! Owners, modes and device files come from the list and not from files on disk, so that an image
//! needs no root to build and comes out the same everywhere.

use std::fmt::Write as _;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::EPOCH;

/// What a node is.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// A directory, which comes before what is in it.
    Directory,
    /// A file with the content of a file on disk.
    File(PathBuf),
    /// A file with this content.
    Text(&'static str),
    /// A symbolic link to this target.
    Link(String),
    /// A character device with its major and minor number.
    Device(u32, u32),
}

/// One node of a tree.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// The path without a leading slash.
    pub(super) path: String,
    pub(super) kind: Kind,
    /// The permission bits.
    pub(super) mode: u32,
    /// The owner, both user and group.
    pub(super) owner: u32,
}

impl Node {
    /// A node that root owns.
    pub(super) fn new(path: &str, kind: Kind, mode: u32) -> Self {
        Self { path: path.to_owned(), kind, mode, owner: 0 }
    }

    /// The mode with the file type, as in `st_mode`.
    fn full_mode(&self) -> u32 {
        let kind = match self.kind {
            Kind::Directory => 0o040_000,
            Kind::File(_) | Kind::Text(_) => 0o100_000,
            Kind::Link(_) => 0o120_000,
            Kind::Device(..) => 0o020_000,
        };
        kind | self.mode
    }
}

/// Writes `nodes` as an uncompressed cpio archive in the `newc` format, as the kernel unpacks it.
///
/// # Errors
/// When a file cannot be read, the archive not written, or a size is beyond the format's 4 GiB.
pub(super) fn write_cpio(nodes: &[Node], out: &mut impl Write) -> Result<()> {
    for (inode, node) in (1_u32..).zip(nodes) {
        let content = match &node.kind {
            Kind::File(path) => {
                fs::read(path).with_context(|| format!("cannot read {}", path.display()))?
            }
            Kind::Text(text) => text.as_bytes().to_vec(),
            Kind::Link(target) => target.as_bytes().to_vec(),
            Kind::Directory | Kind::Device(..) => Vec::new(),
        };
        let device =
            if let Kind::Device(major, minor) = node.kind { (major, minor) } else { (0, 0) };
        let entry = Entry { inode, mode: node.full_mode(), owner: node.owner, device };
        entry.write(&node.path, &content, out)?;
    }
    Entry { inode: 0, mode: 0, owner: 0, device: (0, 0) }.write("TRAILER!!!", &[], out)
}

/// The header fields of a cpio entry that vary.
struct Entry {
    inode: u32,
    mode: u32,
    owner: u32,
    device: (u32, u32),
}

impl Entry {
    fn write(&self, name: &str, content: &[u8], out: &mut impl Write) -> Result<()> {
        let size = u32::try_from(content.len()).with_context(|| format!("{name} is too large"))?;
        let name_size = u32::try_from(name.len() + 1).context("a name is too long")?;
        let (major, minor) = self.device;
        let fields = [
            self.inode, self.mode, self.owner, self.owner, 1, EPOCH, size, 0, 0, major, minor,
            name_size, 0,
        ];
        let mut header = String::from("070701");
        for field in fields {
            write!(header, "{field:08x}").context("cannot encode a header")?;
        }
        header.push_str(name);
        header.push('\0');
        let context = "cannot write the archive";
        out.write_all(header.as_bytes()).context(context)?;
        out.write_all(padding(header.len())).context(context)?;
        out.write_all(content).context(context)?;
        out.write_all(padding(content.len())).context(context)
    }
}

/// The zeros up to the next multiple of four.
fn padding(length: usize) -> &'static [u8] {
    &[0; 3][..(4 - length % 4) % 4]
}

/// The commands that make debugfs add `nodes` to a file system. Files named only here are written
/// into `scratch`.
pub(super) fn debugfs_script(nodes: &[Node], scratch: &Path) -> Result<String> {
    let mut script = String::new();
    let mut line = |text: String| {
        script.push_str(&text);
        script.push('\n');
    };
    for (number, node) in nodes.iter().enumerate() {
        let (parent, name) = node.path.rsplit_once('/').unwrap_or(("", &node.path));
        // debugfs splits its command lines at blanks.
        if name.is_empty() || node.path.contains(char::is_whitespace) {
            bail!("the path `{}` cannot be put into an image", node.path);
        }
        line(format!("cd /{parent}"));
        match &node.kind {
            Kind::Directory => line(format!("mkdir {name}")),
            Kind::File(from) => line(format!("write {} {name}", from.display())),
            Kind::Text(text) => {
                let from = scratch.join(number.to_string());
                fs::write(&from, text)
                    .with_context(|| format!("cannot write {}", from.display()))?;
                line(format!("write {} {name}", from.display()));
            }
            Kind::Link(target) => line(format!("symlink {name} {target}")),
            Kind::Device(major, minor) => line(format!("mknod {name} c {major} {minor}")),
        }
        line(format!("sif {name} mode 0{:o}", node.full_mode()));
        line(format!("sif {name} uid {}", node.owner));
        line(format!("sif {name} gid {}", node.owner));
        for field in ["atime", "ctime", "mtime", "crtime"] {
            line(format!("sif {name} {field} @{EPOCH}"));
        }
    }
    Ok(script)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn nodes() -> Vec<Node> {
        let mut home = Node::new("home", Kind::Directory, 0o750);
        home.owner = 1000;
        vec![
            home,
            Node::new("home/note", Kind::Text("hello"), 0o644),
            Node::new("link", Kind::Link("home/note".into()), 0o777),
        ]
    }

    #[test]
    fn cpio_reads_the_archive_back() {
        let mut archive = Vec::new();
        write_cpio(&nodes(), &mut archive).unwrap();
        assert_eq!(archive.len() % 4, 0);
        let mut cpio = Command::new("cpio")
            .args(["-itv", "--numeric-uid-gid", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        cpio.stdin.take().unwrap().write_all(&archive).unwrap();
        let listing = String::from_utf8(cpio.wait_with_output().unwrap().stdout).unwrap();
        let lines: Vec<Vec<_>> =
            listing.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][..4], ["drwxr-x---", "1", "1000", "1000"]);
        assert_eq!(lines[1][4], "5");
        assert!(listing.trim_end().ends_with("link -> home/note"), "{listing}");
    }

    #[test]
    fn padding_fills_to_four_bytes() {
        for length in 0..9 {
            let padding = padding(length).len();
            assert!(padding < 4 && (length + padding).is_multiple_of(4), "{length}");
        }
    }

    #[test]
    fn a_path_that_debugfs_would_split_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let node = Node::new("a b", Kind::Directory, 0o755);
        assert!(debugfs_script(&[node], scratch.path()).is_err());
    }
}
