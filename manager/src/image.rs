//! Recognises a guest's root file system image by its content and sees whether it is whole, so
//! that a wrong or cut-off file is named before a machine is started for it.
//!
//! Images come from anywhere: nothing in them is trusted, and only headers are read.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use thiserror::Error;

/// Where ext4 and EROFS keep their superblock, in bytes from the start.
const SUPERBLOCK: u64 = 1024;
/// Bytes of the superblock that are looked at.
const SUPERBLOCK_LEN: usize = 0x154;
const EXT4_MAGIC: u16 = 0xEF53;
const EXT4_64BIT: u32 = 0x80;
const EROFS_MAGIC: u32 = 0xE0F5_E1E2;
/// Length of a "newc" cpio header.
const CPIO_HEADER_LEN: usize = 110;
/// Most entries of a cpio archive that are walked in search of its end.
const CPIO_MAX_ENTRIES: u32 = 1_000_000;
/// First bytes of the compressed forms of a RAM disk that kernels unpack: gzip, zstd, xz, lz4.
const COMPRESSED: [&[u8]; 4] =
    [&[0x1F, 0x8B], &[0x28, 0xB5, 0x2F, 0xFD], b"\xFD7zXZ\0", &[0x02, 0x21, 0x4C, 0x18]];

/// What an image holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A disk with an ext2, ext3 or ext4 file system.
    Ext4,
    /// A read-only disk with an EROFS file system.
    Erofs,
    /// A RAM disk: a cpio archive, perhaps compressed.
    Cpio,
}

/// Why a file cannot serve as an image.
#[derive(Debug, Error)]
pub enum Error {
    /// It could not be read.
    #[error("the image cannot be read")]
    Read(#[source] io::Error),
    /// It is none of the known formats.
    #[error("the file is neither an ext4 nor an EROFS file system nor a cpio archive")]
    Unknown,
    /// It ends before the size its own header tells.
    #[error("the image is truncated: its header tells of {expected} bytes, the file has {actual}")]
    Truncated {
        /// Bytes the header tells of.
        expected: u64,
        /// Bytes the file has.
        actual: u64,
    },
}

/// Tells the format of an image and checks that the file is as long as its header says.
///
/// # Errors
/// [`Error::Unknown`] for other content, [`Error::Truncated`] for a file cut short.
pub fn inspect(file: &File) -> Result<Format, Error> {
    let len = file.metadata().map_err(Error::Read)?.len();
    let mut head = [0u8; 6];
    let got = read_up_to(file, &mut head, 0)?;
    let head = head.get(..got).unwrap_or_default();
    if matches!(head, b"070701" | b"070702") {
        return whole(Format::Cpio, cpio_len(file, len)?, len);
    }
    if COMPRESSED.iter().any(|magic| head.starts_with(magic)) {
        return Ok(Format::Cpio);
    }
    let mut block = [0u8; SUPERBLOCK_LEN];
    let got = read_up_to(file, &mut block, SUPERBLOCK)?;
    let block = block.get(..got).unwrap_or_default();
    if let Some(expected) = ext4_len(block) {
        return whole(Format::Ext4, expected, len);
    }
    if let Some(expected) = erofs_len(block) {
        return whole(Format::Erofs, expected, len);
    }
    Err(Error::Unknown)
}

fn whole(format: Format, expected: u64, actual: u64) -> Result<Format, Error> {
    if expected > actual { Err(Error::Truncated { expected, actual }) } else { Ok(format) }
}

fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> Result<usize, Error> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let at = u64::try_from(filled).unwrap_or(u64::MAX);
        match file.read_at(rest, offset.saturating_add(at)) {
            Ok(0) => break,
            Ok(count) => filled = filled.saturating_add(count),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::Read(e)),
        }
    }
    Ok(filled)
}

fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|chunk| u32::from_le_bytes(*chunk))
}

/// Size in bytes that an ext4 superblock tells (fields of the kernel's ext4/super.rst).
fn ext4_len(block: &[u8]) -> Option<u64> {
    let magic = block.get(0x38..)?.first_chunk().map(|chunk| u16::from_le_bytes(*chunk))?;
    if magic != EXT4_MAGIC {
        return None;
    }
    let low = u64::from(le32(block, 0x04)?);
    let wide = le32(block, 0x60)? & EXT4_64BIT != 0;
    let high = if wide { u64::from(le32(block, 0x150)?) } else { 0 };
    let shift = le32(block, 0x18)?.checked_add(10).filter(|shift| *shift <= 16)?;
    (high << 32 | low).checked_mul(1 << shift)
}

/// Size in bytes that an EROFS superblock tells (fields of the kernel's erofs_fs.h).
fn erofs_len(block: &[u8]) -> Option<u64> {
    if le32(block, 0)? != EROFS_MAGIC {
        return None;
    }
    let shift = u32::from(*block.get(12)?);
    let unit = 1u64.checked_shl(shift).filter(|unit| *unit <= 1 << 16)?;
    u64::from(le32(block, 36)?).checked_mul(unit)
}

/// Walks a "newc" archive to its trailer; returns where it ends, or would end.
fn cpio_len(file: &File, len: u64) -> Result<u64, Error> {
    let mut at = 0u64;
    for _ in 0..CPIO_MAX_ENTRIES {
        let mut header = [0u8; CPIO_HEADER_LEN];
        let mut name = [0u8; 11];
        let after = at.saturating_add(CPIO_HEADER_LEN as u64);
        if read_up_to(file, &mut header, at)? < CPIO_HEADER_LEN {
            return Ok(after.max(len.saturating_add(1)));
        }
        let (Some(size), Some(name_len)) = (hex8(&header, 54), hex8(&header, 94)) else {
            return Err(Error::Unknown);
        };
        let data = align4(after.saturating_add(name_len));
        at = align4(data.saturating_add(size));
        read_up_to(file, &mut name, after)?;
        if name == *b"TRAILER!!!\0" {
            return Ok(data);
        }
    }
    Err(Error::Unknown)
}

fn hex8(header: &[u8], at: usize) -> Option<u64> {
    let digits = header.get(at..at.checked_add(8)?)?;
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

fn align4(value: u64) -> u64 {
    value.saturating_add(3) & !3
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    /// A superblock of `blocks` blocks of 4 KiB and nothing else.
    fn ext4(blocks: u32, len: u64) -> File {
        let mut bytes = vec![0u8; 4096];
        bytes[1024 + 0x04..][..4].copy_from_slice(&blocks.to_le_bytes());
        bytes[1024 + 0x18..][..4].copy_from_slice(&2u32.to_le_bytes());
        bytes[1024 + 0x38..][..2].copy_from_slice(&EXT4_MAGIC.to_le_bytes());
        let file = file_of(&bytes);
        file.set_len(len).unwrap();
        file
    }

    fn cpio(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, data) in entries.iter().chain([&("TRAILER!!!", &b""[..])]) {
            let mut fields = [0usize; 13];
            fields[6] = data.len();
            fields[11] = name.len() + 1;
            out.extend_from_slice(b"070701");
            for field in fields {
                out.extend_from_slice(format!("{field:08X}").as_bytes());
            }
            out.extend_from_slice(name.as_bytes());
            out.push(0);
            out.resize(out.len().next_multiple_of(4), 0);
            out.extend_from_slice(data);
            out.resize(out.len().next_multiple_of(4), 0);
        }
        out
    }

    #[test]
    fn a_whole_ext4_image_is_known() {
        assert_eq!(inspect(&ext4(16, 65_536)).unwrap(), Format::Ext4);
    }

    #[test]
    fn an_ext4_image_one_byte_short_is_truncated() {
        let error = inspect(&ext4(16, 65_535)).unwrap_err();
        assert!(matches!(error, Error::Truncated { expected: 65_536, actual: 65_535 }), "{error}");
    }

    #[test]
    fn a_whole_archive_is_known_and_a_cut_one_is_truncated() {
        let bytes = cpio(&[("init", b"#!/bin/sh\n"), ("etc/hostname", b"x")]);
        assert_eq!(inspect(&file_of(&bytes)).unwrap(), Format::Cpio);
        let cut = &bytes[..bytes.len() - 130];
        assert!(matches!(inspect(&file_of(cut)), Err(Error::Truncated { .. })));
    }

    #[test]
    fn text_and_nothing_are_unknown() {
        assert!(matches!(inspect(&file_of(b"hello")), Err(Error::Unknown)));
        assert!(matches!(inspect(&file_of(b"")), Err(Error::Unknown)));
    }

    proptest! {
        #[test]
        fn any_content_is_judged_without_a_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..3000),
            magic in 0..4usize,
        ) {
            let (at, magic): (usize, &[u8]) = [
                (0, &b""[..]),
                (0, b"070701"),
                (1024 + 0x38, &[0x53, 0xEF]),
                (1024, &[0xE2, 0xE1, 0xF5, 0xE0]),
            ][magic];
            if bytes.len() >= at + magic.len() {
                bytes[at..at + magic.len()].copy_from_slice(magic);
            }
            let _ = inspect(&file_of(&bytes));
        }
    }
}
