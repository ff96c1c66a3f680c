//! A hostile guest, played from a string of bytes: for fuzz targets and property tests.
//!
//! The bytes are a program. It writes rings, descriptors and packets with few bounds, and kicks
//! queues; host clients and sockets that listen are there to be disturbed. Whatever it does, the
//! device must return from each call, and stay within its limits.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::packet::{HOST_CID, Header, TYPE_STREAM};
use super::{LIMITS, Limits, Vsock, VsockConfig};
use crate::devices::virtio::{Activation, Interrupt, VirtioDevice as _};
use crate::memory::GuestRam;

const CID: u32 = 3;
const RAM_SIZE: usize = 1 << 20;
const QUEUE_SIZE: u16 = 16;
const BUFFERS: u64 = 0x1_0000;
const LISTENED_PORT: u32 = 1;
const CONNECTIONS: usize = 16;

/// Reads numbers off the program.
struct Program<'a>(&'a [u8]);

impl Program<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn below(&mut self, limit: u8) -> Option<u8> {
        Some(self.byte()? % limit)
    }

    fn word(&mut self) -> Option<u32> {
        let bytes = [self.byte()?, self.byte()?, self.byte()?, self.byte()?];
        Some(u32::from_le_bytes(bytes))
    }

    /// Mostly `usual`, sometimes anything.
    fn mostly(&mut self, usual: u32) -> Option<u32> {
        if self.below(8)? == 0 { self.word() } else { Some(usual) }
    }
}

struct Machine {
    ram: Arc<GuestRam>,
    device: Vsock,
    available: [u16; 3],
    clients: Vec<UnixStream>,
    listener: UnixListener,
    served: Vec<UnixStream>,
    directory: std::path::PathBuf,
}

/// Plays `program` against a new device whose sockets are in `directory`, which must exist and
/// be empty.
///
/// # Panics
/// When the device breaks one of its promises, or sockets cannot be made in `directory`.
#[allow(clippy::unwrap_used, clippy::missing_panics_doc)]
pub fn play(program: &[u8], directory: &Path) {
    let mut machine = Machine::new(directory);
    let mut program = Program(program);
    while machine.step(&mut program).is_some() {
        assert!(machine.device.connections() <= CONNECTIONS, "there are too many connections");
        assert!(machine.device.queued() <= CONNECTIONS, "the line holds more than connections");
        let bound = CONNECTIONS * 64 * 1024;
        assert!(machine.device.buffered() <= bound, "too much memory is held");
    }
}

#[allow(clippy::unwrap_used)]
impl Machine {
    fn new(directory: &Path) -> Self {
        let config = VsockConfig {
            cid: CID,
            listener: UnixListener::bind(directory.join("v")).unwrap(),
            directory: OwnedFd::from(std::fs::File::open(directory).unwrap()),
            name: "v".to_owned(),
        };
        let limits =
            Limits { connections: CONNECTIONS, guest_connections: CONNECTIONS / 2, ..LIMITS };
        let listener = UnixListener::bind(directory.join(format!("v_{LISTENED_PORT}"))).unwrap();
        listener.set_nonblocking(true).unwrap();
        let ram = GuestRam::from_ranges(&[(GuestAddress(0), RAM_SIZE)]).unwrap();
        let mut machine = Self {
            ram: Arc::new(ram),
            device: Vsock::with_limits(config, limits).unwrap(),
            available: [0; 3],
            clients: Vec::new(),
            listener,
            served: Vec::new(),
            directory: directory.to_owned(),
        };
        machine.activate(0);
        machine
    }

    fn base(queue: usize) -> u64 {
        0x1000 * (1 + 4 * u64::try_from(queue).unwrap_or_default())
    }

    fn activate(&mut self, features: u64) {
        self.available = [0; 3];
        let _ = self.ram.write_slice(&vec![0; 0xC000], GuestAddress(0x1000));
        let queues = (0..3).map(|index| {
            let low = |offset| u32::try_from(Self::base(index) + offset).ok();
            let mut queue = Queue::new(QUEUE_SIZE).unwrap();
            queue.set_size(QUEUE_SIZE);
            queue.set_desc_table_address(low(0), Some(0));
            queue.set_avail_ring_address(low(0x1000), Some(0));
            queue.set_used_ring_address(low(0x2000), Some(0));
            queue.set_ready(true);
            queue
        });
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let activation = Activation {
            ram: Arc::clone(&self.ram),
            queues: queues.collect(),
            interrupt: Interrupt::new(line),
            features,
        };
        self.device.activate(activation).unwrap();
    }

    /// One instruction; nothing when the program has ended.
    fn step(&mut self, program: &mut Program<'_>) -> Option<()> {
        match program.below(14)? {
            0..4 => self.packet(program)?,
            4 | 5 => self.chain(program)?,
            6 => self.scribble(program)?,
            7 => self.device.queue_event(usize::from(program.below(4)?)),
            8 => self.client(program)?,
            9 => self.talk(program)?,
            10 => self.device.host_event(),
            11 => {
                if let Ok((stream, _)) = self.listener.accept() {
                    let _ = stream.set_nonblocking(true);
                    self.served.push(stream);
                }
            }
            12 => self.buffers(),
            _ => match program.below(4)? {
                0 => self.device.reset_streams(),
                1 => {
                    self.device.reset();
                    self.activate(if program.below(2)? == 0 { 0 } else { u64::MAX });
                }
                _ => drop((self.clients.pop(), self.served.pop())),
            },
        }
        Some(())
    }

    fn offer(&mut self, queue: usize, head: u16) {
        let index = &mut self.available[queue];
        let ring = Self::base(queue) + 0x1000;
        let slot = ring + 4 + u64::from(*index % QUEUE_SIZE) * 2;
        let _ = self.ram.write_obj(head.to_le(), GuestAddress(slot));
        *index = index.wrapping_add(1);
        let _ = self.ram.write_obj(index.to_le(), GuestAddress(ring + 2));
    }

    fn descriptor(&self, queue: usize, index: u16, fields: (u64, u32, u16, u16)) {
        let at = Self::base(queue) + u64::from(index) * 16;
        let _ = self.ram.write_obj(fields.0.to_le(), GuestAddress(at));
        let _ = self.ram.write_obj(fields.1.to_le(), GuestAddress(at + 8));
        let _ = self.ram.write_obj(fields.2.to_le(), GuestAddress(at + 12));
        let _ = self.ram.write_obj(fields.3.to_le(), GuestAddress(at + 14));
    }

    /// A packet that is well formed more often than not.
    fn packet(&mut self, program: &mut Program<'_>) -> Option<()> {
        let guest_port = u32::from(program.below(4)?);
        // Answers to host clients go to the port that the last packet in a receive buffer names.
        let answered: Header = {
            let mut bytes = [0; 44];
            let at = BUFFERS + u64::from(program.below(16)?) * 0x1000;
            let _ = self.ram.read_slice(&mut bytes, GuestAddress(at));
            Header::from_bytes(&bytes)
        };
        let (src_port, dst_port) = if program.below(2)? == 0 {
            (guest_port, LISTENED_PORT)
        } else {
            (answered.dst_port, answered.src_port)
        };
        let len = u32::from(program.byte()?) * u32::from(program.below(3)?) * 100;
        let flags = u32::from(program.below(4)?);
        let header = Header {
            src_cid: program.mostly(CID)?.into(),
            dst_cid: program.mostly(u32::try_from(HOST_CID).ok()?)?.into(),
            src_port,
            dst_port,
            len: program.mostly(len)?,
            kind: u16::from_le_bytes([program.mostly(TYPE_STREAM.into())?.to_le_bytes()[0], 0]),
            op: u16::from(program.below(9)?),
            flags: program.mostly(flags)?,
            buf_alloc: program.mostly(0x1_0000)?,
            fwd_cnt: program.mostly(0)?,
        };
        let slot = self.available[1] % QUEUE_SIZE;
        let at = 0x4_0000 + u64::from(slot) * 0x1_0000 % 0x8_0000;
        let _ = self.ram.write_slice(&header.to_bytes(), GuestAddress(at));
        self.descriptor(1, slot, (at, 44 + len, 0, 0));
        self.offer(1, slot);
        self.device.queue_event(1);
        Some(())
    }

    /// A descriptor of any shape, loops and indirect tables included.
    fn chain(&mut self, program: &mut Program<'_>) -> Option<()> {
        let queue = usize::from(program.below(3)?);
        let index = u16::from(program.below(20)?);
        let address = u64::from(program.mostly(0x2_0000)?) << program.below(33)?;
        let flags = u16::from(program.byte()?);
        let next = u16::from(program.below(20)?);
        self.descriptor(queue, index % QUEUE_SIZE, (address, program.mostly(5000)?, flags, next));
        self.offer(queue, index);
        self.device.queue_event(queue);
        Some(())
    }

    /// Writes anywhere into the rings.
    fn scribble(&self, program: &mut Program<'_>) -> Option<()> {
        let at = 0x1000 + u64::from(program.word()? % 0xC000);
        let _ = self.ram.write_obj(program.byte()?, GuestAddress(at));
        Some(())
    }

    /// Gives all receive buffers that there can be.
    fn buffers(&mut self) {
        for index in 0..QUEUE_SIZE {
            let at = BUFFERS + u64::from(index) * 0x1000;
            self.descriptor(0, index, (at, 0x1000, 2, 0));
            self.offer(0, index);
        }
        self.descriptor(2, 0, (0xF000, 4, 2, 0));
        self.offer(2, 0);
        self.device.queue_event(0);
    }

    fn client(&mut self, program: &mut Program<'_>) -> Option<()> {
        let Ok(mut client) = UnixStream::connect(self.directory.join("v")) else {
            return Some(());
        };
        let _ = client.set_nonblocking(true);
        let port = program.mostly(7)?;
        let _ = client.write_all(format!("CONNECT {port}\n").as_bytes());
        self.clients.push(client);
        self.device.host_event();
        self.device.host_event();
        Some(())
    }

    /// The host's ends write, read or shut down.
    fn talk(&mut self, program: &mut Program<'_>) -> Option<()> {
        let (what, count) = (program.below(4)?, usize::from(program.byte()?) * 40);
        for stream in self.clients.iter_mut().chain(&mut self.served) {
            let mut bytes = vec![0; count];
            match what {
                0 => drop(stream.write(&bytes)),
                1 => drop(stream.read(&mut bytes)),
                2 => drop(stream.shutdown(std::net::Shutdown::Write)),
                _ => drop(stream.shutdown(std::net::Shutdown::Read)),
            }
        }
        self.device.host_event();
        Some(())
    }
}
