//! Deadlines, interrupts, the transport reset and the device's own registers.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::driver::{CID, EVENT_BUFFERS, Guest, PATIENCE, QUEUE_SIZE, packet, reply};
use super::single::{assert_refused, data, open};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::vsock::packet::{Header, Op, SHUTDOWN_SEND};
use crate::devices::virtio::vsock::{LIMITS, Limits, Vsock, VsockConfig, VsockError};

const EVENT: usize = 2;
const SOON: Duration = Duration::from_millis(20);

fn ready(limits: Limits) -> Guest {
    let mut guest = Guest::with_limits(limits);
    guest.activate();
    guest.offer_buffers();
    guest
}

#[test]
fn a_client_that_never_sends_its_command_is_turned_away_in_time() {
    let mut guest = ready(Limits { command: SOON, ..LIMITS });
    let mut client = UnixStream::connect(guest.path("vsock")).unwrap();
    let deadline = Instant::now() + PATIENCE;
    guest.host_work(deadline);
    assert_eq!(guest.device.connections(), 1);
    while guest.device.connections() > 0 {
        guest.host_work(deadline);
    }
    assert_refused(&mut client);
}

#[test]
fn a_guest_that_never_answers_a_request_is_told_and_the_client_turned_away() {
    let mut guest = ready(Limits { handshake: SOON, ..LIMITS });
    let mut client = guest.client(1);
    guest.expect(Op::Request);
    guest.expect(Op::Reset);
    assert_refused(&mut client);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_guest_that_never_confirms_the_end_is_reset() {
    let mut guest = ready(Limits { linger: SOON, ..LIMITS });
    let client = guest.client(1);
    let request = guest.expect(Op::Request);
    guest.send(reply(Op::Response, &request), &[]);
    drop(client);
    while guest.expect(Op::Shutdown).flags & SHUTDOWN_SEND == 0 {}
    guest.expect(Op::Reset);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn an_accepted_connection_outlives_the_handshake_deadline() {
    let mut guest = ready(Limits { handshake: SOON, linger: SOON, ..LIMITS });
    let _client = guest.client(1);
    let request = guest.expect(Op::Request);
    guest.send(reply(Op::Response, &request), &[]);
    // The other client's deadline is the later one.
    let _other = guest.client(2);
    guest.expect(Op::Request);
    assert_ne!(guest.expect(Op::Reset).src_port, request.src_port);
    assert_eq!(guest.device.connections(), 1);
}

#[test]
fn connections_that_come_and_go_unheard_leave_no_trace() {
    let mut guest = Guest::without_buffers();
    for round in 0..100 {
        drop(guest.client(round));
        guest.settle();
        assert_eq!((guest.device.connections(), guest.device.queued()), (0, 0));
    }
}

#[test]
fn a_transport_reset_ends_streams_and_new_ones_wait_until_the_guest_has_seen_it() {
    let (mut guest, mut client, request) = open();
    guest.device.reset_streams();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    let (head, event) = guest.take_event().expect("the guest hears of the reset");
    assert_eq!(event, 0);

    let _client = guest.client(7);
    assert!(guest.receive().is_none(), "a stream starts that the guest would close");
    guest.offer_event(head);
    guest.device.queue_event(EVENT);
    let renewed = guest.expect(Op::Request);
    assert_eq!(renewed.dst_port, 7);
    assert_ne!(renewed.src_port, request.src_port);
}

#[test]
fn a_transport_reset_waits_for_an_event_buffer() {
    let mut guest = Guest::without_buffers();
    guest.device.reset_streams();
    assert!(guest.take_event().is_none());
    guest.offer_buffers();
    guest.device.queue_event(EVENT);
    assert_eq!(guest.take_event().map(|(_, event)| event), Some(0));
    assert!(guest.take_event().is_none(), "one reset is told twice");
}

#[test]
fn a_driver_that_ignores_a_transport_reset_does_not_stop_new_streams() {
    let mut guest = Guest::new();
    guest.device.reset_streams();
    let _client = guest.client(7);
    // The wait for the event is bounded by a timer.
    guest.expect(Op::Request);
}

#[test]
fn a_listening_guest_port_works_after_many_transport_resets() {
    let mut guest = Guest::new();
    for round in 0..u32::from(EVENT_BUFFERS) * 3 {
        guest.device.reset_streams();
        let (head, _) = guest.take_event().unwrap();
        guest.offer_event(head);
        guest.device.queue_event(EVENT);
        let _client = guest.client(round);
        assert_eq!(guest.expect(Op::Request).dst_port, round);
    }
}

#[test]
fn the_driver_is_interrupted_only_when_it_asked() {
    let (mut guest, _client, request) = open();
    let _ = guest.line.read();
    let used_event = |ring: u64| GuestAddress(ring + 4 + u64::from(QUEUE_SIZE) * 2);
    let used_index = |guest: &Guest, ring: u64| -> u16 {
        guest.ram.load(GuestAddress(ring + 2), Ordering::Acquire).unwrap()
    };
    let (available, used) = (guest.tx.available_ring(), guest.tx.used_ring());
    let now = used_index(&guest, used);
    guest.ram.write_obj(now.wrapping_add(1), used_event(available)).unwrap();
    guest.send(data(&request, b"1"), b"1");
    assert!(guest.line.read().is_err(), "an interrupt that nobody asked for");
    guest.send(data(&request, b"2"), b"2");
    assert!(guest.line.read().is_ok(), "an interrupt that was asked for is missing");
}

#[test]
fn a_broken_ring_asks_for_a_reset_and_ends_streams() {
    let (mut guest, mut client, _) = open();
    let index = GuestAddress(guest.tx.available_ring() + 2);
    guest.ram.write_obj(0x7000_u16, index).unwrap();
    guest.device.queue_event(1);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    guest.device.queue_event(1);
    assert_refused(&mut guest.client(1));
}

#[test]
fn the_configuration_space_holds_the_cid() {
    let guest = Guest::without_driver();
    let mut config = [0xFF; 12];
    guest.device.read_config(0, &mut config);
    assert_eq!(config[..8], u64::from(CID).to_le_bytes());
    assert_eq!(config[8..], [0; 4]);
}

#[test]
fn reserved_cids_and_names_that_leave_the_directory_are_refused() {
    let make = |cid, name: &str| {
        let directory = tempfile::TempDir::new().unwrap();
        Vsock::new(VsockConfig {
            cid,
            listener: UnixListener::bind(directory.path().join("s")).unwrap(),
            directory: OwnedFd::from(std::fs::File::open(directory.path()).unwrap()),
            name: name.to_owned(),
        })
        .err()
    };
    assert!(make(3, "vsock").is_none());
    for cid in [0, 1, 2, u32::MAX] {
        assert!(matches!(make(cid, "vsock"), Some(VsockError::Cid(_))));
    }
    for name in ["", "a/b", "a\0b", &"x".repeat(65)] {
        assert!(matches!(make(3, name), Some(VsockError::Name(_))));
    }
}

#[test]
fn packets_for_other_addresses_and_kinds_are_refused_in_kind() {
    let mut guest = Guest::new();
    let request = packet(Op::Request, 5, 6);
    guest.send(Header { dst_cid: 77, ..request }, &[]);
    let reset = guest.expect(Op::Reset);
    assert_eq!((reset.src_cid, reset.src_port, reset.dst_port), (77, 6, 5));
    guest.send(Header { kind: 2, ..request }, &[]);
    assert_eq!(guest.expect(Op::Reset).kind, 2);
    guest.send(Header { src_cid: 77, ..request }, &[]);
    assert!(guest.receive().is_none());
}
