//! A small guest: memory in two regions, and queues where a driver would put them.

use std::fs::File;
use std::sync::Arc;

use coppice_micro::tree::memory_file;
use coppice_vmm::devices::virtio::Interrupt;
use coppice_vmm::memory::GuestRam;
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::input::Input;

/// Bytes of guest memory.
pub(crate) const MEMORY: u64 = 0x4_0000;
/// Bytes that each queue's rings take.
pub(crate) const RINGS: u64 = 0x4000;
/// Offsets of the available and used rings from the descriptor table.
pub(crate) const AVAILABLE: u64 = 0x2000;
/// See [`AVAILABLE`].
pub(crate) const USED: u64 = 0x3000;

pub(crate) fn memory() -> Arc<GuestRam> {
    let half = MEMORY / 2;
    let ranges = [0, half].map(|start| (GuestAddress(start), usize::try_from(half).unwrap()));
    Arc::new(GuestRam::from_ranges(&ranges).unwrap())
}

pub(crate) fn interrupt() -> Interrupt {
    Interrupt::new(Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()))
}

/// A file in memory with something else in each sector.
pub(crate) fn disk_image(sectors: u8) -> File {
    use std::os::unix::fs::FileExt as _;
    let file = memory_file();
    for sector in 0..sectors {
        file.write_all_at(&[sector ^ 0xA5; 512], u64::from(sector) * 512).unwrap();
    }
    file
}

/// An address that is mostly, but not always, inside guest memory.
pub(crate) fn address(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        0 => input.u64(),
        1 => MEMORY - u64::from(input.u8()),
        2 => MEMORY / 2 - u64::from(input.u8()),
        _ => u64::from(input.u32()) % MEMORY,
    }
}

/// Writes one descriptor of the table at `rings`.
pub(crate) fn describe(ram: &GuestRam, rings: u64, index: u16, descriptor: (u64, u32, u16, u16)) {
    let (addr, len, flags, next) = descriptor;
    let mut bytes = addr.to_le_bytes().to_vec();
    bytes.extend(len.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(next.to_le_bytes());
    let _ = ram.write_slice(&bytes, GuestAddress(rings + 16 * u64::from(index)));
}

/// Makes a chain available in a queue of `size`, whatever the guest wrote there before.
pub(crate) fn publish(ram: &GuestRam, rings: u64, size: u16, head: u16) {
    let index: u16 = ram.read_obj(GuestAddress(rings + AVAILABLE + 2)).unwrap();
    let entry = rings + AVAILABLE + 4 + 2 * u64::from(index % size);
    let _ = ram.write_obj(head, GuestAddress(entry));
    let _ = ram.write_obj(index.wrapping_add(1), GuestAddress(rings + AVAILABLE + 2));
}
