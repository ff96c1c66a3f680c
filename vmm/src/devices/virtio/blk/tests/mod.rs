//! Tests of the block device, request by request, over real files.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vm_memory::bitmap::Bitmap as _;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes as _, GuestMemoryBackend as _, GuestMemoryRegion as _};
use vmm_sys_util::eventfd::EventFd;

use super::super::testing::{Driver, MEMORY, Piece, SEAM, interrupt, memory};
use super::super::{Interrupt, VirtioDevice as _};
use super::*;

mod hostile;
mod layers;
mod model;
mod state;

const ALL: u64 = EVENT_IDX | F_FLUSH | F_DISCARD | F_WRITE_ZEROES;
/// Requests start close enough before the seam of the regions for data to cross it.
const REQUEST: u64 = SEAM - 0x1000;
const STATUS_UNSET: u8 = 0xEE;

/// A guest with one disk.
struct Guest {
    ram: Arc<GuestRam>,
    driver: Driver,
    blk: Blk,
    interrupt: Interrupt,
    line: Arc<EventFd>,
}

/// What a request came back with.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: u32,
    data: Vec<u8>,
    written: u32,
}

impl Guest {
    fn new(backend: Box<dyn Backend>, read_only: bool, features: u64) -> Self {
        let ram = memory();
        let driver = Driver::new(&ram, 0x1000, QUEUE_SIZE);
        let mut blk = Blk::new(backend, read_only, "disk-1").unwrap();
        let (interrupt, line) = interrupt();
        blk.activate(Driver::activation(&[&driver], &interrupt, features)).unwrap();
        Self { ram, driver, blk, interrupt, line }
    }

    fn raw(file: &File) -> Self {
        Self::new(Box::new(Raw::new(file.try_clone().unwrap()).unwrap()), false, ALL)
    }

    /// Sends header and `sent`, asks for `wanted` bytes and the status, all cut into descriptors
    /// of the lengths in `cuts`, over and over.
    fn request(
        &mut self,
        kind: u32,
        sector: u64,
        sent: &[u8],
        wanted: usize,
        cuts: &[u32],
    ) -> Answer {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sector.to_le_bytes());
        bytes.extend(sent);
        let answer_at = REQUEST + u64::try_from(bytes.len()).unwrap();
        self.ram.write_slice(&bytes, GuestAddress(REQUEST)).unwrap();
        self.ram.write_slice(&vec![STATUS_UNSET; wanted + 1], GuestAddress(answer_at)).unwrap();

        let mut pieces = cut(REQUEST, bytes.len(), false, cuts);
        pieces.extend(cut(answer_at, wanted + 1, true, cuts));
        self.driver.offer(&pieces);
        self.blk.queue_event(0);

        let (head, written) = self.driver.completed().unwrap();
        assert_eq!(head, 0);
        let mut data = vec![0; wanted + 1];
        self.ram.read_slice(&mut data, GuestAddress(answer_at)).unwrap();
        let status = data.pop().unwrap().into();
        Answer { status, data, written }
    }

    fn simple(&mut self, kind: u32, sector: u64, sent: &[u8], wanted: usize) -> Answer {
        self.request(kind, sector, sent, wanted, &[u32::MAX])
    }

    fn status(&mut self, kind: u32, sector: u64, sent: &[u8], wanted: usize) -> u32 {
        self.simple(kind, sector, sent, wanted).status
    }
}

fn cut(mut addr: u64, mut left: usize, writable: bool, cuts: &[u32]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for &length in cuts.iter().cycle() {
        let now = u32::try_from(left).unwrap().min(length);
        pieces.push((addr, now, writable));
        addr += u64::from(now);
        left -= usize::try_from(now).unwrap();
        if left == 0 {
            break;
        }
    }
    pieces
}

/// A file of `len` bytes that differ from place to place.
fn image(len: usize) -> (File, Vec<u8>) {
    let content: Vec<u8> = (0..len).map(|i| u8::try_from(i / 7 % 251).unwrap()).collect();
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&content, 0).unwrap();
    (file, content)
}

fn range_bytes(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn reads_what_the_file_has() {
    let (file, content) = image(64 * 512);
    let answer = Guest::raw(&file).simple(spec::VIRTIO_BLK_T_IN, 3, &[], 20 * 512);
    assert_eq!(
        answer,
        Answer { status: 0, data: content[3 * 512..23 * 512].to_vec(), written: 20 * 512 + 1 }
    );
}

#[test]
fn writes_reach_the_file() {
    let (file, mut content) = image(64 * 512);
    let answer = Guest::raw(&file).simple(spec::VIRTIO_BLK_T_OUT, 5, &[0xAB; 1024], 0);
    assert_eq!(answer, Answer { status: 0, data: vec![], written: 1 });
    content[5 * 512..7 * 512].fill(0xAB);
    let mut now = vec![0; content.len()];
    file.read_exact_at(&mut now, 0).unwrap();
    assert!(now == content);
}

#[test]
fn get_id_gives_the_serial_number() {
    let (file, _) = image(512);
    let answer = Guest::raw(&file).simple(spec::VIRTIO_BLK_T_GET_ID, 0, &[], 20);
    assert_eq!(answer.data, b"disk-1\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!((answer.status, answer.written), (0, 21));
}

#[test]
fn a_serial_number_must_fit() {
    for bad in ["a".repeat(21), "h\u{e9}".to_owned()] {
        let backend = Box::new(Raw::new(image(512).0).unwrap());
        assert!(matches!(Blk::new(backend, false, &bad), Err(DiskError::Serial(_))));
    }
}

#[test]
fn requests_past_the_end_fail() {
    let (file, _) = image(8 * 512);
    let mut guest = Guest::raw(&file);
    for sector in [8, 7, u64::MAX, u64::MAX / 512] {
        assert_eq!(
            guest.status(spec::VIRTIO_BLK_T_IN, sector, &[], 1024),
            spec::VIRTIO_BLK_S_IOERR
        );
        assert_eq!(
            guest.status(spec::VIRTIO_BLK_T_OUT, sector, &[0; 1024], 0),
            spec::VIRTIO_BLK_S_IOERR
        );
        let range = range_bytes(sector, 2, 0);
        assert_eq!(
            guest.status(spec::VIRTIO_BLK_T_DISCARD, 0, &range, 0),
            spec::VIRTIO_BLK_S_IOERR
        );
    }
    assert_eq!(file.metadata().unwrap().len(), 8 * 512);
}

#[test]
fn lengths_that_are_not_whole_sectors_fail() {
    let (file, _) = image(8 * 512);
    let mut guest = Guest::raw(&file);
    assert_eq!(guest.status(spec::VIRTIO_BLK_T_IN, 0, &[], 511), spec::VIRTIO_BLK_S_IOERR);
    assert_eq!(guest.status(spec::VIRTIO_BLK_T_OUT, 0, &[0; 513], 0), spec::VIRTIO_BLK_S_IOERR);
}

#[test]
fn data_in_the_wrong_direction_fails() {
    let (file, _) = image(8 * 512);
    let mut guest = Guest::raw(&file);
    for kind in [spec::VIRTIO_BLK_T_IN, spec::VIRTIO_BLK_T_OUT, spec::VIRTIO_BLK_T_FLUSH] {
        assert_eq!(guest.status(kind, 0, &[0; 512], 512), spec::VIRTIO_BLK_S_IOERR);
    }
}

#[test]
fn unknown_requests_are_not_supported() {
    let (file, _) = image(512);
    assert_eq!(Guest::raw(&file).status(99, 0, &[], 512), spec::VIRTIO_BLK_S_UNSUPP);
}

#[test]
fn a_read_only_disk_is_not_written() {
    let (file, content) = image(8 * 512);
    let backend = Raw::new(file.try_clone().unwrap()).unwrap();
    let mut guest = Guest::new(Box::new(backend), true, EVENT_IDX | F_RO);
    assert_eq!(guest.blk.features() & (F_RO | F_FLUSH | F_DISCARD | F_WRITE_ZEROES), F_RO);
    assert_eq!(guest.status(spec::VIRTIO_BLK_T_OUT, 0, &[1; 512], 0), spec::VIRTIO_BLK_S_IOERR);
    let range = range_bytes(0, 1, 0);
    assert_eq!(guest.status(spec::VIRTIO_BLK_T_DISCARD, 0, &range, 0), spec::VIRTIO_BLK_S_UNSUPP);
    assert_eq!(
        guest.status(spec::VIRTIO_BLK_T_WRITE_ZEROES, 0, &range, 0),
        spec::VIRTIO_BLK_S_UNSUPP
    );
    assert_eq!(guest.simple(spec::VIRTIO_BLK_T_IN, 0, &[], 4096).data, content);
}

#[test]
fn discard_flags_and_limits_are_checked() {
    let (file, _) = image(8 * 512);
    let mut guest = Guest::raw(&file);
    let cases = [
        (range_bytes(0, 1, 1), spec::VIRTIO_BLK_S_UNSUPP),
        (range_bytes(0, DISCARD_SECTORS_MAX + 1, 0), spec::VIRTIO_BLK_S_IOERR),
        (range_bytes(0, 1, 0).repeat(33), spec::VIRTIO_BLK_S_IOERR),
        (vec![0; 15], spec::VIRTIO_BLK_S_IOERR),
        (vec![], spec::VIRTIO_BLK_S_IOERR),
        (range_bytes(0, 1, 0).repeat(32), spec::VIRTIO_BLK_S_OK),
    ];
    for (sent, status) in cases {
        assert_eq!(guest.status(spec::VIRTIO_BLK_T_DISCARD, 0, &sent, 0), status, "{sent:?}");
    }
    let reserved = range_bytes(0, 1, 2);
    assert_eq!(
        guest.status(spec::VIRTIO_BLK_T_WRITE_ZEROES, 0, &reserved, 0),
        spec::VIRTIO_BLK_S_UNSUPP
    );
}

#[test]
fn a_file_that_shrank_gives_an_io_error() {
    let (file, _) = image(64 * 512);
    let mut guest = Guest::raw(&file);
    file.set_len(512).unwrap();
    let answer = guest.simple(spec::VIRTIO_BLK_T_IN, 8, &[], 512);
    assert_eq!((answer.status, answer.written), (spec::VIRTIO_BLK_S_IOERR, 0));
}

#[test]
fn a_file_that_cannot_be_written_gives_an_io_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::write(&path, [0; 4096]).unwrap();
    let mut guest = Guest::raw(&File::open(&path).unwrap());
    assert_eq!(guest.status(spec::VIRTIO_BLK_T_OUT, 0, &[0; 512], 0), spec::VIRTIO_BLK_S_IOERR);
}

#[test]
fn an_empty_file_is_not_a_disk() {
    assert!(matches!(Raw::new(tempfile::tempfile().unwrap()), Err(DiskError::TooSmall)));
    assert!(matches!(Raw::new(image(511).0), Err(DiskError::TooSmall)));
}

#[test]
fn an_overlay_must_be_empty() {
    let result = Overlay::new(image(4096).0, image(1).0);
    assert!(matches!(result, Err(DiskError::OverlayInUse)));
}

/// A raw disk that counts its flushes.
struct Counting(Raw, Arc<AtomicUsize>);

impl Backend for Counting {
    fn capacity(&self) -> u64 {
        self.0.capacity()
    }
    fn read(&mut self, offset: u64, buffers: Buffers<'_>) -> io::Result<()> {
        self.0.read(offset, buffers)
    }
    fn write(&mut self, offset: u64, buffers: Buffers<'_>) -> io::Result<()> {
        self.0.write(offset, buffers)
    }
    fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.0.write_zeroes(offset, len, unmap)
    }
    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.0.discard(offset, len)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.flush()
    }
}

fn counting(features: u64) -> (Guest, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let backend = Counting(Raw::new(image(4096).0).unwrap(), Arc::clone(&count));
    (Guest::new(Box::new(backend), false, features), count)
}

#[test]
fn a_write_waits_for_its_flush_when_the_driver_can_flush() {
    let (mut guest, flushes) = counting(ALL);
    guest.status(spec::VIRTIO_BLK_T_OUT, 0, &[0; 512], 0);
    assert_eq!(flushes.load(Ordering::Relaxed), 0);
    assert_eq!(guest.status(spec::VIRTIO_BLK_T_FLUSH, 0, &[], 0), spec::VIRTIO_BLK_S_OK);
    assert_eq!(flushes.load(Ordering::Relaxed), 1);
}

#[test]
fn every_write_is_flushed_when_the_driver_cannot() {
    let (mut guest, flushes) = counting(ALL & !F_FLUSH);
    guest.status(spec::VIRTIO_BLK_T_OUT, 0, &[0; 512], 0);
    assert_eq!(flushes.load(Ordering::Relaxed), 1);
}

fn is_dirty(ram: &GuestRam, addr: u64) -> bool {
    let (region, offset) = ram.to_region_addr(GuestAddress(addr)).unwrap();
    region.bitmap().dirty_at(usize::try_from(offset.0).unwrap())
}

#[test]
fn pages_that_a_read_filled_are_dirty() {
    let (file, _) = image(64 * 512);
    let mut guest = Guest::raw(&file);
    guest.ram.write_slice(&[0; 16], GuestAddress(0x10_0000)).unwrap();
    guest.ram.iter().for_each(|region| MmapRegion::bitmap(region).reset());
    let data = (SEAM - 0x2000, 0x4000, true);
    guest.driver.offer(&[(0x10_0000, 16, false), data, (0x18_0000, 1, true)]);
    guest.blk.queue_event(0);
    let pages = [SEAM - 0x2000, SEAM - 0x1000, SEAM, SEAM + 0x1000, 0x18_0000];
    assert!(pages.iter().all(|&page| is_dirty(&guest.ram, page)));
    assert!(!is_dirty(&guest.ram, SEAM + 0x2000));
    assert!(!is_dirty(&guest.ram, 0x10_0000));
}

#[test]
fn an_interrupt_comes_when_the_driver_wants_it() {
    let (file, _) = image(4096);
    let mut guest = Guest::raw(&file);
    guest.driver.set_used_event(1);
    guest.status(spec::VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    assert!(guest.line.read().is_err());
    guest.status(spec::VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    assert!(guest.line.read().is_ok());
}

#[test]
fn config_space_tells_size_and_limits() {
    let (file, _) = image(100 * 512 + 3);
    let guest = Guest::raw(&file);
    let read = |offset, len| {
        let mut data = vec![0xEE; len];
        guest.blk.read_config(offset, &mut data);
        data
    };
    assert_eq!(read(0, 8), 100u64.to_le_bytes());
    assert_eq!(read(12, 4), 254u32.to_le_bytes());
    assert_eq!(read(20, 4), 512u32.to_le_bytes());
    assert_eq!(read(24, 1), [3]);
    assert_eq!(read(56, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(read(u64::MAX, 4), [0; 4]);
}

#[test]
fn nothing_happens_before_activation_and_after_reset() {
    let (file, _) = image(4096);
    let mut guest = Guest::raw(&file);
    guest.blk.reset();
    guest.driver.offer(&[(0x10_0000, 16, false), (0x10_1000, 1, true)]);
    guest.blk.queue_event(0);
    assert_eq!(guest.driver.completed(), None);
}
