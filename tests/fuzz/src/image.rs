//! Files that claim to be a checkpoint: the bytes as they are, and the bytes as sections and page
//! index under checksums that hold, so that what lies behind the checksums is reached too.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use coppice_image::{HeaderInfo, Image, Kind, PAGE, Source, View, Writer};
use coppice_micro::tree::memory_file;
use twox_hash::XxHash3_64;

use crate::input::Input;

const RAM_PAGES: u64 = 64;
/// Where made-up sections lie, behind the header.
const SECTIONS: u64 = 4096;
/// Where a made-up file has its section table.
const TABLE: u64 = 0x2_0000;

/// Reads the bytes as a checkpoint and as the parts of one.
pub fn run(data: &[u8]) {
    let file = memory_file();
    file.write_all_at(data, 0).unwrap();
    read(file);
    read(forge(&mut Input(data)));
}

fn read(file: File) {
    let length = file.metadata().unwrap().len();
    let image = match Image::open(file) {
        Ok(image) => image,
        Err(error) => return assert!(!error.to_string().contains('\n'), "a refusal is one line"),
    };
    let _ = image.verify();
    for kind in [Kind::Meta, Kind::Vcpu, Kind::Device, Kind::Pages, Kind::DiskMap] {
        for instance in image.instances(kind) {
            let _ = image.section(kind, instance);
        }
    }
    let Ok(index) = image.page_index() else { return };
    let pages = image.info().ram_pages;
    let mut view = View::empty(pages);
    view.push(0, &index).unwrap();
    let mut at = 0;
    for run in view.runs(0..pages) {
        assert!(run.first == at && run.count > 0, "runs leave no gap");
        at = run.end();
        if let Source::Layer { page, .. } = run.source {
            assert!((page + run.count) * PAGE <= length, "page data lies in the file");
        }
    }
    assert_eq!(at, pages, "runs cover guest RAM");
}

/// A file whose table and index come from the bytes, with right checksums.
fn forge(input: &mut Input<'_>) -> File {
    let file = memory_file();
    let info = HeaderInfo { cpu: Default::default(), build: String::new(), ram_pages: RAM_PAGES };
    Writer::new(file.try_clone().unwrap(), info).unwrap().finish().unwrap();
    let mut header = [0; 4096];
    file.read_exact_at(&mut header, 0).unwrap();

    let mut table = Vec::new();
    let mut place = SECTIONS;
    for _ in 0..input.u8() % 6 {
        let kind = u32::from(input.u8() % 11);
        let content = match kind {
            7 => index(input),
            _ => {
                let count = input.u8();
                input.bytes(count.into()).to_vec()
            }
        };
        file.write_all_at(&content, place).unwrap();
        // Mostly where it really is; page data lies where the format has it.
        let (offset, length) = match (input.u8(), kind) {
            (0, _) => (input.u64(), input.u64()),
            (1, _) => (u64::from(input.u16()) * 8, input.u16().into()),
            (_, 8) => (0x1_0000, u64::from(input.u8() % 16) * PAGE),
            _ => (place, content.len() as u64),
        };
        table.extend(kind.to_le_bytes());
        table.extend(u32::from(input.u8() / 128).to_le_bytes());
        table.extend(u16::from(input.u8() / 200 + 1).to_le_bytes());
        table.extend(u16::from(input.u8() / 100).to_le_bytes());
        table.extend([0; 4]);
        table.extend(offset.to_le_bytes());
        table.extend(length.to_le_bytes());
        table.extend(XxHash3_64::oneshot(&content).to_le_bytes());
        place += 2048;
    }
    file.write_all_at(&table, TABLE).unwrap();
    file.set_len(TABLE + 4096).unwrap();
    let count = u32::try_from(table.len() / 40).unwrap();
    header[104..108].copy_from_slice(&count.to_le_bytes());
    header[112..120].copy_from_slice(&TABLE.to_le_bytes());
    header[120..128].copy_from_slice(&(table.len() as u64).to_le_bytes());
    header[128..136].copy_from_slice(&XxHash3_64::oneshot(&table).to_le_bytes());
    header[136..144].fill(0);
    let sum = XxHash3_64::oneshot(&header);
    header[136..144].copy_from_slice(&sum.to_le_bytes());
    file.write_all_at(&header, 0).unwrap();
    file
}

/// A page index that mostly ascends.
fn index(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let (mut first, mut page) = (0u64, 16u64);
    for _ in 0..input.u8() % 32 {
        let (gap, count, kind) = (input.u8() % 3, u32::from(input.u8() % 5), input.u8());
        first = if kind == 0 { input.u64() } else { first + u64::from(gap) };
        let (flags, place) = match kind {
            1..64 => (1, 0),
            64 => (input.u32(), input.u64()),
            _ => (0, page),
        };
        bytes.extend(first.to_le_bytes());
        bytes.extend(count.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(place.to_le_bytes());
        bytes.extend([0; 8]);
        first = first.saturating_add(count.into());
        page += u64::from(count);
    }
    bytes
}
