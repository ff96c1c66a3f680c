//! Reads a checkpoint file that nobody vouches for: every length is checked before memory is
//! taken for it, every checksum before its bytes are used.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use thiserror::Error;

use crate::checksum::{self, Checksum};
use crate::header::{HEADER_BYTES, HeaderError, HeaderInfo, TablePlace};
use crate::index::{self, IndexError, MAX_EXTENTS, PageIndex, byte_offset};
use crate::section::{self, Entry, Kind, MAX_SECTION, MAX_SECTIONS, TableError, decode_table};
use crate::writer::INDEX_VERSION;
use crate::{PAGE, PAGE_BYTES};

/// Read at once when data is only summed.
const BLOCK: usize = 64 * PAGE_BYTES;

/// A checkpoint file that cannot be used.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The header is not one this version can use.
    #[error("the checkpoint's file cannot be used")]
    Header(#[source] HeaderError),
    /// The section table is not valid.
    #[error("the checkpoint's file cannot be used")]
    Table(#[source] TableError),
    /// The page index is not valid.
    #[error("the checkpoint's file cannot be used")]
    Index(#[source] IndexError),
    /// The file ends before something the header speaks of.
    #[error("the checkpoint's file is cut off")]
    Truncated,
    /// A section that every checkpoint has is not there.
    #[error("the checkpoint's file has no section {0:?}")]
    Missing(Kind),
    /// A section has a version that this crate does not know.
    #[error("section {0:?} of the checkpoint's file has version {1}, which is not known here")]
    Version(Kind, u16),
    /// A section is longer than fits in memory sensibly; page data always is.
    #[error("section {0:?} of the checkpoint's file is too long to be read as a whole")]
    TooLong(Kind),
    /// A section was changed after it was written.
    #[error("section {kind}.{instance} of the checkpoint's file is damaged (wrong checksum)")]
    SectionChecksum {
        /// Number of the kind.
        kind: u32,
        /// The instance.
        instance: u32,
    },
    /// Page data was changed after it was written.
    #[error("pages {first} to {last} of the checkpoint's file are damaged (wrong checksum)")]
    PageChecksum {
        /// The first page of guest RAM of the extent.
        first: u64,
        /// The last one.
        last: u64,
    },
    /// The system refused.
    #[error("cannot read the checkpoint's file")]
    Io(#[source] io::Error),
}

/// One section's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// Version of the content's own format.
    pub version: u16,
    /// The content, of the checksum it was written with.
    pub data: Vec<u8>,
}

/// An open checkpoint file with a good header and section table.
#[derive(Debug)]
pub struct Image {
    file: File,
    info: HeaderInfo,
    entries: Vec<Entry>,
}

impl Image {
    /// Opens a checkpoint: reads header and section table and checks both. `file` must be open
    /// for reading; its position is neither used nor changed.
    ///
    /// # Errors
    ///
    /// The file is no finished checkpoint, not of this version or architecture, damaged or cut
    /// off, or it cannot be read.
    pub fn open(file: File) -> Result<Self, ReadError> {
        let file_bytes = file.metadata().map_err(ReadError::Io)?.len();
        let mut header = [0; HEADER_BYTES];
        file.read_exact_at(&mut header, 0).map_err(end_is_truncation)?;
        let (info, place) = HeaderInfo::decode(&header).map_err(ReadError::Header)?;
        let entries = read_table(&file, &place, file_bytes)?;
        Ok(Self { file, info, entries })
    }

    /// What the header says.
    #[must_use]
    pub fn info(&self) -> &HeaderInfo {
        &self.info
    }

    /// The file, for mapping page data: extents say where it lies.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Instances of sections of a kind, in ascending order.
    #[must_use]
    pub fn instances(&self, kind: Kind) -> Vec<u32> {
        let of_kind = self.entries.iter().filter(|entry| entry.is(kind));
        let mut instances: Vec<u32> = of_kind.map(|entry| entry.instance).collect();
        instances.sort_unstable();
        instances
    }

    /// Reads a section and checks its checksum; `None` if the file has no such section.
    ///
    /// # Errors
    ///
    /// The section is damaged, too long (page data always is), or cannot be read.
    pub fn section(&self, kind: Kind, instance: u32) -> Result<Option<Section>, ReadError> {
        let found = self.entries.iter().find(|e| e.is(kind) && e.instance == instance);
        let Some(entry) = found else { return Ok(None) };
        let limit = match kind {
            Kind::Pages => 0,
            Kind::PageIndex => index_limit(),
            _ => MAX_SECTION,
        };
        let length = usize::try_from(entry.length).ok().filter(|_| entry.length <= limit);
        let mut data = vec![0; length.ok_or(ReadError::TooLong(kind))?];
        self.file.read_exact_at(&mut data, entry.offset).map_err(end_is_truncation)?;
        if checksum::of(&data) != entry.checksum {
            return Err(ReadError::SectionChecksum { kind: entry.kind, instance });
        }
        Ok(Some(Section { version: entry.version, data }))
    }

    /// Reads the page index and checks that its extents lie in guest RAM, in the file's page data
    /// and not over each other. The page data itself is checked by [`Image::verify`] only.
    ///
    /// # Errors
    ///
    /// The index is not there, damaged or not valid, or it cannot be read.
    pub fn page_index(&self) -> Result<PageIndex, ReadError> {
        let section =
            self.section(Kind::PageIndex, 0)?.ok_or(ReadError::Missing(Kind::PageIndex))?;
        if section.version != INDEX_VERSION {
            return Err(ReadError::Version(Kind::PageIndex, section.version));
        }
        PageIndex::decode(&section.data, self.info.ram_pages, self.data_pages()?)
            .map_err(ReadError::Index)
    }

    /// Reads everything there is and checks every checksum, page data included.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong with the file.
    pub fn verify(&self) -> Result<(), ReadError> {
        let mut block = vec![0; BLOCK];
        for entry in self.entries.iter().filter(|entry| !entry.is(Kind::Pages)) {
            if self.sum(&mut block, entry.offset, entry.length)? != entry.checksum {
                let Entry { kind, instance, .. } = *entry;
                return Err(ReadError::SectionChecksum { kind, instance });
            }
        }
        for extent in self.page_index()?.extents() {
            let Some(place) = extent.data else { continue };
            // Both lie in the file, as the index was checked.
            let (offset, length) = (byte_offset(place), byte_offset(extent.count));
            if self.sum(&mut block, offset, length)? != extent.checksum {
                let last = extent.end().saturating_sub(1);
                return Err(ReadError::PageChecksum { first: extent.first, last });
            }
        }
        Ok(())
    }

    /// The pages of the file that hold page data.
    fn data_pages(&self) -> Result<std::ops::Range<u64>, ReadError> {
        let found = self.entries.iter().find(|e| e.is(Kind::Pages) && e.instance == 0);
        let entry = found.ok_or(ReadError::Missing(Kind::Pages))?;
        if entry.version != INDEX_VERSION {
            return Err(ReadError::Version(Kind::Pages, entry.version));
        }
        if !entry.offset.is_multiple_of(PAGE) || !entry.length.is_multiple_of(PAGE) {
            return Err(ReadError::Table(TableError::Bounds { kind: entry.kind, instance: 0 }));
        }
        let first = entry.offset / PAGE;
        Ok(first..first + entry.length / PAGE)
    }

    fn sum(&self, block: &mut [u8], mut at: u64, mut left: u64) -> Result<u64, ReadError> {
        let mut sum = Checksum::default();
        while left > 0 {
            let count = usize::try_from(left).unwrap_or(usize::MAX).min(block.len());
            let (now, _) = block.split_at_mut(count);
            self.file.read_exact_at(now, at).map_err(end_is_truncation)?;
            sum.update(now);
            let count = u64::try_from(count).unwrap_or(u64::MAX);
            at = at.saturating_add(count);
            left = left.saturating_sub(count);
        }
        Ok(sum.finish())
    }
}

fn index_limit() -> u64 {
    u64::try_from(MAX_EXTENTS.saturating_mul(index::ENTRY_BYTES)).unwrap_or(u64::MAX)
}

fn read_table(file: &File, place: &TablePlace, file_bytes: u64) -> Result<Vec<Entry>, ReadError> {
    let sections = usize::try_from(place.sections).unwrap_or(usize::MAX);
    if sections > MAX_SECTIONS {
        return Err(ReadError::Table(TableError::TooMany));
    }
    let length = sections * section::ENTRY_BYTES;
    if u64::try_from(length) != Ok(place.length) {
        return Err(ReadError::Table(TableError::Length));
    }
    let end = place.offset.checked_add(place.length);
    let end = end.filter(|end| *end <= file_bytes).ok_or(ReadError::Truncated)?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, place.offset).map_err(end_is_truncation)?;
    if checksum::of(&bytes) != place.checksum {
        return Err(ReadError::Table(TableError::Checksum));
    }
    decode_table(&bytes, place.offset..end, file_bytes).map_err(ReadError::Table)
}

fn end_is_truncation(error: io::Error) -> ReadError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => ReadError::Truncated,
        _ => ReadError::Io(error),
    }
}
