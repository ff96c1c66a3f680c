//! A connection against a model of both ends: a guest that counts its credit, and a socket that
//! takes and gives as it likes.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

fn header(op: Op) -> Header {
    Header { kind: TYPE_STREAM, op: op.to_wire(), buf_alloc: 1 << 20, ..Header::default() }
}

fn open() -> Connection {
    let mut connection = Connection::accept(&header(Op::Request));
    assert_eq!(control(&mut connection), Some((Op::Response, 0)));
    connection
}

fn control(connection: &mut Connection) -> Option<(Op, u32)> {
    let header = connection.next_control(false)?;
    Some((Op::from_wire(header.op).unwrap(), header.flags))
}

#[test]
fn a_response_before_the_request_was_sent_is_a_lie() {
    let mut connection = Connection::request();
    let reaction = connection.packet(Some(Op::Response), &header(Op::Response));
    assert_eq!(reaction, Reaction::None);
    assert!(connection.is_over());
}

#[test]
fn a_second_request_or_response_resets() {
    for op in [Op::Request, Op::Response] {
        let mut connection = open();
        connection.packet(Some(op), &header(op));
        assert_eq!(control(&mut connection), Some((Op::Reset, 0)));
        assert!(connection.is_over());
    }
}

#[test]
fn an_unknown_operation_resets() {
    let mut connection = open();
    connection.packet(None, &header(Op::Data));
    assert_eq!(control(&mut connection), Some((Op::Reset, 0)));
}

#[test]
fn data_after_the_guest_said_it_was_the_last_resets() {
    let mut connection = open();
    let last = Header { flags: SHUTDOWN_SEND, ..header(Op::Shutdown) };
    connection.packet(Some(Op::Shutdown), &last);
    let reaction = connection.packet(Some(Op::Data), &Header { len: 1, ..header(Op::Data) });
    assert_eq!(reaction, Reaction::None);
    assert_eq!(control(&mut connection), Some((Op::Reset, 0)));
}

#[test]
fn the_write_side_is_shut_down_only_after_the_last_buffered_byte() {
    let mut connection = open();
    connection.packet(Some(Op::Data), &Header { len: 3, ..header(Op::Data) });
    connection.payload(3, 1, |buffer| buffer.push(b"bc"));
    let last = Header { flags: SHUTDOWN_SEND, ..header(Op::Shutdown) };
    connection.packet(Some(Op::Shutdown), &last);
    assert_eq!(connection.take_shutdown(), (false, false));
    connection.drained(1);
    assert_eq!(connection.take_shutdown(), (false, false));
    connection.drained(1);
    assert_eq!(connection.take_shutdown(), (false, true));
}

#[test]
fn a_reset_by_the_guest_is_not_answered() {
    let mut connection = open();
    connection.packet(Some(Op::Reset), &header(Op::Reset));
    assert_eq!(control(&mut connection), None);
    assert!(connection.is_over());
}

#[test]
fn old_news_of_credit_is_left_aside() {
    let mut connection = open();
    connection.data(1000);
    let credit = |buf_alloc, fwd_cnt| Header { buf_alloc, fwd_cnt, ..header(Op::CreditUpdate) };
    connection.packet(Some(Op::CreditUpdate), &credit(1000, 600));
    assert_eq!(connection.read_budget(), 600);
    connection.packet(Some(Op::CreditUpdate), &credit(1000, 300));
    assert_eq!(connection.read_budget(), 600);
}

/// One step of the world around a connection. Numbers are cut to what is possible.
#[derive(Debug, Clone)]
enum Step {
    /// The guest program writes.
    GuestSends(u32),
    /// The guest program reads, and the guest says so.
    GuestReads(u32),
    /// The host program writes.
    HostSends(usize),
    /// The host program reads.
    HostReads(usize),
    /// The device fills one receive buffer of this size.
    Fill(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (1_u32..30_000).prop_map(Step::GuestSends),
        (1_u32..30_000).prop_map(Step::GuestReads),
        (1_usize..30_000).prop_map(Step::HostSends),
        (1_usize..30_000).prop_map(Step::HostReads),
        (1_usize..9_000).prop_map(Step::Fill),
    ];
    proptest::collection::vec(step, 1..100)
}

/// Both ends, their buffers and what they have seen.
struct World {
    connection: Connection,
    /// Size of the guest's buffer and of the socket's.
    guest_room: u32,
    socket_room: usize,
    guest_sent: u32,
    guest_credit: (u32, u32),
    guest_received: u32,
    guest_read: u32,
    socket_out: VecDeque<u8>,
    host_read: u32,
    socket_in: usize,
    host_sent: usize,
}

fn byte(at: u32) -> u8 {
    u8::try_from((u64::from(at) * 31 + u64::from(at) / 251) % 256).unwrap()
}

impl World {
    fn new(guest_room: u32, socket_room: usize) -> Self {
        let request = Header { buf_alloc: guest_room, ..header(Op::Request) };
        let mut connection = Connection::accept(&request);
        let response = connection.next_control(false).unwrap();
        Self {
            connection,
            guest_room,
            socket_room,
            guest_sent: 0,
            guest_credit: (response.buf_alloc, response.fwd_cnt),
            guest_received: 0,
            guest_read: 0,
            socket_out: VecDeque::new(),
            host_read: 0,
            socket_in: 0,
            host_sent: 0,
        }
    }

    fn guest_packet(&self, op: Op, len: u32) -> Header {
        Header { len, buf_alloc: self.guest_room, fwd_cnt: self.guest_read, ..header(op) }
    }

    fn guest_credit(&self) -> u32 {
        self.guest_credit.0 - (self.guest_sent - self.guest_credit.1)
    }

    fn guest_sends(&mut self, wanted: u32) {
        let len = wanted.min(self.guest_credit());
        if len == 0 {
            return;
        }
        let packet = self.guest_packet(Op::Data, len);
        let reaction = self.connection.packet(Some(Op::Data), &packet);
        assert_eq!(reaction, Reaction::Payload, "data within credit is refused");
        let bytes: Vec<u8> = (self.guest_sent..self.guest_sent + len).map(byte).collect();
        self.guest_sent += len;
        let room = self.socket_room - self.socket_out.len();
        let direct = if self.connection.writes_directly() { bytes.len().min(room) } else { 0 };
        self.socket_out.extend(&bytes[..direct]);
        let taken = u32::try_from(direct).unwrap();
        self.connection.payload(len, taken, |buffer| buffer.push(&bytes[direct..]));
    }

    fn host_reads(&mut self, wanted: usize) {
        for _ in 0..wanted.min(self.socket_out.len()) {
            assert_eq!(self.socket_out.pop_front(), Some(byte(self.host_read)));
            self.host_read += 1;
        }
        while self.connection.is_blocked() && self.socket_out.len() < self.socket_room {
            let room = self.socket_room - self.socket_out.len();
            let count = self.connection.buffered().len().min(room);
            self.socket_out.extend(&self.connection.buffered()[..count]);
            self.connection.drained(count);
        }
    }

    /// Returns whether a packet went to the guest.
    fn fill(&mut self, buffer: usize) -> bool {
        let budget = self.connection.read_budget();
        let header = self.connection.next_control(budget > 0).or_else(|| {
            let limit = usize::try_from(budget).unwrap().min(buffer).min(self.socket_in);
            if limit == 0 {
                if budget > 0 {
                    self.connection.host_would_block();
                }
                return self.connection.next_control(false);
            }
            self.socket_in -= limit;
            Some(self.connection.data(u32::try_from(limit).unwrap()))
        });
        let Some(header) = header else { return false };
        self.guest_credit = (header.buf_alloc, header.fwd_cnt);
        assert!(header.fwd_cnt <= self.guest_sent);
        self.guest_received += header.len;
        assert!(self.guest_received - self.guest_read <= self.guest_room, "credit is exceeded");
        true
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::GuestSends(wanted) => self.guest_sends(wanted),
            Step::GuestReads(wanted) => {
                self.guest_read += wanted.min(self.guest_received - self.guest_read);
                let packet = self.guest_packet(Op::CreditUpdate, 0);
                self.connection.packet(Some(Op::CreditUpdate), &packet);
            }
            Step::HostSends(wanted) => {
                self.socket_in += wanted;
                self.host_sent += wanted;
                self.connection.host_readable();
            }
            Step::HostReads(wanted) => self.host_reads(wanted),
            Step::Fill(buffer) => {
                self.fill(buffer);
            }
        }
        let held = self.connection.buffer.len();
        assert!(held <= usize::try_from(BUFFER_SIZE).unwrap(), "{held} bytes are buffered");
    }

    /// Lets both programs read until nothing moves any more.
    fn run_dry(&mut self) {
        loop {
            self.host_reads(usize::MAX);
            let moved = self.fill(4096);
            let unread = self.guest_received - self.guest_read;
            if unread > 0 {
                self.step(&Step::GuestReads(unread));
            }
            if !moved && unread == 0 && self.socket_out.is_empty() {
                return;
            }
        }
    }
}

proptest! {
    #[test]
    fn bytes_arrive_in_order_within_credit_and_none_is_lost(
        steps in steps(),
        guest_room in 500_u32..100_000,
        socket_room in 500_usize..100_000,
    ) {
        let mut world = World::new(guest_room, socket_room);
        for step in &steps {
            world.step(step);
        }
        world.run_dry();
        prop_assert_eq!(world.host_read, world.guest_sent);
        prop_assert_eq!(usize::try_from(world.guest_received).unwrap(), world.host_sent);
        // Enough credit is back that no writer stands still.
        prop_assert!(world.guest_credit() > BUFFER_SIZE / 2);
        prop_assert_eq!(world.connection.buffer_capacity(), 0);
    }
}
