//! Which pages of guest RAM a checkpoint has to hold, and what RAM stands on.
//!
//! Until the first checkpoint nothing is logged, because logging costs the guest a fault for
//! every page; what was written is then what the process has made its own. From there on KVM
//! logs what vCPUs write, and the memory's bitmap has what devices write.

use std::fs::File;
use std::io;
use std::sync::Arc;

use coppice_image::{Image, PageSet};
use vm_memory::bitmap::AtomicBitmap;

use crate::checkpoint::{self, Selection};
use crate::memory::backing::{Backing, BackingError, Chain, Replaced};
use crate::memory::pages;
use crate::sys::kvm::VmWithRam;
use crate::sys::pagemap::Pagemap;

/// Guest RAM as checkpoints see it.
pub(super) struct Memory {
    vm: Arc<VmWithRam<AtomicBitmap>>,
    backing: Backing,
    pagemap: Arc<Pagemap>,
    logging: bool,
    /// Pages of a checkpoint that could not be written: the next one has to have them.
    unsaved: PageSet,
}

impl Memory {
    pub(super) fn new(
        vm: Arc<VmWithRam<AtomicBitmap>>,
        backing: Backing,
        pagemap: Arc<Pagemap>,
    ) -> Self {
        let unsaved = PageSet::new(pages::count(vm.ram()));
        Self { vm, backing, pagemap, logging: false, unsaved }
    }

    /// What RAM stands on.
    pub(super) fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Number of checkpoint layers that RAM stands on.
    pub(super) fn layers(&self) -> u32 {
        u32::try_from(self.backing.depth()).unwrap_or(u32::MAX)
    }

    /// About how many pages a checkpoint would have to copy now. The machine may run.
    pub(super) fn estimate(&self) -> io::Result<u64> {
        if !self.logging {
            return Ok(pages::private_pages(self.vm.ram(), &self.pagemap)?.len());
        }
        let mut set = self.unsaved.clone();
        for (slot, first, _) in pages::regions(self.vm.ram()) {
            set.union_words(first, &self.vm.dirty_log(slot)?);
        }
        Ok(set.len())
    }

    /// The pages written since the checkpoint that the machine stands on; from here on they count
    /// as not written. For when no vCPU and no device runs.
    pub(super) fn take_written(&mut self) -> io::Result<PageSet> {
        let ram = self.vm.ram();
        let mut set = pages::take_own_writes(ram);
        set.union(&self.unsaved);
        // If what follows fails, nothing is lost.
        self.unsaved = set.clone();
        if self.logging {
            for (slot, first, region) in pages::regions(ram) {
                let mut words = self.vm.dirty_log(slot)?;
                set.union_words(first, &words);
                self.unsaved.union_words(first, &words);
                let count = u32::try_from(region.size() / pages::PAGE).map_err(io::Error::other)?;
                self.vm.clear_dirty_log(slot, 0, count, &mut words)?;
            }
        } else {
            set.union(&pages::private_pages(ram, &self.pagemap)?);
            self.unsaved.union(&set);
            self.vm.log_dirty(true)?;
            self.logging = true;
        }
        self.unsaved.clear();
        Ok(set)
    }

    /// The selection of a checkpoint that holds `written`.
    pub(super) fn select(&self, written: PageSet) -> Selection {
        if self.backing.depth() == 0 {
            Selection::first(written)
        } else {
            Selection::later(written)
        }
    }

    /// A checkpoint of this machine is complete: the machine stands on it.
    ///
    /// # Errors
    /// When its file is not what was written.
    pub(super) fn advance(&mut self, image: &Image) -> Result<(), BackingError> {
        self.backing.advance(image)
    }

    /// Writes down which pages of its checkpoint the machine has used since it started.
    pub(super) fn record_working_set(&self, file: &File) -> io::Result<()> {
        checkpoint::record(&self.vm, &self.pagemap, &self.backing, file)
    }

    /// A checkpoint that should have held `pages` was not written.
    pub(super) fn keep(&mut self, pages: &PageSet) {
        self.unsaved.union(pages);
    }

    /// Brings RAM to the checkpoint `target`; returns how many pages were touched.
    ///
    /// # Errors
    /// RAM is then a mixture that must not run.
    pub(super) fn roll_back(
        &mut self,
        written: PageSet,
        target: Chain,
    ) -> Result<(u64, Replaced), BackingError> {
        let mut changed = written;
        changed.union(&self.backing.difference(&target));
        let replaced = self.backing.roll_back(self.vm.ram(), &changed, target)?;
        Ok((changed.len(), replaced))
    }
}
