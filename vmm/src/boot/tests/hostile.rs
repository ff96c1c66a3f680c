//! Kernel files that lie. Whatever they say, loading ends with an entry inside what was loaded
//! or with an error, and never panics. Writes outside guest memory cannot happen: they all go
//! through vm-memory's bounds.

use proptest::prelude::*;

use super::files::{BzFile, ElfFile, file};
use super::*;

/// Values that break careless arithmetic, and any others.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..0x2000u64,
        0..64 * MIB,
        Just(u64::MAX),
        Just(u64::MAX - 0xFFF),
        Just(i64::MAX.cast_unsigned()),
        Just(u64::from(u32::MAX)),
        Just(1 << 63),
    ]
}

/// Overwrites of 1 to 8 bytes at places that are mostly in the headers.
fn changes(headers: usize) -> impl Strategy<Value = Vec<(usize, u64, usize)>> {
    let size = prop_oneof![Just(1usize), Just(2), Just(4), Just(8)];
    proptest::collection::vec((0..headers, value(), size), 1..6)
}

fn apply(bytes: &mut [u8], changes: &[(usize, u64, usize)]) {
    for (at, value, size) in changes {
        // Fields are aligned, so most changes hit exactly one.
        let at = at / size * size;
        for (to, from) in bytes.iter_mut().skip(at).zip(value.to_le_bytes()).take(*size) {
            *to = from;
        }
    }
}

fn survives(bytes: &[u8]) {
    let ram = ram(32);
    let initrd = file(&[1; 100]);
    if let Ok(entry) = load(&ram, &config(&file(bytes), Some(&initrd))) {
        assert!((KERNEL_START..32 * MIB).contains(&entry.address), "{entry:?}");
        let text = bytes_at_cmdline(&ram);
        assert_eq!(text, CMDLINE_TEXT.as_bytes(), "the kernel lies over the boot data");
    }
}

fn bytes_at_cmdline(ram: &GuestRam) -> Vec<u8> {
    bytes(ram, CMDLINE, CMDLINE_TEXT.len())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_changed_vmlinux_is_survived(changes in changes(300), linux: bool, pvh: bool) {
        let mut bytes = ElfFile { linux, pvh, ..ElfFile::linux() }.build();
        apply(&mut bytes, &changes);
        survives(&bytes);
    }

    #[test]
    fn changed_program_headers_are_survived(changes in changes(112)) {
        let mut bytes = ElfFile { pvh: true, ..ElfFile::linux() }.build();
        apply(&mut bytes[64..], &changes);
        survives(&bytes);
    }

    #[test]
    fn a_changed_bzimage_is_survived(changes in changes(0x90)) {
        let mut bytes = BzFile::default().build();
        apply(&mut bytes[0x1F0..], &changes);
        survives(&bytes);
    }

    #[test]
    fn a_cut_file_is_survived(len in 0..2000usize, elf: bool) {
        let mut bytes = if elf { ElfFile::linux().build() } else { BzFile::default().build() };
        bytes.truncate(len);
        survives(&bytes);
    }

    #[test]
    fn any_bytes_after_a_magic_number_are_survived(
        tail in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        survives(&[b"\x7fELF\x02\x01", tail.as_slice()].concat());
    }
}
