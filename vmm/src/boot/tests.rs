//! Whole loads, from files made here: what ends up in guest memory, and what bad files get.

mod files;
mod hostile;

use std::fs::File;

use coppice_vmm_protocol::ErrorKind;
use linux_loader::bootparam::boot_params;
use linux_loader::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::ByteValued;

use super::*;
use crate::memory::layout::{ACPI_TABLES, CMDLINE, HOLE_END, PVH_START_INFO, ZERO_PAGE};
use files::{BzFile, CODE, ElfFile, file};

const CMDLINE_TEXT: &str = "console=ttyS0 root=/dev/vda";

fn ram(mib: u64) -> GuestRam {
    GuestRam::from_ranges(&[(GuestAddress(0), usize::try_from(mib * MIB).unwrap())]).unwrap()
}

fn config<'a>(kernel: &'a File, initrd: Option<&'a File>) -> BootConfig<'a> {
    BootConfig { kernel, initrd, cmdline: CMDLINE_TEXT, vcpus: 2, virtio_devices: 3 }
}

fn read<T: ByteValued>(ram: &GuestRam, at: u64) -> T {
    ram.read_obj(GuestAddress(at)).unwrap()
}

fn bytes(ram: &GuestRam, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ram.read_slice(&mut bytes, GuestAddress(at)).unwrap();
    bytes
}

fn refusal(kernel: &[u8]) -> BootError {
    load(&ram(64), &config(&file(kernel), None)).unwrap_err()
}

#[test]
fn a_linux_vmlinux_is_entered_in_64_bit_mode_even_with_a_pvh_note() {
    let kernel = file(&ElfFile { pvh: true, ..ElfFile::linux() }.build());
    let entry = load(&ram(64), &config(&kernel, None)).unwrap();
    assert_eq!(entry, BootEntry { protocol: Protocol::Linux64, address: files::ENTRY });
}

#[test]
fn another_kernel_is_entered_through_pvh() {
    let kernel = file(&ElfFile { linux: false, pvh: true, ..ElfFile::linux() }.build());
    let entry = load(&ram(64), &config(&kernel, None)).unwrap();
    assert_eq!(entry, BootEntry { protocol: Protocol::Pvh, address: files::PVH_ENTRY });
}

#[test]
fn a_vmlinux_is_where_its_headers_want_it() {
    let (ram, kernel) = (ram(64), file(&ElfFile::linux().build()));
    load(&ram, &config(&kernel, None)).unwrap();
    assert_eq!(bytes(&ram, files::LOAD, CODE.len()), CODE);
}

#[test]
fn a_bzimage_is_at_one_mebibyte_with_its_header_in_the_zero_page() {
    let (ram, kernel) = (ram(64), file(&BzFile::default().build()));
    let entry = load(&ram, &config(&kernel, None)).unwrap();
    assert_eq!(entry, BootEntry { protocol: Protocol::Linux64, address: KERNEL_START + 0x200 });
    assert_eq!(bytes(&ram, KERNEL_START, CODE.len()), CODE);
    let params: boot_params = read(&ram, ZERO_PAGE);
    assert_eq!({ params.hdr.init_size }, BzFile::default().init_size);
    assert_eq!({ params.hdr.header }, bzimage::MAGIC);
}

#[test]
fn the_zero_page_leads_to_everything() {
    let (ram, kernel) = (ram(64), file(&ElfFile::linux().build()));
    let initrd = file(&[0xAB; 5000]);
    load(&ram, &config(&kernel, Some(&initrd))).unwrap();
    let params: boot_params = read(&ram, ZERO_PAGE);
    let cmdline = bytes(&ram, u64::from(params.hdr.cmd_line_ptr), CMDLINE_TEXT.len() + 1);
    assert_eq!(cmdline, [CMDLINE_TEXT.as_bytes(), b"\0"].concat());
    assert_eq!({ params.acpi_rsdp_addr }, ACPI_TABLES);
    let table = params.e820_table;
    let last = table[usize::from(params.e820_entries) - 1];
    assert_eq!(({ last.addr }, { last.size }, { last.r#type }), (MIB, 63 * MIB, 1));
    assert_eq!(params.hdr.type_of_loader, 0xFF);
    let at = u64::from(params.hdr.ramdisk_image);
    assert_eq!(at, 64 * MIB - 2 * PAGE, "as high as it goes, on a page");
    assert_eq!({ params.hdr.ramdisk_size }, 5000);
    assert_eq!(bytes(&ram, at, 5000), [0xAB; 5000]);
}

#[test]
fn the_pvh_start_info_leads_to_everything() {
    let kernel = file(&ElfFile { linux: false, pvh: true, ..ElfFile::linux() }.build());
    let (ram, initrd) = (ram(64), file(b"initrd"));
    load(&ram, &config(&kernel, Some(&initrd))).unwrap();
    let info: hvm_start_info = read(&ram, PVH_START_INFO);
    assert_eq!((info.magic, info.version), (XEN_HVM_START_MAGIC_VALUE, 1));
    assert_eq!((info.cmdline_paddr, info.rsdp_paddr), (CMDLINE, ACPI_TABLES));
    let module: hvm_modlist_entry = read(&ram, info.modlist_paddr);
    assert_eq!((info.nr_modules, module.size), (1, 6));
    assert_eq!(bytes(&ram, module.paddr, 6), b"initrd");
    let size = u64::try_from(size_of::<hvm_memmap_table_entry>()).unwrap();
    let entries: Vec<hvm_memmap_table_entry> = (0..u64::from(info.memmap_entries))
        .map(|index| read(&ram, info.memmap_paddr + index * size))
        .collect();
    let last = entries.last().unwrap();
    assert_eq!((last.addr, last.size, last.type_), (MIB, 63 * MIB, 1));
    assert!(entries.windows(2).all(|pair| pair[0].addr + pair[0].size <= pair[1].addr));
}

#[test]
fn an_initrd_stays_below_the_hole() {
    let ranges = [(GuestAddress(0), 3 << 30), (GuestAddress(HOLE_END), 1 << 30)];
    let ram = GuestRam::from_ranges(&ranges).unwrap();
    let (kernel, initrd) = (file(&ElfFile::linux().build()), file(&[1; 100]));
    load(&ram, &config(&kernel, Some(&initrd))).unwrap();
    let params: boot_params = read(&ram, ZERO_PAGE);
    assert_eq!(u64::from(params.hdr.ramdisk_image), HOLE_START - PAGE);
}

#[test]
fn an_initrd_stays_below_the_limit_of_a_bzimage() {
    let limit = 48 * MIB;
    let image = BzFile { initrd_addr_max: u32::try_from(limit - 1).unwrap(), ..BzFile::default() };
    let (ram, kernel, initrd) = (ram(64), file(&image.build()), file(&[1; 100]));
    load(&ram, &config(&kernel, Some(&initrd))).unwrap();
    let params: boot_params = read(&ram, ZERO_PAGE);
    assert_eq!(u64::from(params.hdr.ramdisk_image), limit - PAGE);
}

#[test]
fn page_tables_map_the_first_gibibyte_onto_itself() {
    let (ram, kernel) = (ram(64), file(&ElfFile::linux().build()));
    load(&ram, &config(&kernel, None)).unwrap();
    let walk = |address: u64| {
        let mask = !0xFFF_u64;
        let middle = read::<u64>(&ram, crate::memory::layout::PAGE_TABLES) & mask;
        let bottom = read::<u64>(&ram, middle + ((address >> 30) & 511) * 8) & mask;
        read::<u64>(&ram, bottom + ((address >> 21) & 511) * 8)
    };
    for address in [0, files::ENTRY, (1 << 30) - (2 << 20)] {
        assert_eq!(walk(address), (address & !0x1F_FFFF) | 0b1000_0011);
    }
}

#[test]
fn a_reset_through_the_bios_meets_code_that_writes_the_reset_register() {
    let (ram, kernel) = (ram(64), file(&ElfFile::linux().build()));
    load(&ram, &config(&kernel, None)).unwrap();
    let code = bytes(&ram, 0xF_FFF0, 9);
    assert_eq!(code, [0xB0, 0x01, 0xBA, 0x02, 0x06, 0xEE, 0xF4, 0xEB, 0xFD]);
}

#[test]
fn the_file_position_is_left_alone() {
    use std::io::Seek;
    let mut kernel = file(&ElfFile::linux().build());
    kernel.seek(std::io::SeekFrom::Start(7)).unwrap();
    load(&ram(64), &config(&kernel, None)).unwrap();
    assert_eq!(kernel.stream_position().unwrap(), 7);
}

#[test]
fn what_is_not_a_kernel_is_named_so() {
    let program = ElfFile { linux: false, ..ElfFile::linux() }.build();
    for (bytes, why) in [
        (b"".to_vec(), "neither"),
        (b"#!/bin/sh\n".to_vec(), "neither"),
        (vec![0; 4096], "neither"),
        (program, "a program"),
        (ElfFile { machine: 183, ..ElfFile::linux() }.build(), "another processor"),
        (ElfFile { load: 0x1000, ..ElfFile::linux() }.build(), "outside"),
        (BzFile { xloadflags: 0, ..BzFile::default() }.build(), "64-bit entry"),
        (BzFile { version: 0x0206, ..BzFile::default() }.build(), "older than 2.12"),
    ] {
        let error = refusal(&bytes);
        assert_eq!(error.kind(), ErrorKind::Kernel);
        assert!(error.to_string().contains(why), "{error} for {why}");
    }
}

#[test]
fn a_kernel_that_is_not_a_plain_file_is_refused() {
    let error = load(&ram(64), &config(&File::open("/dev/zero").unwrap(), None)).unwrap_err();
    assert!(matches!(error, BootError::NotAKernel("it is not a plain file")));
}

#[test]
fn truncated_kernels_are_named_so() {
    let mut elf = ElfFile::linux().build();
    elf.truncate(elf.len() - 1);
    let mut image = BzFile::default().build();
    image.truncate(image.len() - 1);
    for bytes in [elf, image, b"\x7fELF\x02\x01".to_vec()] {
        assert!(matches!(refusal(&bytes), BootError::Truncated { .. }));
    }
}

#[test]
fn too_little_memory_says_how_much_is_needed() {
    let elf = ElfFile { memory: 70 * MIB, ..ElfFile::linux() }.build();
    let image = BzFile { init_size: 100 << 20, ..BzFile::default() }.build();
    for (bytes, wanted) in [(elf, 86), (image, 116)] {
        match refusal(&bytes) {
            BootError::KernelMemory { needed_mib, have_mib: 64 } => assert_eq!(needed_mib, wanted),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn an_initrd_that_does_not_fit_says_how_much_is_needed() {
    let (kernel, initrd) = (file(&ElfFile::linux().build()), tempfile::tempfile().unwrap());
    initrd.set_len(60 * MIB).unwrap();
    match load(&ram(64), &config(&kernel, Some(&initrd))).unwrap_err() {
        error @ BootError::InitrdMemory { needed_mib, .. } => {
            assert_eq!(error.kind(), ErrorKind::Memory);
            load(&ram(needed_mib), &config(&kernel, Some(&initrd))).unwrap();
        }
        other => panic!("{other}"),
    }
}

#[test]
fn an_initrd_over_the_kernels_own_limit_is_not_a_matter_of_memory() {
    let image = BzFile { initrd_addr_max: 0x1FF_FFFF, ..BzFile::default() };
    let (kernel, initrd) = (file(&image.build()), tempfile::tempfile().unwrap());
    initrd.set_len(20 * MIB).unwrap();
    let error = load(&ram(64), &config(&kernel, Some(&initrd))).unwrap_err();
    assert!(matches!(error, BootError::InitrdLimit { limit: 0x200_0000 }), "{error}");
}

#[test]
fn an_unusable_initrd_is_refused() {
    let kernel = file(&ElfFile::linux().build());
    for initrd in [file(b""), File::open("/dev/null").unwrap(), File::open("/").unwrap()] {
        let error = load(&ram(64), &config(&kernel, Some(&initrd))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Initrd);
    }
}

#[test]
fn a_command_line_may_be_as_long_as_its_limit() {
    let kernel = file(&ElfFile::linux().build());
    let longest = "x".repeat(CMDLINE_MAX - 1);
    load(&ram(64), &BootConfig { cmdline: &longest, ..config(&kernel, None) }).unwrap();
    let longer = "x".repeat(CMDLINE_MAX);
    let error = load(&ram(64), &BootConfig { cmdline: &longer, ..config(&kernel, None) });
    assert!(matches!(error, Err(BootError::CmdlineTooLong { len: CMDLINE_MAX, limit: 2047 })));
}

#[test]
fn a_bzimage_may_allow_only_shorter_command_lines() {
    let kernel = file(&BzFile { cmdline_size: 10, ..BzFile::default() }.build());
    let error = load(&ram(64), &config(&kernel, None)).unwrap_err();
    assert!(matches!(error, BootError::CmdlineTooLong { limit: 10, .. }));
    assert_eq!(error.kind(), ErrorKind::Cmdline);
}

#[test]
fn strange_characters_in_the_command_line_are_refused() {
    let kernel = file(&ElfFile::linux().build());
    for cmdline in ["quiet\0", "quiet\n", "na\u{ef}ve"] {
        let error = load(&ram(64), &BootConfig { cmdline, ..config(&kernel, None) }).unwrap_err();
        assert!(matches!(error, BootError::CmdlineCharacter { .. }), "{error}");
    }
}

#[test]
fn a_refused_guest_has_untouched_memory() {
    let ram = ram(64);
    let kernel = file(&ElfFile::linux().build());
    let _ = load(&ram, &BootConfig { cmdline: "\n", ..config(&kernel, None) }).unwrap_err();
    assert_eq!(bytes(&ram, files::LOAD, CODE.len()), vec![0; CODE.len()]);
}
