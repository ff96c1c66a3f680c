//! Guest RAM: private, copy-on-write mappings over an immutable image.
//!
//! Everything above (boot, devices, vCPUs) sees guest memory only through [`GuestRam`]; writes
//! made by the VMM itself are recorded in its bitmap, because KVM's dirty log does not see them.
//!
//! No other machine's live memory is ever mapped: a [`MemoryImage`] cannot change, and what this
//! guest writes stays in private pages of this process.

pub mod backing;
pub mod layout;
pub mod pages;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use thiserror::Error;
use vm_memory::bitmap::{AtomicBitmap, NewBitmap};
use vm_memory::mmap::{FromRangesError, MmapRegionBuilder};
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap};

use crate::sys::mem::{self, Advice};

/// Guest RAM with a bitmap of the pages that the VMM itself wrote.
pub type GuestRam = vm_memory::GuestMemoryMmap<AtomicBitmap>;

/// Least guest RAM in MiB.
pub const MIN_MEMORY_MIB: u32 = 64;
/// Most guest RAM in MiB (1 TiB): far above what a sandbox needs, and what the address map and
/// the bitmaps are made for.
pub const MAX_MEMORY_MIB: u32 = 1 << 20;

/// The immutable contents that guest RAM starts from.
#[derive(Debug, Clone)]
pub enum MemoryImage {
    /// Zeroes without end: what a cold boot starts from.
    ///
    /// It is mapped as private anonymous memory, which is a private mapping of the kernel's own
    /// immutable page of zeroes and costs nothing. A private mapping of an empty memory file
    /// would look alike, but the first read of each page would allocate a page in the file, and
    /// the first write a second one.
    Empty,
    /// A sealed memory file that holds all of RAM in order of guest address, without the hole.
    Sealed(Arc<File>),
}

/// Why guest RAM cannot be made.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The size is out of range.
    #[error(
        "guest memory of {0} MiB is out of range: give {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB} MiB"
    )]
    Size(u32),
    /// The image file could still change under the guest.
    #[error("the memory image is not sealed against writes and changes of size")]
    NotSealed,
    /// The image does not cover guest RAM.
    #[error("the memory image has {image} bytes where guest memory has {ram}")]
    ImageSize {
        /// Bytes in the image.
        image: u64,
        /// Bytes of guest RAM.
        ram: u64,
    },
    /// The image file cannot be examined.
    #[error("the memory image cannot be read")]
    Image(#[source] io::Error),
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

/// Maps `mib` MiB of guest RAM copy-on-write over `image`.
///
/// # Errors
/// [`MemoryError`]: the size is out of range, the image does not fit or could change, or the
/// host refuses the mapping.
pub fn map(image: &MemoryImage, mib: u32) -> Result<GuestRam, MemoryError> {
    if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&mib) {
        return Err(MemoryError::Size(mib));
    }
    let bytes = u64::from(mib) << 20;
    check_image(image, bytes)?;
    let mut regions = Vec::new();
    let mut offset = 0u64;
    for (start, size) in ram_ranges(bytes) {
        let region =
            map_region(image, offset, size).map_err(|source| MemoryError::Map { mib, source })?;
        offset += size;
        regions.push(
            GuestRegionMmap::new(region, start)
                .ok_or(MemoryError::Regions(FromRangesError::InvalidGuestRegion))?,
        );
    }
    GuestRam::from_regions(regions).map_err(|e| MemoryError::Regions(e.into()))
}

fn check_image(image: &MemoryImage, ram: u64) -> Result<(), MemoryError> {
    let MemoryImage::Sealed(file) = image else {
        return Ok(());
    };
    if !mem::is_immutable(file.as_fd()) {
        return Err(MemoryError::NotSealed);
    }
    let image = file.metadata().map_err(MemoryError::Image)?.len();
    if image == ram { Ok(()) } else { Err(MemoryError::ImageSize { image, ram }) }
}

fn map_region(
    image: &MemoryImage,
    offset: u64,
    size: u64,
) -> io::Result<vm_memory::MmapRegion<AtomicBitmap>> {
    let size = usize::try_from(size).map_err(io::Error::other)?;
    let builder = MmapRegionBuilder::new_with_bitmap(size, AtomicBitmap::with_len(size))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    let builder = match image {
        MemoryImage::Empty => builder.with_mmap_flags(flags | libc::MAP_ANONYMOUS),
        MemoryImage::Sealed(file) => builder
            .with_mmap_flags(flags)
            .with_file_offset(FileOffset::from_arc(Arc::clone(file), offset)),
    };
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
    use std::io::{Seek, SeekFrom, Write};

    use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion};

    use super::*;

    fn sealed(bytes: u64, at: u64, text: &[u8]) -> MemoryImage {
        let mut file = mem::memory_file(c"image").unwrap();
        file.set_len(bytes).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(text).unwrap();
        mem::seal(&file).unwrap();
        MemoryImage::Sealed(Arc::new(file))
    }

    #[test]
    fn ram_above_the_hole_continues_at_4_gib() {
        let ram = map(&MemoryImage::Empty, 3072 + 64).unwrap();
        let regions: Vec<_> = ram.iter().map(|r| (r.start_addr().0, r.len())).collect();
        assert_eq!(regions, [(0, 3 << 30), (4 << 30, 64 << 20)]);
    }

    #[test]
    fn ram_up_to_the_hole_is_one_region() {
        let ram = map(&MemoryImage::Empty, 3072).unwrap();
        assert_eq!(ram.iter().map(GuestMemoryRegion::len).collect::<Vec<_>>(), [3 << 30]);
    }

    #[test]
    fn two_guests_over_one_image_do_not_see_each_other() {
        let image = sealed(64 << 20, 0x5000, b"from the image");
        let (one, two) = (map(&image, 64).unwrap(), map(&image, 64).unwrap());
        one.write_slice(b"changed", GuestAddress(0x5000)).unwrap();
        let mut seen = [0u8; 14];
        two.read_slice(&mut seen, GuestAddress(0x5000)).unwrap();
        assert_eq!(&seen, b"from the image");
    }

    #[test]
    fn an_image_that_could_change_is_refused() {
        let file = mem::memory_file(c"image").unwrap();
        file.set_len(64 << 20).unwrap();
        let image = MemoryImage::Sealed(Arc::new(file));
        assert!(matches!(map(&image, 64), Err(MemoryError::NotSealed)));
    }

    #[test]
    fn an_image_of_another_size_is_refused() {
        let image = sealed(32 << 20, 0, b"short");
        assert!(matches!(map(&image, 64), Err(MemoryError::ImageSize { .. })));
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        for mib in [0, MIN_MEMORY_MIB - 1, MAX_MEMORY_MIB + 1] {
            assert!(matches!(map(&MemoryImage::Empty, mib), Err(MemoryError::Size(_))), "{mib}");
        }
    }
}
