//! The memory map the guest is told: RAM, and what it must leave alone.

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use crate::memory::GuestRam;
use crate::memory::layout::{ACPI_TABLES, KERNEL_START};

/// First byte of the kilobyte that PCs keep for the BIOS; kernels look for it there.
const EBDA: u64 = 0x9_FC00;
/// What stands in for firmware, up to the first mebibyte: the ACPI tables, the generation ID and
/// the reset vector. It is one range because kernels walk the whole map for every large page they
/// could map: four ranges here cost a boot more than half a millisecond.
const FIRMWARE: Range = Range { start: ACPI_TABLES, end: KERNEL_START, kind: Kind::Reserved };

/// What a range is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Free for the kernel.
    Ram,
    /// To be left as it is.
    Reserved,
}

impl Kind {
    /// The number that stands for it in both maps.
    pub(super) fn code(self) -> u32 {
        match self {
            Self::Ram => 1,
            Self::Reserved => 2,
        }
    }
}

/// One entry of the map; `end` is the first byte after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) kind: Kind,
}

impl Range {
    /// Its length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// The regions of guest memory as start and end, neighbours joined.
pub(super) fn ram_ranges(ram: &GuestRam) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::with_capacity(ram.num_regions());
    for region in ram.iter() {
        let start = region.start_addr().raw_value();
        let end = start.saturating_add(region.len());
        match ranges.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => ranges.push((start, end)),
        }
    }
    ranges
}

/// The map of a machine with this RAM: ordered, without overlaps.
pub(super) fn memory_map(ram: &[(u64, u64)]) -> Vec<Range> {
    let mut map = Vec::with_capacity(ram.len().saturating_add(2));
    for (start, end) in ram {
        push_ram(&mut map, *start, (*end).min(EBDA));
    }
    map.push(FIRMWARE);
    for (start, end) in ram {
        push_ram(&mut map, (*start).max(KERNEL_START), *end);
    }
    map
}

fn push_ram(map: &mut Vec<Range>, start: u64, end: u64) {
    if start < end {
        map.push(Range { start, end, kind: Kind::Ram });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::layout::{
        ACPI_TABLES_SIZE, HOLE_END, HOLE_START, RESET_VECTOR, VMGENID_PAGE,
    };

    const MIB: u64 = 1 << 20;

    fn machine(mib: u64) -> Vec<(u64, u64)> {
        let low = (mib * MIB).min(HOLE_START);
        let mut ram = vec![(0, low)];
        if mib * MIB > low {
            ram.push((HOLE_END, HOLE_END + mib * MIB - low));
        }
        ram
    }

    #[test]
    fn ram_continues_above_the_hole() {
        let map = memory_map(&machine(5 * 1024));
        let last = map.last().unwrap();
        assert_eq!((last.start, last.end), (HOLE_END, HOLE_END + 2048 * MIB));
    }

    proptest! {
        #[test]
        fn the_map_is_ordered_without_overlaps(mib in 64..=16 * 1024u64) {
            let map = memory_map(&machine(mib));
            prop_assert!(map.iter().all(|range| range.start < range.end));
            prop_assert!(map.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }

        #[test]
        fn all_ram_above_the_first_mebibyte_is_offered(mib in 64..=16 * 1024u64) {
            let offered: u64 = memory_map(&machine(mib))
                .iter()
                .filter(|range| range.kind == Kind::Ram && range.start >= KERNEL_START)
                .map(Range::len)
                .sum();
            prop_assert_eq!(offered, (mib - 1) * MIB);
        }

        #[test]
        fn what_the_firmware_owns_is_reserved_and_never_ram(mib in 64..=16 * 1024u64) {
            let owned =
                [(ACPI_TABLES, ACPI_TABLES_SIZE), (VMGENID_PAGE, 0x1000), (RESET_VECTOR, 16)];
            let map = memory_map(&machine(mib));
            for (start, len) in owned {
                let holds = |range: &Range| range.start <= start && start + len <= range.end;
                let owner = map.iter().find(|range| holds(range)).map(|range| range.kind);
                prop_assert_eq!(owner, Some(Kind::Reserved));
            }
            for range in map.iter().filter(|range| range.kind == Kind::Ram) {
                prop_assert!(range.end <= FIRMWARE.start || range.start >= FIRMWARE.end);
                prop_assert!(range.end <= HOLE_START || range.start >= HOLE_END);
            }
        }
    }
}
