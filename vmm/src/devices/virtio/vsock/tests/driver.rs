//! A guest's driver over real queues in memory: as simple as a driver can be, and strict about
//! what the device sends.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::devices::OwnState;
use crate::devices::virtio::vsock::packet::{HEADER_SIZE, HOST_CID, Header, Op, TYPE_STREAM};
use crate::devices::virtio::vsock::{LIMITS, Limits, Vsock, VsockConfig};
use crate::devices::virtio::{Activation, Interrupt, QueuePosition, VirtioDevice};
use crate::memory::GuestRam;

pub(super) const CID: u32 = 42;
/// Buffers in each queue, which are all it has room for.
pub(super) const QUEUE_SIZE: u16 = 64;
/// Bytes per receive buffer, header included, as Linux has it.
pub(super) const RX_BUFFER: u32 = 3776;
/// Event buffers offered.
pub(super) const EVENT_BUFFERS: u16 = 4;
const TX_BUFFER: u32 = 128 * 1024;
const RAM_SIZE: usize = 16 << 20;
/// Longer than anything takes here, on a machine that is busy with something else.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

const RX: u16 = 0;
const TX: u16 = 1;
const EVENT: u16 = 2;

/// One queue from the driver's side. Descriptor `n` always describes part `n` of its buffers.
pub(super) struct Ring {
    base: u64,
    buffers: u64,
    buffer_size: u32,
    available: u16,
    used: u16,
}

impl Ring {
    fn new(index: u16, buffer_size: u32) -> Self {
        let base = 0x1000 + u64::from(index) * 0x4000;
        Self {
            base,
            buffers: 0x10_0000 + u64::from(index) * 0x20_0000,
            buffer_size,
            available: 0,
            used: 0,
        }
    }

    pub(super) fn available_ring(&self) -> u64 {
        self.base + 0x1000
    }

    pub(super) fn used_ring(&self) -> u64 {
        self.base + 0x2000
    }

    /// The available index.
    pub(super) fn available(&self) -> u16 {
        self.available
    }

    fn queue(&self) -> Queue {
        let low = |address: u64| u32::try_from(address).unwrap();
        let mut queue = Queue::new(QUEUE_SIZE).unwrap();
        queue.set_size(QUEUE_SIZE);
        queue.set_desc_table_address(Some(low(self.base)), Some(0));
        queue.set_avail_ring_address(Some(low(self.available_ring())), Some(0));
        queue.set_used_ring_address(Some(low(self.used_ring())), Some(0));
        queue.set_ready(true);
        queue
    }

    pub(super) fn buffer(&self, index: u16) -> u64 {
        let slots = if self.buffer_size > 0x8000 { 8 } else { QUEUE_SIZE };
        self.buffers + u64::from(index % slots) * u64::from(self.buffer_size)
    }

    pub(super) fn descriptor(&self, ram: &GuestRam, index: u16, fields: (u64, u32, u16, u16)) {
        let at = self.base + u64::from(index) * 16;
        ram.write_obj(fields.0.to_le(), GuestAddress(at)).unwrap();
        ram.write_obj(fields.1.to_le(), GuestAddress(at + 8)).unwrap();
        ram.write_obj(fields.2.to_le(), GuestAddress(at + 12)).unwrap();
        ram.write_obj(fields.3.to_le(), GuestAddress(at + 14)).unwrap();
    }

    /// Makes the chain that starts with descriptor `head` available.
    pub(super) fn offer(&mut self, ram: &GuestRam, head: u16) {
        let slot = self.available_ring() + 4 + u64::from(self.available % QUEUE_SIZE) * 2;
        ram.write_obj(head.to_le(), GuestAddress(slot)).unwrap();
        self.available = self.available.wrapping_add(1);
        ram.store(
            self.available.to_le(),
            GuestAddress(self.available_ring() + 2),
            Ordering::Release,
        )
        .unwrap();
    }

    /// The next chain the device is done with: its head and the length it wrote.
    fn take_used(&mut self, ram: &GuestRam) -> Option<(u16, u32)> {
        let index: u16 = ram.load(GuestAddress(self.used_ring() + 2), Ordering::Acquire).unwrap();
        if u16::from_le(index) == self.used {
            return None;
        }
        let slot = self.used_ring() + 4 + u64::from(self.used % QUEUE_SIZE) * 8;
        self.used = self.used.wrapping_add(1);
        let head: u32 = ram.read_obj(GuestAddress(slot)).unwrap();
        let len: u32 = ram.read_obj(GuestAddress(slot + 4)).unwrap();
        Some((u16::try_from(head).unwrap(), len))
    }
}

/// A packet as the driver sees it.
pub(super) type Packet = (Header, Vec<u8>);

/// Device, driver and the directory of sockets.
pub(super) struct Guest {
    pub(super) ram: Arc<GuestRam>,
    pub(super) device: Vsock,
    pub(super) rx: Ring,
    pub(super) tx: Ring,
    pub(super) event: Ring,
    pub(super) directory: TempDir,
    pub(super) line: Arc<EventFd>,
    pub(super) host: Epoll,
    next_tx: u16,
}

impl Guest {
    /// A machine whose driver is ready and has offered all its receive buffers.
    pub(super) fn new() -> Self {
        let mut guest = Self::without_buffers();
        guest.offer_buffers();
        guest
    }

    /// A machine whose driver is ready but has offered no buffers.
    pub(super) fn without_buffers() -> Self {
        let mut guest = Self::without_driver();
        guest.activate();
        guest
    }

    /// A machine in which no driver has been loaded.
    pub(super) fn without_driver() -> Self {
        Self::with_limits(LIMITS)
    }

    /// The same with other limits.
    pub(super) fn with_limits(limits: Limits) -> Self {
        let directory = TempDir::new().unwrap();
        let listener = UnixListener::bind(directory.path().join("vsock")).unwrap();
        let config = VsockConfig {
            cid: CID,
            listener,
            directory: OwnedFd::from(std::fs::File::open(directory.path()).unwrap()),
            name: "vsock".to_owned(),
        };
        let device = Vsock::with_limits(config, limits).unwrap();
        let host = Epoll::new().unwrap();
        let fd = device.host_fd().unwrap();
        host.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, 0)).unwrap();
        let ram = GuestRam::from_ranges(&[(GuestAddress(0), RAM_SIZE)]).unwrap();
        Self {
            ram: Arc::new(ram),
            device,
            rx: Ring::new(RX, RX_BUFFER),
            tx: Ring::new(TX, TX_BUFFER),
            event: Ring::new(EVENT, 16),
            directory,
            line: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
            host,
            next_tx: 0,
        }
    }

    pub(super) fn offer_buffers(&mut self) {
        for index in 0..QUEUE_SIZE {
            self.offer_rx(index);
        }
        for index in 0..EVENT_BUFFERS {
            self.offer_event(index);
        }
        self.device.queue_event(usize::from(RX));
    }

    /// Starts with empty rings again, as a driver that is loaded anew.
    pub(super) fn clear_rings(&mut self) {
        let zeroes = vec![0; 0xC000];
        self.ram.write_slice(&zeroes, GuestAddress(0x1000)).unwrap();
        for ring in [&mut self.rx, &mut self.tx, &mut self.event] {
            ring.available = 0;
            ring.used = 0;
        }
        self.next_tx = 0;
    }

    pub(super) fn activate(&mut self) {
        self.device
            .activate(Activation {
                ram: Arc::clone(&self.ram),
                queues: vec![self.rx.queue(), self.tx.queue(), self.event.queue()],
                interrupt: Interrupt::new(Arc::clone(&self.line)),
                features: self.device.features(),
            })
            .unwrap();
    }

    /// What a checkpoint keeps of the device.
    pub(super) fn save(&self) -> (OwnState, Vec<QueuePosition>) {
        (self.device.save().unwrap(), self.device.queue_positions().unwrap())
    }

    /// Brings the device to a state saved before; the rings are as they are. The driver's first
    /// kick is up to the caller.
    pub(super) fn restore(&mut self, saved: &(OwnState, Vec<QueuePosition>)) {
        let (state, positions) = saved;
        let mut queues = vec![self.rx.queue(), self.tx.queue(), self.event.queue()];
        for (queue, position) in queues.iter_mut().zip(positions) {
            queue.set_next_avail(position.next_avail);
            queue.set_next_used(position.next_used);
        }
        let activation = Activation {
            ram: Arc::clone(&self.ram),
            queues,
            interrupt: Interrupt::new(Arc::clone(&self.line)),
            features: self.device.features(),
        };
        self.device.reset();
        self.device.restore(state, Some(activation)).unwrap();
    }

    pub(super) fn offer_rx(&mut self, index: u16) {
        let write = u16::try_from(VRING_DESC_F_WRITE).unwrap();
        self.rx.descriptor(&self.ram, index, (self.rx.buffer(index), RX_BUFFER, write, 0));
        self.rx.offer(&self.ram, index);
    }

    pub(super) fn offer_event(&mut self, index: u16) {
        let write = u16::try_from(VRING_DESC_F_WRITE).unwrap();
        self.event.descriptor(&self.ram, index, (self.event.buffer(index), 4, write, 0));
        self.event.offer(&self.ram, index);
    }

    /// Sends a packet as one or two descriptors, and sees the device take it.
    pub(super) fn send(&mut self, header: Header, payload: &[u8]) {
        assert!(self.send_unchecked(header, payload), "the device leaves a packet in its queue");
    }

    /// Sends a packet; says whether the device took it.
    pub(super) fn send_unchecked(&mut self, header: Header, payload: &[u8]) -> bool {
        let head = self.next_tx % QUEUE_SIZE;
        let split = payload.len() > 4096;
        self.next_tx = self.next_tx.wrapping_add(if split { 2 } else { 1 }) & !u16::from(split);
        let head = if split { head & !1 } else { head };
        let at = self.tx.buffer(head);
        let header_len = u32::try_from(HEADER_SIZE).unwrap();
        let len = u32::try_from(payload.len()).unwrap();
        self.ram.write_slice(&header.to_bytes(), GuestAddress(at)).unwrap();
        self.ram.write_slice(payload, GuestAddress(at + u64::from(header_len))).unwrap();
        if split {
            let next = u16::try_from(VRING_DESC_F_NEXT).unwrap();
            self.tx.descriptor(&self.ram, head, (at, header_len, next, head + 1));
            let data = (at + u64::from(header_len), len, 0, 0);
            self.tx.descriptor(&self.ram, head + 1, data);
        } else {
            self.tx.descriptor(&self.ram, head, (at, header_len + len, 0, 0));
        }
        self.tx.offer(&self.ram, head);
        self.device.queue_event(usize::from(TX));
        let mut taken = false;
        while let Some((used, written)) = self.tx.take_used(&self.ram) {
            assert_eq!(written, 0, "the device wrote to a buffer it may only read");
            taken |= used == head;
        }
        taken
    }

    /// Takes the next packet from the device and gives the buffer back to it.
    pub(super) fn receive(&mut self) -> Option<Packet> {
        let packet = self.receive_keeping_buffer()?;
        self.offer_rx(packet.0);
        self.device.queue_event(usize::from(RX));
        Some(packet.1)
    }

    pub(super) fn receive_keeping_buffer(&mut self) -> Option<(u16, Packet)> {
        self.receive_for(CID)
    }

    /// The next packet, which has to be for `cid`, and its buffer, which is kept.
    pub(super) fn receive_for(&mut self, cid: u32) -> Option<(u16, Packet)> {
        let (head, written) = self.rx.take_used(&self.ram)?;
        let mut bytes = vec![0; usize::try_from(written).unwrap()];
        self.ram.read_slice(&mut bytes, GuestAddress(self.rx.buffer(head))).unwrap();
        let header = Header::from_bytes(bytes.first_chunk().expect("a packet has a header"));
        assert_eq!(usize::try_from(header.len).unwrap(), bytes.len() - HEADER_SIZE);
        assert_eq!(header.dst_cid, u64::from(cid));
        Some((head, (header, bytes.split_off(HEADER_SIZE))))
    }

    /// The next event, its buffer kept.
    pub(super) fn take_event(&mut self) -> Option<(u16, u32)> {
        let (head, written) = self.event.take_used(&self.ram)?;
        assert_eq!(written, 4);
        Some((head, self.ram.read_obj(GuestAddress(self.event.buffer(head))).unwrap()))
    }

    /// Takes the next packet, doing the host's work until it comes.
    pub(super) fn expect_packet(&mut self) -> Packet {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(packet) = self.receive() {
                return packet;
            }
            self.host_work(deadline);
        }
    }

    /// The next packet's header, which must have operation `op`.
    pub(super) fn expect(&mut self, op: Op) -> Header {
        let (header, _) = self.expect_packet();
        assert_eq!(Op::from_wire(header.op), Some(op), "{header:?}");
        header
    }

    /// Takes `count` bytes of payload; other packets are an error.
    pub(super) fn expect_data(&mut self, count: usize) -> Vec<u8> {
        let mut data = Vec::new();
        while data.len() < count {
            let (header, payload) = self.expect_packet();
            assert_eq!(Op::from_wire(header.op), Some(Op::Data), "{header:?}");
            data.extend(payload);
        }
        data
    }

    /// Waits until the host side has work, and has it done.
    pub(super) fn host_work(&mut self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now()).as_millis();
        let mut events = [EpollEvent::default()];
        let timeout = i32::try_from(left).unwrap();
        assert_eq!(self.host.wait(timeout, &mut events).unwrap(), 1, "nothing happens any more");
        self.device.host_event();
    }

    /// Does all the work that the host side has now.
    pub(super) fn settle(&mut self) {
        let mut events = [EpollEvent::default()];
        while self.host.wait(0, &mut events).unwrap() > 0 {
            self.device.host_event();
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A host client that has sent the command for `port`; the device has handled it.
    pub(super) fn client(&mut self, port: u32) -> UnixStream {
        use std::io::Write as _;
        let mut client = UnixStream::connect(self.path("vsock")).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client.set_write_timeout(Some(PATIENCE)).unwrap();
        client.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        self.settle();
        client
    }
}

/// A packet from guest port `guest` to host port `host`, with room for 64 KiB to come back.
pub(super) fn packet(op: Op, guest: u32, host: u32) -> Header {
    Header {
        src_cid: u64::from(CID),
        dst_cid: HOST_CID,
        src_port: guest,
        dst_port: host,
        kind: TYPE_STREAM,
        op: op.to_wire(),
        buf_alloc: 64 * 1024,
        ..Header::default()
    }
}

/// The answer to `header`, the other way round.
pub(super) fn reply(op: Op, header: &Header) -> Header {
    packet(op, header.dst_port, header.src_port)
}
