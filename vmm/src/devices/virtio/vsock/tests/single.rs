//! One connection at a time: handshakes, data, and every way to an end.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};

use super::driver::{Guest, PATIENCE, packet, reply};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::vsock::packet::{
    Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND,
};
use crate::devices::virtio::vsock::{LIMITS, Limits};
use crate::sys::vsock as sys;

const PORT: u32 = 1024;

pub(super) fn line(client: &mut UnixStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.last() != Some(&b'\n') && client.read(&mut byte).unwrap() == 1 {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

/// A connection that a host client opened; the header is that of the request.
pub(super) fn open() -> (Guest, UnixStream, Header) {
    let mut guest = Guest::new();
    let mut client = guest.client(PORT);
    let request = guest.expect(Op::Request);
    guest.send(reply(Op::Response, &request), &[]);
    assert_eq!(line(&mut client), format!("OK {}\n", request.src_port));
    (guest, client, request)
}

pub(super) fn data(request: &Header, payload: &[u8]) -> Header {
    Header { len: u32::try_from(payload.len()).unwrap(), ..reply(Op::Data, request) }
}

fn read_to_end(client: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_host_client_reaches_a_guest_port_and_data_goes_both_ways() {
    let (mut guest, mut client, request) = open();
    assert_eq!(request.dst_port, PORT);
    client.write_all(b"ping").unwrap();
    assert_eq!(guest.expect_data(4), b"ping");
    guest.send(data(&request, b"pong"), b"pong");
    let mut answer = [0; 4];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"pong");
}

fn shutdown(request: &Header, flags: u32) -> Header {
    Header { flags, ..reply(Op::Shutdown, request) }
}

/// The guest program closes, as Linux does it; the device confirms.
fn close_from_guest(guest: &mut Guest, request: &Header) {
    guest.send(shutdown(request, SHUTDOWN_BOTH), &[]);
    guest.expect(Op::Reset);
}

pub(super) fn assert_refused(client: &mut UnixStream) {
    match client.read(&mut [0]) {
        Ok(count) => assert_eq!(count, 0, "the connection is not refused"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
}

#[test]
fn data_sent_right_behind_the_command_arrives() {
    let mut guest = Guest::new();
    let mut client = UnixStream::connect(guest.path("vsock")).unwrap();
    client.write_all(b"CONNECT 7\nearly").unwrap();
    let request = guest.expect(Op::Request);
    guest.send(reply(Op::Response, &request), &[]);
    assert_eq!(guest.expect_data(5), b"early");
}

#[test]
fn a_command_may_come_in_pieces() {
    let mut guest = Guest::new();
    let mut client = UnixStream::connect(guest.path("vsock")).unwrap();
    for piece in ["CON", "NECT ", "10", "24", "\n"] {
        guest.settle();
        client.write_all(piece.as_bytes()).unwrap();
    }
    assert_eq!(guest.expect(Op::Request).dst_port, 1024);
}

#[test]
fn a_port_without_a_listener_in_the_guest_ends_the_client() {
    let mut guest = Guest::new();
    let mut client = guest.client(PORT);
    let request = guest.expect(Op::Request);
    guest.send(reply(Op::Reset, &request), &[]);
    assert_refused(&mut client);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_malformed_command_ends_the_client() {
    let mut guest = Guest::new();
    let mut client = UnixStream::connect(guest.path("vsock")).unwrap();
    client.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    guest.settle();
    assert_refused(&mut client);
    assert!(guest.receive().is_none());
}

#[test]
fn without_a_driver_a_client_is_turned_away() {
    let mut guest = Guest::without_driver();
    let mut client = guest.client(PORT);
    assert_refused(&mut client);
}

#[test]
fn clients_beyond_the_limit_are_turned_away_and_room_is_found_again() {
    let mut guest = Guest::with_limits(Limits { connections: 2, ..LIMITS });
    guest.activate();
    guest.offer_buffers();
    let first = guest.client(1);
    let _second = guest.client(2);
    assert_refused(&mut guest.client(3));
    guest.expect(Op::Request);
    guest.expect(Op::Request);
    drop(first);
    guest.expect(Op::Reset);
    let _third = guest.client(3);
    assert_eq!(guest.expect(Op::Request).dst_port, 3);
}

#[test]
fn a_guest_program_reaches_a_host_socket() {
    let mut guest = Guest::new();
    let listener = UnixListener::bind(guest.path("vsock_5000")).unwrap();
    guest.send(packet(Op::Request, 99, 5000), &[]);
    let response = guest.expect(Op::Response);
    assert_eq!((response.src_port, response.dst_port), (5000, 99));
    let (mut server, _) = listener.accept().unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    guest.send(data(&response, b"hello"), b"hello");
    let mut bytes = [0; 5];
    server.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    server.write_all(b"welcome").unwrap();
    assert_eq!(guest.expect_data(7), b"welcome");
}

#[test]
fn a_guest_program_is_refused_where_no_host_socket_exists() {
    let mut guest = Guest::new();
    guest.send(packet(Op::Request, 99, 5000), &[]);
    let reset = guest.expect(Op::Reset);
    assert_eq!((reset.src_port, reset.dst_port), (5000, 99));
}

#[test]
fn a_guest_program_is_refused_where_nobody_listens_any_more() {
    let mut guest = Guest::new();
    drop(UnixListener::bind(guest.path("vsock_5000")).unwrap());
    guest.send(packet(Op::Request, 99, 5000), &[]);
    guest.expect(Op::Reset);
}

#[test]
fn a_guest_program_is_refused_when_the_backlog_is_full() {
    let mut guest = Guest::new();
    let path = guest.path("vsock_5000");
    let _listener = UnixListener::bind(&path).unwrap();
    let mut waiting = Vec::new();
    let full = loop {
        match sys::connect(&path) {
            Ok(socket) => waiting.push(socket),
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    guest.send(packet(Op::Request, 99, 5000), &[]);
    guest.expect(Op::Reset);
}

#[test]
fn the_guest_may_have_only_its_share_of_the_connections() {
    let mut guest = Guest::with_limits(Limits { guest_connections: 3, ..LIMITS });
    guest.activate();
    guest.offer_buffers();
    let _listener = UnixListener::bind(guest.path("vsock_5000")).unwrap();
    for port in 0..3 {
        guest.send(packet(Op::Request, port, 5000), &[]);
        guest.expect(Op::Response);
    }
    guest.send(packet(Op::Request, 3, 5000), &[]);
    guest.expect(Op::Reset);
    let _client = guest.client(PORT);
    guest.expect(Op::Request);
}

#[test]
fn a_client_that_stops_writing_can_still_read() {
    let (mut guest, mut client, request) = open();
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(guest.expect_data(8), b"question");
    assert_eq!(guest.expect(Op::Shutdown).flags, SHUTDOWN_SEND);
    guest.send(data(&request, b"answer"), b"answer");
    close_from_guest(&mut guest, &request);
    assert_eq!(read_to_end(&mut client), b"answer");
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_guest_program_that_stops_writing_can_still_read() {
    let (mut guest, mut client, request) = open();
    guest.send(data(&request, b"answer"), b"answer");
    guest.send(shutdown(&request, SHUTDOWN_SEND), &[]);
    assert_eq!(read_to_end(&mut client), b"answer");
    client.write_all(b"more").unwrap();
    assert_eq!(guest.expect_data(4), b"more");
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(guest.expect(Op::Shutdown).flags, SHUTDOWN_BOTH);
    guest.send(reply(Op::Reset, &request), &[]);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_guest_program_that_stops_reading_stops_the_client() {
    let (mut guest, mut client, request) = open();
    guest.send(shutdown(&request, SHUTDOWN_RECEIVE), &[]);
    assert_eq!(client.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    guest.send(data(&request, b"still"), b"still");
    guest.send(shutdown(&request, SHUTDOWN_SEND), &[]);
    guest.expect(Op::Reset);
    assert_eq!(read_to_end(&mut client), b"still");
}

#[test]
fn a_client_that_stops_reading_stops_the_guest_program() {
    let (mut guest, mut client, request) = open();
    client.shutdown(Shutdown::Read).unwrap();
    guest.send(data(&request, b"lost"), b"lost");
    assert_eq!(guest.expect(Op::Shutdown).flags, SHUTDOWN_RECEIVE);
    client.write_all(b"kept").unwrap();
    assert_eq!(guest.expect_data(4), b"kept");
}

#[test]
fn the_guest_gets_what_a_client_sent_before_it_vanished() {
    let (mut guest, mut client, request) = open();
    client.write_all(b"last words").unwrap();
    drop(client);
    let mut received = Vec::new();
    loop {
        let (header, payload) = guest.expect_packet();
        if header.flags & SHUTDOWN_SEND != 0 {
            break;
        }
        received.extend(payload);
    }
    assert_eq!(received, b"last words");
    guest.send(reply(Op::Reset, &request), &[]);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_client_that_vanishes_before_its_command_leaves_nothing() {
    let mut guest = Guest::new();
    drop(UnixStream::connect(guest.path("vsock")).unwrap());
    guest.settle();
    assert_eq!(guest.device.connections(), 0);
    assert!(guest.receive().is_none());
}

#[test]
fn a_client_that_vanishes_before_the_guest_heard_of_it_is_never_mentioned() {
    let mut guest = Guest::without_buffers();
    let client = guest.client(PORT);
    drop(client);
    guest.settle();
    guest.offer_buffers();
    assert!(guest.receive().is_none());
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_client_that_vanishes_before_the_answer_is_reset_in_the_guest() {
    let mut guest = Guest::new();
    let client = guest.client(PORT);
    let request = guest.expect(Op::Request);
    drop(client);
    guest.expect(Op::Reset);
    guest.send(reply(Op::Response, &request), &[]);
    guest.expect(Op::Reset);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_reset_by_the_guest_delivers_what_it_sent_before() {
    let (mut guest, mut client, request) = open();
    guest.send(data(&request, b"so far"), b"so far");
    guest.send(reply(Op::Reset, &request), &[]);
    assert_eq!(read_to_end(&mut client), b"so far");
    assert!(guest.receive().is_none());
}

#[test]
fn a_driver_that_goes_away_ends_its_streams_and_can_come_back() {
    let (mut guest, mut client, _) = open();
    guest.device.reset();
    assert_eq!(read_to_end(&mut client), b"");
    guest.clear_rings();
    guest.activate();
    guest.offer_buffers();
    let _client = guest.client(PORT);
    guest.expect(Op::Request);
}
