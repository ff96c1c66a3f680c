//! Many streams at once, with host programs in threads of their own and a guest that counts its
//! credit as Linux does.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{Read, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Instant;

use super::driver::{Guest, PATIENCE, Packet, packet, reply};
use super::single::line;
use crate::devices::virtio::vsock::packet::{Header, Op, SHUTDOWN_BOTH, SHUTDOWN_SEND};

const STREAMS: usize = 100;
const PORT: u32 = 5;
/// The buffer of a guest program; small, so that writers wait for it often.
const WINDOW: u32 = 16 * 1024;

/// Numbers without a pattern, the same for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> usize {
        usize::try_from(self.next() % limit).unwrap()
    }
}

fn message(seed: u64) -> Vec<u8> {
    let mut random = Random(seed | 1 << 40);
    let len = random.below(300_000);
    (0..len).map(|_| random.next().to_le_bytes()[3]).collect()
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// A guest program's end of a stream, which sends back all it gets and then closes.
struct Echo {
    request: Header,
    waiting: Vec<u8>,
    received: u32,
    /// Bytes taken out of the guest's buffer.
    read: u32,
    told: u32,
    sent: u32,
    device_credit: (u32, u32),
    host_done: bool,
    closed: bool,
}

impl Echo {
    fn new(request: Header) -> Self {
        Self {
            request,
            waiting: Vec::new(),
            received: 0,
            read: 0,
            told: 0,
            sent: 0,
            device_credit: (request.buf_alloc, request.fwd_cnt),
            host_done: false,
            closed: false,
        }
    }

    fn take(&mut self, header: &Header, payload: &[u8]) {
        self.device_credit = (header.buf_alloc, header.fwd_cnt);
        match Op::from_wire(header.op) {
            Some(Op::Data) => {
                self.received += header.len;
                assert!(self.received - self.read <= WINDOW, "the guest's buffer overflows");
                self.waiting.extend_from_slice(payload);
            }
            Some(Op::Shutdown) => self.host_done |= header.flags & SHUTDOWN_SEND != 0,
            Some(Op::CreditUpdate | Op::CreditRequest | Op::Response) => {}
            op => panic!("unexpected {op:?}"),
        }
    }

    fn header(&mut self, op: Op, len: usize) -> Header {
        self.told = self.read;
        Header {
            len: u32::try_from(len).unwrap(),
            buf_alloc: WINDOW,
            fwd_cnt: self.read,
            ..reply(op, &self.request)
        }
    }

    /// The next packet this program sends.
    fn answer(&mut self) -> Option<Packet> {
        let credit = self.device_credit.0 - (self.sent - self.device_credit.1);
        let count = self.waiting.len().min(usize::try_from(credit).unwrap()).min(9000);
        if count > 0 {
            let payload: Vec<u8> = self.waiting.drain(..count).collect();
            self.sent += u32::try_from(count).unwrap();
            self.read = self.sent;
            return Some((self.header(Op::Data, count), payload));
        }
        if self.read - self.told > 0 {
            return Some((self.header(Op::CreditUpdate, 0), Vec::new()));
        }
        if self.host_done && self.waiting.is_empty() && !self.closed {
            self.closed = true;
            let header = self.header(Op::Shutdown, 0);
            return Some((Header { flags: SHUTDOWN_BOTH, ..header }, Vec::new()));
        }
        None
    }
}

/// Runs guest programs until `streams` of them have been opened and closed.
fn run_guest(guest: &mut Guest, mut programs: HashMap<(u32, u32), Echo>, streams: usize) {
    let deadline = Instant::now() + PATIENCE;
    let mut closed = 0;
    while closed < streams {
        let mut moved = false;
        while let Some((header, payload)) = guest.receive() {
            moved = true;
            let ports = (header.src_port, header.dst_port);
            match Op::from_wire(header.op) {
                Some(Op::Request) => {
                    let mut program = Echo::new(header);
                    let response = program.header(Op::Response, 0);
                    guest.send(response, &[]);
                    programs.insert(ports, program);
                }
                Some(Op::Reset) => {
                    let program = programs.remove(&ports).expect("a stream the guest knows");
                    assert!(program.closed, "a stream is reset before its end");
                    closed += 1;
                }
                _ => programs.get_mut(&ports).unwrap().take(&header, &payload),
            }
        }
        for program in programs.values_mut() {
            if let Some((header, payload)) = program.answer() {
                guest.send(header, &payload);
                moved = true;
            }
        }
        if !moved {
            guest.host_work(deadline);
        }
    }
}

/// Writes a message in chunks of random size, shuts the write side down and checks the echo.
fn exchange(stream: UnixStream, seed: u64) {
    let sent = message(seed);
    let digest_sent = digest(&sent);
    let mut writer = stream.try_clone().unwrap();
    let writing = thread::spawn(move || {
        let mut random = Random(seed + 7);
        let mut rest = &sent[..];
        while !rest.is_empty() {
            let count = (1 + random.below(20_000)).min(rest.len());
            writer.write_all(&rest[..count]).unwrap();
            rest = &rest[count..];
        }
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut echo = Vec::new();
    let mut stream = stream;
    stream.read_to_end(&mut echo).unwrap();
    writing.join().unwrap();
    assert_eq!(digest(&echo), digest_sent, "stream {seed} came back changed");
}

fn connect(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(format!("CONNECT {PORT}\n").as_bytes()).unwrap();
    assert!(line(&mut stream).starts_with("OK "));
    stream
}

#[test]
fn a_hundred_host_streams_come_back_unchanged() {
    let mut guest = Guest::new();
    let path = guest.path("vsock");
    let clients: Vec<_> = (0..STREAMS)
        .map(|index| {
            let path = path.clone();
            let seed = u64::try_from(index).unwrap();
            thread::spawn(move || exchange(connect(&path), seed))
        })
        .collect();
    run_guest(&mut guest, HashMap::new(), STREAMS);
    while clients.iter().any(|client| !client.is_finished()) && guest.device.connections() > 0 {
        guest.host_work(Instant::now() + PATIENCE);
    }
    for client in clients {
        client.join().unwrap();
    }
    assert_eq!(guest.device.connections(), 0);
    assert_eq!(guest.device.buffered(), 0);
}

#[test]
fn a_hundred_guest_streams_come_back_unchanged() {
    let mut guest = Guest::new();
    let listener = UnixListener::bind(guest.path("vsock_700")).unwrap();
    let server = thread::spawn(move || {
        let exchanges: Vec<_> = (0..STREAMS)
            .map(|index| {
                let (stream, _) = listener.accept().unwrap();
                let seed = u64::try_from(index).unwrap();
                thread::spawn(move || exchange(stream, seed))
            })
            .collect();
        for exchange in exchanges {
            exchange.join().unwrap();
        }
    });
    let mut programs = HashMap::new();
    for port in 0..u32::try_from(STREAMS).unwrap() {
        let request = Header { buf_alloc: WINDOW, ..packet(Op::Request, port, 700) };
        guest.send(request, &[]);
        // Its own view is that of the packets it gets.
        let seen = Header { src_port: 700, dst_port: port, ..Header::default() };
        programs.insert((700, port), Echo::new(seen));
    }
    run_guest(&mut guest, programs, STREAMS);
    while !server.is_finished() && guest.device.connections() > 0 {
        guest.host_work(Instant::now() + PATIENCE);
    }
    server.join().unwrap();
    assert_eq!(guest.device.connections(), 0);
}
