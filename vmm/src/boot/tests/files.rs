//! Kernel files made for tests: as small as they can be, and right unless a field says otherwise.

use std::fs::File;
use std::io::Write;

use linux_loader::bootparam::setup_header;
use linux_loader::elf::{Elf64_Ehdr, Elf64_Phdr, PT_LOAD, PT_NOTE};
use vm_memory::ByteValued;

use super::super::bzimage::{HEADER_OFFSET, LOADED_HIGH, MAGIC};

/// What stands for a kernel's code.
pub(super) const CODE: &[u8] = b"code of a kernel";
/// Where [`ElfFile`] is loaded and entered unless told otherwise.
pub(super) const LOAD: u64 = 0x100_0000;
pub(super) const ENTRY: u64 = LOAD + 1;
pub(super) const PVH_ENTRY: u64 = LOAD + 2;

/// A plain file with these bytes.
pub(super) fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// An ELF kernel: one loaded segment and one with notes.
#[derive(Debug, Clone)]
pub(super) struct ElfFile {
    pub(super) linux: bool,
    pub(super) pvh: bool,
    pub(super) machine: u16,
    pub(super) load: u64,
    pub(super) memory: u64,
}

impl ElfFile {
    pub(super) fn linux() -> Self {
        Self { linux: true, pvh: false, machine: 62, load: LOAD, memory: 0x10_0000 }
    }

    pub(super) fn build(&self) -> Vec<u8> {
        let mut notes = note(b"GNU\0", 3, &[7; 20]);
        if self.linux {
            notes.extend(note(b"Linux\0", 0x100, b"\0"));
        }
        if self.pvh {
            notes.extend(note(b"Xen\0", 18, &PVH_ENTRY.to_le_bytes()));
        }
        let headers = size_of::<Elf64_Ehdr>() + 2 * size_of::<Elf64_Phdr>();
        let (notes_at, notes_len) = (as_u64(headers), as_u64(notes.len()));
        let segments = [
            Elf64_Phdr {
                p_type: PT_NOTE,
                p_offset: notes_at,
                p_filesz: notes_len,
                p_memsz: notes_len,
                ..Default::default()
            },
            Elf64_Phdr {
                p_type: PT_LOAD,
                p_offset: notes_at + notes_len,
                p_paddr: self.load,
                p_filesz: as_u64(CODE.len()),
                p_memsz: self.memory,
                ..Default::default()
            },
        ];
        let mut ident = [0u8; 16];
        ident[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        let header = Elf64_Ehdr {
            e_ident: ident,
            e_type: 2,
            e_machine: self.machine,
            e_entry: ENTRY,
            e_phoff: as_u64(size_of::<Elf64_Ehdr>()),
            e_phentsize: u16::try_from(size_of::<Elf64_Phdr>()).unwrap(),
            e_phnum: 2,
            ..Default::default()
        };
        let mut bytes = header.as_slice().to_vec();
        segments.iter().for_each(|segment| bytes.extend_from_slice(segment.as_slice()));
        bytes.extend(notes);
        bytes.extend_from_slice(CODE);
        bytes
    }
}

/// A bzImage: a boot sector, one setup sector, and code of one paragraph.
#[derive(Debug, Clone)]
pub(super) struct BzFile {
    pub(super) version: u16,
    pub(super) xloadflags: u16,
    pub(super) init_size: u32,
    pub(super) initrd_addr_max: u32,
    pub(super) cmdline_size: u32,
}

impl Default for BzFile {
    fn default() -> Self {
        Self {
            version: 0x020F,
            xloadflags: 1,
            init_size: 4 << 20,
            initrd_addr_max: 0x7FFF_FFFF,
            cmdline_size: 2047,
        }
    }
}

impl BzFile {
    pub(super) fn build(&self) -> Vec<u8> {
        let header = setup_header {
            setup_sects: 1,
            syssize: 1,
            boot_flag: 0xAA55,
            header: MAGIC,
            version: self.version,
            loadflags: LOADED_HIGH,
            code32_start: 0x10_0000,
            initrd_addr_max: self.initrd_addr_max,
            kernel_alignment: 0x20_0000,
            relocatable_kernel: 1,
            xloadflags: self.xloadflags,
            cmdline_size: self.cmdline_size,
            pref_address: LOAD,
            init_size: self.init_size,
            ..Default::default()
        };
        let mut bytes = vec![0; 1024];
        let at = usize::try_from(HEADER_OFFSET).unwrap();
        bytes[at..at + size_of::<setup_header>()].copy_from_slice(header.as_slice());
        bytes.extend_from_slice(CODE);
        bytes
    }
}

fn note(owner: &[u8], kind: u32, descriptor: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [owner.len(), descriptor.len()] {
        bytes.extend(u32::try_from(word).unwrap().to_le_bytes());
    }
    bytes.extend(kind.to_le_bytes());
    for part in [owner, descriptor] {
        bytes.extend_from_slice(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

fn as_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap()
}
