//! One connection at a time: handshakes, data, and every way to an end.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};

use super::driver::{Guest, PATIENCE, packet, reply};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::vsock::connection::BUFFER_SIZE;
use crate::devices::virtio::vsock::packet::{
    Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND,
};

const PORT: u32 = 1024;

fn line(client: &mut UnixStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.last() != Some(&b'\n') && client.read(&mut byte).unwrap() == 1 {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

/// A connection that a host client opened; the header is that of the request.
fn open() -> (Guest, UnixStream, Header) {
    let mut guest = Guest::new();
    let mut client = guest.client(PORT);
    let request = guest.expect(Op::Request);
    guest.send(reply(Op::Response, &request), &[]);
    assert_eq!(line(&mut client), format!("OK {}\n", request.src_port));
    (guest, client, request)
}

fn data(request: &Header, payload: &[u8]) -> Header {
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
