//! What a kernel finds in memory when it starts: the zero page of the 64-bit boot protocol or the
//! start info of PVH, and the page tables and descriptors the processor needs to get there.

use linux_loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::bzimage::{LOADED_HIGH, MAGIC};
use super::elf::IDENTITY_MAP;
use super::error::BootError;
use super::memmap::Range;
use crate::memory::GuestRam;
use crate::memory::layout::{
    ACPI_RESET_PORT, ACPI_RESET_VALUE, ACPI_TABLES, CMDLINE, GDT, KERNEL_START, PAGE_TABLES,
    PVH_START_INFO, RESET_VECTOR, ZERO_PAGE,
};

/// Descriptors of the GDT by index. The 64-bit boot protocol fixes code at 2 and data at 3.
pub(super) const CODE_INDEX: u16 = 2;
pub(super) const DATA_INDEX: u16 = 3;
pub(super) const TASK_INDEX: u16 = 4;
/// Number of descriptors.
pub(super) const GDT_LEN: usize = 5;

/// `type_of_loader` of a boot loader without a number of its own.
const LOADER_UNKNOWN: u8 = 0xFF;
/// `boot_flag`, at the end of every boot sector.
const BOOT_FLAG: u16 = 0xAA55;
/// Version 2.12 of the boot protocol.
const PROTOCOL_VERSION: u16 = 0x020C;
/// Version 1 of the start info: the first with a memory map.
const START_INFO_VERSION: u32 = 1;
/// Start info, then memory map, then module list share a page at these offsets.
const MEMMAP_OFFSET: u64 = 0x100;
const MODULES_OFFSET: u64 = 0x80;

/// Page table bits.
const PRESENT_WRITABLE: u64 = 0b11;
const LARGE_PAGE: u64 = 1 << 7;
const PAGE: u64 = 0x1000;
const LARGE_PAGE_SIZE: usize = 2 << 20;

/// Where the initrd is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    /// Its first byte in guest memory.
    pub(super) start: u64,
    /// Its length in bytes, below 4 GiB as it lies below the hole.
    pub(super) len: u64,
}

/// Writes the zero page. `header` is that of a bzImage; a vmlinux has none.
pub(super) fn write_zero_page(
    ram: &GuestRam,
    header: Option<setup_header>,
    map: &[Range],
    initrd: Option<Placed>,
) -> Result<(), BootError> {
    let mut hdr = header.unwrap_or_else(|| setup_header {
        boot_flag: BOOT_FLAG,
        header: MAGIC,
        version: PROTOCOL_VERSION,
        loadflags: LOADED_HIGH,
        code32_start: low(KERNEL_START),
        ..setup_header::default()
    });
    hdr.type_of_loader = LOADER_UNKNOWN;
    hdr.cmd_line_ptr = low(CMDLINE);
    if let Some(initrd) = initrd {
        hdr.ramdisk_image = low(initrd.start);
        hdr.ramdisk_size = low(initrd.len);
    }
    let mut params = boot_params { hdr, acpi_rsdp_addr: ACPI_TABLES, ..boot_params::default() };
    let mut table = params.e820_table;
    for (entry, range) in table.iter_mut().zip(map) {
        *entry =
            boot_e820_entry { addr: range.start, size: range.len(), r#type: range.kind.code() };
    }
    params.e820_table = table;
    params.e820_entries = u8::try_from(map.len().min(table.len())).unwrap_or(u8::MAX);
    write(ram, ZERO_PAGE, params.as_slice(), "the boot parameters")
}

/// Writes the PVH start info with its memory map and module list.
pub(super) fn write_start_info(
    ram: &GuestRam,
    map: &[Range],
    initrd: Option<Placed>,
) -> Result<(), BootError> {
    let mut info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: START_INFO_VERSION,
        cmdline_paddr: CMDLINE,
        rsdp_paddr: ACPI_TABLES,
        memmap_paddr: PVH_START_INFO + MEMMAP_OFFSET,
        ..hvm_start_info::default()
    };
    let mut at = info.memmap_paddr;
    for range in map.iter().take(max_map_entries()) {
        let entry = hvm_memmap_table_entry {
            addr: range.start,
            size: range.len(),
            type_: range.kind.code(),
            reserved: 0,
        };
        write(ram, at, entry.as_slice(), "the memory map")?;
        at += u64::try_from(size_of::<hvm_memmap_table_entry>()).unwrap_or_default();
        info.memmap_entries += 1;
    }
    if let Some(initrd) = initrd {
        let module =
            hvm_modlist_entry { paddr: initrd.start, size: initrd.len, ..Default::default() };
        info.nr_modules = 1;
        info.modlist_paddr = PVH_START_INFO + MODULES_OFFSET;
        write(ram, info.modlist_paddr, module.as_slice(), "the module list")?;
    }
    write(ram, PVH_START_INFO, info.as_slice(), "the PVH start info")
}

/// Entries that fit in the rest of the start info's page.
fn max_map_entries() -> usize {
    let room = usize::try_from(PAGE - MEMMAP_OFFSET).unwrap_or_default();
    room / size_of::<hvm_memmap_table_entry>()
}

/// Writes page tables that map the first GiB onto itself, in large pages.
pub(super) fn write_page_tables(ram: &GuestRam) -> Result<(), BootError> {
    const WHAT: &str = "the page tables";
    let (middle, bottom) = (PAGE_TABLES + PAGE, PAGE_TABLES + 2 * PAGE);
    write(ram, PAGE_TABLES, (middle | PRESENT_WRITABLE).as_slice(), WHAT)?;
    write(ram, middle, (bottom | PRESENT_WRITABLE).as_slice(), WHAT)?;
    let pages = (0..IDENTITY_MAP).step_by(LARGE_PAGE_SIZE);
    let entries = pages.map(|page| page | PRESENT_WRITABLE | LARGE_PAGE);
    write(ram, bottom, &entries.flat_map(u64::to_le_bytes).collect::<Vec<u8>>(), WHAT)
}

/// Writes the global descriptor table.
pub(super) fn write_gdt(ram: &GuestRam, table: &[u64; GDT_LEN]) -> Result<(), BootError> {
    let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    write(ram, GDT, &bytes, "the descriptor table")
}

/// Writes the real-mode code that a reset through the BIOS meets: it writes to the reset register.
///
/// A Linux kernel built for EFI resets hardware-reduced platforms through EFI, and where that is
/// missing through the BIOS. Without this code it would run through zeroes for ever.
pub(super) fn write_reset_vector(ram: &GuestRam) -> Result<(), BootError> {
    let [port_low, port_high] = ACPI_RESET_PORT.to_le_bytes();
    let code = [
        [0xB0, ACPI_RESET_VALUE].as_slice(), // mov al, value
        &[0xBA, port_low, port_high],        // mov dx, port
        &[0xEE],                             // out dx, al
        &[0xF4, 0xEB, 0xFD],                 // hlt, again and again
    ]
    .concat();
    write(ram, RESET_VECTOR, &code, "the reset vector")
}

/// Writes the command line with its terminating zero.
pub(super) fn write_cmdline(ram: &GuestRam, cmdline: &str) -> Result<(), BootError> {
    let end = CMDLINE.saturating_add(u64::try_from(cmdline.len()).unwrap_or(u64::MAX));
    write(ram, CMDLINE, cmdline.as_bytes(), "the command line")?;
    write(ram, end, &[0], "the command line")
}

/// Writes bytes to guest memory.
pub(super) fn write(
    ram: &GuestRam,
    at: u64,
    bytes: &[u8],
    what: &'static str,
) -> Result<(), BootError> {
    ram.write_slice(bytes, GuestAddress(at)).map_err(|source| BootError::Write { what, source })
}

/// An address or length below 4 GiB, as the old fields of the header hold it.
fn low(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
