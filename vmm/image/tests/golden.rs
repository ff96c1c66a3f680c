//! The image that a version left behind goes on reading in every later one.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;

use common::{page, reading, write_sample};
use coppice_image::Image;
use tempfile::tempfile;

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/format-1.ckpt")
}

#[test]
fn the_first_version_still_reads() {
    let text = reading(File::open(golden()).unwrap()).unwrap();
    assert!(text.contains(r#"build: "coppice-vmm 0.1.0", ram_pages: 64"#), "{text}");
    assert!(text.contains("Vcpu 1 Section { version: 7, data: [115, 101"), "{text}");
    assert!(text.contains("DiskMap 0 Section { version: 1, data: [] }"), "{text}");
    let index = Image::open(File::open(golden()).unwrap()).unwrap().page_index().unwrap();
    let extents: Vec<_> = index.extents().iter().map(|e| (e.first, e.count, e.data)).collect();
    let expected = [(2, 3, Some(16)), (5, 4, None), (19, 2, None), (22, 1, Some(19))];
    assert_eq!(extents, expected);
    let data = [page(3), page(0), page(5)].concat();
    assert!(text.contains(&format!("{data:?}")), "the pages differ");
}

/// Fails when the writer's format changes: then it needs a new number and a new golden image.
#[test]
fn the_writer_still_writes_the_first_version() {
    let file = tempfile().unwrap();
    write_sample(file.try_clone().unwrap());
    std::io::Seek::rewind(&mut &file).unwrap();
    let mut bytes = Vec::new();
    (&file).read_to_end(&mut bytes).unwrap();
    assert!(std::fs::read(golden()).unwrap() == bytes, "the written bytes differ");
}
