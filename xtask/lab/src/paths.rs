//! Where things are on the host: the checkout, its build output, the cache.

use std::env;
use std::path::{Path, PathBuf};

/// The checkout this crate was built from.
#[must_use]
pub fn checkout() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).unwrap_or(manifest).to_path_buf()
}

/// Cargo's target directory: `CARGO_TARGET_DIR`, else `target` in the checkout.
#[must_use]
pub fn target_dir() -> PathBuf {
    checkout().join(env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// Where cargo leaves this workspace's optimised binaries.
#[must_use]
pub fn release_dir() -> PathBuf {
    target_dir().join("x86_64-unknown-linux-gnu/release")
}

/// The project's cache: `${XDG_CACHE_HOME:-~/.cache}/coppice`.
#[must_use]
pub fn cache_dir() -> PathBuf {
    let home = || Path::new(&env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache");
    env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from).join("coppice")
}

/// Where the lab keeps its own files.
pub(crate) fn lab_dir() -> PathBuf {
    cache_dir().join("lab")
}
