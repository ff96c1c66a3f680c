//! What the tests of the manager share: the programs of other crates, built when needed.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

/// Builds the program `package` and returns its path, next to `coppice`.
pub(crate) fn program(package: &str) -> PathBuf {
    // One build at a time: they would only wait for each other.
    static BUILD: Mutex<()> = Mutex::new(());
    let _build = BUILD.lock().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", package]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
    assert!(status.success(), "{package} does not build");
    PathBuf::from(env!("CARGO_BIN_EXE_coppice")).with_file_name(package)
}
