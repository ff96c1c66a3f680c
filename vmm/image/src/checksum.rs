//! The format's one checksum, XXH3-64 with seed 0, whole or in pieces.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

/// Sums something once. The first sum of a process asks the processor what it can do, which in a
/// virtual machine exits to the hypervisor several times and takes longer than opening a
/// checkpoint; a process that waits for its work does it ahead.
pub fn make_ready() {
    // Long enough for the way that depends on the processor.
    std::hint::black_box(of(&[0; crate::PAGE_BYTES]));
}

/// Checksum of one piece.
pub(crate) fn of(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// Checksum of pieces one after the other.
#[derive(Default)]
pub(crate) struct Checksum(XxHash3_64);

impl Checksum {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub(crate) fn finish(&self) -> u64 {
        self.0.finish()
    }
}
