//! The page index: which pages of guest RAM a layer holds, and where in its file.

use thiserror::Error;

use crate::PAGE;
use crate::header::Fields;

/// Most extents of one layer: one on every other page of 32 GiB, or 128 MiB of index.
pub const MAX_EXTENTS: usize = 1 << 22;
/// Bytes of one entry.
pub(crate) const ENTRY_BYTES: usize = 32;
/// The flag of extents of zero pages.
const ZERO: u32 = 1;

/// A run of pages that a layer holds. Those with data may span holes of the file, which read as
/// zeroes like any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The first page of guest RAM.
    pub first: u64,
    /// Number of pages, from 1.
    pub count: u64,
    /// The page of the file with the first one's data; `None` for zero pages.
    pub data: Option<u64>,
    /// XXH3-64 of the data; 0 for zero pages.
    pub checksum: u64,
}

impl Extent {
    /// The page behind the last one.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.count)
    }

    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        // The writer makes no extent of more pages.
        let count = u32::try_from(self.count).unwrap_or(u32::MAX);
        to.extend(self.first.to_le_bytes());
        to.extend(count.to_le_bytes());
        to.extend(if self.data.is_some() { 0 } else { ZERO }.to_le_bytes());
        to.extend(self.data.unwrap_or(0).to_le_bytes());
        to.extend(self.checksum.to_le_bytes());
    }
}

/// A page index that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum IndexError {
    /// The index is not made of whole entries.
    #[error("its page index has the wrong length")]
    Length,
    /// More extents than [`MAX_EXTENTS`].
    #[error("it has more than {MAX_EXTENTS} extents of pages")]
    TooMany,
    /// Extents are not in ascending order, or overlap, or are empty.
    #[error("extent {0} of its page index is empty or out of order")]
    Order(usize),
    /// An extent is not inside guest RAM.
    #[error("extent {0} of its page index is outside guest RAM")]
    OutsideRam(usize),
    /// An extent's data is not where page data lies, or another extent has it too.
    #[error("extent {0} of its page index has no page data of its own")]
    OutsideData(usize),
    /// Values in fields or flags that have no meaning.
    #[error("extent {0} of its page index has values in reserved fields")]
    Reserved(usize),
}

/// The pages a layer holds, in ascending order and without overlap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PageIndex {
    extents: Vec<Extent>,
    pages: u64,
}

impl PageIndex {
    /// The extents, in ascending order.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Number of pages the extents cover together.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Reads an index. `data` are the file's pages that hold page data.
    pub(crate) fn decode(
        bytes: &[u8],
        ram_pages: u64,
        data: std::ops::Range<u64>,
    ) -> Result<Self, IndexError> {
        if !bytes.len().is_multiple_of(ENTRY_BYTES) {
            return Err(IndexError::Length);
        }
        let count = bytes.len() / ENTRY_BYTES;
        if count > MAX_EXTENTS {
            return Err(IndexError::TooMany);
        }
        let mut extents = Vec::with_capacity(count);
        let (mut next_page, mut next_data, mut pages) = (0u64, data.start, 0u64);
        for (number, entry) in bytes.chunks_exact(ENTRY_BYTES).enumerate() {
            let mut fields = Fields(entry);
            let (first, count, flags) = (fields.u64(), fields.u32(), fields.u32());
            let (file_page, checksum) = (fields.u64(), fields.u64());
            let count = u64::from(count);
            if first < next_page || count == 0 {
                return Err(IndexError::Order(number));
            }
            next_page = first
                .checked_add(count)
                .filter(|end| *end <= ram_pages)
                .ok_or(IndexError::OutsideRam(number))?;
            let place = match flags {
                ZERO if file_page == 0 && checksum == 0 => None,
                0 if file_page < next_data => return Err(IndexError::OutsideData(number)),
                0 => {
                    next_data = file_page
                        .checked_add(count)
                        .filter(|end| *end <= data.end)
                        .ok_or(IndexError::OutsideData(number))?;
                    Some(file_page)
                }
                _ => return Err(IndexError::Reserved(number)),
            };
            // No more than `ram_pages` in all, since extents do not overlap.
            pages = pages.saturating_add(count);
            extents.push(Extent { first, count, data: place, checksum });
        }
        Ok(Self { extents, pages })
    }
}

/// Byte offset of a page of the file. Pages come from offsets, so this cannot overflow for those
/// that lie in a file.
pub(crate) fn byte_offset(file_page: u64) -> u64 {
    file_page.saturating_mul(PAGE)
}
