//! What the writer took, the reader gives back.

#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use common::{PAGE_BYTES, Part, info, page, write_parts};
use coppice_image::{Image, Kind, PAGE, WriteError, Writer};
use proptest::collection::vec;
use proptest::prelude::*;
use tempfile::tempfile;

/// Runs of pages, some long enough to be written without a copy, many of them with zero pages.
fn parts() -> impl Strategy<Value = Vec<Part>> {
    let fill = prop_oneof![1 => Just(0u8), 3 => 0u8..4, 1 => any::<u8>()];
    let part = prop_oneof![
        (0u64..4, 1u32..50).prop_map(|(gap, count)| Part::Zero(gap, count)),
        (0u64..4, vec(fill, 1..100)).prop_map(|(gap, fills)| Part::Data(gap, fills)),
        (0u64..2, 1usize..30).prop_map(|(gap, count)| Part::Data(gap, vec![0; count])),
        (0u64..2, 60usize..150).prop_map(|(gap, count)| Part::Data(gap, vec![9; count])),
    ];
    vec(part, 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn pages_come_back(parts in parts(), vectored in any::<bool>()) {
        let file = tempfile().unwrap();
        let mut writer = Writer::new(file.try_clone().unwrap(), info(2000)).unwrap();
        let model = write_parts(&mut writer, &parts, vectored);
        let summary = writer.finish().unwrap();

        let image = Image::open(file).unwrap();
        image.verify().unwrap();
        prop_assert_eq!(image.info(), &info(2000));
        prop_assert_eq!(image.file().metadata().unwrap().len(), summary.file_bytes);
        let index = image.page_index().unwrap();
        prop_assert_eq!(index.extents().len(), summary.extents);
        prop_assert_eq!(index.pages(), model.len() as u64);
        let written = model.iter().filter(|(_, fill)| *fill != 0).count();
        prop_assert_eq!(summary.pages_written, written as u64);
        let mut expected = model.iter();
        for extent in index.extents() {
            for offset in 0..extent.count {
                let (number, fill) = expected.next().unwrap();
                prop_assert_eq!(extent.first + offset, *number);
                let mut content = vec![0; PAGE_BYTES];
                if let Some(data) = extent.data {
                    image.file().read_exact_at(&mut content, (data + offset) * PAGE).unwrap();
                }
                prop_assert!(content == page(*fill), "page {} differs", number);
            }
        }
    }
}

#[test]
fn sections_come_back_by_kind_and_instance() {
    let file = tempfile().unwrap();
    let mut writer = Writer::new(file.try_clone().unwrap(), info(1)).unwrap();
    writer.section(Kind::Device, 9, 3, true, b"nine").unwrap();
    writer.section(Kind::Device, 2, 4, false, b"two").unwrap();
    writer.finish().unwrap();
    let image = Image::open(file).unwrap();
    assert_eq!(image.instances(Kind::Device), [2, 9]);
    let section = image.section(Kind::Device, 2).unwrap().unwrap();
    assert_eq!((section.version, section.data.as_slice()), (4, b"two".as_slice()));
    assert_eq!(image.section(Kind::Device, 3).unwrap(), None);
}

#[test]
fn zero_pages_take_no_room() {
    let file = tempfile().unwrap();
    let mut writer = Writer::new(file.try_clone().unwrap(), info(4096)).unwrap();
    let mut data = vec![0; 2048 * PAGE_BYTES];
    data[0] = 1;
    data[2047 * PAGE_BYTES] = 1;
    writer.pages(0, 2048, &data).unwrap();
    writer.pages(2048, 2048, &vec![0; 2048 * PAGE_BYTES]).unwrap();
    let summary = writer.finish().unwrap();
    assert_eq!((summary.pages_written, summary.extents), (2, 2));
    // Two pages and the rest of the format; a file system may keep some more for itself.
    assert!(file.metadata().unwrap().blocks() * 512 < 256 * 1024);
}

#[test]
fn a_finished_file_is_not_written_again() {
    let file = tempfile().unwrap();
    Writer::new(file.try_clone().unwrap(), info(1)).unwrap().finish().unwrap();
    assert!(matches!(Writer::new(file, info(1)), Err(WriteError::NotEmpty)));
}

#[test]
fn an_unfinished_file_is_no_checkpoint() {
    let file = tempfile().unwrap();
    let mut writer = Writer::new(file.try_clone().unwrap(), info(200)).unwrap();
    writer.pages(0, 200, &vec![7; 200 * PAGE_BYTES]).unwrap();
    drop(writer);
    Image::open(file).unwrap_err();
}

#[test]
fn runs_must_ascend_and_fit() {
    let file = tempfile().unwrap();
    let mut writer = Writer::new(file, info(10)).unwrap();
    writer.zero(3, 2).unwrap();
    let data = vec![1; 2 * PAGE_BYTES];
    for (first, count) in [(4, 2), (2, 2), (9, 2), (5, 1), (5, 0), (u64::MAX, 2)] {
        let result = writer.pages(first, count, &data);
        assert!(matches!(result, Err(WriteError::Run(_))), "{first} {count}: {result:?}");
    }
    writer.pages(8, 2, &data).unwrap();
}

#[test]
fn a_section_goes_in_once() {
    let mut writer = Writer::new(tempfile().unwrap(), info(10)).unwrap();
    writer.section(Kind::Meta, 0, 1, true, b"").unwrap();
    writer.section(Kind::Meta, 0, 1, true, b"").unwrap_err();
    writer.section(Kind::Pages, 0, 1, true, b"").unwrap_err();
}

#[test]
fn a_failed_write_ends_the_writer() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let read_only = std::fs::File::open(file.path()).unwrap();
    let mut writer = Writer::new(read_only, info(100)).unwrap();
    // Too much to be only gathered.
    let data = vec![1; 100 * PAGE_BYTES];
    assert!(matches!(writer.pages(0, 100, &data), Err(WriteError::Io(_))));
    assert!(matches!(writer.zero(0, 1), Err(WriteError::Broken)));
    assert!(matches!(writer.finish(), Err(WriteError::Broken)));
}
