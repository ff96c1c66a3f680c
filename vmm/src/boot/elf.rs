//! Checks of an ELF kernel before linux-loader reads it into guest memory.
//!
//! linux-loader 0.14 bounds its writes by guest memory, but it trusts the headers otherwise: it
//! accepts files for other processors, segments below the place kernels go (where the boot
//! tables are), segments that end after the file, any number of headers, and it walks a note
//! segment of any size with a system call per note. So everything is checked here first, and
//! what memory the kernel needs is known before a byte is written.

use linux_loader::elf::{Elf64_Ehdr, Elf64_Phdr, PT_LOAD, PT_NOTE};
use vm_memory::ByteValued;

use super::error::BootError;
use super::file::BootFile;
use crate::memory::layout::{HOLE_START, KERNEL_START};

/// First bytes of an ELF file.
pub(super) const MAGIC: &[u8] = b"\x7fELF";
/// Offsets and values of the identification and of `e_machine` (System V ABI).
const CLASS: usize = 4;
const CLASS_64: u8 = 2;
const DATA: usize = 5;
const DATA_LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u16 = 62;
/// A kernel has about five program headers.
const MAX_SEGMENTS: u16 = 64;
/// A kernel's notes take a few hundred bytes.
const MAX_NOTES: u64 = 64 * 1024;
/// Note of the owner "Xen" that holds the PVH entry, a physical address (Xen's `elfnote.h`).
const PHYS32_ENTRY: u32 = 18;
/// The page tables at entry map this much.
pub(super) const IDENTITY_MAP: u64 = 1 << 30;

/// How to enter the kernel, and what it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ElfKernel {
    /// Entry of the 64-bit boot protocol, if it is a Linux kernel.
    pub(super) linux64: Option<u64>,
    /// Entry of PVH, if it has one.
    pub(super) pvh: Option<u64>,
    /// First byte after the kernel in guest memory, its zeroed data included.
    pub(super) end: u64,
}

/// What the notes say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Notes {
    /// There is a note of the owner "Linux", which every vmlinux since 4.19 has.
    linux: bool,
    /// The PVH entry.
    pvh: Option<u64>,
}

/// Examines an ELF file.
///
/// # Errors
/// When it is not a kernel for this machine or it is truncated.
pub(super) fn examine(file: &BootFile<'_>) -> Result<ElfKernel, BootError> {
    let header = read_header(file)?;
    let mut notes = Notes::default();
    let mut loaded = Vec::new();
    for segment in read_segments(file, &header)? {
        match segment.p_type {
            PT_LOAD => loaded.extend(check_segment(file, &segment)?),
            PT_NOTE => read_notes(file, &segment, &mut notes)?,
            _ => {}
        }
    }
    let inside = |entry: u64| loaded.iter().any(|(start, end)| (*start..*end).contains(&entry));
    let kernel = ElfKernel {
        linux64: (notes.linux && header.e_entry < IDENTITY_MAP && inside(header.e_entry))
            .then_some(header.e_entry),
        pvh: notes.pvh.filter(|entry| inside(*entry)),
        end: loaded.iter().map(|(_, end)| *end).max().unwrap_or_default(),
    };
    if kernel.linux64.is_none() && kernel.pvh.is_none() {
        return Err(BootError::NotAKernel("it is a program, or a kernel without a usable entry"));
    }
    Ok(kernel)
}

fn read_header(file: &BootFile<'_>) -> Result<Elf64_Ehdr, BootError> {
    let header: Elf64_Ehdr = read_object(file, 0)?;
    let ident = |at: usize| header.e_ident.get(at).copied();
    if ident(CLASS) != Some(CLASS_64) || header.e_machine != MACHINE_X86_64 {
        return Err(BootError::NotAKernel("it is an ELF file for another processor"));
    }
    if ident(DATA) != Some(DATA_LITTLE_ENDIAN)
        || usize::from(header.e_phentsize) != size_of::<Elf64_Phdr>()
        || header.e_phnum == 0
        || header.e_phnum > MAX_SEGMENTS
    {
        return Err(BootError::NotAKernel("its ELF header makes no sense"));
    }
    Ok(header)
}

fn read_segments(file: &BootFile<'_>, header: &Elf64_Ehdr) -> Result<Vec<Elf64_Phdr>, BootError> {
    let mut segments = Vec::with_capacity(usize::from(header.e_phnum));
    let mut offset = header.e_phoff;
    for _ in 0..header.e_phnum {
        segments.push(read_object(file, offset)?);
        offset = offset.saturating_add(u64::from(header.e_phentsize));
    }
    Ok(segments)
}

/// Checks a segment to be loaded; gives its place in guest memory, if it has one.
fn check_segment(
    file: &BootFile<'_>,
    segment: &Elf64_Phdr,
) -> Result<Option<(u64, u64)>, BootError> {
    if segment.p_memsz == 0 && segment.p_filesz == 0 {
        return Ok(None);
    }
    if segment.p_filesz > segment.p_memsz {
        return Err(BootError::NotAKernel("a segment is larger in the file than in memory"));
    }
    let needed = segment.p_offset.saturating_add(segment.p_filesz);
    if needed > file.len() {
        return Err(BootError::Truncated { len: file.len(), needed });
    }
    let end = segment.p_paddr.saturating_add(segment.p_memsz);
    if segment.p_paddr < KERNEL_START || end > HOLE_START {
        return Err(BootError::NotAKernel("a segment belongs outside the memory for kernels"));
    }
    Ok(Some((segment.p_paddr, end)))
}

fn read_notes(
    file: &BootFile<'_>,
    segment: &Elf64_Phdr,
    notes: &mut Notes,
) -> Result<(), BootError> {
    if segment.p_filesz > MAX_NOTES {
        return Err(BootError::NotAKernel("its notes are too long"));
    }
    let needed = segment.p_offset.saturating_add(segment.p_filesz);
    if needed > file.len() {
        return Err(BootError::Truncated { len: file.len(), needed });
    }
    let mut bytes = vec![0u8; usize::try_from(segment.p_filesz).unwrap_or_default()];
    let bytes = file.read_at(segment.p_offset, &mut bytes).map_err(BootError::ReadKernel)?;
    parse_notes(bytes, notes);
    Ok(())
}

/// Walks the notes; what follows the first malformed one is ignored.
fn parse_notes(mut bytes: &[u8], notes: &mut Notes) {
    while let Some((name, kind, descriptor)) = take_note(&mut bytes) {
        match name {
            b"Linux\0" => notes.linux = true,
            b"Xen\0" if kind == PHYS32_ENTRY => {
                // Four bytes by specification; 64-bit kernels write eight.
                let entry = descriptor.first_chunk::<4>();
                notes.pvh = entry.map(|entry| u64::from(u32::from_le_bytes(*entry)));
            }
            _ => {}
        }
    }
}

/// Takes the next note: its owner, its type and its descriptor.
fn take_note<'a>(bytes: &mut &'a [u8]) -> Option<(&'a [u8], u32, &'a [u8])> {
    let name_len = usize::try_from(take_word(bytes)?).ok()?;
    let descriptor_len = usize::try_from(take_word(bytes)?).ok()?;
    let kind = take_word(bytes)?;
    let name = take_padded(bytes, name_len)?;
    let descriptor = take_padded(bytes, descriptor_len)?;
    Some((name, kind, descriptor))
}

fn take_word(bytes: &mut &[u8]) -> Option<u32> {
    let (word, rest) = bytes.split_first_chunk::<4>()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*word))
}

/// Takes `len` bytes and the padding to a multiple of four, which the last note may lack.
fn take_padded<'a>(bytes: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let taken = bytes.get(..len)?;
    *bytes = bytes.get(len.checked_next_multiple_of(4)?..).unwrap_or_default();
    Some(taken)
}

fn read_object<T: ByteValued + Default>(file: &BootFile<'_>, offset: u64) -> Result<T, BootError> {
    let mut object = T::default();
    let size = object.as_slice().len();
    let read = file.read_at(offset, object.as_mut_slice()).map_err(BootError::ReadKernel)?.len();
    if read < size {
        let needed = offset.saturating_add(u64::try_from(size).unwrap_or(u64::MAX));
        return Err(BootError::Truncated { len: file.len(), needed });
    }
    Ok(object)
}
