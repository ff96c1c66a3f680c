//! Checks of a bzImage before linux-loader reads it into guest memory.
//!
//! The field names are those of the Linux/x86 boot protocol (`Documentation/arch/x86/boot.rst`).

use linux_loader::bootparam::setup_header;
use vm_memory::ByteValued;

use super::elf::IDENTITY_MAP;
use super::error::BootError;
use super::file::BootFile;
use crate::memory::layout::{CMDLINE_MAX, KERNEL_START};

/// Offset of the setup header in the file.
pub(super) const HEADER_OFFSET: u64 = 0x1F1;
/// `HdrS`.
pub(super) const MAGIC: u32 = 0x5372_6448;
/// First version of the protocol with `xloadflags`, from Linux 3.8.
const MIN_VERSION: u16 = 0x020C;
/// `loadflags`: the protected-mode code is loaded at 1 MiB.
pub(super) const LOADED_HIGH: u8 = 1 << 0;
/// `xloadflags`: there is a 64-bit entry point.
const XLF_KERNEL_64: u16 = 1 << 0;
/// Where the 64-bit entry point is in the protected-mode code.
const ENTRY_64: u64 = 0x200;
/// Unit of `setup_sects`.
const SECTOR: u64 = 512;
/// Unit of `syssize`.
const PARAGRAPH: u64 = 16;

/// How to enter the kernel, and what it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BzImage {
    /// Entry of the 64-bit boot protocol.
    pub(super) entry: u64,
    /// First byte of guest memory that the kernel does not need to unpack itself and start.
    pub(super) end: u64,
    /// First address that the initrd must not reach.
    pub(super) initrd_limit: u64,
    /// Longest command line, without the terminating zero.
    pub(super) cmdline_limit: usize,
}

/// Whether the file has the magic number of a bzImage.
///
/// # Errors
/// When the file cannot be read.
pub(super) fn is_bzimage(file: &BootFile<'_>) -> Result<bool, BootError> {
    Ok(read_header(file)?.is_some_and(|header| header.header == MAGIC))
}

/// Examines a bzImage.
///
/// # Errors
/// When it is not a kernel for this machine or it is truncated.
pub(super) fn examine(file: &BootFile<'_>) -> Result<BzImage, BootError> {
    let header = read_header(file)?.ok_or(BootError::NotAKernel("it is too short"))?;
    if header.version < MIN_VERSION {
        return Err(BootError::NotAKernel("its boot protocol is older than 2.12"));
    }
    if header.loadflags & LOADED_HIGH == 0 || header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(BootError::NotAKernel("it has no 64-bit entry point"));
    }
    let setup = match header.setup_sects {
        // By specification, for very old kernels.
        0 => 5,
        sectors => u64::from(sectors) + 1,
    } * SECTOR;
    let needed = setup + u64::from(header.syssize) * PARAGRAPH;
    if file.len() < needed {
        return Err(BootError::Truncated { len: file.len(), needed });
    }
    let loaded_end = KERNEL_START.saturating_add(file.len() - setup);
    // Loaded below its preferred address, the kernel moves itself there to unpack.
    let unpacked_end =
        header.pref_address.max(KERNEL_START).saturating_add(u64::from(header.init_size));
    let end = loaded_end.max(unpacked_end);
    if end > IDENTITY_MAP {
        return Err(BootError::NotAKernel("it is larger than any kernel"));
    }
    let cmdline_limit = usize::try_from(header.cmdline_size).unwrap_or(usize::MAX);
    Ok(BzImage {
        entry: KERNEL_START + ENTRY_64,
        end,
        initrd_limit: u64::from(header.initrd_addr_max) + 1,
        cmdline_limit: cmdline_limit.min(CMDLINE_MAX - 1),
    })
}

/// Reads the header, if the file is long enough to have one.
fn read_header(file: &BootFile<'_>) -> Result<Option<setup_header>, BootError> {
    let mut header = setup_header::default();
    let size = size_of::<setup_header>();
    let read =
        file.read_at(HEADER_OFFSET, header.as_mut_slice()).map_err(BootError::ReadKernel)?.len();
    Ok((read == size).then_some(header))
}
