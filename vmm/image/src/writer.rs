//! Writes a checkpoint file in one pass: page data as it comes, then the sections, the header last.
//!
//! Until the header is there the file is no checkpoint, so a writer that dies leaves nothing that
//! could be taken for one. Small runs of pages are gathered and written together, large ones go
//! out without a copy.

use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;

use rustix::io::Errno;
use thiserror::Error;

use crate::checksum::{self, Checksum};
use crate::header::{HEADER_BYTES, HeaderError, HeaderInfo, TablePlace};
use crate::index::{Extent, MAX_EXTENTS};
use crate::section::{Entry, Kind, MAX_SECTION, MAX_SECTIONS};
use crate::{PAGE, PAGE_BYTES};

/// Where page data starts: behind the header, with room for what later versions may want there,
/// and aligned for any page size in use.
pub(crate) const DATA_START: u64 = 16 * PAGE;
/// Version of the page index and the page data.
pub(crate) const INDEX_VERSION: u16 = 1;

/// Page data is examined, summed and written in pieces of this size, which stay in the cache.
const BLOCK: usize = 64 * PAGE_BYTES;
/// Room for small pieces that are written together.
const GATHER: usize = 32 * PAGE_BYTES;
/// A piece is small up to this size: copying it costs less than a system call.
const SMALL: usize = 8 * PAGE_BYTES;
/// Entries of the page index encoded at once.
const INDEX_BLOCK: usize = 2048;

/// A checkpoint that could not be written.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The file has content already.
    #[error("the new checkpoint's file is not empty")]
    NotEmpty,
    /// What should go into the header is not valid.
    #[error("the checkpoint's header cannot be written")]
    Header(#[source] HeaderError),
    /// A run of pages is empty, not in ascending order, outside guest RAM, or its data has
    /// another length.
    #[error("pages {0:?} are not a run that can follow")]
    Run(Range<u64>),
    /// More than [`MAX_EXTENTS`] extents.
    #[error("the checkpoint has more than {MAX_EXTENTS} extents of pages")]
    TooManyExtents,
    /// A section that is there already, too long, one too many, or one that the writer makes.
    #[error("section {0:?}.{1} cannot be added")]
    Section(Kind, u32),
    /// An earlier write failed, so that the file cannot become a checkpoint.
    #[error("an earlier write to the checkpoint failed")]
    Broken,
    /// The system refused.
    #[error("cannot write the checkpoint's file")]
    Io(#[source] io::Error),
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Pages whose data was written; zero pages are not among them.
    pub pages_written: u64,
    /// Length of the file in bytes, holes included.
    pub file_bytes: u64,
    /// Extents of the page index.
    pub extents: usize,
}

/// A checkpoint file in the making.
#[derive(Debug)]
pub struct Writer {
    out: Output,
    info: HeaderInfo,
    extents: Vec<Extent>,
    sections: Vec<(Entry, Vec<u8>)>,
    /// Where the next extent's data goes.
    data_end: u64,
    /// The lowest page that may come next.
    next_page: u64,
    pages_written: u64,
    broken: bool,
}

impl Writer {
    /// Starts a checkpoint in `file`, which must be empty and open for writing.
    ///
    /// # Errors
    ///
    /// The file is not empty, or `info` has values out of range.
    pub fn new(file: File, info: HeaderInfo) -> Result<Self, WriteError> {
        info.check().map_err(WriteError::Header)?;
        if file.metadata().map_err(WriteError::Io)?.len() != 0 {
            return Err(WriteError::NotEmpty);
        }
        Ok(Self {
            out: Output { file, gathered: Vec::new(), at: 0 },
            info,
            extents: Vec::new(),
            sections: Vec::new(),
            data_end: DATA_START,
            next_page: 0,
            pages_written: 0,
            broken: false,
        })
    }

    /// Appends `count` pages from page `first` on, whose content is `data`, as one extent. Zero
    /// pages become holes of the file; a run of nothing else becomes an extent without data.
    ///
    /// # Errors
    ///
    /// [`WriteError::Run`] if the run is empty, does not lie behind all earlier ones or outside
    /// guest RAM, or if `data` is not `count` pages long; or the write failed.
    pub fn pages(&mut self, first: u64, count: u32, data: &[u8]) -> Result<(), WriteError> {
        self.pages_vectored(first, count, &[IoSlice::new(data)])
    }

    /// As [`Writer::pages`], with the content in several slices of whole pages each.
    ///
    /// # Errors
    ///
    /// As [`Writer::pages`]; a slice that is not made of whole pages is also a
    /// [`WriteError::Run`].
    pub fn pages_vectored(
        &mut self,
        first: u64,
        count: u32,
        data: &[IoSlice<'_>],
    ) -> Result<(), WriteError> {
        let end = self.check_run(first, count)?;
        let whole = data.iter().all(|slice| slice.len().is_multiple_of(PAGE_BYTES));
        let pages = data.iter().map(|slice| slice.len() / PAGE_BYTES).sum();
        if !whole || usize::try_from(count) != Ok(pages) {
            return Err(WriteError::Run(first..end));
        }
        self.broken = true;
        let (sum, written) = self.write_data(data).map_err(WriteError::Io)?;
        self.broken = false;
        self.next_page = end;
        if written == 0 {
            self.push_zero(first, end);
            return Ok(());
        }
        let place = Some(self.data_end / PAGE);
        self.extents.push(Extent { first, count: count.into(), data: place, checksum: sum });
        self.data_end += u64::from(count) * PAGE;
        self.pages_written += written;
        Ok(())
    }

    /// Appends `count` zero pages from page `first` on.
    ///
    /// # Errors
    ///
    /// [`WriteError::Run`] if the run is empty, does not lie behind all earlier ones or outside
    /// guest RAM.
    pub fn zero(&mut self, first: u64, count: u32) -> Result<(), WriteError> {
        let end = self.check_run(first, count)?;
        self.next_page = end;
        self.push_zero(first, end);
        Ok(())
    }

    /// Adds a section; it is written by [`Writer::finish`]. `required` says that readers that do
    /// not know the kind must refuse the file.
    ///
    /// # Errors
    ///
    /// [`WriteError::Section`] if kind and instance are there already, `data` is longer than
    /// [`MAX_SECTION`], there are too many sections, or the kind is one the writer makes.
    pub fn section(
        &mut self,
        kind: Kind,
        instance: u32,
        version: u16,
        required: bool,
        data: &[u8],
    ) -> Result<(), WriteError> {
        let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let twice = self.sections.iter().any(|(e, _)| e.is(kind) && e.instance == instance);
        let own = matches!(kind, Kind::PageIndex | Kind::Pages);
        // Two are the writer's own.
        if twice || own || length > MAX_SECTION || self.sections.len() + 2 >= MAX_SECTIONS {
            return Err(WriteError::Section(kind, instance));
        }
        let checksum = checksum::of(data);
        let kind = kind.number();
        let entry = Entry { kind, instance, version, required, offset: 0, length, checksum };
        self.sections.push((entry, data.to_vec()));
        Ok(())
    }

    /// Completes the file: everything else reaches the disk before the header is written, and the
    /// header before this returns.
    ///
    /// # Errors
    ///
    /// The write failed now or earlier; the file is no checkpoint then.
    pub fn finish(mut self) -> Result<Summary, WriteError> {
        if self.broken {
            return Err(WriteError::Broken);
        }
        let sections = std::mem::take(&mut self.sections);
        let mut table = Vec::with_capacity((sections.len() + 2) * crate::section::ENTRY_BYTES);
        let mut at = self.data_end;
        for (mut entry, data) in sections {
            entry.offset = at;
            self.out.put(at, &data).map_err(WriteError::Io)?;
            at += entry.length;
            entry.encode(&mut table);
        }
        let index = self.write_index(at).map_err(WriteError::Io)?;
        index.encode(&mut table);
        self.pages_entry().encode(&mut table);
        at += index.length;

        self.out.put(at, &table).map_err(WriteError::Io)?;
        let length = u64::try_from(table.len()).unwrap_or(u64::MAX);
        let sections = u32::try_from(table.len() / crate::section::ENTRY_BYTES).unwrap_or(u32::MAX);
        let checksum = checksum::of(&table);
        let place = TablePlace { sections, offset: at, length, checksum };
        self.out.sync().map_err(WriteError::Io)?;
        self.out.put(0, &self.info.encode(&place)).map_err(WriteError::Io)?;
        self.out.sync().map_err(WriteError::Io)?;
        Ok(Summary {
            pages_written: self.pages_written,
            file_bytes: at + length,
            extents: self.extents.len(),
        })
    }

    fn pages_entry(&self) -> Entry {
        Entry {
            kind: Kind::Pages.number(),
            instance: 0,
            version: INDEX_VERSION,
            required: true,
            offset: DATA_START,
            length: self.data_end - DATA_START,
            checksum: 0,
        }
    }

    /// Writes the page index piece by piece, as it may be large.
    fn write_index(&mut self, at: u64) -> io::Result<Entry> {
        let mut sum = Checksum::default();
        let mut length = 0;
        let mut bytes = Vec::new();
        for extents in self.extents.chunks(INDEX_BLOCK) {
            bytes.clear();
            extents.iter().for_each(|extent| extent.encode(&mut bytes));
            sum.update(&bytes);
            self.out.put(at + length, &bytes)?;
            length += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        }
        Ok(Entry {
            kind: Kind::PageIndex.number(),
            instance: 0,
            version: INDEX_VERSION,
            required: true,
            offset: at,
            length,
            checksum: sum.finish(),
        })
    }

    /// The page behind a run, if the run may follow.
    fn check_run(&self, first: u64, count: u32) -> Result<u64, WriteError> {
        if self.broken {
            return Err(WriteError::Broken);
        }
        let end = first.saturating_add(count.into());
        if count == 0 || first < self.next_page || end > self.info.ram_pages {
            return Err(WriteError::Run(first..end));
        }
        if self.extents.len() >= MAX_EXTENTS {
            return Err(WriteError::TooManyExtents);
        }
        Ok(end)
    }

    /// Adds zero pages to the index, to the last extent if they continue it.
    fn push_zero(&mut self, first: u64, end: u64) {
        let count = end - first;
        if let Some(last) = self.extents.last_mut()
            && last.data.is_none()
            && last.end() == first
            && last.count + count <= u64::from(u32::MAX)
        {
            last.count += count;
            return;
        }
        self.extents.push(Extent { first, count, data: None, checksum: 0 });
    }

    /// Writes a run's data where the next extent's goes; gives its checksum and how many pages
    /// were not zero.
    fn write_data(&mut self, data: &[IoSlice<'_>]) -> io::Result<(u64, u64)> {
        let (mut at, mut written) = (self.data_end, 0);
        if let [one] = data
            && one.len() <= BLOCK
        {
            written = self.out.put_block(at, one)?;
            // All zero is the common case without data: no sum is needed then.
            return Ok((if written == 0 { 0 } else { checksum::of(one) }, written));
        }
        let mut sum = Checksum::default();
        for block in data.iter().flat_map(|slice| slice.chunks(BLOCK)) {
            sum.update(block);
            written += self.out.put_block(at, block)?;
            at += u64::try_from(block.len()).unwrap_or(u64::MAX);
        }
        Ok((sum.finish(), written))
    }
}

/// The file, and small pieces not written yet.
#[derive(Debug)]
struct Output {
    file: File,
    gathered: Vec<u8>,
    /// Where the first gathered byte goes.
    at: u64,
}

impl Output {
    /// Puts those pages of a block that are not zero; gives their number.
    fn put_block(&mut self, at: u64, block: &[u8]) -> io::Result<u64> {
        let mut written = 0;
        let mut from = 0;
        let mut pages = block.chunks_exact(PAGE_BYTES).map(is_zero).enumerate();
        // One step more than there are pages, for the run that lasts to the end.
        loop {
            let (place, zero) =
                pages.next().map_or((block.len(), true), |(page, zero)| (page * PAGE_BYTES, zero));
            if zero {
                if from < place {
                    let skipped = u64::try_from(from).unwrap_or(u64::MAX);
                    self.put(at.saturating_add(skipped), &block[from..place])?;
                    written += (place - from) / PAGE_BYTES;
                }
                if place == block.len() {
                    return Ok(u64::try_from(written).unwrap_or(u64::MAX));
                }
                from = place + PAGE_BYTES;
            }
        }
    }

    /// Puts bytes at a place: behind the gathered ones if they go there and are few.
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let end = self.at + u64::try_from(self.gathered.len()).unwrap_or(u64::MAX);
        if end != at {
            self.flush()?;
            self.at = at;
        }
        if bytes.len() <= SMALL && self.gathered.len() + bytes.len() <= GATHER {
            self.gathered.reserve_exact(GATHER.saturating_sub(self.gathered.len()));
            self.gathered.extend_from_slice(bytes);
            return Ok(());
        }
        let parts = &mut [IoSlice::new(&self.gathered), IoSlice::new(bytes)];
        write_all(&self.file, parts, self.at)?;
        self.at = at + u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.gathered.clear();
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        write_all(&self.file, &mut [IoSlice::new(&self.gathered)], self.at)?;
        self.at += u64::try_from(self.gathered.len()).unwrap_or(u64::MAX);
        self.gathered.clear();
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.file.sync_data()
    }
}

fn write_all(file: &File, mut parts: &mut [IoSlice<'_>], mut at: u64) -> io::Result<()> {
    IoSlice::advance_slices(&mut parts, 0);
    while !parts.is_empty() {
        match rustix::io::pwritev(file, parts, at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                IoSlice::advance_slices(&mut parts, count);
                at += u64::try_from(count).unwrap_or(u64::MAX);
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Whether all bytes are zero. Wide pieces let the compiler use vector instructions, and a page in
/// use nearly always ends it within the first.
fn is_zero(page: &[u8]) -> bool {
    page.chunks(256).all(|piece| piece.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Bytes of the header fit before the page data.
const _: () = assert!(HEADER_BYTES as u64 <= DATA_START);
