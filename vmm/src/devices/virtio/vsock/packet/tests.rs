//! Headers against the layout of the virtio-vsock crate, and chains of every shape.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use virtio_vsock::packet::VsockPacket;
use vm_memory::bitmap::Bitmap as _;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::chain::ChainError;
use super::*;
use crate::memory::GuestRam;
use crate::sys::vsock::MAX_SLICES;

const BUFFERS: u64 = 0x10_0000;
const WRITE: u32 = VRING_DESC_F_WRITE;

/// RAM in two parts that touch, so that a buffer can lie in both.
fn ram() -> GuestRam {
    let second = GuestAddress(BUFFERS + 0x1_0000);
    GuestRam::from_ranges(&[(GuestAddress(0), 0x11_0000), (second, 0x10_0000)]).unwrap()
}

/// Descriptors for the buffers at `pieces`, each an address and a length.
fn descriptors(pieces: &[(u64, u32)], flags: u32) -> Vec<RawDescriptor> {
    let last = pieces.len() - 1;
    let describe = |(index, &(address, len)): (usize, &(u64, u32))| {
        let next = if index < last { VRING_DESC_F_NEXT } else { 0 };
        let flags = u16::try_from(flags | next).unwrap();
        let following = u16::try_from(index + 1).unwrap();
        RawDescriptor::from(Descriptor::new(address, len, flags, following))
    };
    pieces.iter().enumerate().map(describe).collect()
}

fn parse_tx<'a>(
    ram: &'a GuestRam,
    pieces: &[(u64, u32)],
    flags: u32,
) -> Result<TxPacket<'a>, ChainError> {
    let queue = MockSplitQueue::new(ram, 64);
    TxPacket::parse(ram, queue.build_desc_chain(&descriptors(pieces, flags)).unwrap())
}

fn parse_rx<'a>(
    ram: &'a GuestRam,
    pieces: &[(u64, u32)],
    flags: u32,
) -> Result<RxPacket<'a>, ChainError> {
    let queue = MockSplitQueue::new(ram, 64);
    RxPacket::parse(ram, queue.build_desc_chain(&descriptors(pieces, flags)).unwrap())
}

/// Cuts `len` bytes at `start` into pieces of these lengths, and one with the rest.
fn cut(start: u64, len: u32, lengths: &[u32]) -> Vec<(u64, u32)> {
    let (mut at, mut left, mut pieces) = (start, len, Vec::new());
    for &wanted in lengths {
        let piece = wanted.min(left);
        pieces.push((at, piece));
        at += u64::from(piece);
        left -= piece;
    }
    pieces.push((at, left));
    pieces
}

fn any_header() -> impl Strategy<Value = Header> {
    any::<[u8; HEADER_SIZE]>().prop_map(|bytes| Header::from_bytes(&bytes))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn headers_have_the_layout_of_the_virtio_vsock_crate(header in any_header()) {
        let header = Header { len: header.len % 1000, ..header };
        let ram = ram();
        ram.write_slice(&header.to_bytes(), GuestAddress(BUFFERS)).unwrap();
        let queue = MockSplitQueue::new(&ram, 16);
        let pieces = descriptors(&[(BUFFERS, 4096)], 0);
        let mut chain = queue.build_desc_chain(&pieces).unwrap();
        let theirs = VsockPacket::from_tx_virtq_chain(&ram, &mut chain, 4096).unwrap();
        prop_assert_eq!(header, Header {
            src_cid: theirs.src_cid(),
            dst_cid: theirs.dst_cid(),
            src_port: theirs.src_port(),
            dst_port: theirs.dst_port(),
            len: theirs.len(),
            kind: theirs.type_(),
            op: theirs.op(),
            flags: theirs.flags(),
            buf_alloc: theirs.buf_alloc(),
            fwd_cnt: theirs.fwd_cnt(),
        });
    }

    #[test]
    fn a_packet_is_the_same_however_its_buffers_are_cut(
        header in any_header(),
        payload in proptest::collection::vec(any::<u8>(), 0..9000),
        cuts in proptest::collection::vec(0_u32..3000, 0..20),
        // On both sides of the border between the parts of RAM.
        start in BUFFERS + 0xE000..BUFFERS + 0x1_1000,
    ) {
        let ram = ram();
        let len = u32::try_from(payload.len()).unwrap();
        let header = Header { len, ..header };
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(&payload);
        ram.write_slice(&bytes, GuestAddress(start)).unwrap();
        let pieces = cut(start, u32::try_from(bytes.len()).unwrap(), &cuts);
        let packet = parse_tx(&ram, &pieces, 0).unwrap();
        prop_assert_eq!(packet.header, header);
        prop_assert!(packet.is_complete());

        let mut copy = Vec::new();
        packet.copy_from(payload.len() / 3, |piece| copy.extend_from_slice(piece));
        prop_assert!(copy == payload[payload.len() / 3..]);

        let (ours, mut theirs) = UnixStream::pair().unwrap();
        if !payload.is_empty() {
            prop_assert_eq!(packet.send_to(ours.as_fd()).unwrap(), payload.len());
        }
        drop(ours);
        let mut sent = Vec::new();
        theirs.read_to_end(&mut sent).unwrap();
        prop_assert!(sent == payload);
    }

    #[test]
    fn received_bytes_land_behind_the_header_and_are_marked_dirty(
        payload in proptest::collection::vec(any::<u8>(), 1..5000),
        cuts in proptest::collection::vec(0_u32..3000, 0..20),
        start in BUFFERS + 0xE000..BUFFERS + 0x1_1000,
    ) {
        let ram = ram();
        let room = u32::try_from(HEADER_SIZE).unwrap() + 4000;
        let packet = parse_rx(&ram, &cut(start, room, &cuts), WRITE).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&payload).unwrap();
        let count = packet.receive_from(ours.as_fd(), 3500).unwrap();
        prop_assert_eq!(count, payload.len().min(3500));
        let header = Header { len: u32::try_from(count).unwrap(), op: 5, ..Header::default() };
        let total = packet.finish(header);

        let mut bytes = vec![0; usize::try_from(total).unwrap()];
        ram.read_slice(&mut bytes, GuestAddress(start)).unwrap();
        prop_assert_eq!(&bytes[..HEADER_SIZE], &header.to_bytes()[..]);
        prop_assert!(bytes[HEADER_SIZE..] == payload[..count]);
        let end = start + u64::from(total);
        for address in start..end {
            let (region, offset) = ram.to_region_addr(GuestAddress(address)).unwrap();
            let offset = usize::try_from(offset.0).unwrap();
            prop_assert!(region.bitmap().dirty_at(offset), "{:#x} is not marked", address);
        }
        let (region, offset) = ram.to_region_addr(GuestAddress(end + 4096)).unwrap();
        let offset = usize::try_from(offset.0).unwrap();
        prop_assert!(!region.bitmap().dirty_at(offset), "too much is marked");
    }
}

#[test]
fn buffers_outside_of_memory_are_refused() {
    let ram = ram();
    for piece in [(0x4000_0000, 4096), (u64::MAX - 8, 4096), (0x20_0000, 0x10_0000)] {
        assert!(matches!(parse_tx(&ram, &[piece], 0), Err(ChainError::Memory(_))));
        assert!(matches!(parse_rx(&ram, &[piece], WRITE), Err(ChainError::Memory(_))));
    }
}

#[test]
fn buffers_of_the_wrong_direction_are_refused() {
    let ram = ram();
    let piece = [(BUFFERS, 4096)];
    assert!(matches!(parse_tx(&ram, &piece, WRITE), Err(ChainError::Direction)));
    assert!(matches!(parse_rx(&ram, &piece, 0), Err(ChainError::Direction)));
}

#[test]
fn chains_without_room_for_a_packet_are_refused() {
    let ram = ram();
    assert!(matches!(parse_tx(&ram, &[(BUFFERS, 43)], 0), Err(ChainError::TooShort(43))));
    assert!(matches!(parse_rx(&ram, &[(BUFFERS, 44)], WRITE), Err(ChainError::TooShort(44))));
}

#[test]
fn chains_of_more_buffers_than_a_packet_needs_are_refused() {
    let ram = ram();
    let pieces = vec![(BUFFERS, 64); MAX_SLICES + 1];
    assert!(matches!(parse_tx(&ram, &pieces, 0), Err(ChainError::TooMany)));
    assert!(parse_tx(&ram, &pieces[1..], 0).is_ok());
}

#[test]
fn a_header_that_promises_more_than_there_is_makes_no_packet_complete() {
    let ram = ram();
    let header = Header { len: u32::MAX, ..Header::default() };
    ram.write_slice(&header.to_bytes(), GuestAddress(BUFFERS)).unwrap();
    let packet = parse_tx(&ram, &[(BUFFERS, 100)], 0).unwrap();
    assert!(!packet.is_complete());
}
