//! Guest RAM as numbered pages: page 0 is at guest address 0, and numbers go on over the hole
//! without a gap. Checkpoints, dirty logs and page sets count this way.

use std::io;
use std::ops::Range;

use coppice_image::PageSet;
use vm_memory::bitmap::{AtomicBitmap, BS};
use vm_memory::{
    GuestMemoryBackend as _, GuestMemoryRegion as _, GuestRegionMmap, MemoryRegionAddress,
    MmapRegion, VolatileSlice,
};

use super::GuestRam;
use crate::sys::pagemap::Pagemap;

/// Size of a page in bytes.
pub const PAGE: usize = 4096;

/// A region of guest RAM.
pub type Region = GuestRegionMmap<AtomicBitmap>;

/// Consecutive pages inside one region.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// The region.
    pub region: &'a Region,
    /// The first page's offset in the region, in bytes.
    pub offset: usize,
    /// Length in bytes, from one page.
    pub len: usize,
}

impl<'a> Piece<'a> {
    /// The memory itself.
    pub fn slice(&self) -> Option<VolatileSlice<'a, BS<'a, AtomicBitmap>>> {
        let offset = MemoryRegionAddress(u64::try_from(self.offset).ok()?);
        self.region.get_slice(offset, self.len).ok()
    }

    /// The addresses in this process.
    pub fn addresses(&self) -> Range<usize> {
        let start = self.region.as_ptr().addr() + self.offset;
        start..start + self.len
    }
}

/// How many pages guest RAM has.
pub fn count(ram: &GuestRam) -> u64 {
    ram.iter().map(|region| pages_of(region.len())).sum()
}

/// Each region with its number as a slot and its first page.
pub fn regions(ram: &GuestRam) -> impl Iterator<Item = (u32, u64, &Region)> {
    let mut first = 0;
    (0..).zip(ram.iter()).map(move |(slot, region)| {
        let at = first;
        first += pages_of(region.len());
        (slot, at, region)
    })
}

/// The parts of RAM that hold `pages`, in order; what lies outside RAM is left out.
pub fn pieces(ram: &GuestRam, pages: Range<u64>) -> impl Iterator<Item = Piece<'_>> {
    regions(ram).filter_map(move |(_, first, region)| {
        let start = pages.start.max(first);
        let end = pages.end.min(first + pages_of(region.len()));
        let len = bytes_of(end.checked_sub(start)?)?;
        let offset = bytes_of(start.checked_sub(first)?)?;
        (len > 0).then_some(Piece { region, offset, len })
    })
}

/// The memory of `pages` as slices.
pub fn slices(
    ram: &GuestRam,
    pages: Range<u64>,
) -> impl Iterator<Item = VolatileSlice<'_, BS<'_, AtomicBitmap>>> {
    pieces(ram, pages).filter_map(|piece| piece.slice())
}

/// Copies `pages` into `to`, as much as fits.
pub fn copy_out(ram: &GuestRam, pages: Range<u64>, mut to: &mut [u8]) {
    for slice in slices(ram, pages) {
        let len = slice.len().min(to.len());
        let (now, rest) = to.split_at_mut(len);
        slice.copy_to(now);
        to = rest;
    }
}

/// Overwrites `pages` with zeroes.
pub fn clear(ram: &GuestRam, pages: Range<u64>) {
    const ZEROES: [u8; PAGE] = [0; PAGE];
    for slice in slices(ram, pages) {
        for offset in (0..slice.len()).step_by(PAGE) {
            // Offsets of whole pages inside the slice.
            if let Ok(page) = slice.subslice(offset, PAGE) {
                page.copy_from(&ZEROES);
            }
        }
    }
}

/// The pages that this process itself wrote since the last call: what KVM's dirty log lacks.
pub fn take_own_writes(ram: &GuestRam) -> PageSet {
    let mut set = PageSet::new(count(ram));
    for (_, first, region) in regions(ram) {
        set.union_words(first, &MmapRegion::bitmap(region).get_and_reset());
    }
    set
}

/// The pages that were written since RAM was mapped, by whomever, and perhaps a few more: those
/// that are this process's own.
///
/// # Errors
/// Those of reading the pagemap.
pub fn private_pages(ram: &GuestRam, pagemap: &Pagemap) -> io::Result<PageSet> {
    collect(ram, |region, each| pagemap.private_pages(region, each))
}

/// The pages that were read or written since RAM was mapped, and perhaps a few more.
///
/// # Errors
/// Those of reading the pagemap.
pub fn present_pages(ram: &GuestRam, pagemap: &Pagemap) -> io::Result<PageSet> {
    collect(ram, |region, each| pagemap.present_pages(region, each))
}

fn collect(
    ram: &GuestRam,
    list: impl Fn(&Region, &mut dyn FnMut(usize)) -> io::Result<()>,
) -> io::Result<PageSet> {
    let mut set = PageSet::new(count(ram));
    for (_, first, region) in regions(ram) {
        list(region, &mut |page| {
            if let Ok(page) = u64::try_from(page) {
                set.insert(first + page);
            }
        })?;
    }
    Ok(set)
}

fn pages_of(bytes: u64) -> u64 {
    bytes / 4096
}

fn bytes_of(pages: u64) -> Option<usize> {
    usize::try_from(pages).ok()?.checked_mul(PAGE)
}
