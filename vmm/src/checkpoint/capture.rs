//! The content of a checkpoint's pages, fixed while the machine is paused.
//!
//! Pages are copied aside into memory that was made ready before the pause, so that the pause
//! costs one copy and no page fault. In the background mode nothing is copied: pages are
//! write-protected and read later, and only those that cannot be protected are copied.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use coppice_image::{WriteError, Writer};
use thiserror::Error;

use super::protect::Protected;
use super::selection::Selection;
use crate::memory::GuestRam;
use crate::memory::backing::Backing;
use crate::memory::pages::{self, PAGE};
use crate::sys::mem::Buffer;
use crate::sys::uffd::Userfaultfd;

/// Why pages cannot be captured.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The host does not let memory be write-protected.
    #[error(
        "the host does not let guest memory be write-protected for a background copy: run as root, \
         set vm.unprivileged_userfaultfd to 1, open /dev/userfaultfd to this user, or take the \
         checkpoint without it"
    )]
    NotAllowed(#[source] Arc<io::Error>),
    /// There is no memory to copy to.
    #[error("the host has no {bytes} bytes of memory to copy guest pages to")]
    Memory {
        /// How much was wanted.
        bytes: usize,
        /// What the host says.
        #[source]
        source: io::Error,
    },
    /// Pages cannot be write-protected.
    #[error("guest memory cannot be write-protected")]
    Protect(#[source] io::Error),
}

/// Memory made ready for a copy before the machine is paused.
#[derive(Debug, Default)]
pub struct Spare(Option<Buffer>);

/// The host's leave to write-protect memory, to be had before the machine is stopped and its disks
/// go over to new layers.
#[derive(Debug)]
pub struct Guard(Arc<Userfaultfd>);

impl Guard {
    /// Takes it, if the host gave it when the process started.
    ///
    /// # Errors
    /// [`CaptureError::NotAllowed`].
    pub fn new(given: &Result<Arc<Userfaultfd>, Arc<io::Error>>) -> Result<Self, CaptureError> {
        given.clone().map(Self).map_err(CaptureError::NotAllowed)
    }
}

impl Spare {
    /// Makes room for `pages` and a little more, for what the guest writes until it is paused.
    ///
    /// # Errors
    /// When the host has no memory.
    pub fn new(pages: u64) -> Result<Self, CaptureError> {
        let bytes = bytes_of(pages.saturating_add(pages / 4).saturating_add(256));
        let buffer = Buffer::new(bytes).map_err(|source| CaptureError::Memory { bytes, source })?;
        Ok(Self(Some(buffer)))
    }

    /// The buffer if it is large enough, else a new one.
    fn take(self, pages: u64) -> Result<Buffer, CaptureError> {
        let bytes = bytes_of(pages);
        match self.0.filter(|buffer| buffer.bytes().len() >= bytes) {
            Some(buffer) => Ok(buffer),
            None => Buffer::new(bytes).map_err(|source| CaptureError::Memory { bytes, source }),
        }
    }
}

fn bytes_of(pages: u64) -> usize {
    usize::try_from(pages).unwrap_or(usize::MAX).saturating_mul(PAGE)
}

/// The pages of one checkpoint.
#[derive(Debug)]
pub struct Capture {
    selection: Selection,
    /// Copied pages, one behind the other in ascending order.
    copied: Copied,
    protected: Option<Protected>,
}

/// Pages in a buffer.
#[derive(Debug)]
struct Copied {
    buffer: Buffer,
    /// The runs in the buffer, with the offset of each.
    places: Vec<(Range<u64>, usize)>,
}

impl Copied {
    fn new(ram: &GuestRam, runs: impl Iterator<Item = Range<u64>>, mut buffer: Buffer) -> Self {
        let mut places = Vec::new();
        let mut at = 0;
        for run in runs {
            let end = at + bytes_of(run.end - run.start);
            if let Some(to) = buffer.bytes_mut().get_mut(at..end) {
                pages::copy_out(ram, run.clone(), to);
            }
            places.push((run, at));
            at = end;
        }
        Self { buffer, places }
    }

    /// The content of the pages at the start of `pages` that are here, and how many they are.
    fn find(&self, pages: &Range<u64>) -> Option<(&[u8], u64)> {
        let at = self.places.partition_point(|(run, _)| run.end <= pages.start);
        let (run, offset) = self.places.get(at).filter(|(run, _)| run.start <= pages.start)?;
        let count = run.end.min(pages.end) - pages.start;
        let start = offset + bytes_of(pages.start - run.start);
        Some((self.buffer.bytes().get(start..start + bytes_of(count))?, count))
    }
}

impl Capture {
    /// Copies the pages. For when no vCPU and no device runs.
    ///
    /// # Errors
    /// When the host has no memory.
    pub fn copy(ram: &GuestRam, selection: Selection, spare: Spare) -> Result<Self, CaptureError> {
        let buffer = spare.take(selection.page_count())?;
        let copied = Copied::new(ram, selection.pages().runs(), buffer);
        Ok(Self { selection, copied, protected: None })
    }

    /// Write-protects the pages that lie over zeroes and copies the others: mappings of files
    /// cannot be protected. For when no vCPU and no device runs.
    ///
    /// # Errors
    /// When the host does not let pages be protected, or has no memory.
    pub fn protect(
        ram: &Arc<GuestRam>,
        selection: Selection,
        backing: &Backing,
        guard: Guard,
    ) -> Result<Self, CaptureError> {
        let (mut over_zeroes, mut over_files) = (Vec::new(), Vec::new());
        for run in selection.pages().runs() {
            for (part, zeroes) in backing.by_kind(run) {
                if zeroes { over_zeroes.push(part) } else { over_files.push(part) }
            }
        }
        let pages = over_files.iter().map(|run| run.end - run.start).sum();
        let buffer = Spare::default().take(pages)?;
        let copied = Copied::new(ram, over_files.into_iter(), buffer);
        let protected =
            Protected::new(Arc::clone(ram), over_zeroes, guard.0).map_err(CaptureError::Protect)?;
        Ok(Self { selection, copied, protected: Some(protected) })
    }

    /// The pages it holds.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Writes all pages, and lets the guest write to each as soon as its content is safe; `false`
    /// when `cancelled` put an end to it.
    ///
    /// # Errors
    /// Those of the file; protection ends all the same when the capture is dropped.
    pub(super) fn write(
        &mut self,
        writer: &mut Writer,
        cancelled: &AtomicBool,
    ) -> Result<bool, WriteError> {
        for run in self.selection.runs() {
            if cancelled.load(Ordering::Relaxed) {
                return Ok(false);
            }
            write_run(&self.selection, &self.copied, self.protected.as_mut(), writer, run)?;
        }
        Ok(true)
    }
}

/// Pages given to the writer at once: the extent of a protected run, and how long one who writes
/// to such a page may have to wait.
const CHUNK: u64 = 128;
/// Content of the pages that close a gap of a first checkpoint.
static ZEROES: [u8; 64 * PAGE] = [0; 64 * PAGE];

/// Writes one run: as one extent if all of it was copied, else in chunks.
fn write_run(
    selection: &Selection,
    copied: &Copied,
    mut protected: Option<&mut Protected>,
    writer: &mut Writer,
    run: &Range<u64>,
) -> Result<(), WriteError> {
    let step = if protected.is_some() { CHUNK } else { u64::from(u32::MAX) };
    let mut start = run.start;
    while start < run.end {
        let chunk = start..run.end.min(start + step);
        let count = u32::try_from(chunk.end - chunk.start).unwrap_or(u32::MAX);
        if let Some(protected) = protected.as_deref_mut() {
            protected.fetch(&chunk).map_err(WriteError::Io)?;
        }
        let mut slices = Vec::new();
        let mut page = chunk.start;
        while page < chunk.end {
            let rest = page..chunk.end;
            let found = copied
                .find(&rest)
                .or_else(|| protected.as_deref().and_then(|protected| protected.find(&rest)));
            let (bytes, pages) = found.unwrap_or_else(|| gap(selection, &rest));
            slices.push(io::IoSlice::new(bytes));
            page += pages.max(1);
        }
        writer.pages_vectored(chunk.start, count, &slices)?;
        start = chunk.end;
    }
    Ok(())
}

/// The zero pages from the start of `pages` to the next page that was selected.
fn gap(selection: &Selection, pages: &Range<u64>) -> (&'static [u8], u64) {
    let longest = pages.end.min(pages.start + 64);
    let end = (pages.start + 1..longest).find(|page| selection.pages().contains(*page));
    let count = end.unwrap_or(longest) - pages.start;
    (ZEROES.get(..bytes_of(count)).unwrap_or(&ZEROES), count)
}
