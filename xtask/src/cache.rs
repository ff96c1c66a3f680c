//! The cache of big artefacts (kernels, root file systems), keyed by what they are made from.
//!
//! An entry is a directory that appears whole, by one rename, or not at all. Whoever builds an
//! entry holds its lock; others wait and then find it done. A build that died leaves a temporary
//! directory, which the next holder of the lock removes.

use std::fmt::Write as _;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::command::HoldInterrupts;
use crate::progress;

/// Collects what an artefact is made from; equal ingredients give equal keys.
#[derive(Default)]
pub(crate) struct Key(Sha256);

impl Key {
    /// Adds one named ingredient. Lengths are hashed too, so that no two lists look alike.
    pub(crate) fn add(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        for part in [name.as_bytes(), value.as_ref()] {
            self.0.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
            self.0.update(part);
        }
        self
    }

    /// The key as a directory name: 32 hexadecimal digits.
    pub(crate) fn finish(self) -> String {
        let mut name = hex(&self.0.finalize());
        name.truncate(32);
        name
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The SHA-256 digest of a file's content, in hexadecimal.
pub(crate) fn sha256_file(path: &Path) -> Result<String> {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let mut digest = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(hex(&digest.finalize())),
                n => digest.update(&buffer[..n]),
            }
        }
    };
    read().with_context(|| format!("cannot read {}", path.display()))
}

/// The root of this project's cache: `$XDG_CACHE_HOME/coppice`, else `~/.cache/coppice`.
pub(crate) fn root() -> Result<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = from("XDG_CACHE_HOME")
        .filter(|path| path.is_absolute())
        .or_else(|| from("HOME").map(|home| home.join(".cache")));
    match base {
        Some(base) => Ok(base.join("coppice")),
        None => bail!("no place for the cache; set HOME or XDG_CACHE_HOME"),
    }
}

/// The root of this checkout.
pub(crate) fn workspace() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}

/// Where this checkout keeps what its programs run with: the value of `COPPICE_HOME`.
pub(crate) fn home() -> PathBuf {
    workspace().join("target/coppice/home")
}

/// Returns the entry `kind/key`, made by `build` in a temporary directory when it is missing.
///
/// `label` names the artefact in what the user reads.
///
/// # Errors
/// Those of `build`, and of the file system; nothing of a failed build stays.
pub(crate) fn entry(
    kind: &str,
    key: &str,
    label: &str,
    build: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    entry_in(&root()?.join(kind), key, label, build)
}

fn entry_in(
    parent: &Path,
    key: &str,
    label: &str,
    build: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let entry = parent.join(key);
    if entry.is_dir() {
        return Ok(entry);
    }
    fs::create_dir_all(parent)
        .with_context(|| format!("cannot make the cache directory {}", parent.display()))?;
    let _lock = lock(&parent.join(format!("{key}.lock")), label)?;
    if entry.is_dir() {
        return Ok(entry);
    }
    let _held = HoldInterrupts::new();
    let prefix = format!(".{key}.");
    remove_stale(parent, &prefix)?;
    let temporary = tempfile::Builder::new()
        .prefix(&prefix)
        .tempdir_in(parent)
        .with_context(|| format!("cannot make a directory in {}", parent.display()))?;
    build(temporary.path()).map_err(|error| explain_space(error, parent))?;
    publish(temporary.path(), &entry)?;
    Ok(entry)
}

/// Takes the lock at `path`, saying so when another process has it.
pub(crate) fn lock(path: &Path, label: &str) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress::step(format_args!("{label}: another process is building it; waiting"));
            file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    Ok(file)
}

fn remove_stale(parent: &Path, prefix: &str) -> Result<()> {
    let context = || format!("cannot tidy {}", parent.display());
    for child in fs::read_dir(parent).with_context(context)? {
        let child = child.with_context(context)?;
        if child.file_name().to_string_lossy().starts_with(prefix) {
            progress::step("removing what an interrupted build left");
            fs::remove_dir_all(child.path()).with_context(context)?;
        }
    }
    Ok(())
}

fn publish(temporary: &Path, entry: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let context = || format!("cannot put {} in place", entry.display());
    // Temporary directories are private; the cache is the user's to share.
    fs::set_permissions(temporary, fs::Permissions::from_mode(0o755)).with_context(context)?;
    for file in fs::read_dir(temporary).with_context(context)? {
        let path = file.with_context(context)?.path();
        File::open(&path).and_then(|file| file.sync_all()).with_context(context)?;
    }
    fs::rename(temporary, entry).with_context(context)
}

/// Adds the remedy when a build failed for want of disk space.
fn explain_space(error: anyhow::Error, place: &Path) -> anyhow::Error {
    let full = error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|io| {
            matches!(io.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
        }) || cause.to_string().contains("No space left on device")
    });
    if full {
        let remedy = format!(
            "the disk of {} is full; free some space or point XDG_CACHE_HOME elsewhere",
            place.display()
        );
        return error.context(remedy);
    }
    error
}

/// Checks that `place` has `bytes` free for a build.
pub(crate) fn check_space(place: &Path, bytes: u64, label: &str) -> Result<()> {
    let stat = nix::sys::statvfs::statvfs(place)
        .with_context(|| format!("cannot look at the disk of {}", place.display()))?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    if free < bytes {
        bail!(
            "{label} needs {} free in {}, which has {}; free some space or point XDG_CACHE_HOME elsewhere",
            progress::size(bytes),
            place.display(),
            progress::size(free)
        );
    }
    Ok(())
}

/// Replaces the file at `path` in one step.
pub(crate) fn write_file(path: &Path, text: &str) -> Result<()> {
    let context = || format!("cannot write {}", path.display());
    let temporary = path.with_extension("new");
    fs::write(&temporary, text).with_context(context)?;
    fs::rename(&temporary, path).with_context(context)
}

/// Makes the file at `path` by `build` in a temporary directory beside it, unless it was made from
/// the same `key` before. For artefacts that change too often to keep every version.
///
/// # Errors
/// Those of `build`, and of the file system; the file is then as it was.
pub(crate) fn keyed_file(
    path: &Path,
    key: &str,
    label: &str,
    build: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str()))
    else {
        bail!("{} is no place for a file", path.display());
    };
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    let _lock = lock(&parent.join(format!(".{name}.lock")), label)?;
    let key_path = parent.join(format!(".{name}.key"));
    if path.is_file() && fs::read_to_string(&key_path).is_ok_and(|made_from| made_from == key) {
        return Ok(());
    }
    let prefix = format!(".{name}.tmp.");
    remove_stale(parent, &prefix)?;
    let temporary = tempfile::Builder::new()
        .prefix(&prefix)
        .tempdir_in(parent)
        .with_context(|| format!("cannot make a directory in {}", parent.display()))?;
    let new = temporary.path().join(name);
    build(&new).map_err(|error| explain_space(error, parent))?;
    let context = || format!("cannot put {} in place", path.display());
    // Without the key a crash between the two renames only means another build.
    match fs::remove_file(&key_path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(context);
        }
        _ => {}
    }
    fs::rename(&new, path).with_context(context)?;
    write_file(&key_path, key)
}

/// Makes `link` point to `target`, in one step, whatever was there before.
pub(crate) fn link(target: &Path, link: &Path) -> Result<()> {
    let context = || format!("cannot link {} to {}", link.display(), target.display());
    let parent = link.parent().with_context(context)?;
    fs::create_dir_all(parent).with_context(context)?;
    let place =
        tempfile::Builder::new().prefix(".link.").tempdir_in(parent).with_context(context)?;
    let temporary = place.path().join("link");
    symlink(target, &temporary).with_context(context)?;
    fs::rename(&temporary, link).with_context(context)
}

#[cfg(test)]
#[path = "cache/tests.rs"]
mod tests;
