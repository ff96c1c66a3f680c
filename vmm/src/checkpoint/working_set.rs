//! Which pages a machine uses soon after it starts from a checkpoint: recorded at a first start,
//! and brought in ahead of the guest at later ones.
//!
//! Only pages that lie in checkpoint files count; zeroes are cheap to come by. The record is a
//! hint: what is wrong in it costs time and nothing else, so whatever does not make sense is left
//! out.

use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use vm_memory::bitmap::AtomicBitmap;

use crate::memory::GuestRam;
use crate::memory::backing::Backing;
use crate::memory::pages;
use crate::sys::kvm::VmWithRam;
use crate::sys::mem;
use crate::sys::pagemap::Pagemap;

/// First bytes of a record; the last one is its version.
const MAGIC: &[u8; 8] = b"CPCEWSET";
/// Runs of a record; more are left out.
const MAX_RUNS: usize = 16_384;
/// Gaps up to this many pages are brought in as well: the kernel reads ahead as much.
const GAP: u64 = 8;
const RUN_BYTES: usize = 16;
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
    let present = pages::present_pages(vm.ram(), pagemap)?;
    let mut bytes = MAGIC.to_vec();
    let used = present
        .runs_with_gaps(GAP)
        .flat_map(|run| backing.by_kind(run).filter(|(_, zeroes)| !zeroes).map(|(run, _)| run));
    for run in used.take(MAX_RUNS) {
        bytes.extend(run.start.to_le_bytes());
        bytes.extend((run.end - run.start).to_le_bytes());
    }
    file.write_all(&bytes)
}

/// Reads a record; nothing of what is not one.
fn read(file: &File, limit: u64) -> io::Result<Vec<Range<u64>>> {
    let mut bytes = vec![0; MAGIC.len() + MAX_RUNS * RUN_BYTES];
    let mut length = 0;
    while let Some(rest) = bytes.get_mut(length..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, u64::try_from(length).map_err(io::Error::other)?)? {
            0 => break,
            count => length += count,
        }
    }
    let runs = bytes.get(..length).and_then(|bytes| bytes.strip_prefix(MAGIC)).unwrap_or_default();
    let (runs, _) = runs.as_chunks::<RUN_BYTES>();
    let run = |bytes: &[u8; RUN_BYTES]| {
        let (first, count) = bytes.split_at(RUN_BYTES / 2);
        let first = u64::from_le_bytes(first.try_into().ok()?);
        let end = first.checked_add(u64::from_le_bytes(count.try_into().ok()?))?;
        (first < end && end <= limit).then_some(first..end)
    };
    Ok(runs.iter().filter_map(run).collect())
}

/// How far pages are brought in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Into the page cache, for a machine that is about to run: filling page tables beside it
    /// would take processor time from it, and a page that the guest then writes costs more when
    /// it is there to read already.
    PageCache,
    /// Into the page tables, for when there is time: a machine that waits for KVM.
    PageTables,
}

/// A thread that brings pages in; dropping it waits for its end.
#[derive(Debug)]
pub struct Prefetch(Option<JoinHandle<()>>);

impl Prefetch {
    /// Starts bringing in the pages of a record.
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub fn start(ram: Arc<GuestRam>, file: File, depth: Depth) -> io::Result<Self> {
        let thread =
            Builder::new().name("prefetch".into()).stack_size(STACK_SIZE).spawn(move || {
                if let Err(error) = prefetch(&ram, &file, depth) {
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

fn prefetch(ram: &GuestRam, file: &File, depth: Depth) -> io::Result<()> {
    for run in read(file, pages::count(ram))? {
        for piece in pages::pieces(ram, run) {
            match depth {
                Depth::PageCache => mem::read_ahead(piece.region, piece.offset, piece.len)?,
                Depth::PageTables => mem::populate(piece.region, piece.offset, piece.len)?,
            }
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

    #[test]
    fn runs_outside_memory_or_without_pages_are_left_out() {
        let mut bytes = MAGIC.to_vec();
        for (first, count) in [(1u64, 2u64), (5, 0), (u64::MAX, 2), (9, 2), (8, 2)] {
            bytes.extend(first.to_le_bytes());
            bytes.extend(count.to_le_bytes());
        }
        assert_eq!(read(&file(&bytes), 10).unwrap(), [1..3, 8..10]);
    }

    proptest! {
        #[test]
        fn any_bytes_give_runs_inside_memory(bytes: Vec<u8>, magic: bool) {
            let mut all = if magic { MAGIC.to_vec() } else { Vec::new() };
            all.extend(bytes);
            let runs = read(&file(&all), 100).unwrap();
            prop_assert!(runs.iter().all(|run| run.start < run.end && run.end <= 100));
        }
    }
}
