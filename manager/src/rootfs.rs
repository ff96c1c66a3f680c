//! Root file systems out of directories: an ext4 image of the directory's files, with the agent in
//! it. Done with e2fsprogs, which every distribution has and which needs no root.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use thiserror::Error;

/// Where the agent is in such an image. A directory may lack every other one but the root.
const AGENT: &str = ".coppice-agent";
/// Kernel option that has it be the first process.
pub const KERNEL_OPTION: &str = "init=/.coppice-agent";
/// What guests can write to, in bytes: the least size of an image, of which only what is written
/// takes space.
const LEAST_SIZE: u64 = 8 << 30;
/// The size of an image is this many times that of its files.
const ROOM: u64 = 2;
/// Bytes that a file takes beside its content, at most: an inode and a part of a block.
const PER_FILE: u64 = 8192;

/// Why there is no image of a directory.
#[derive(Debug, Error)]
pub enum Error {
    /// A program of e2fsprogs is not there.
    #[error("'{program}' is not there")]
    Missing {
        /// The program.
        program: &'static str,
    },
    /// A program cannot be started.
    #[error("'{program}' cannot be started")]
    Start {
        /// The program.
        program: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A program failed.
    #[error("'{program}' failed: {said}")]
    Failed {
        /// The program.
        program: &'static str,
        /// The last thing it said.
        said: String,
    },
    /// The agent is not where it has to be.
    #[error("the agent is not at {}", path.display())]
    NoAgent {
        /// Where it has to be.
        path: PathBuf,
    },
    /// The image cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The image.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file of the directory cannot be looked at.
    #[error("cannot look at {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// Makes an image at `image` of everything in `directory`, and puts the program `agent` into it.
/// Owners, modes and links are those of the directory's files.
///
/// # Errors
/// [`Error`]; a part of an image may be left then.
pub fn make(directory: &Path, agent: &Path, image: &Path) -> Result<(), Error> {
    if !agent.is_file() {
        return Err(Error::NoAgent { path: agent.to_owned() });
    }
    let size = LEAST_SIZE.max(size_of(directory)?.saturating_mul(ROOM));
    // All of it is holes, so that neither the host nor the guest has to zero inode tables.
    let file = fs::OpenOptions::new().write(true).create(true).truncate(true).open(image);
    let sized = file.and_then(|file| file.set_len(size));
    sized.map_err(|source| Error::Write { path: image.to_owned(), source })?;
    let mut mke2fs = Command::new("mke2fs");
    mke2fs
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-J", "size=16"])
        .args(["-E", "lazy_itable_init=0,root_owner=0:0", "-d"])
        .args([directory, image])
        .arg(format!("{}k", size.div_ceil(1024)));
    run(&mut mke2fs, "mke2fs")?;
    let place = directory.join(AGENT);
    if fs::symlink_metadata(&place).is_ok() {
        debugfs(image, &format!("rm /{AGENT}"))?;
    }
    // Its name is ours: nothing in it has a meaning to debugfs. The agent's path may have anything.
    let mut write = Command::new("debugfs");
    write.current_dir(agent.parent().unwrap_or(Path::new("/")));
    let name = agent.file_name().unwrap_or_default().to_string_lossy();
    write.args(["-w", "-R", &format!("write \"{name}\" {AGENT}")]).arg(image);
    quiet(&mut write)?;
    debugfs(image, &format!("sif /{AGENT} mode 0100755"))?;
    debugfs(image, &format!("sif /{AGENT} uid 0"))?;
    debugfs(image, &format!("sif /{AGENT} gid 0"))
}

/// The size of everything in a directory, in bytes.
fn size_of(directory: &Path) -> Result<u64, Error> {
    let failed = |path: &Path, source| Error::Read { path: path.to_owned(), source };
    let mut size = 0u64;
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).map_err(|e| failed(&directory, e))? {
            let path = entry.map_err(|e| failed(&directory, e))?.path();
            let meta = fs::symlink_metadata(&path).map_err(|e| failed(&path, e))?;
            size = size.saturating_add(meta.size()).saturating_add(PER_FILE);
            if meta.is_dir() {
                left.push(path);
            }
        }
    }
    Ok(size)
}

fn debugfs(image: &Path, request: &str) -> Result<(), Error> {
    quiet(Command::new("debugfs").args(["-w", "-R", request]).arg(image))
}

/// Runs debugfs, whose exit code does not tell of a failure: what it says does. It always says its
/// version.
fn quiet(command: &mut Command) -> Result<(), Error> {
    let output = run(command, "debugfs")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let bad = |line: &&str| !line.starts_with("debugfs 1.") && !line.trim().is_empty();
    match said.lines().find(bad) {
        Some(line) => Err(Error::Failed { program: "debugfs", said: line.to_owned() }),
        None => Ok(()),
    }
}

fn run(command: &mut Command, program: &'static str) -> Result<Output, Error> {
    // Distributions keep these where only root looks.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin")).stdin(Stdio::null());
    let output = command.output().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Error::Missing { program },
        _ => Error::Start { program, source },
    })?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
    Err(Error::Failed { program, said: last.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn debugfs_says(image: &Path, request: &str) -> String {
        let output = Command::new("debugfs").args(["-R", request]).arg(image).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn an_image_has_what_the_directory_has_and_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let [tree, agent, image] = ["tree", "an agent", "image"].map(|name| dir.path().join(name));
        fs::create_dir_all(tree.join("etc")).unwrap();
        fs::write(tree.join("etc/motd"), "hello\n").unwrap();
        fs::write(&agent, "new").unwrap();
        // As in a directory that was itself made from such an image.
        fs::write(tree.join(AGENT), "old").unwrap();
        make(&tree, &agent, &image).unwrap();
        assert_eq!(debugfs_says(&image, "cat /etc/motd"), "hello\n");
        assert_eq!(debugfs_says(&image, &format!("cat /{AGENT}")), "new");
        let stat = debugfs_says(&image, &format!("stat /{AGENT}"));
        assert!(stat.contains("Type: regular    Mode:  0755"), "{stat}");
        let meta = fs::metadata(&image).unwrap();
        assert_eq!(meta.len(), LEAST_SIZE);
        assert!(meta.blocks() * 512 < 64 << 20, "{} bytes on disk", meta.blocks() * 512);
        let sound = Command::new("e2fsck").arg("-fn").arg(&image).output().unwrap();
        assert!(sound.status.success(), "{}", String::from_utf8_lossy(&sound.stdout));
    }

    #[test]
    fn a_directory_that_is_not_there_and_a_missing_agent_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let [agent, image] = ["agent", "image"].map(|name| dir.path().join(name));
        let gone = dir.path().join("gone");
        let error = make(&gone, &agent, &image).unwrap_err();
        assert!(matches!(error, Error::NoAgent { .. }), "{error}");
        fs::write(&agent, "agent").unwrap();
        let error = make(&gone, &agent, &image).unwrap_err();
        assert!(matches!(error, Error::Read { .. }), "{error}");
    }
}
