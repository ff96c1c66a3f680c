//! Where a Linux kernel keeps what has to change when its time line forks, by the symbols that
//! its ELF file may have.
//!
//! The generation ID tells a guest's kernel that it was cloned, but it takes milliseconds until
//! the kernel has acted on it, and programs may draw random numbers meanwhile. With these
//! addresses the generator is given a new key before the guest runs at all. A kernel without
//! symbols does without.

use std::io;

use serde::{Deserialize, Serialize};

use super::file::BootFile;

/// Guest-physical addresses in a Linux kernel from 5.18 on (`drivers/char/random.c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelState {
    /// `base_crng.key`, the key of the random number generator, 32 bytes.
    pub rng_key: u64,
    /// `base_crng.generation`, 64 bits: how often the key was changed.
    pub rng_generation: u64,
    /// `sysctl_bootid`, 16 bytes that are made anew at the next look when the ninth is zero.
    pub boot_id: Option<u64>,
    /// `_vdso_rng_data`, 64 bits of the generation that programs draw by, plus one.
    pub vdso_rng: Option<u64>,
}

const RNG: &str = "base_crng";
/// Where the generation is in `base_crng`, by its size. Up to Linux 6.1 the time of the last
/// change stands between key and generation. The lock behind them has another size in kernels
/// built for debugging; those do without.
const GENERATION: [(u64, u64); 2] = [(48, 32), (56, 40)];
const BOOT_ID: &str = "sysctl_bootid";
const VDSO_RNG: &str = "_vdso_rng_data";

const SECTION_HEADER: usize = 64;
const SYMBOL: usize = 24;
const PROGRAM_HEADER: usize = 56;
/// Section types (System V ABI).
const SHT_SYMTAB: u32 = 2;
const PT_LOAD: u32 = 1;
/// A kernel has about forty sections.
const MAX_SECTIONS: u16 = 256;
const MAX_SEGMENTS: u16 = 64;
/// Distribution kernels have about 10 MiB of symbols and as much of names.
const MAX_TABLE: u64 = 32 << 20;

/// Looks for the symbols; there are none in a file that was stripped or is something else.
pub(super) fn find(file: &BootFile<'_>) -> Option<KernelState> {
    let header = bytes(file, 0, 64).ok()?;
    let sections = table(file, &header, 40, 58, 60, SECTION_HEADER, MAX_SECTIONS)?;
    let segments = table(file, &header, 32, 54, 56, PROGRAM_HEADER, MAX_SEGMENTS)?;
    let symtab = sections.chunks(SECTION_HEADER).find(|s| u32_at(s, 4) == Some(SHT_SYMTAB))?;
    let linked = usize::try_from(u32_at(symtab, 40)?).ok()?;
    let strtab = sections.chunks(SECTION_HEADER).nth(linked)?;
    let symbols = contents(file, symtab)?;
    let names = contents(file, strtab)?;
    let symbol = |wanted: &str| {
        symbols.chunks_exact(SYMBOL).find(|symbol| {
            let name = u32_at(symbol, 0).and_then(|at| usize::try_from(at).ok());
            let name = name.and_then(|at| names.get(at..));
            name.is_some_and(|name| {
                name.strip_prefix(wanted.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
            })
        })
    };
    let address = |wanted| physical(&segments, u64_at(symbol(wanted)?, 8)?);
    let rng_key = address(RNG)?;
    let size = u64_at(symbol(RNG)?, 16)?;
    let (_, generation) = GENERATION.iter().find(|(known, _)| *known == size)?;
    Some(KernelState {
        rng_key,
        rng_generation: rng_key.checked_add(*generation)?,
        boot_id: address(BOOT_ID),
        vdso_rng: address(VDSO_RNG),
    })
}

/// The guest-physical address of a virtual one.
fn physical(segments: &[u8], virtual_address: u64) -> Option<u64> {
    segments.chunks(PROGRAM_HEADER).find_map(|segment| {
        let inside = virtual_address.checked_sub(u64_at(segment, 16)?)?;
        let loaded = u32_at(segment, 0)? == PT_LOAD && inside < u64_at(segment, 40)?;
        loaded.then(|| u64_at(segment, 24)?.checked_add(inside))?
    })
}

/// A table that the ELF header tells of: at `offset_at` its offset, at `size_at` the size of its
/// entries, at `count_at` their number.
fn table(
    file: &BootFile<'_>,
    header: &[u8],
    offset_at: usize,
    size_at: usize,
    count_at: usize,
    size: usize,
    most: u16,
) -> Option<Vec<u8>> {
    let count = u16_at(header, count_at).filter(|count| *count <= most)?;
    if usize::from(u16_at(header, size_at)?) != size {
        return None;
    }
    bytes(file, u64_at(header, offset_at)?, usize::from(count) * size).ok()
}

/// The contents of the section with this header.
fn contents(file: &BootFile<'_>, section: &[u8]) -> Option<Vec<u8>> {
    let length = u64_at(section, 32).filter(|length| *length <= MAX_TABLE.min(file.len()))?;
    bytes(file, u64_at(section, 24)?, usize::try_from(length).ok()?).ok()
}

fn bytes(file: &BootFile<'_>, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    if file.read_at(offset, &mut bytes)?.len() == length {
        Ok(bytes)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;

    use super::*;

    /// An ELF file with one segment (virtual 0xffffffff81000000 at physical 16 MiB) and symbols.
    fn kernel(symbols: &[(&str, u64)]) -> Vec<u8> {
        sized(symbols, 48)
    }

    /// The same with symbols of this size.
    fn sized(symbols: &[(&str, u64)], size: u64) -> Vec<u8> {
        let mut names = vec![0u8];
        let mut table = vec![0u8; SYMBOL];
        for (name, value) in symbols {
            table.extend(u32::try_from(names.len()).unwrap().to_le_bytes());
            table.extend([0; 4]);
            table.extend(value.to_le_bytes());
            table.extend(size.to_le_bytes());
            names.extend(name.bytes().chain([0]));
        }
        let mut file = vec![0u8; 64];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(32, &64u64.to_le_bytes());
        put(54, &56u16.to_le_bytes());
        put(56, &1u16.to_le_bytes());
        put(40, &120u64.to_le_bytes());
        put(58, &64u16.to_le_bytes());
        put(60, &3u16.to_le_bytes());
        file.extend(1u32.to_le_bytes());
        file.extend([0; 4]);
        for value in [0u64, 0xFFFF_FFFF_8100_0000, 0x100_0000, 0, 0x10_0000, 0] {
            file.extend(value.to_le_bytes());
        }
        let data = 120 + 3 * 64;
        let mut section = |kind: u32, offset: usize, length: usize, link: u32| {
            file.extend(0u32.to_le_bytes());
            file.extend(kind.to_le_bytes());
            file.extend([0; 16]);
            file.extend(u64::try_from(offset).unwrap().to_le_bytes());
            file.extend(u64::try_from(length).unwrap().to_le_bytes());
            file.extend(link.to_le_bytes());
            file.extend([0; 20]);
        };
        section(0, 0, 0, 0);
        section(SHT_SYMTAB, data, table.len(), 2);
        section(3, data + table.len(), names.len(), 0);
        file.extend(table);
        file.extend(names);
        file
    }

    fn find_in(bytes: &[u8]) -> Option<KernelState> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        find(&BootFile::new(&file).unwrap().unwrap())
    }

    #[test]
    fn symbols_are_found_by_their_whole_name_at_their_physical_address() {
        let symbols = [
            ("base_crng_not", 0xFFFF_FFFF_8100_0000),
            ("base_crng", 0xFFFF_FFFF_8100_1000),
            ("sysctl_bootid", 0xFFFF_FFFF_8100_2000),
        ];
        let expected = KernelState {
            rng_key: 0x100_1000,
            rng_generation: 0x100_1020,
            boot_id: Some(0x100_2000),
            vdso_rng: None,
        };
        assert_eq!(find_in(&kernel(&symbols)), Some(expected));
    }

    #[test]
    fn the_generators_size_says_how_it_is_laid_out() {
        let generation = |size| {
            let state = find_in(&sized(&[("base_crng", 0xFFFF_FFFF_8100_1000)], size));
            state.map(|state| state.rng_generation - state.rng_key)
        };
        assert_eq!([48, 56, 72, 0].map(generation), [Some(32), Some(40), None, None]);
    }

    #[test]
    fn a_symbol_outside_the_kernel_is_none() {
        assert_eq!(find_in(&kernel(&[("base_crng", 0xFFFF_FFFF_8110_0000)])), None);
        assert_eq!(find_in(&kernel(&[("base_crng", 5)])), None);
    }

    #[test]
    fn a_file_without_symbols_has_none() {
        assert_eq!(find_in(&kernel(&[])), None);
        assert_eq!(find_in(b"\x7fELF"), None);
    }

    proptest! {
        #[test]
        fn damage_is_no_harm(at in 0usize..400, byte: u8, len in 0usize..600) {
            let mut bytes = kernel(&[("base_crng", 0xFFFF_FFFF_8100_1000)]);
            if let Some(place) = bytes.get_mut(at) {
                *place = byte;
            }
            bytes.truncate(len);
            let _whatever = find_in(&bytes);
        }
    }
}
