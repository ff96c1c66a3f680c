//! Which pages a machine uses soon after it starts from a checkpoint: recorded at a first start,
//! and brought in ahead of the guest at later ones.
//!
//! Only pages that lie in checkpoint files count; zeroes are cheap to come by. The record is a
//! hint: what is wrong in it costs time and nothing else, so whatever does not make sense is left
//! out.
//!
//! A page that is written costs a guest most: it comes into the page tables to be read, is then
//! copied, which takes it from KVM's tables, and has to come there again. So such pages are copied
//! before the guest runs, as many as memory allows.

use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Address as _, GuestMemoryRegion as _};

use crate::memory::GuestRam;
use crate::memory::backing::Backing;
use crate::memory::pages;
use crate::sys::jail::{self, Role};
use crate::sys::kvm::VmWithRam;
use crate::sys::mem;
use crate::sys::pagemap::Pagemap;

/// First bytes of a record; the last one is its version.
const MAGIC: &[u8; 8] = b"CPCEWSE2";
/// Runs of a record; more are left out.
const MAX_RUNS: usize = 16_384;
/// Gaps up to this many pages are brought in as well: the kernel reads ahead as much.
const GAP: u64 = 8;
const RUN_BYTES: usize = 16;
/// Set in a run's length when its pages were written.
const WRITTEN: u64 = 1 << 63;
/// Most pages that are copied ahead: 960 KiB, which a machine has of its own then even if it never
/// writes to them.
const MAX_COPIED: u64 = 240;
const STACK_SIZE: usize = 64 << 10;

/// Writes the pages that the machine has used since it started, into an empty file.
///
/// # Errors
/// Those of the file and of the pagemap.
pub fn record(
    vm: &VmWithRam<AtomicBitmap>,
    pagemap: &Pagemap,
    backing: &Backing,
    mut file: &File,
) -> io::Result<()> {
    let written = pages::private_pages(vm.ram(), pagemap)?;
    let present = pages::present_pages(vm.ram(), pagemap)?;
    let in_files =
        |run: Range<u64>| backing.by_kind(run).filter(|(_, zeroes)| !zeroes).map(|(run, _)| run);
    let written = written.runs_with_gaps(0).flat_map(in_files).map(|run| (run, WRITTEN));
    let used = present.runs_with_gaps(GAP).flat_map(in_files).map(|run| (run, 0));
    let mut bytes = MAGIC.to_vec();
    for (run, mark) in written.chain(used).take(MAX_RUNS) {
        bytes.extend(run.start.to_le_bytes());
        bytes.extend(((run.end - run.start) | mark).to_le_bytes());
    }
    file.write_all(&bytes)
}

/// What a record says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// Pages that were written, at most [`MAX_COPIED`].
    written: Vec<Range<u64>>,
    /// Pages that were used, those that were written among them.
    used: Vec<Range<u64>>,
}

impl WorkingSet {
    /// Reads a record for RAM of `limit` pages; nothing of what is not one.
    ///
    /// # Errors
    /// Those of reading the file.
    pub fn read(file: &File, limit: u64) -> io::Result<Self> {
        let most = MAGIC.len() + MAX_RUNS * RUN_BYTES;
        let size = usize::try_from(file.metadata()?.len()).unwrap_or(most).min(most);
        let mut bytes = vec![0; size];
        let mut length = 0;
        while let Some(rest) = bytes.get_mut(length..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, u64::try_from(length).map_err(io::Error::other)?)? {
                0 => break,
                count => length += count,
            }
        }
        let runs = bytes.get(..length).and_then(|bytes| bytes.strip_prefix(MAGIC));
        let (runs, _) = runs.unwrap_or_default().as_chunks::<RUN_BYTES>();
        let mut set = Self::default();
        let mut left = MAX_COPIED;
        for bytes in runs {
            let word = |at: usize| {
                let bytes = bytes.get(at..)?.first_chunk()?;
                Some(u64::from_le_bytes(*bytes))
            };
            let (Some(first), Some(count)) = (word(0), word(RUN_BYTES / 2)) else { continue };
            let Some(end) = first.checked_add(count & !WRITTEN) else { continue };
            if first >= end || end > limit {
                continue;
            }
            if count & WRITTEN == 0 {
                set.used.push(first..end);
            } else if left > 0 {
                let end = end.min(first.saturating_add(left));
                left -= end - first;
                set.written.push(first..end);
            }
        }
        Ok(set)
    }

    /// Copies the pages that were written, before anybody runs that could write to them.
    ///
    /// # Errors
    /// On kernels older than 5.14, or when memory is short.
    pub fn copy_written(&self, ram: &GuestRam) -> io::Result<()> {
        for piece in self.written.iter().flat_map(|run| pages::pieces(ram, run.clone())) {
            mem::populate_for_writes(piece.region, piece.offset, piece.len)?;
        }
        Ok(())
    }

    /// Whether any of the files' pages must be read from their disk, by the first page of each run.
    fn is_on_disk(&self, ram: &GuestRam) -> bool {
        let mut pieces = self.used.iter().flat_map(|run| pages::pieces(ram, run.clone()));
        // If the kernel does not say, reading ahead does no harm.
        pieces.any(|piece| !mem::is_resident(piece.region, piece.offset).unwrap_or(false))
    }

    /// The guest's addresses of the pages that [`WorkingSet::copy_written`] copies.
    pub fn written_addresses(&self, ram: &GuestRam) -> Vec<Range<u64>> {
        let pieces = self.written.iter().flat_map(|run| pages::pieces(ram, run.clone()));
        let range = |piece: pages::Piece<'_>| {
            let offset = u64::try_from(piece.offset).ok()?;
            let start = piece.region.start_addr().checked_add(offset)?.raw_value();
            Some(start..start.checked_add(u64::try_from(piece.len).ok()?)?)
        };
        pieces.filter_map(range).collect()
    }
}

/// How far pages are brought in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Into the page cache, for a machine that is about to run: filling page tables beside it
    /// would take processor time from it.
    PageCache,
    /// Into the page tables, for when there is time: a machine that waits for KVM.
    PageTables,
}

/// A thread that brings pages in; dropping it waits for its end.
#[derive(Debug)]
pub struct Prefetch(Option<JoinHandle<()>>);

impl Prefetch {
    /// Starts bringing in the pages of a working set, unless they are there.
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub fn start(ram: Arc<GuestRam>, set: WorkingSet, depth: Depth) -> io::Result<Self> {
        if depth == Depth::PageCache && !set.is_on_disk(&ram) {
            return Ok(Self(None));
        }
        let thread =
            Builder::new().name("prefetch".into()).stack_size(STACK_SIZE).spawn(move || {
                jail::confine(Role::Worker);
                if let Err(error) = prefetch(&ram, &set, depth) {
                    tracing::debug!(%error, "the working set was not brought in");
                }
            })?;
        Ok(Self(Some(thread)))
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A thread that panicked has nothing more to tell.
            let _ = thread.join();
        }
    }
}

fn prefetch(ram: &GuestRam, set: &WorkingSet, depth: Depth) -> io::Result<()> {
    for piece in set.used.iter().flat_map(|run| pages::pieces(ram, run.clone())) {
        match depth {
            Depth::PageCache => mem::read_ahead(piece.region, piece.offset, piece.len)?,
            Depth::PageTables => mem::populate(piece.region, piece.offset, piece.len)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn record_of(runs: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for (first, count) in runs {
            bytes.extend(first.to_le_bytes());
            bytes.extend(count.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn runs_outside_memory_or_without_pages_are_left_out() {
        let bytes = record_of(&[(1, 2), (5, 0), (u64::MAX, 2), (9, 2), (8, 2)]);
        assert_eq!(WorkingSet::read(&file(&bytes), 10).unwrap().used, [1..3, 8..10]);
    }

    #[test]
    fn no_more_pages_are_copied_than_memory_allows() {
        let bytes = record_of(&[(0, 100 | WRITTEN), (200, 100 | WRITTEN), (400, 100 | WRITTEN)]);
        let set = WorkingSet::read(&file(&bytes), 1000).unwrap();
        assert_eq!(set.written, [0..100, 200..300, 400..440]);
        assert!(set.used.is_empty());
    }

    proptest! {
        #[test]
        fn any_bytes_give_runs_inside_memory(bytes: Vec<u8>, magic: bool) {
            let mut all = if magic { MAGIC.to_vec() } else { Vec::new() };
            all.extend(bytes);
            let set = WorkingSet::read(&file(&all), 100).unwrap();
            let mut runs = set.written.iter().chain(&set.used);
            prop_assert!(runs.all(|run| run.start < run.end && run.end <= 100));
        }
    }
}
