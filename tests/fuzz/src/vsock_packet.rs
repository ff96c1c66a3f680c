//! A guest that sends any vsock packets over any rings, with host programs in between.

use coppice_vmm::devices::virtio::vsock::fuzz;
use tempfile::TempDir;

/// Plays the bytes as a hostile guest's program.
pub fn run(data: &[u8]) {
    let directory = TempDir::new().unwrap();
    fuzz::play(data, directory.path());
}
