//! The guest's side: packets it sends, and packets for its receive buffers.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use super::super::connection::{Connection, Reaction};
use super::super::packet::{HOST_CID, Header, Op, RxPacket, TYPE_STREAM, TxPacket};
use super::host::confirm;
use super::{MAX_RESETS, Muxer, Ports, Stream};
use crate::sys::vsock as sys;

impl Muxer {
    /// Whether [`Muxer::transmit`] may be called. If not, the guest's packets stay in their queue
    /// until it has taken some of what is owed to it.
    pub(crate) fn can_transmit(&self) -> bool {
        self.resets.len() < MAX_RESETS
    }

    /// Handles a packet that the guest sent.
    pub(crate) fn transmit(&mut self, packet: &TxPacket<'_>) {
        let header = &packet.header;
        if header.src_cid != self.cid {
            // An answer would go to somebody who did not ask.
            tracing::debug!(
                cid = header.src_cid,
                "a vsock packet with a foreign source is dropped"
            );
            return;
        }
        let op = Op::from_wire(header.op);
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            self.refuse(header, op);
            return;
        }
        let ports = Ports { host: header.dst_port, guest: header.src_port };
        let known = self.by_ports.get(&ports).copied();
        match known.and_then(|id| Some((id, self.streams.get_mut(&id)?))) {
            Some((id, stream)) => {
                if packet.is_complete() {
                    deliver(stream, op, packet);
                } else {
                    stream.connection.reset();
                }
                self.settle(id);
            }
            None if op == Some(Op::Request) => self.connect(ports, header),
            None => self.refuse(header, op),
        }
    }

    /// Opens the connection that the guest asks for, if somebody listens on the host.
    fn connect(&mut self, ports: Ports, header: &Header) {
        if self.is_full() || self.by_guest >= self.limits.guest_connections {
            tracing::warn!("the guest has too many vsock connections; one is refused");
            self.refuse(header, Some(Op::Request));
            return;
        }
        let path = PathBuf::from(format!(
            "/proc/self/fd/{}/{}_{}",
            self.directory.as_raw_fd(),
            self.name,
            ports.host
        ));
        let id = self.next_id();
        let connected = sys::connect(&path).and_then(|socket: UnixStream| {
            self.watch(&socket, id)?;
            Ok(socket)
        });
        match connected {
            Ok(socket) => self.insert(id, ports, socket, Connection::accept(header), true),
            Err(error) => {
                tracing::debug!(port = ports.host, %error, "a vsock connection is refused");
                self.refuse(header, Some(Op::Request));
            }
        }
    }

    /// Answers a packet that belongs to no connection.
    fn refuse(&mut self, header: &Header, op: Option<Op>) {
        if op == Some(Op::Reset) {
            return;
        }
        self.resets.push_back(Header {
            src_cid: header.dst_cid,
            dst_cid: self.cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            kind: header.kind,
            op: Op::Reset.to_wire(),
            ..Header::default()
        });
    }

    /// Fills a receive buffer with the next packet: each connection in its turn gives one.
    /// Returns the packet's length, or nothing when there is none; then the buffer is untouched.
    pub(crate) fn receive(&mut self, buffer: &RxPacket<'_>) -> Option<u32> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(buffer.finish(reset));
        }
        while let Some(id) = self.ready.pop_front() {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.queued = false;
            let ports = stream.ports;
            let packet = next_packet(stream, buffer);
            self.settle(id);
            if let Some(header) = packet {
                return Some(buffer.finish(Header {
                    src_cid: HOST_CID,
                    dst_cid: self.cid,
                    src_port: ports.host,
                    dst_port: ports.guest,
                    ..header
                }));
            }
        }
        None
    }
}

/// Gives a packet to its connection, and its payload to the socket.
fn deliver(stream: &mut Stream, op: Option<Op>, packet: &TxPacket<'_>) {
    let connection = &mut stream.connection;
    match connection.packet(op, &packet.header) {
        Reaction::None => {}
        Reaction::Established => {
            let confirmed = stream
                .socket
                .as_ref()
                .is_some_and(|socket| confirm(socket, stream.ports.host).is_ok());
            if !confirmed {
                connection.reset();
            }
        }
        Reaction::Payload => {
            let mut direct = 0;
            if let Some(socket) = &stream.socket
                && connection.writes_directly()
            {
                match packet.send_to(socket.as_fd()) {
                    Ok(count) => direct = count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => connection.host_stopped_reading(),
                }
            }
            let taken = u32::try_from(direct).unwrap_or(u32::MAX);
            connection.payload(packet.header.len, taken, |buffer| {
                packet.copy_from(direct, |bytes| buffer.push(bytes));
            });
        }
    }
}

/// The header of a stream's next packet; its payload is then in `buffer`.
fn next_packet(stream: &mut Stream, buffer: &RxPacket<'_>) -> Option<Header> {
    let connection = &mut stream.connection;
    let budget = connection.read_budget();
    if let Some(header) = connection.next_control(budget > 0) {
        return Some(header);
    }
    let limit = usize::try_from(budget).ok()?;
    if limit > 0
        && let Some(socket) = &stream.socket
    {
        match buffer.receive_from(socket.as_fd(), limit) {
            Ok(0) => connection.host_end_of_file(),
            Ok(count) => return Some(connection.data(u32::try_from(count).ok()?)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                connection.host_would_block();
            }
            Err(_) => {
                connection.host_end_of_file();
                connection.host_stopped_reading();
            }
        }
    }
    connection.next_control(false)
}
