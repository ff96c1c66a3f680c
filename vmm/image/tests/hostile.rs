//! Files that are damaged or made up get a clear refusal, and never another reading.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use common::{reading, write_sample};
use coppice_image::{Image, IndexError, Kind, ReadError, TableError};
use tempfile::tempfile;

fn sample() -> (File, String) {
    let file = tempfile().unwrap();
    write_sample(file.try_clone().unwrap());
    let text = reading(file.try_clone().unwrap()).unwrap();
    (file, text)
}

#[test]
fn no_flipped_bit_changes_what_is_read() {
    let (file, text) = sample();
    let length = file.metadata().unwrap().len();
    for at in 0..length {
        // All bits where the format's own structures are, some in the page data.
        let bits: &[u32] = match at {
            0..200 => &[0, 1, 2, 3, 4, 5, 6, 7],
            200..4096 if at % 16 != 0 => continue,
            // Unused up to the page data.
            4096..65_536 if at % 1024 != 0 => continue,
            65_536.. if at < length - 600 && at % 16 != 0 => continue,
            _ => &[0, 5, 7],
        };
        for bit in bits {
            flip(&file, at, *bit);
            match reading(file.try_clone().unwrap()) {
                Ok(other) => assert!(other == text, "bit {bit} of byte {at} changed the reading"),
                Err(error) => assert!(!error.to_string().contains('\n'), "one line: {error}"),
            }
            flip(&file, at, *bit);
        }
    }
}

fn flip(file: &File, at: u64, bit: u32) {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ (1 << bit)], at).unwrap();
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let (file, _) = sample();
    let length = file.metadata().unwrap().len();
    let copy = tempfile().unwrap();
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    copy.write_all_at(&bytes, 0).unwrap();
    for end in (0..length).rev().filter(|end| end % 61 == 0 || *end > length - 300) {
        copy.set_len(end).unwrap();
        reading(copy.try_clone().unwrap()).unwrap_err();
    }
}

/// A section of a made-up file: kind, instance, flags, offset, length, content.
type Made = (u32, u32, u16, u64, u64, Vec<u8>);

/// Writes a file with right checksums around whatever sections a liar wants.
fn forge(sections: &[Made]) -> File {
    let file = tempfile().unwrap();
    let mut table = Vec::new();
    for (kind, instance, flags, offset, length, content) in sections {
        table.extend(kind.to_le_bytes());
        table.extend(instance.to_le_bytes());
        table.extend(1u16.to_le_bytes());
        table.extend(flags.to_le_bytes());
        table.extend([0; 4]);
        table.extend(offset.to_le_bytes());
        table.extend(length.to_le_bytes());
        table.extend(sum(content).to_le_bytes());
        if !content.is_empty() {
            file.write_all_at(content, *offset).unwrap();
        }
    }
    let table_at = 0x40_0000u64;
    file.write_all_at(&table, table_at).unwrap();
    file.set_len(0x40_0000 + 0x1000).unwrap();
    let mut header = vec![0; 4096];
    let sample = sample().0;
    sample.read_exact_at(&mut header, 0).unwrap();
    let count = u32::try_from(sections.len()).unwrap();
    header[104..108].copy_from_slice(&count.to_le_bytes());
    header[112..120].copy_from_slice(&table_at.to_le_bytes());
    header[120..128].copy_from_slice(&(table.len() as u64).to_le_bytes());
    header[128..136].copy_from_slice(&sum(&table).to_le_bytes());
    header[136..144].fill(0);
    let checksum = sum(&header);
    header[136..144].copy_from_slice(&checksum.to_le_bytes());
    file.write_all_at(&header, 0).unwrap();
    file
}

fn sum(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

fn refused(sections: &[Made]) -> Option<TableError> {
    match Image::open(forge(sections)) {
        Err(ReadError::Table(error)) => Some(error),
        _ => None,
    }
}

#[test]
fn a_section_the_reader_must_know_is_refused() {
    let unknown = (99, 0, 1, 0x10000, 4, b"what".to_vec());
    assert_eq!(refused(&[unknown]), Some(TableError::UnknownRequired { kind: 99, instance: 0 }));
}

#[test]
fn a_section_nobody_needs_is_passed_over() {
    let unknown = (99, 0, 0, 0x10000, 4, b"what".to_vec());
    Image::open(forge(&[unknown])).unwrap();
}

#[test]
fn a_section_twice_is_refused() {
    let one = (1, 0, 1, 0x10000, 4, b"here".to_vec());
    let two = (1, 0, 1, 0x11000, 4, b"also".to_vec());
    assert_eq!(refused(&[one, two]), Some(TableError::Duplicate { kind: 1, instance: 0 }));
}

#[test]
fn sections_over_each_other_are_refused() {
    let one = (1, 0, 1, 0x10000, 4, b"here".to_vec());
    let two = (2, 0, 1, 0x10003, 4, b"here".to_vec());
    assert_eq!(refused(&[one, two]), Some(TableError::Overlap));
}

#[test]
fn a_section_over_the_header_or_the_table_is_refused() {
    for offset in [0, 4095, 0x40_0000] {
        assert_eq!(
            refused(&[(1, 0, 1, offset, 8, Vec::new())]),
            Some(TableError::Overlap),
            "{offset}"
        );
    }
}

#[test]
fn a_section_outside_the_file_is_refused() {
    for (offset, length) in [(0x10000, u64::MAX), (u64::MAX, 2), (0x40_0FFF, 2)] {
        let section = (1, 0, 1, offset, length, Vec::new());
        assert_eq!(refused(&[section]), Some(TableError::Bounds { kind: 1, instance: 0 }));
    }
}

#[test]
fn a_flag_without_meaning_is_refused() {
    assert_eq!(refused(&[(1, 0, 2, 0x10000, 0, Vec::new())]), Some(TableError::Reserved));
}

/// One index entry: first, count, flags, file page.
type Entry = (u64, u32, u32, u64);

/// The page data has pages 16 to 19 of the file; RAM has 64 pages.
fn index_of(entries: &[Entry]) -> Result<(), ReadError> {
    let mut index = Vec::new();
    for (first, count, flags, page) in entries {
        index.extend(first.to_le_bytes());
        index.extend(count.to_le_bytes());
        index.extend(flags.to_le_bytes());
        index.extend(page.to_le_bytes());
        index.extend([0; 8]);
    }
    let length = index.len() as u64;
    let file = forge(&[
        (8, 0, 1, 0x10000, 0x4000, Vec::new()),
        (Kind::PageIndex as u32, 0, 1, 0x20000, length, index),
    ]);
    Image::open(file)?.page_index().map(drop)
}

#[test]
fn extents_must_be_in_order_in_ram_and_in_the_page_data() {
    index_of(&[(0, 1, 0, 16), (1, 2, 1, 0), (60, 3, 0, 17)]).unwrap();
    let cases: [(&[Entry], IndexError); 9] = [
        (&[(5, 1, 0, 16), (4, 1, 0, 17)], IndexError::Order(1)),
        (&[(5, 2, 0, 16), (6, 1, 0, 18)], IndexError::Order(1)),
        (&[(5, 0, 0, 16)], IndexError::Order(0)),
        (&[(63, 2, 1, 0)], IndexError::OutsideRam(0)),
        (&[(u64::MAX, 2, 1, 0)], IndexError::OutsideRam(0)),
        (&[(0, 1, 0, 15)], IndexError::OutsideData(0)),
        (&[(0, 5, 0, 16)], IndexError::OutsideData(0)),
        (&[(0, 2, 0, 16), (2, 1, 0, 17)], IndexError::OutsideData(1)),
        (&[(0, 1, 2, 16)], IndexError::Reserved(0)),
    ];
    for (entries, expected) in cases {
        match index_of(entries) {
            Err(ReadError::Index(error)) => assert_eq!(error, expected, "{entries:?}"),
            other => panic!("{entries:?} not refused: {other:?}"),
        }
    }
}

#[test]
fn a_damaged_page_is_found_by_a_full_check_only() {
    let (file, _) = sample();
    flip(&file, 16 * 4096, 0);
    let image = Image::open(file).unwrap();
    image.page_index().unwrap();
    let error = image.verify().unwrap_err();
    assert!(matches!(error, ReadError::PageChecksum { first: 2, last: 4 }), "{error:?}");
}
