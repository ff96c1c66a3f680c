//! What guest RAM stands on: checkpoint layers under the guest's own writes.
//!
//! A [`Backing`] knows two pictures of RAM. The *mapped* one is what the process's mappings show
//! where the guest wrote nothing: the view of the checkpoint a clone was made from, or zeroes
//! after a cold boot. The *current* one is the view of the checkpoint the machine stands on now;
//! it moves on with every checkpoint and back with every rollback, while mappings stay.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use coppice_image::{Image, PageIndex, PageSet, ReadError, Run, Source, View, ViewError};
use thiserror::Error;
use vm_memory::VolatileSlice;
use vm_memory::bitmap::{AtomicBitmap, BS};

use super::GuestRam;
use super::pages::{self, Piece};
use crate::sys::block_io;
use crate::sys::mem;

/// Runs at least this long are dropped when what lies under them is right: shorter ones are
/// copied, which spares the guest the fault at its next access.
const FORGET_PAGES: u64 = 64;

/// Most mappings of files that guest RAM is made of; the kernel allows a process 65,530 mappings
/// in all. The shortest runs beyond are copied.
const MAX_MAPPINGS: usize = 16_384;

/// Why RAM cannot be put on checkpoint layers.
#[derive(Debug, Error)]
pub enum BackingError {
    /// A layer's file is not a checkpoint.
    #[error("checkpoint layer {layer} cannot be used")]
    Layer {
        /// Its position, from the root.
        layer: usize,
        /// What is wrong.
        #[source]
        source: ReadError,
    },
    /// A layer's file cannot be examined.
    #[error("checkpoint layer {layer} cannot be examined")]
    Stat {
        /// Its position, from the root.
        layer: usize,
        /// What the host says.
        #[source]
        source: io::Error,
    },
    /// A layer is of a machine with another amount of RAM.
    #[error("checkpoint layer {layer} does not fit guest memory")]
    Fit {
        /// Its position, from the root.
        layer: usize,
        /// What is wrong.
        #[source]
        source: ViewError,
    },
    /// There are more layers than can be numbered.
    #[error("the checkpoint stands on more than {} layers: flatten it", u16::MAX)]
    TooManyLayers,
    /// There are no layers.
    #[error("a checkpoint without layers cannot be restored")]
    NoLayers,
    /// A layer cannot be mapped or read into guest memory.
    #[error("guest memory cannot be filled from its checkpoint")]
    Fill(#[source] io::Error),
}

/// One layer: a checkpoint's file and the pages in it.
#[derive(Debug)]
pub struct Layer {
    file: File,
    index: PageIndex,
    /// Device and inode of the file, which tell whether two layers are the same one.
    id: (u64, u64),
}

impl Layer {
    /// The layer in an opened checkpoint.
    fn new(layer: usize, image: &Image) -> Result<Self, BackingError> {
        let stat = |source| BackingError::Stat { layer, source };
        let index = image.page_index().map_err(|source| BackingError::Layer { layer, source })?;
        let file = image.file().try_clone().map_err(stat)?;
        let metadata = file.metadata().map_err(stat)?;
        Ok(Self { file, index, id: (metadata.dev(), metadata.ino()) })
    }
}

/// A chain of layers, root first, and what RAM looks like on it.
#[derive(Debug)]
pub struct Chain {
    layers: Vec<Arc<Layer>>,
    view: View,
}

impl Chain {
    /// What a machine that was never checkpointed stands on: nothing but zeroes.
    pub fn empty(ram_pages: u64) -> Self {
        Self { layers: Vec::new(), view: View::empty(ram_pages) }
    }

    /// Stacks opened checkpoints, root first, for RAM of `ram_pages`.
    ///
    /// # Errors
    /// [`BackingError`]: a file is damaged or of another machine.
    pub fn new(images: &[Image], ram_pages: u64) -> Result<Self, BackingError> {
        if images.is_empty() {
            return Err(BackingError::NoLayers);
        }
        let mut chain = Self::empty(ram_pages);
        for (at, image) in images.iter().enumerate() {
            chain.push(Arc::new(Layer::new(at, image)?))?;
        }
        Ok(chain)
    }

    /// Adds a layer on top.
    fn push(&mut self, layer: Arc<Layer>) -> Result<(), BackingError> {
        let at = self.layers.len();
        let number = u16::try_from(at).map_err(|_| BackingError::TooManyLayers)?;
        self.view
            .push(number, &layer.index)
            .map_err(|source| BackingError::Fit { layer: at, source })?;
        self.layers.push(layer);
        Ok(())
    }

    fn file(&self, layer: u16) -> io::Result<&File> {
        let layer = self.layers.get(usize::from(layer)).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(&layer.file)
    }

    /// How many layers there are.
    pub fn depth(&self) -> usize {
        self.layers.len()
    }

    /// Whether two runs of the same pages, of two chains, have the same content by place.
    fn same(&self, run: &Run, other: &Self, other_run: &Run) -> bool {
        if run.count != other_run.count {
            return false;
        }
        match (run.source, other_run.source) {
            (Source::Zero, Source::Zero) => true,
            (
                Source::Layer { layer, page },
                Source::Layer { layer: other_layer, page: other_page },
            ) => {
                let id = |chain: &Self, layer: u16| {
                    chain.layers.get(usize::from(layer)).map(|layer| layer.id)
                };
                page == other_page && id(self, layer) == id(other, other_layer)
            }
            (Source::Zero, Source::Layer { .. }) | (Source::Layer { .. }, Source::Zero) => false,
        }
    }
}

/// What guest RAM stands on.
#[derive(Debug)]
pub struct Backing {
    mapped: Arc<Chain>,
    /// Whether every run of files in it is mapped; else short ones were copied, and what lies
    /// under those is zeroes.
    complete: bool,
    current: Arc<Chain>,
}

impl Backing {
    /// That of a machine that starts from zeroes.
    pub fn empty(ram: &GuestRam) -> Self {
        let chain = Arc::new(Chain::empty(pages::count(ram)));
        Self { mapped: Arc::clone(&chain), complete: true, current: chain }
    }

    /// Maps `chain` over RAM that holds nothing yet.
    ///
    /// # Errors
    /// [`BackingError::Fill`]; RAM is then partly mapped.
    pub fn map(ram: &GuestRam, chain: Chain) -> Result<Self, BackingError> {
        let all = 0..pages::count(ram);
        let least = shortest_mapped(&chain.view);
        for run in chain.view.runs(all) {
            let Source::Layer { layer, page } = run.source else { continue };
            let file = chain.file(layer).map_err(BackingError::Fill)?;
            if run.count >= least {
                map_run(ram, file, &run, page).map_err(BackingError::Fill)?;
            } else {
                read_run(ram, file, &run, page).map_err(BackingError::Fill)?;
            }
        }
        // Reading marked pages as written by this process, but they are as the checkpoint has
        // them. Pages that were copied stay in the pagemap as private, which is harmless.
        drop(pages::take_own_writes(ram));
        let chain = Arc::new(chain);
        Ok(Self { mapped: Arc::clone(&chain), complete: least == 1, current: chain })
    }

    /// How many layers the machine stands on.
    pub fn depth(&self) -> usize {
        self.current.depth()
    }

    /// The parts of `pages` that lie over zeroes (`true`) and over files (`false`).
    pub fn by_kind(&self, pages: Range<u64>) -> impl Iterator<Item = (Range<u64>, bool)> {
        self.mapped.view.runs(pages).map(|run| (run.first..run.end(), run.source == Source::Zero))
    }

    /// The machine now stands on a checkpoint of itself with this file, taken over its present
    /// one.
    ///
    /// # Errors
    /// When the file is not what was just written.
    pub fn advance(&mut self, image: &Image) -> Result<(), BackingError> {
        let layer = Layer::new(self.depth(), image)?;
        let mut chain =
            Chain { layers: self.current.layers.clone(), view: self.current.view.clone() };
        chain.push(Arc::new(layer))?;
        self.current = Arc::new(chain);
        Ok(())
    }

    /// The pages in which the current checkpoint and `target` may differ: those in the layers of
    /// either that the other does not have.
    pub fn difference(&self, target: &Chain) -> PageSet {
        let ours: HashSet<_> = self.current.layers.iter().map(|layer| layer.id).collect();
        let theirs: HashSet<_> = target.layers.iter().map(|layer| layer.id).collect();
        let mut set = PageSet::new(self.current.view.ram_pages());
        let own = self.current.layers.iter().filter(|layer| !theirs.contains(&layer.id));
        let other = target.layers.iter().filter(|layer| !ours.contains(&layer.id));
        for layer in own.chain(other) {
            for extent in layer.index.extents() {
                set.insert_run(extent.first, extent.count);
            }
        }
        set
    }

    /// Makes `changed` pages of RAM what `target` has there, and `target` the current checkpoint.
    /// `changed` must hold every page in which RAM differs from it.
    ///
    /// # Errors
    /// [`BackingError::Fill`]; RAM is then a mixture that must not run.
    pub fn roll_back(
        &mut self,
        ram: &GuestRam,
        changed: &PageSet,
        target: Chain,
    ) -> Result<Replaced, BackingError> {
        self.bring_back(ram, changed, &target).map_err(BackingError::Fill)?;
        drop(pages::take_own_writes(ram));
        let before = std::mem::replace(&mut self.current, Arc::new(target));
        Ok(Replaced { _chain: before })
    }

    fn bring_back(&self, ram: &GuestRam, changed: &PageSet, target: &Chain) -> io::Result<()> {
        let mut batch = Batch::new(target);
        for range in changed.runs() {
            for run in target.view.runs(range) {
                self.roll_back_run(ram, target, &mut batch, &run)?;
            }
        }
        batch.read()
    }

    fn roll_back_run<'a>(
        &self,
        ram: &'a GuestRam,
        target: &Chain,
        batch: &mut Batch<'a>,
        run: &Run,
    ) -> io::Result<()> {
        if run.count >= FORGET_PAGES {
            let under = self.mapped.view.runs(run.first..run.end()).next();
            let known = self.complete || run.source == Source::Zero;
            if known && under.is_some_and(|under| target.same(run, &self.mapped, &under)) {
                return forget_run(ram, run);
            }
        }
        match run.source {
            Source::Zero => {
                pages::clear(ram, run.first..run.end());
                Ok(())
            }
            Source::Layer { layer, page } => placed(ram, run, page).try_for_each(|placed| {
                let (piece, at) = placed?;
                batch.add(layer, at, piece.slice().ok_or(io::ErrorKind::InvalidInput)?)
            }),
        }
    }
}

/// What a rollback needs no more. Dropping it closes files, which can wait until the machine runs.
pub struct Replaced {
    _chain: Arc<Chain>,
}

/// Parts of guest memory whose content lies one behind the other in a layer's file, to be read
/// by one call. A layer holds its pages in order, so a rollback reads most of them in a few calls,
/// and a call costs less than mapping the file and taking the mapping down again.
struct Batch<'a> {
    chain: &'a Chain,
    layer: u16,
    /// Where the parts lie in the file, in bytes.
    place: Range<u64>,
    parts: Vec<Slice<'a>>,
}

type Slice<'a> = VolatileSlice<'a, BS<'a, AtomicBitmap>>;

impl<'a> Batch<'a> {
    fn new(chain: &'a Chain) -> Self {
        Self { chain, layer: 0, place: 0..0, parts: Vec::with_capacity(block_io::MAX_PARTS) }
    }

    /// Adds a part with content at `at` of the layer's file, after reading the others if it does
    /// not go with them.
    fn add(&mut self, layer: u16, at: u64, part: Slice<'a>) -> io::Result<()> {
        let follows = layer == self.layer && at == self.place.end;
        if !follows || self.parts.len() == block_io::MAX_PARTS {
            self.read()?;
            (self.layer, self.place) = (layer, at..at);
        }
        let len = u64::try_from(part.len()).map_err(io::Error::other)?;
        self.place.end = at.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        self.parts.push(part);
        Ok(())
    }

    /// Reads what was added.
    fn read(&mut self) -> io::Result<()> {
        if self.parts.is_empty() {
            return Ok(());
        }
        let file = self.chain.file(self.layer)?;
        read_parts(file, &self.parts, self.place.start)?;
        self.parts.clear();
        Ok(())
    }
}

/// Fills all of `parts` from `at` on.
fn read_parts(file: &File, parts: &[Slice<'_>], mut at: u64) -> io::Result<()> {
    let mut done = 0;
    loop {
        // What earlier calls have read is left out.
        let mut skip = done;
        let rest = parts.iter().filter_map(move |part| {
            let skipped = skip.min(part.len());
            skip -= skipped;
            part.offset(skipped).ok().filter(|part| !part.is_empty())
        });
        if rest.clone().next().is_none() {
            return Ok(());
        }
        let count = block_io::read_at(file.as_fd(), rest, at)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        done += count;
        at += u64::try_from(count).map_err(io::Error::other)?;
    }
}

/// The length that a run must have to be mapped, so that mappings stay bounded.
fn shortest_mapped(view: &View) -> u64 {
    if view.span_count() <= MAX_MAPPINGS {
        return 1;
    }
    let all = 0..view.ram_pages();
    let mut lengths: Vec<_> =
        view.runs(all).filter(|run| run.source != Source::Zero).map(|run| run.count).collect();
    lengths.sort_unstable_by(|a, b| b.cmp(a));
    // One more than the first that is too many, in case of equal lengths.
    lengths.get(MAX_MAPPINGS).map_or(1, |length| length + 1)
}

/// Each piece of a run with the offset of its content in the run's file.
fn placed<'a>(
    ram: &'a GuestRam,
    run: &Run,
    page: u64,
) -> impl Iterator<Item = io::Result<(Piece<'a>, u64)>> {
    let mut offset = page.checked_mul(4096);
    pages::pieces(ram, run.first..run.end()).map(move |piece| {
        let at = offset.ok_or(io::ErrorKind::InvalidInput)?;
        offset = u64::try_from(piece.len).ok().and_then(|len| at.checked_add(len));
        Ok((piece, at))
    })
}

fn map_run(ram: &GuestRam, file: &File, run: &Run, page: u64) -> io::Result<()> {
    for placed in placed(ram, run, page) {
        let (piece, at) = placed?;
        mem::map_file_over(piece.region, piece.offset, piece.len, file.as_fd(), at)?;
    }
    Ok(())
}

fn forget_run(ram: &GuestRam, run: &Run) -> io::Result<()> {
    pages::pieces(ram, run.first..run.end())
        .try_for_each(|piece| mem::forget_writes(piece.region, piece.offset, piece.len))
}

fn read_run(ram: &GuestRam, file: &File, run: &Run, page: u64) -> io::Result<()> {
    placed(ram, run, page).try_for_each(|placed| {
        let (piece, at) = placed?;
        read_parts(file, &[piece.slice().ok_or(io::ErrorKind::InvalidInput)?], at)
    })
}
