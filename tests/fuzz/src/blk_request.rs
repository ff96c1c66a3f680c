//! Chains of block requests, served by a raw disk and by an overlay alike.
//!
//! Both start with the same content and memory, so after any requests their guests must have the
//! same memory: whatever differs is an error of the one or the other.

use std::sync::Arc;

use coppice_micro::tree::memory_file;
use coppice_vmm::devices::virtio::blk::{Backend, Blk, Overlay, Raw};
use coppice_vmm::devices::virtio::{Activation, VirtioDevice as _};
use coppice_vmm::memory::GuestRam;
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress};

use crate::guest::{self, AVAILABLE, MEMORY, RINGS, USED};
use crate::input::Input;

const SECTORS: u8 = 43;
const QUEUE_SIZE: u16 = 32;
/// Request headers, one each 16 bytes.
const HEADERS: u64 = 0x1_0000;

struct Guest {
    ram: Arc<GuestRam>,
    blk: Blk,
}

impl Guest {
    fn new(backend: Box<dyn Backend>) -> Self {
        let ram = guest::memory();
        let mut blk = Blk::new(backend, false, "fuzz").unwrap();
        let mut queue = Queue::new(QUEUE_SIZE).unwrap();
        queue.try_set_desc_table_address(GuestAddress(RINGS)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(RINGS + AVAILABLE)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(RINGS + USED)).unwrap();
        queue.set_ready(true);
        let features = blk.features();
        let interrupt = guest::interrupt();
        let activation =
            Activation { ram: Arc::clone(&ram), queues: vec![queue], interrupt, features };
        blk.activate(activation).unwrap();
        Self { ram, blk }
    }
}

/// A well-formed request, cut as the bytes say; now and then a descriptor is spoilt.
fn request(input: &mut Input<'_>) -> (Vec<u8>, Vec<(u64, u32, u16, u16)>) {
    let kind = [0u32, 1, 4, 8, 11, 13, 99][usize::from(input.u8() % 7)];
    let mut header = kind.to_le_bytes().to_vec();
    header.extend([0; 4]);
    header.extend((u64::from(input.u8()) % 48).to_le_bytes());

    let count = u16::from(input.u8() % 8);
    let mut descriptors = vec![(HEADERS, 16, 1, 1)];
    for index in 0..count {
        let addr = HEADERS + 0x1000 + u64::from(input.u16()) % 0xF000;
        let len = match kind {
            11 | 13 => 16 * (u32::from(input.u8()) % 3),
            _ => 512 * (u32::from(input.u8()) % 12),
        };
        let len = if input.u8() < 16 { input.u32() } else { len };
        let write = if matches!(kind, 0 | 8) { 2 } else { 0 };
        descriptors.push((addr, len, 1 | write, index + 2));
    }
    descriptors.push((HEADERS + 16, 1, 2, 0));
    if input.u8() < 32 {
        let spoilt = usize::from(input.u8()) % descriptors.len();
        descriptors[spoilt] =
            (guest::address(input), input.u32(), input.u16() % 8, input.u16() % QUEUE_SIZE);
    }
    (header, descriptors)
}

/// Requests against two disks that must behave as one.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let raw = Box::new(Raw::new(guest::disk_image(SECTORS)).unwrap());
    let top = memory_file();
    let overlay = Box::new(Overlay::new(guest::disk_image(SECTORS), top).unwrap());
    let mut guests = [Guest::new(raw), Guest::new(overlay)];

    while !input.is_empty() {
        let (header, descriptors) = request(&mut input);
        // Ranges for discards and data for writes; anything will do.
        let fill_at = HEADERS + 0x1000 + u64::from(input.u16()) % 0xF000;
        let count = input.u8();
        let fill = input.bytes(count.into());
        for guest in &mut guests {
            guest.ram.write_slice(&header, GuestAddress(HEADERS)).unwrap();
            guest.ram.write_slice(fill, GuestAddress(fill_at)).unwrap();
            for (index, descriptor) in (0..).zip(&descriptors) {
                guest::describe(&guest.ram, RINGS, index, *descriptor);
            }
            guest::publish(&guest.ram, RINGS, QUEUE_SIZE, 0);
            guest.blk.queue_event(0);
        }
    }
    let memory = guests.map(|guest| {
        let mut bytes = vec![0; usize::try_from(MEMORY).unwrap()];
        guest.ram.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    });
    assert!(memory[0] == memory[1], "a raw disk and an overlay answered differently");
}
