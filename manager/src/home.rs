//! Where kernels and images are kept: `COPPICE_HOME`, and how short names resolve in it.
//!
//! Layout: `kernels/NAME/vmlinux`, `images/NAME.{ext4,erofs,cpio}` and `coppice-agent`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// File name endings of images, in the order they are looked for.
const IMAGE_ENDINGS: [&str; 3] = ["ext4", "erofs", "cpio"];

/// A name that does not resolve.
#[derive(Debug, Error)]
pub enum Error {
    /// No kernel of this name.
    #[error("there is no kernel '{name}' ({})", looked_for(path))]
    NoKernel {
        /// As given.
        name: String,
        /// Where it would be.
        path: PathBuf,
    },
    /// No image of this name.
    #[error("there is no image '{name}' (looked for {}.ext4, .erofs and .cpio)", path.display())]
    NoImage {
        /// As given.
        name: String,
        /// Where it would be, without its ending.
        path: PathBuf,
    },
}

fn looked_for(path: &Path) -> String {
    format!("looked for {}", path.display())
}

/// The directory of kernels and images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    root: PathBuf,
}

impl Home {
    /// The directory that `COPPICE_HOME` names, else `/var/lib/coppice` for root, else
    /// `~/.local/share/coppice`.
    pub fn from_env() -> Self {
        let root = rustix::process::geteuid().is_root();
        Self::at(choose(std::env::var_os("COPPICE_HOME"), root, std::env::var_os("HOME")))
    }

    /// A directory chosen by the caller.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The directory itself; it need not exist.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The kernel file that `name` means: a path when it has a slash, else a kernel's name.
    ///
    /// # Errors
    /// [`Error::NoKernel`] when a name is not there; a path is returned unseen.
    pub fn kernel(&self, name: &str) -> Result<PathBuf, Error> {
        if name.contains('/') {
            return Ok(PathBuf::from(name));
        }
        let path = self.root.join("kernels").join(name).join("vmlinux");
        if path.is_file() { Ok(path) } else { Err(Error::NoKernel { name: name.into(), path }) }
    }

    /// The image file that `name` means: a path when it has a slash, else an image's name.
    ///
    /// # Errors
    /// [`Error::NoImage`] when a name is not there; a path is returned unseen.
    pub fn image(&self, name: &str) -> Result<PathBuf, Error> {
        if name.contains('/') {
            return Ok(PathBuf::from(name));
        }
        let stem = self.root.join("images").join(name);
        let found = IMAGE_ENDINGS.iter().map(|ending| with_ending(&stem, ending));
        found
            .into_iter()
            .find(|path| path.is_file())
            .ok_or_else(|| Error::NoImage { name: name.into(), path: stem })
    }

    /// Where the agent is that goes into root file systems made from directories.
    pub fn agent(&self) -> PathBuf {
        self.root.join("coppice-agent")
    }

    /// Names of the kernels present, sorted.
    pub fn kernels(&self) -> Vec<String> {
        names(&self.root.join("kernels"), |path| {
            path.join("vmlinux").is_file().then(|| path.file_name().map(OsString::from)).flatten()
        })
    }

    /// Names of the images present, sorted, each once.
    pub fn images(&self) -> Vec<String> {
        names(&self.root.join("images"), |path| {
            let ending = path.extension()?.to_str()?;
            IMAGE_ENDINGS.contains(&ending).then(|| path.file_stem().map(OsString::from)).flatten()
        })
    }
}

fn choose(explicit: Option<OsString>, root: bool, home: Option<OsString>) -> PathBuf {
    match (explicit.filter(|value| !value.is_empty()), home) {
        (Some(explicit), _) => PathBuf::from(explicit),
        (None, Some(home)) if !root => Path::new(&home).join(".local/share/coppice"),
        (None, _) => PathBuf::from("/var/lib/coppice"),
    }
}

fn with_ending(stem: &Path, ending: &str) -> PathBuf {
    let mut name = stem.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    PathBuf::from(name)
}

fn names(directory: &Path, name_of: impl Fn(&Path) -> Option<OsString>) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut found: Vec<String> = entries
        .flatten()
        .filter_map(|entry| name_of(&entry.path()))
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home_with(files: &[&str]) -> (tempfile::TempDir, Home) {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, b"x").unwrap();
        }
        let home = Home::at(dir.path());
        (dir, home)
    }

    #[test]
    fn names_resolve_and_paths_pass_through() {
        let (dir, home) = home_with(&["kernels/agent/vmlinux", "images/tiny.cpio"]);
        assert_eq!(home.kernel("agent").unwrap(), dir.path().join("kernels/agent/vmlinux"));
        assert_eq!(home.image("tiny").unwrap(), dir.path().join("images/tiny.cpio"));
        assert_eq!(home.kernel("./vmlinux").unwrap(), Path::new("./vmlinux"));
    }

    #[test]
    fn ext4_is_preferred_when_an_image_has_two_forms() {
        let (dir, home) = home_with(&["images/tiny.cpio", "images/tiny.ext4"]);
        assert_eq!(home.image("tiny").unwrap(), dir.path().join("images/tiny.ext4"));
        assert_eq!(home.images(), ["tiny"]);
    }

    #[test]
    fn a_missing_name_is_an_error_that_names_the_place() {
        let (dir, home) = home_with(&[]);
        let text = home.kernel("agent").unwrap_err().to_string();
        assert!(text.contains(dir.path().to_str().unwrap()), "{text}");
    }

    #[test]
    fn a_dotted_name_keeps_its_dots() {
        let (dir, home) = home_with(&["images/base.v2.ext4"]);
        assert_eq!(home.image("base.v2").unwrap(), dir.path().join("images/base.v2.ext4"));
    }

    #[test]
    fn the_default_depends_on_who_runs_it() {
        let user = Some(OsString::from("/home/u"));
        assert_eq!(choose(None, true, user.clone()), Path::new("/var/lib/coppice"));
        assert_eq!(choose(None, false, user.clone()), Path::new("/home/u/.local/share/coppice"));
        assert_eq!(choose(Some("/x".into()), false, user), Path::new("/x"));
    }
}
