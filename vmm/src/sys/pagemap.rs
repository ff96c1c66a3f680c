//! `/proc/self/pagemap`: which pages of a mapping this process has made its own
//! (`Documentation/admin-guide/mm/pagemap.rst`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use vm_memory::bitmap::Bitmap;
use vm_memory::mmap::MmapRegion;

const PAGE: usize = 4096;
const ENTRY: usize = 8;
/// Entries read at once.
const CHUNK: usize = 2048;

/// The page is in memory.
const PRESENT: u64 = 1 << 63;
/// The page is in swap.
const SWAPPED: u64 = 1 << 62;
/// The page is one of a file, or shared.
const FILE: u64 = 1 << 61;

/// An open pagemap of this process.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens it; physical addresses, which take privileges, are not needed.
    ///
    /// # Errors
    /// When `/proc` is not mounted.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// Calls `each` with the number of every page of a region that was written since it was
    /// mapped, in order. A few that were only read may be among them.
    ///
    /// # Errors
    /// Those of `pread`.
    pub fn private_pages<B: Bitmap>(
        &self,
        region: &MmapRegion<B>,
        each: impl FnMut(usize),
    ) -> io::Result<()> {
        self.pages(region, |entry| entry & (PRESENT | SWAPPED) != 0 && entry & FILE == 0, each)
    }

    /// Calls `each` with the number of every page of a region that is in the page tables: read or
    /// written since it was mapped, or near one that was.
    ///
    /// # Errors
    /// Those of `pread`.
    pub fn present_pages<B: Bitmap>(
        &self,
        region: &MmapRegion<B>,
        each: impl FnMut(usize),
    ) -> io::Result<()> {
        self.pages(region, |entry| entry & (PRESENT | SWAPPED) != 0, each)
    }

    fn pages<B: Bitmap>(
        &self,
        region: &MmapRegion<B>,
        wanted: impl Fn(u64) -> bool,
        mut each: impl FnMut(usize),
    ) -> io::Result<()> {
        let mut bytes = vec![0u8; CHUNK * ENTRY];
        let first = region.as_ptr().addr() / PAGE;
        let pages = region.size() / PAGE;
        let mut page = 0;
        while page < pages {
            let count = CHUNK.min(pages - page);
            let bytes = bytes.get_mut(..count * ENTRY).unwrap_or_default();
            let offset = u64::try_from((first + page) * ENTRY).map_err(io::Error::other)?;
            self.0.read_exact_at(bytes, offset)?;
            for (number, entry) in (page..).zip(bytes.as_chunks::<ENTRY>().0) {
                if wanted(u64::from_ne_bytes(*entry)) {
                    each(number);
                }
            }
            page += count;
        }
        Ok(())
    }
}
