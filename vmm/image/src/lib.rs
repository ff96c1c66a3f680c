//! Checkpoints on disk, and what guest memory looks like through several of them.
//!
//! A checkpoint is one file: a header that any version can read, sections with versions and
//! checksums of their own, and the page data of one memory layer (the pages written since the
//! parent checkpoint). [`Writer`] makes such a file in one pass, [`Image`] reads it and trusts
//! nothing in it. [`View`] stacks the page indexes of several layers and says for each page of
//! guest RAM which file holds it; [`PageSet`] is a plain set of pages, such as the dirty ones.
//!
//! # The file
//!
//! All integers are little endian. Offsets count from the start of the file.
//!
//! ```text
//!        0  header (4,096 bytes), written last
//!   65,536  page data: pages of 4,096 bytes, aligned so that they can be mapped
//!           other sections, one after the other
//!           page index, section table
//! ```
//!
//! | Header offset | Size | Field |
//! |---|---|---|
//! | 0 | 8 | magic `COPPICE\0` |
//! | 8 | 4 | format version, now 1 |
//! | 12 | 4 | architecture as in ELF's `e_machine`: 62 for x86-64 |
//! | 16 | 32 | build of the VMM that wrote it, ASCII, zeroes behind |
//! | 48 | 12 | CPU vendor, as CPUID leaf 0 spells it |
//! | 60 | 4 | CPU signature, as CPUID leaf 1 EAX |
//! | 64 | 32 | eight words of CPU feature bits |
//! | 96 | 8 | pages of guest RAM |
//! | 104 | 4 | number of sections |
//! | 108 | 4 | zero |
//! | 112 | 8 | offset of the section table |
//! | 120 | 8 | length of the section table in bytes |
//! | 128 | 8 | checksum of the section table |
//! | 136 | 8 | checksum of the header's 4,096 bytes, this field taken as zero |
//!
//! Every checksum is XXH3-64 with seed 0. An entry of the section table has 40 bytes: kind `u32`,
//! instance `u32`, version `u16`, flags `u16` (bit 0: a reader that does not know the kind must
//! refuse the file), zero `u32`, offset `u64`, length `u64`, checksum `u64`. An entry of the page
//! index has 32 bytes: first page `u64`, count `u32`, flags `u32` (bit 0: zero pages without
//! data), the first page in the file `u64`, checksum of the data `u64`. The checksum of the
//! section with page data is zero, since each entry of the index has its own.
//!
//! Pages of guest RAM are numbered from 0 in the order of guest addresses, the hole below 4 GiB
//! left out.

mod checksum;
mod header;
mod index;
mod page_set;
mod reader;
mod sealed_map;
mod section;
mod view;
mod writer;

pub use checksum::make_ready;
pub use header::{BUILD_MAX, CpuIdentity, CpuMismatch, FORMAT_VERSION, HeaderError, HeaderInfo};
pub use index::{Extent, IndexError, MAX_EXTENTS, PageIndex};
pub use page_set::{PageSet, Runs};
pub use reader::{Image, ReadError, Section};
pub use sealed_map::{ClusterRun, MapError, SealedMap, decode_maps, encode_maps};
pub use section::{Kind, MAX_SECTION, MAX_SECTIONS, TableError};
pub use view::{Run, Source, View, ViewError, ViewRuns};
pub use writer::{Summary, WriteError, Writer};

/// Size of a page of guest RAM in bytes.
pub const PAGE: u64 = 4096;

/// [`PAGE`] for lengths in memory.
pub(crate) const PAGE_BYTES: usize = 4096;
