//! Putting a guest's kernel in memory, and its processors where the kernel expects them.
//!
//! [`load`] reads the kernel and initrd into guest memory and writes what they look for there:
//! command line, memory map, ACPI tables, page tables. It gives a [`BootEntry`], with which
//! [`cpu::CpuTemplate::configure`] sets the first vCPU's registers.
//!
//! Three ways in:
//!
//! | file | entry | chosen when |
//! |---|---|---|
//! | bzImage | 64-bit, at +0x200 | always; the kernel unpacks itself |
//! | ELF | 64-bit, `e_entry` | it is a Linux kernel |
//! | ELF | PVH, 32-bit | any other kernel that has the PVH note |
//!
//! A Linux vmlinux with a PVH note is entered in 64-bit mode all the same: its PVH entry first
//! looks for Xen with 256 CPUID instructions, each of which leaves the guest. That is about a
//! quarter of all exits up to the guest's init.

pub mod cpu;

mod acpi;
mod bzimage;
mod elf;
mod error;
mod file;
mod memmap;
mod params;
mod symbols;
mod sys;
#[cfg(test)]
mod tests;

use std::fs::File;

use linux_loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use vm_memory::{Bytes, GuestAddress};

pub use error::BootError;
pub use symbols::KernelState;

use crate::memory::GuestRam;
use crate::memory::layout::{CMDLINE_MAX, HOLE_START, KERNEL_START};
use file::BootFile;
use params::Placed;

const PAGE: u64 = 0x1000;
const MIB: u64 = 1 << 20;

/// What to boot.
#[derive(Debug, Clone, Copy)]
pub struct BootConfig<'a> {
    /// The kernel, an ELF vmlinux or a bzImage: a plain file, open for reading. Its file
    /// position is neither used nor moved.
    pub kernel: &'a File,
    /// The initial RAM disk, a plain file open for reading.
    pub initrd: Option<&'a File>,
    /// The kernel command line: printable ASCII, shorter than
    /// [`CMDLINE_MAX`](crate::memory::layout::CMDLINE_MAX).
    pub cmdline: &'a str,
    /// Number of vCPUs, from 1.
    pub vcpus: u8,
    /// Number of virtio-mmio devices, in the windows from 0 on, at most
    /// [`VIRTIO_MAX`](crate::memory::layout::VIRTIO_MAX).
    pub virtio_devices: usize,
}

/// The state a processor is in when it enters the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Long mode, paging on, RSI holds the address of the zero page
    /// (`Documentation/arch/x86/boot.rst`, "64-bit boot protocol").
    Linux64,
    /// 32-bit protected mode, paging off, EBX holds the address of the start info
    /// (Xen's `docs/misc/pvh.pandoc`).
    Pvh,
}

/// Where and how the first vCPU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootEntry {
    /// The state to start in.
    pub protocol: Protocol,
    /// Guest-physical address of the first instruction.
    pub address: u64,
}

/// A kernel that was examined and not loaded yet.
struct Kernel {
    entry: BootEntry,
    /// Whether it is a bzImage.
    compressed: bool,
    /// First byte of guest memory that the kernel does not need.
    end: u64,
    /// First address that the initrd must not reach.
    initrd_limit: u64,
    /// Longest command line, without the terminating zero.
    cmdline_limit: usize,
}

/// Where a Linux kernel's file says that it keeps what a clone must not share; nothing for other
/// files and for those without symbols.
pub fn kernel_state(kernel: &File) -> Option<KernelState> {
    symbols::find(&BootFile::new(kernel).ok()??)
}

/// Loads a guest: afterwards its memory holds all that the kernel needs to start.
///
/// Everything is checked before the first byte is written. Guest memory must be zero, as a new
/// machine's is.
///
/// # Errors
/// [`BootError`]; [`BootError::kind`] says what to blame.
pub fn load(ram: &GuestRam, config: &BootConfig<'_>) -> Result<BootEntry, BootError> {
    let mut file = BootFile::new(config.kernel)
        .map_err(BootError::ReadKernel)?
        .ok_or(BootError::NotAKernel("it is not a plain file"))?;
    let kernel = examine(&file)?;
    check_cmdline(config.cmdline, kernel.cmdline_limit)?;
    let ranges = memmap::ram_ranges(ram);
    let low_end = ranges.first().filter(|(start, _)| *start == 0).map_or(0, |(_, end)| *end);
    if kernel.end > low_end {
        let (needed_mib, have_mib) = (kernel.end.div_ceil(MIB), low_end / MIB);
        return Err(BootError::KernelMemory { needed_mib, have_mib });
    }
    let initrd = config.initrd.map(|initrd| place_initrd(initrd, &kernel, low_end)).transpose()?;

    let header = read_kernel(ram, &mut file, &kernel)?;
    if let Some((file, placed)) = initrd {
        read_initrd(ram, file, placed)?;
    }
    let initrd = initrd.map(|(_, placed)| placed);
    params::write_cmdline(ram, config.cmdline)?;
    acpi::write(ram, config.vcpus, config.virtio_devices)?;
    params::write_reset_vector(ram)?;
    params::write_gdt(ram, &cpu::gdt(kernel.entry.protocol))?;
    let map = memmap::memory_map(&ranges);
    match kernel.entry.protocol {
        Protocol::Linux64 => {
            params::write_page_tables(ram)?;
            params::write_zero_page(ram, header, &map, initrd)?;
        }
        Protocol::Pvh => params::write_start_info(ram, &map, initrd)?,
    }
    Ok(kernel.entry)
}

/// Finds out what kind of kernel a file is, and what it takes to boot it.
fn examine(file: &BootFile<'_>) -> Result<Kernel, BootError> {
    let mut magic = [0u8; 4];
    if file.read_at(0, &mut magic).map_err(BootError::ReadKernel)? == elf::MAGIC {
        let kernel = elf::examine(file)?;
        let (protocol, address) = match (kernel.linux64, kernel.pvh) {
            (Some(address), _) => (Protocol::Linux64, address),
            (None, Some(address)) => (Protocol::Pvh, address),
            (None, None) => return Err(BootError::NotAKernel("it has no entry point")),
        };
        return Ok(Kernel {
            entry: BootEntry { protocol, address },
            compressed: false,
            end: kernel.end,
            initrd_limit: HOLE_START,
            cmdline_limit: CMDLINE_MAX - 1,
        });
    }
    if bzimage::is_bzimage(file)? {
        let kernel = bzimage::examine(file)?;
        return Ok(Kernel {
            entry: BootEntry { protocol: Protocol::Linux64, address: kernel.entry },
            compressed: true,
            end: kernel.end,
            initrd_limit: kernel.initrd_limit,
            cmdline_limit: kernel.cmdline_limit,
        });
    }
    Err(BootError::NotAKernel("it is neither an ELF file nor a bzImage"))
}

/// Reads the kernel into guest memory; gives the setup header of a bzImage.
fn read_kernel(
    ram: &GuestRam,
    file: &mut BootFile<'_>,
    kernel: &Kernel,
) -> Result<Option<setup_header>, BootError> {
    let loaded = if kernel.compressed {
        BzImage::load(ram, Some(GuestAddress(KERNEL_START)), file, None)
    } else {
        Elf::load(ram, None, file, None)
    };
    Ok(loaded.map_err(BootError::Loader)?.setup_header)
}

fn check_cmdline(cmdline: &str, limit: usize) -> Result<(), BootError> {
    if let Some(at) = cmdline.bytes().position(|byte| !matches!(byte, b' '..=b'~')) {
        return Err(BootError::CmdlineCharacter { at });
    }
    let len = cmdline.len();
    if len > limit { Err(BootError::CmdlineTooLong { len, limit }) } else { Ok(()) }
}

/// Places the initrd as high as it may be, so that the kernel has what is below in one piece.
fn place_initrd<'a>(
    file: &'a File,
    kernel: &Kernel,
    low_end: u64,
) -> Result<(&'a File, Placed), BootError> {
    let plain = BootFile::new(file).map_err(BootError::ReadInitrd)?;
    let len = plain.ok_or(BootError::BadInitrd("not a plain file"))?.len();
    if len == 0 {
        return Err(BootError::BadInitrd("empty"));
    }
    let limit = low_end.min(kernel.initrd_limit);
    let start = limit.checked_sub(len).map(|start| start / PAGE * PAGE);
    match start.filter(|start| *start >= kernel.end) {
        Some(start) => Ok((file, Placed { start, len })),
        None => {
            let needed = kernel.end.next_multiple_of(PAGE).saturating_add(len);
            if needed > kernel.initrd_limit && needed <= HOLE_START {
                return Err(BootError::InitrdLimit { limit: kernel.initrd_limit });
            }
            let needed_mib = needed.saturating_add(PAGE - 1).div_ceil(MIB);
            Err(BootError::InitrdMemory { needed_mib, have_mib: low_end / MIB })
        }
    }
}

fn read_initrd(ram: &GuestRam, file: &File, placed: Placed) -> Result<(), BootError> {
    let Ok(Some(mut file)) = BootFile::new(file) else {
        return Err(BootError::BadInitrd("not a plain file"));
    };
    let len = usize::try_from(placed.len).unwrap_or(usize::MAX);
    ram.read_exact_volatile_from(GuestAddress(placed.start), &mut file, len)
        .map_err(BootError::LoadInitrd)
}
