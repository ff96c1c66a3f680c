//! What the tests of this crate share: an image's content as plain data, and a file with it.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::fs::File;
use std::io::IoSlice;

use coppice_image::{CpuIdentity, HeaderInfo, Image, Kind, PAGE, Summary, Writer};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// A run as it is handed to the writer.
#[derive(Debug, Clone)]
pub enum Part {
    /// `zero(gap, count)`, `gap` pages behind the part before.
    Zero(u64, u32),
    /// Pages with these fill bytes; 0 makes a zero page.
    Data(u64, Vec<u8>),
}

/// The content of one page with a fill byte.
pub fn page(fill: u8) -> Vec<u8> {
    let mut page = vec![fill; PAGE_BYTES];
    if fill != 0 {
        // Not the same bytes all over, so that a shift shows.
        page[..fill.into()].fill(1);
    }
    page
}

pub fn info(ram_pages: u64) -> HeaderInfo {
    let cpu = CpuIdentity {
        vendor: *b"GenuineIntel",
        signature: 0x000C_06F2,
        features: [1, 2, 4, 8, 16, 32, 64, 0xF000_0000],
    };
    HeaderInfo { cpu, build: "coppice-vmm 0.1.0".into(), ram_pages }
}

/// Writes parts through either way of handing data over; gives each covered page's fill byte.
pub fn write_parts(writer: &mut Writer, parts: &[Part], vectored: bool) -> Vec<(u64, u8)> {
    let mut model = Vec::new();
    let mut next = 0;
    for part in parts {
        match part {
            Part::Zero(gap, count) => {
                let first = next + gap;
                writer.zero(first, *count).unwrap();
                next = first + u64::from(*count);
                model.extend((first..next).map(|page| (page, 0)));
            }
            Part::Data(gap, fills) => {
                let first = next + gap;
                let pages: Vec<Vec<u8>> = fills.iter().map(|fill| page(*fill)).collect();
                let count = u32::try_from(fills.len()).unwrap();
                if vectored {
                    let slices: Vec<_> = pages.iter().map(|page| IoSlice::new(page)).collect();
                    writer.pages_vectored(first, count, &slices).unwrap();
                } else {
                    writer.pages(first, count, &pages.concat()).unwrap();
                }
                next = first + u64::from(count);
                model.extend((first..next).zip(fills.iter().copied()));
            }
        }
    }
    model
}

/// A small image with a bit of everything, the same bytes in every run.
pub fn write_sample(file: File) -> Summary {
    let mut writer = Writer::new(file, info(64)).unwrap();
    writer.section(Kind::Meta, 0, 1, true, br#"{"id":"golden"}"#).unwrap();
    writer.section(Kind::Vcpu, 1, 7, true, b"second").unwrap();
    let parts = [
        Part::Data(2, vec![3, 0, 5]),
        Part::Zero(0, 4),
        Part::Data(10, vec![0, 0]),
        Part::Data(1, vec![200]),
    ];
    write_parts(&mut writer, &parts, false);
    writer.section(Kind::Vcpu, 0, 7, true, b"first").unwrap();
    writer.section(Kind::DiskMap, 0, 1, false, &[]).unwrap();
    writer.finish().unwrap()
}

/// Everything a reader can learn from an image, or what it refused.
pub fn reading(file: File) -> Result<String, coppice_image::ReadError> {
    use std::fmt::Write as _;
    use std::os::unix::fs::FileExt as _;
    let image = Image::open(file)?;
    image.verify()?;
    let mut text = format!("{:?}", image.info());
    for kind in [Kind::Meta, Kind::Machine, Kind::Vcpu, Kind::Irqchip, Kind::Clock, Kind::Device]
        .into_iter()
        .chain([Kind::DiskMap])
    {
        for instance in image.instances(kind) {
            let section = image.section(kind, instance)?.unwrap();
            writeln!(text, "{kind:?} {instance} {section:?}").unwrap();
        }
    }
    for extent in image.page_index()?.extents() {
        writeln!(text, "{extent:?}").unwrap();
        if let Some(place) = extent.data {
            let mut data = vec![0; usize::try_from(extent.count * PAGE).unwrap()];
            image.file().read_exact_at(&mut data, place * PAGE).unwrap();
            writeln!(text, "{data:?}").unwrap();
        }
    }
    Ok(text)
}
