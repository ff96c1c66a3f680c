//! Save and restore: the host loses its streams, the guest is told, and both begin anew.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use proptest::prelude::*;
use tempfile::TempDir;
use vm_memory::{Bytes as _, GuestAddress};

use super::super::super::testing::{check_hostile, edits};
use super::driver::{EVENT_BUFFERS, Guest, QUEUE_SIZE, packet, reply};
use super::single::{data, line, open};
use crate::devices::virtio::VirtioDevice as _;
use crate::devices::virtio::vsock::packet::Op;
use crate::devices::virtio::vsock::{Vsock, VsockConfig, VsockError};

const TX: usize = 1;
const EVENT: usize = 2;

fn device(directory: &TempDir, cid: u32) -> Vsock {
    let number = std::fs::read_dir(directory.path()).unwrap().count();
    let listener = UnixListener::bind(directory.path().join(number.to_string())).unwrap();
    let open = std::fs::File::open(directory.path()).unwrap();
    let config = VsockConfig { cid, listener, directory: OwnedFd::from(open), name: "v".into() };
    Vsock::new(config).unwrap()
}

fn assert_ended(client: &mut UnixStream) {
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
}

/// The guest is told of the reset; then a new stream works both ways.
fn expect_new_start(guest: &mut Guest) {
    let (head, event) = guest.take_event().expect("the guest hears of the reset");
    assert_eq!(event, 0);
    guest.offer_event(head);
    guest.device.queue_event(EVENT);
    let mut client = guest.client(9);
    let request = guest.expect(Op::Request);
    assert_eq!(request.dst_port, 9);
    guest.send(reply(Op::Response, &request), &[]);
    line(&mut client);
    client.write_all(b"ping").unwrap();
    assert_eq!(guest.expect_data(4), b"ping");
    guest.send(data(&request, b"pong"), b"pong");
    let mut answer = [0; 4];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"pong");
}

#[test]
fn a_saved_device_keeps_its_streams() {
    let (mut guest, mut client, request) = open();
    guest.save();
    client.write_all(b"still there").unwrap();
    assert_eq!(guest.expect_data(11), b"still there");
    guest.send(data(&request, b"yes"), b"yes");
    let mut answer = [0; 3];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"yes");
    assert!(guest.take_event().is_none());
}

#[test]
fn a_rolled_back_device_ends_streams_and_starts_anew() {
    let (mut guest, mut client, _) = open();
    let saved = guest.save();
    guest.restore(&saved);
    assert_ended(&mut client);
    assert!(guest.take_event().is_none(), "the guest runs before it is kicked");
    guest.device.queue_event(TX);
    expect_new_start(&mut guest);
}

#[test]
fn a_new_device_goes_on_with_the_guest_of_another() {
    let (mut guest, _client, _) = open();
    let saved = guest.save();
    let other = Guest::without_driver();
    guest.device = other.device;
    guest.directory = other.directory;
    guest.host = other.host;
    guest.restore(&saved);
    guest.device.queue_event(TX);
    expect_new_start(&mut guest);
}

#[test]
fn a_guest_that_gives_the_events_buffer_back_is_heard_at_once() {
    let (mut guest, _client, _) = open();
    guest.device.reset_streams();
    assert!(guest.take_event().is_some());
    let at = guest.event.used_ring() + 4 + 8 * u64::from(QUEUE_SIZE);
    let wanted: u16 = guest.ram.read_obj(GuestAddress(at)).unwrap();
    assert_eq!(wanted, guest.event.available(), "the next buffer brings no kick");
}

#[test]
fn a_guest_without_event_buffers_is_told_when_it_gives_one() {
    let (mut guest, _client, _) = open();
    for _ in 0..EVENT_BUFFERS {
        guest.device.reset_streams();
        guest.take_event().unwrap();
    }
    let saved = guest.save();
    guest.restore(&saved);
    guest.device.queue_event(TX);
    assert!(guest.take_event().is_none());
    guest.offer_event(0);
    guest.device.queue_event(EVENT);
    expect_new_start(&mut guest);
}

#[test]
fn packets_for_streams_of_before_are_refused() {
    let (mut guest, _client, request) = open();
    let saved = guest.save();
    guest.restore(&saved);
    guest.send(data(&request, b"lost"), b"lost");
    let (head, _) = guest.take_event().unwrap();
    guest.offer_event(head);
    guest.device.queue_event(EVENT);
    assert_eq!(guest.expect(Op::Reset).dst_port, request.dst_port);
}

#[test]
fn a_restore_leaves_guest_memory_alone() {
    let (mut guest, _client, _) = open();
    let content = |guest: &Guest| {
        let mut bytes = vec![0; 0xC000];
        guest.ram.read_slice(&mut bytes, GuestAddress(0x1000)).unwrap();
        bytes
    };
    let saved = guest.save();
    let before = content(&guest);
    guest.restore(&saved);
    assert!(content(&guest) == before);
}

#[test]
fn a_clone_can_have_an_address_of_its_own() {
    let (mut guest, _client, _) = open();
    let saved = guest.save();
    guest.restore(&saved);
    guest.device.set_cid(77).unwrap();
    let mut config = [0; 8];
    guest.device.read_config(0, &mut config);
    assert_eq!(u64::from_le_bytes(config), 77);
    // A packet with the address is answered, to that address.
    let mut refused = packet(Op::Request, 5, 6);
    refused.src_cid = 77;
    let (head, _) = {
        guest.send(refused, &[]);
        guest.take_event().unwrap()
    };
    guest.offer_event(head);
    guest.device.queue_event(EVENT);
    let (_, (header, _)) = guest.receive_for(77).expect("an answer");
    assert_eq!(Op::from_wire(header.op), Some(Op::Reset));
    assert!(matches!(guest.device.set_cid(2), Err(VsockError::Cid(2))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn hostile_state_is_survived(edits in edits()) {
        let directory = TempDir::new().unwrap();
        check_hostile(
            device(&directory, 3),
            |machine| machine.drivers[EVENT].offer(&[(0x8_0000, 4, true)]),
            &edits,
        );
    }
}
