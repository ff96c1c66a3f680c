//! Sections and their table: where each part of a checkpoint lies in the file.

use thiserror::Error;

use crate::header::{Fields, HEADER_BYTES};

/// Most sections in a file.
pub const MAX_SECTIONS: usize = 1024;
/// Longest section in bytes, page data and page index apart: room for the cluster map of a disk
/// of 30 TiB.
pub const MAX_SECTION: u64 = 64 << 20;
/// Bytes of one entry of the table.
pub(crate) const ENTRY_BYTES: usize = 40;

/// The flag of sections that a reader must know.
const REQUIRED: u16 = 1;

/// What a section holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Kind {
    /// What the manager knows about the checkpoint, as JSON.
    Meta = 1,
    /// The machine's shape.
    Machine = 2,
    /// State of one vCPU; the instance is its index.
    Vcpu = 3,
    /// State of the interrupt controllers.
    Irqchip = 4,
    /// The clocks.
    Clock = 5,
    /// State of one device; the instance says which.
    Device = 6,
    /// The page index; made by the writer.
    PageIndex = 7,
    /// Page data; made by the writer.
    Pages = 8,
    /// Which clusters a disk layer holds; the instance is the disk's index.
    DiskMap = 9,
}

impl Kind {
    const ALL: [Self; 9] = [
        Self::Meta,
        Self::Machine,
        Self::Vcpu,
        Self::Irqchip,
        Self::Clock,
        Self::Device,
        Self::PageIndex,
        Self::Pages,
        Self::DiskMap,
    ];

    pub(crate) fn number(self) -> u32 {
        self as u32
    }

    pub(crate) fn is_known(number: u32) -> bool {
        Self::ALL.iter().any(|kind| kind.number() == number)
    }
}

/// A section table that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TableError {
    /// More sections than [`MAX_SECTIONS`].
    #[error("it has more than {MAX_SECTIONS} sections")]
    TooMany,
    /// The table's length is not that of its entries.
    #[error("its section table has the wrong length")]
    Length,
    /// The table was changed after it was written.
    #[error("its section table is damaged (wrong checksum)")]
    Checksum,
    /// Two sections of the same kind and instance.
    #[error("section {kind}.{instance} is there twice")]
    Duplicate {
        /// Number of the kind.
        kind: u32,
        /// The instance.
        instance: u32,
    },
    /// A section outside the file, or longer than its kind may be.
    #[error("section {kind}.{instance} does not lie in the file, or is too long")]
    Bounds {
        /// Number of the kind.
        kind: u32,
        /// The instance.
        instance: u32,
    },
    /// Two parts of the file lie over each other.
    #[error("two of its sections overlap")]
    Overlap,
    /// A section that this version does not know, without which the file must not be used.
    #[error("section {kind}.{instance} is needed, but this version does not know it")]
    UnknownRequired {
        /// Number of the kind.
        kind: u32,
        /// The instance.
        instance: u32,
    },
    /// Values in fields or flags that have no meaning.
    #[error("its section table has values in reserved fields")]
    Reserved,
}

/// One entry of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: u32,
    pub(crate) instance: u32,
    pub(crate) version: u16,
    pub(crate) required: bool,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) checksum: u64,
}

impl Entry {
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        to.extend(self.kind.to_le_bytes());
        to.extend(self.instance.to_le_bytes());
        to.extend(self.version.to_le_bytes());
        to.extend(if self.required { REQUIRED } else { 0 }.to_le_bytes());
        to.extend([0; 4]);
        to.extend(self.offset.to_le_bytes());
        to.extend(self.length.to_le_bytes());
        to.extend(self.checksum.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Result<Self, TableError> {
        let mut fields = Fields(bytes);
        let (kind, instance, version) = (fields.u32(), fields.u32(), fields.u16());
        let (flags, reserved) = (fields.u16(), fields.u32());
        if flags & !REQUIRED != 0 || reserved != 0 {
            return Err(TableError::Reserved);
        }
        Ok(Self {
            kind,
            instance,
            version,
            required: flags == REQUIRED,
            offset: fields.u64(),
            length: fields.u64(),
            checksum: fields.u64(),
        })
    }

    pub(crate) fn is(&self, kind: Kind) -> bool {
        self.kind == kind.number()
    }
}

/// Reads a table and checks its entries against each other and the file.
///
/// `table` is where it lies itself, so that no section claims its bytes.
pub(crate) fn decode_table(
    bytes: &[u8],
    table: std::ops::Range<u64>,
    file_bytes: u64,
) -> Result<Vec<Entry>, TableError> {
    let entries =
        bytes.chunks_exact(ENTRY_BYTES).map(Entry::decode).collect::<Result<Vec<_>, _>>()?;
    let mut names: Vec<_> = entries.iter().map(|entry| (entry.kind, entry.instance)).collect();
    names.sort_unstable();
    if let Some([(kind, instance), _]) = names.array_windows().find(|[a, b]| a == b) {
        return Err(TableError::Duplicate { kind: *kind, instance: *instance });
    }
    let header = u64::try_from(HEADER_BYTES).unwrap_or(u64::MAX);
    let mut places = vec![0..header, table];
    for entry in &entries {
        let Entry { kind, instance, offset, length, .. } = *entry;
        if entry.required && !Kind::is_known(kind) {
            return Err(TableError::UnknownRequired { kind, instance });
        }
        let end = offset.checked_add(length).filter(|end| *end <= file_bytes);
        let large = entry.is(Kind::Pages) || entry.is(Kind::PageIndex);
        let Some(end) = end.filter(|_| large || length <= MAX_SECTION) else {
            return Err(TableError::Bounds { kind, instance });
        };
        if length > 0 {
            places.push(offset..end);
        }
    }
    places.sort_unstable_by_key(|place| place.start);
    if places.array_windows().any(|[a, b]| a.end > b.start) {
        return Err(TableError::Overlap);
    }
    Ok(entries)
}
