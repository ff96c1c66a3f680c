//! A thread that writes records to a file, half of them past the page cache, and reads them back
//! from the disk; and the mark, which is on disk as well.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;

use crate::block::{Places, Stamp, WORDS};
use crate::state::Shared;

/// Records of one file: 256 KiB.
const RECORDS: usize = 32;
const RECORD: usize = WORDS * 8;
/// What direct transfers want their buffers aligned to.
const ALIGN: usize = 4096;

/// A buffer for one record, aligned as direct transfers want it.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new() -> Self {
        let bytes = vec![0; RECORD + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN);
        Self { bytes, start }
    }

    fn record(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..self.start + RECORD).unwrap_or_default()
    }

    fn fill(&mut self, stamp: Stamp) {
        let mut words = [0; WORDS];
        stamp.fill(&mut words);
        for (bytes, word) in self.record().chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    fn check(&mut self, stamp: Stamp) -> Result<(), String> {
        let words = self
            .record()
            .chunks_exact(8)
            .map(|bytes| bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)));
        stamp.check(words)
    }
}

/// The file of one thread, open with and without the page cache.
struct Records<'a> {
    shared: &'a Shared,
    name: &'a str,
    cached: File,
    direct: File,
    stamps: Vec<Stamp>,
    buffer: Buffer,
}

fn direct(path: &Path) -> io::Result<File> {
    let flags = i32::try_from(OFlags::DIRECT.bits()).map_err(io::Error::other)?;
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

fn offset(at: usize) -> io::Result<u64> {
    u64::try_from(at * RECORD).map_err(io::Error::other)
}

impl Records<'_> {
    fn write(&mut self, at: usize, stamp: Stamp) -> io::Result<()> {
        self.buffer.fill(stamp);
        let file = if stamp.number.is_multiple_of(2) { &self.cached } else { &self.direct };
        file.write_all_at(self.buffer.record(), offset(at)?)?;
        file.sync_data()?;
        if let Some(kept) = self.stamps.get_mut(at) {
            *kept = stamp;
        }
        Ok(())
    }

    fn check(&mut self, at: usize) -> io::Result<()> {
        self.direct.read_exact_at(self.buffer.record(), offset(at)?)?;
        let stamp = self.stamps.get(at).copied().unwrap_or_default();
        if let Err(what) = self.buffer.check(stamp) {
            self.shared.fail(self.name, &format!("record {at}: {what}"));
        }
        Ok(())
    }
}

/// Runs until something fails.
pub(crate) fn run(shared: &Shared, name: &str, dir: &Path, pace: Duration) -> io::Result<()> {
    let path = dir.join(name);
    let cached =
        OpenOptions::new().create(true).truncate(true).read(true).write(true).open(&path)?;
    let direct = direct(&path)?;
    let (stamps, buffer) = (vec![Stamp::default(); RECORDS], Buffer::new());
    let mut records = Records { shared, name, cached, direct, stamps, buffer };
    for at in 0..RECORDS {
        records.write(at, Stamp::draw(0)?)?;
    }
    let mut places = Places::new(u64::from(std::process::id()) << 16);
    for number in 1.. {
        records.check(places.below(RECORDS))?;
        records.write(places.below(RECORDS), Stamp::draw(number)?)?;
        if let Some(round) = shared.step(name, 0) {
            for at in 0..RECORDS {
                records.check(at)?;
            }
            shared.checked(name, round);
        }
        std::thread::sleep(pace);
    }
    Ok(())
}

/// Puts a mark on disk.
pub(crate) fn write_mark(dir: &Path, mark: u64) -> io::Result<()> {
    let path = dir.join("mark");
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    let mut record = vec![0; ALIGN];
    record.splice(..8, mark.to_le_bytes());
    file.write_all_at(&record, 0)?;
    file.sync_all()
}

/// The mark as the disk has it.
pub(crate) fn read_mark(dir: &Path) -> io::Result<u64> {
    let file = direct(&dir.join("mark"))?;
    let mut buffer = Buffer::new();
    let page = buffer.record().get_mut(..ALIGN).unwrap_or_default();
    file.read_exact_at(page, 0)?;
    Ok(page.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)))
}
