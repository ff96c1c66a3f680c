//! Guest RAM: private, copy-on-write mappings over an immutable image.
//!
//! Everything above (boot, devices, vCPUs) sees guest memory only through [`GuestRam`]; writes
//! made by the VMM itself are recorded in its bitmap, because KVM's dirty log does not see them.
//!
//! No other machine's live memory is ever mapped: RAM stands on zeroes and on checkpoint files,
//! which never change ([`backing`]), and what this guest writes stays in private pages of this
//! process.

pub mod backing;
pub mod layout;
pub mod pages;

use std::io;

use thiserror::Error;
use vm_memory::bitmap::{AtomicBitmap, NewBitmap};
use vm_memory::mmap::{FromRangesError, MmapRegionBuilder};
use vm_memory::{GuestAddress, GuestRegionMmap};

use crate::sys::mem::{self, Advice};

/// Guest RAM with a bitmap of the pages that the VMM itself wrote.
pub type GuestRam = vm_memory::GuestMemoryMmap<AtomicBitmap>;

/// Least guest RAM in MiB.
pub const MIN_MEMORY_MIB: u32 = 64;
/// Most guest RAM in MiB (1 TiB): far above what a sandbox needs, and what the address map and
/// the bitmaps are made for.
pub const MAX_MEMORY_MIB: u32 = 1 << 20;

/// Why guest RAM cannot be made.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The size is out of range.
    #[error(
        "guest memory of {0} MiB is out of range: give {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB} MiB"
    )]
    Size(u32),
    /// The host has no room for it.
    #[error("{mib} MiB of guest memory cannot be mapped: ask for less or free memory on the host")]
    Map {
        /// The size asked for.
        mib: u32,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The regions do not fit together.
    #[error("guest memory regions do not fit together")]
    Regions(#[source] FromRangesError),
}

/// The ranges of guest-physical addresses that RAM of this size occupies: from 0 up to the hole
/// for device registers, the rest from 4 GiB on.
pub fn ram_ranges(bytes: u64) -> impl Iterator<Item = (GuestAddress, u64)> {
    let low = bytes.min(layout::HOLE_START);
    [(GuestAddress(0), low), (GuestAddress(layout::HOLE_END), bytes - low)]
        .into_iter()
        .filter(|(_, size)| *size > 0)
}

/// Pages of guest RAM of `mib` MiB.
pub fn pages_of(mib: u32) -> u64 {
    u64::from(mib) << 8
}

/// Maps `mib` MiB of guest RAM that holds zeroes.
///
/// It is private anonymous memory, which is a private mapping of the kernel's own immutable page
/// of zeroes. [`backing::Backing::map`] puts private mappings of checkpoint files over parts of
/// it. A private mapping of an empty memory file would look alike, but the first read of each
/// page would allocate a page in the file, and the first write a second one.
///
/// # Errors
/// [`MemoryError`]: the size is out of range, or the host refuses the mapping.
pub fn map(mib: u32) -> Result<GuestRam, MemoryError> {
    if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&mib) {
        return Err(MemoryError::Size(mib));
    }
    let bytes = u64::from(mib) << 20;
    let mut regions = Vec::new();
    for (start, size) in ram_ranges(bytes) {
        let region = map_region(size).map_err(|source| MemoryError::Map { mib, source })?;
        regions.push(
            GuestRegionMmap::new(region, start)
                .ok_or(MemoryError::Regions(FromRangesError::InvalidGuestRegion))?,
        );
    }
    GuestRam::from_regions(regions).map_err(|e| MemoryError::Regions(e.into()))
}

fn map_region(size: u64) -> io::Result<vm_memory::MmapRegion<AtomicBitmap>> {
    let size = usize::try_from(size).map_err(io::Error::other)?;
    let builder = MmapRegionBuilder::new_with_bitmap(size, AtomicBitmap::with_len(size))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_ANONYMOUS);
    let region =
        mem::with_huge_page_gap(size, || builder.build())?.map_err(|error| match error {
            vm_memory::mmap::MmapRegionError::Mmap(error) => error,
            other => io::Error::other(other),
        })?;
    mem::advise(&region, Advice::DontDump)?;
    // A huge page costs one fault and one exit from the guest where small ones cost 512 each. A
    // kernel without huge pages refuses the advice; the guest then runs on small ones.
    if let Err(error) = mem::advise(&region, Advice::HugePages) {
        tracing::debug!(%error, "guest memory is not backed by huge pages");
    }
    Ok(region)
}

#[cfg(test)]
mod tests {
    use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

    use super::*;

    #[test]
    fn ram_above_the_hole_continues_at_4_gib() {
        let ram = map(3072 + 64).unwrap();
        let regions: Vec<_> = ram.iter().map(|r| (r.start_addr().0, r.len())).collect();
        assert_eq!(regions, [(0, 3 << 30), (4 << 30, 64 << 20)]);
    }

    #[test]
    fn ram_up_to_the_hole_is_one_region() {
        let ram = map(3072).unwrap();
        assert_eq!(ram.iter().map(GuestMemoryRegion::len).collect::<Vec<_>>(), [3 << 30]);
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        for mib in [0, MIN_MEMORY_MIB - 1, MAX_MEMORY_MIB + 1] {
            assert!(matches!(map(mib), Err(MemoryError::Size(_))), "{mib}");
        }
    }
}
