//! One stream, as a state machine without I/O.
//!
//! ```text
//!   CONNECT of a host client          REQUEST of the guest
//!              |                               |
//!          Requested ------- RESPONSE ------> Open
//!              |                               |  \ both directions ended on the host's side
//!      refused, gone, late                     |   Closing (waits for the guest's RST)
//!              |       RST, SHUTDOWN of both,  |     |
//!              |       broken rules            |     | RST, or late
//!              +----------> Ended <------------+-----+
//!                             | RST delivered if one is owed, buffered bytes delivered
//!                            gone
//! ```
//!
//! Inputs are the guest's packets and what the socket said; outputs are [`Reaction`]s and the
//! answers to questions such as [`Connection::needs_host`], which the muxer puts after each input.
//! The two directions end independently of each other; bytes accepted before an end are delivered
//! before it.

mod buffer;
mod credit;
#[cfg(test)]
mod tests;

use super::packet::{Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM};
pub(crate) use buffer::Buffer;
#[cfg(test)]
pub(crate) use credit::BUFFER_SIZE;
use credit::Credit;

/// Most payload bytes of one packet to the guest.
const MAX_PAYLOAD: u32 = 64 * 1024;

/// Where a connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The host asked; the guest has not answered.
    Requested,
    /// Data flows.
    Open,
    /// Both directions ended on the host's side; the guest is to confirm with RST.
    Closing,
    /// Over for the guest, but for an RST that it may be owed.
    Ended,
}

/// One direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Open,
    /// The sender is done; bytes are still buffered.
    Finishing,
    Ended,
}

/// What the muxer has to do about a packet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reaction {
    /// Nothing but the usual questions.
    None,
    /// The guest accepted: tell the host client.
    Established,
    /// Deliver the payload with [`Connection::payload`].
    Payload,
}

/// A wait that must end in bounded time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// For the guest's answer to REQUEST.
    Handshake,
    /// For the guest's RST after SHUTDOWN.
    Linger,
}

/// Packets owed to the guest.
#[derive(Debug, Default)]
struct Owed {
    request: bool,
    response: bool,
    reset: bool,
    shutdown: bool,
    credit_update: bool,
    credit_request: bool,
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Connection {
    phase: Phase,
    owed: Owed,
    credit: Credit,
    to_guest: Direction,
    to_host: Direction,
    /// SHUTDOWN flags the guest sent.
    guest_shutdown: u32,
    /// SHUTDOWN flags we sent or owe.
    our_shutdown: u32,
    /// The socket may have bytes for us.
    readable: bool,
    /// The guest was asked for credit since it last gave some.
    asked_for_credit: bool,
    /// The host end's read side is to be shut down.
    shut_read: bool,
    /// The host end's write side is to be shut down.
    shut_write: bool,
    buffer: Buffer,
}

impl Connection {
    fn new(phase: Phase, owed: Owed) -> Self {
        Self {
            phase,
            owed,
            credit: Credit::default(),
            to_guest: Direction::Open,
            to_host: Direction::Open,
            guest_shutdown: 0,
            our_shutdown: 0,
            readable: true,
            asked_for_credit: false,
            shut_read: false,
            shut_write: false,
            buffer: Buffer::default(),
        }
    }

    /// A connection that a host client asks for.
    pub(crate) fn request() -> Self {
        Self::new(Phase::Requested, Owed { request: true, ..Owed::default() })
    }

    /// A connection that the guest asked for with `header`, and that the host end accepted.
    pub(crate) fn accept(header: &Header) -> Self {
        let mut connection = Self::new(Phase::Open, Owed { response: true, ..Owed::default() });
        connection.credit.update(header);
        connection
    }

    /// Takes a packet of the guest. One that breaks the rules resets the connection.
    pub(crate) fn packet(&mut self, op: Option<Op>, header: &Header) -> Reaction {
        if op == Some(Op::Reset) {
            self.end(false);
            return Reaction::None;
        }
        match self.phase {
            Phase::Requested => {
                if op == Some(Op::Response) && !self.owed.request {
                    self.phase = Phase::Open;
                    self.credit.update(header);
                    return Reaction::Established;
                }
                self.reset();
            }
            Phase::Open => return self.packet_while_open(op, header),
            Phase::Closing => {
                if op == Some(Op::Shutdown) && self.guest_closes(header.flags) == SHUTDOWN_BOTH {
                    self.reset();
                }
            }
            Phase::Ended => {}
        }
        Reaction::None
    }

    fn packet_while_open(&mut self, op: Option<Op>, header: &Header) -> Reaction {
        let window = self.credit.window();
        self.credit.update(header);
        if self.credit.window() > window {
            self.asked_for_credit = false;
        }
        match op {
            Some(Op::Data) => {
                let sends = self.guest_shutdown & SHUTDOWN_SEND == 0;
                if sends && self.credit.allows(header.len) {
                    self.credit.received(header.len);
                    return Reaction::Payload;
                }
                self.reset();
            }
            Some(Op::Shutdown) => self.shutdown_by_guest(header.flags),
            Some(Op::CreditRequest) => self.owed.credit_update = true,
            Some(Op::CreditUpdate) => {}
            Some(Op::Request | Op::Response | Op::Reset) | None => self.reset(),
        }
        self.ask_for_credit();
        Reaction::None
    }

    fn guest_closes(&mut self, flags: u32) -> u32 {
        self.guest_shutdown |= flags & SHUTDOWN_BOTH;
        self.guest_shutdown
    }

    fn shutdown_by_guest(&mut self, flags: u32) {
        if self.guest_closes(flags) == SHUTDOWN_BOTH {
            // The guest waits for RST; what it sent before is delivered nevertheless.
            self.reset();
            return;
        }
        if self.guest_shutdown & SHUTDOWN_RECEIVE != 0 && self.to_guest != Direction::Ended {
            self.to_guest = Direction::Ended;
            self.shut_read = true;
        }
        if self.guest_shutdown & SHUTDOWN_SEND != 0 && self.to_host == Direction::Open {
            self.to_host = Direction::Finishing;
            self.finish_if_drained();
        }
        self.close_if_over();
    }

    /// Takes the payload of a packet that gave [`Reaction::Payload`]: the socket took `direct`
    /// bytes at once; `rest` puts those after them into the buffer it is given.
    pub(crate) fn payload(&mut self, len: u32, direct: u32, rest: impl FnOnce(&mut Buffer)) {
        if self.to_host == Direction::Ended {
            self.credit.forwarded(len);
        } else {
            self.credit.forwarded(direct.min(len));
            if direct < len {
                rest(&mut self.buffer);
            }
        }
        self.tell_credit();
    }

    /// Bytes that wait for the socket.
    pub(crate) fn buffered(&self) -> &[u8] {
        self.buffer.front()
    }

    /// The socket took `count` bytes of [`Connection::buffered`].
    pub(crate) fn drained(&mut self, count: usize) {
        let count = count.min(self.buffer.len());
        self.buffer.consume(count);
        self.credit.forwarded(u32::try_from(count).unwrap_or(u32::MAX));
        self.tell_credit();
        self.finish_if_drained();
        self.close_if_over();
    }

    /// The socket may have something to read.
    pub(crate) fn host_readable(&mut self) {
        self.readable = true;
        self.ask_for_credit();
    }

    /// The socket has nothing to read now.
    pub(crate) fn host_would_block(&mut self) {
        self.readable = false;
    }

    /// The host end sent its last byte, and all of them were read.
    pub(crate) fn host_end_of_file(&mut self) {
        self.readable = false;
        if self.phase == Phase::Open && self.to_guest == Direction::Open {
            self.to_guest = Direction::Ended;
            self.tell_shutdown(SHUTDOWN_SEND);
            self.close_if_over();
        }
    }

    /// The host end reads no more. What waits for it is thrown away.
    pub(crate) fn host_stopped_reading(&mut self) {
        let waiting = self.buffer.len();
        self.buffer.consume(waiting);
        self.credit.forwarded(u32::try_from(waiting).unwrap_or(u32::MAX));
        match self.phase {
            // It does not even wait for the answer.
            Phase::Requested => self.reset(),
            Phase::Open if self.to_host != Direction::Ended => {
                self.to_host = Direction::Ended;
                self.tell_shutdown(SHUTDOWN_RECEIVE);
                self.close_if_over();
            }
            Phase::Open | Phase::Closing | Phase::Ended => {}
        }
    }

    /// Ends the connection; the guest gets an RST if it knows of it.
    pub(crate) fn reset(&mut self) {
        if self.phase != Phase::Ended {
            let unknown = self.phase == Phase::Requested && self.owed.request;
            self.end(!unknown);
        }
    }

    fn end(&mut self, owe_reset: bool) {
        self.phase = Phase::Ended;
        self.owed = Owed { reset: owe_reset, ..Owed::default() };
        self.to_guest = Direction::Ended;
    }

    fn finish_if_drained(&mut self) {
        if self.to_host == Direction::Finishing && self.buffer.is_empty() {
            self.to_host = Direction::Ended;
            self.shut_write = true;
        }
    }

    fn close_if_over(&mut self) {
        let over = self.to_guest == Direction::Ended && self.to_host == Direction::Ended;
        if self.phase == Phase::Open && over {
            self.phase = Phase::Closing;
            self.tell_shutdown(SHUTDOWN_BOTH);
        }
    }

    fn tell_shutdown(&mut self, flags: u32) {
        if self.our_shutdown & flags != flags {
            self.our_shutdown |= flags;
            self.owed.shutdown = true;
        }
    }

    fn tell_credit(&mut self) {
        if self.phase == Phase::Open && self.credit.is_update_due() {
            self.owed.credit_update = true;
        }
    }

    fn ask_for_credit(&mut self) {
        let stuck = self.readable
            && self.phase == Phase::Open
            && self.to_guest == Direction::Open
            && self.credit.window() == 0;
        if stuck && !self.asked_for_credit {
            self.asked_for_credit = true;
            self.owed.credit_request = true;
        }
    }

    /// Most bytes that may be read from the socket into one packet now.
    pub(crate) fn read_budget(&self) -> u32 {
        let reads = self.readable && self.phase == Phase::Open && self.to_guest == Direction::Open;
        if reads { self.credit.window().min(MAX_PAYLOAD) } else { 0 }
    }

    /// Takes the next packet without payload that the guest is owed. A credit update is left
    /// for a packet with payload to carry, while `data_follows`.
    pub(crate) fn next_control(&mut self, data_follows: bool) -> Option<Header> {
        let owed = &mut self.owed;
        let (op, flags) = if std::mem::take(&mut owed.reset) {
            (Op::Reset, 0)
        } else if std::mem::take(&mut owed.request) {
            (Op::Request, 0)
        } else if std::mem::take(&mut owed.response) {
            (Op::Response, 0)
        } else if std::mem::take(&mut owed.shutdown) {
            (Op::Shutdown, self.our_shutdown)
        } else if std::mem::take(&mut owed.credit_request) {
            (Op::CreditRequest, 0)
        } else if owed.credit_update && !data_follows {
            (Op::CreditUpdate, 0)
        } else {
            return None;
        };
        Some(self.stamp(op, flags, 0))
    }

    /// The header for `len` bytes of payload, which count as sent from here on.
    pub(crate) fn data(&mut self, len: u32) -> Header {
        self.credit.sent(len);
        self.ask_for_credit();
        self.stamp(Op::Data, 0, len)
    }

    fn stamp(&mut self, op: Op, flags: u32, len: u32) -> Header {
        let mut header =
            Header { len, kind: TYPE_STREAM, op: op.to_wire(), flags, ..Header::default() };
        self.credit.stamp(&mut header);
        self.owed.credit_update = false;
        header
    }

    /// Whether there is, or may be, a packet for the guest.
    pub(crate) fn wants_to_send(&self) -> bool {
        let owed = &self.owed;
        owed.request
            || owed.response
            || owed.reset
            || owed.shutdown
            || owed.credit_update
            || owed.credit_request
            || self.read_budget() > 0
    }

    /// Takes the order to shut down the read and the write side of the socket.
    pub(crate) fn take_shutdown(&mut self) -> (bool, bool) {
        (std::mem::take(&mut self.shut_read), std::mem::take(&mut self.shut_write))
    }

    /// Whether payload may go to the socket without passing those that wait.
    pub(crate) fn writes_directly(&self) -> bool {
        self.buffer.is_empty() && self.to_host == Direction::Open
    }

    /// Whether bytes wait until the socket can be written.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.buffer.is_empty()
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn buffer_capacity(&self) -> usize {
        self.buffer.capacity()
    }

    /// Whether the socket has a purpose still.
    pub(crate) fn needs_host(&self) -> bool {
        match self.phase {
            Phase::Requested | Phase::Open => true,
            Phase::Closing => false,
            Phase::Ended => !self.buffer.is_empty(),
        }
    }

    /// Whether the guest still has, or is owed, a word about this connection.
    pub(crate) fn is_known_to_guest(&self) -> bool {
        self.phase != Phase::Ended || self.owed.reset
    }

    /// Whether nothing is left to do.
    pub(crate) fn is_over(&self) -> bool {
        !self.is_known_to_guest() && self.buffer.is_empty()
    }

    /// What is being waited for that may never come.
    pub(crate) fn wait(&self) -> Option<Wait> {
        match self.phase {
            Phase::Requested => Some(Wait::Handshake),
            Phase::Closing => Some(Wait::Linger),
            Phase::Open | Phase::Ended => None,
        }
    }
}
