//! Credit and back pressure: nothing is lost, and nothing piles up.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use super::driver::{Guest, QUEUE_SIZE, packet, reply};
use super::single::{data, open};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::vsock::connection::BUFFER_SIZE;
use crate::devices::virtio::vsock::packet::{Header, Op};

const RX: usize = 0;

/// Bytes that differ from their neighbours, so that a slip shows.
fn pattern(start: usize, len: usize) -> Vec<u8> {
    (start..start + len).map(|at| u8::try_from((at * 31 + at / 251) % 256).unwrap()).collect()
}

/// Sends to the client within credit until it runs out; returns the bytes sent.
fn send_all_credit(guest: &mut Guest, request: &Header) -> usize {
    let (mut sent, mut forwarded) = (0, 0);
    loop {
        let credit = usize::try_from(BUFFER_SIZE).unwrap() - (sent - forwarded);
        let chunk = credit.min(10_000);
        if chunk == 0 {
            return sent;
        }
        let payload = pattern(sent, chunk);
        guest.send(data(request, &payload), &payload);
        sent += chunk;
        while let Some((header, _)) = guest.receive() {
            assert_eq!(Op::from_wire(header.op), Some(Op::CreditUpdate));
            forwarded = usize::try_from(header.fwd_cnt).unwrap();
        }
    }
}

#[test]
fn a_slow_reader_costs_a_bounded_buffer_and_loses_nothing() {
    let (mut guest, mut client, request) = open();
    let sent = send_all_credit(&mut guest, &request);
    let held = guest.device.buffered();
    let bound = usize::try_from(BUFFER_SIZE).unwrap();
    assert!(held > 0 && held <= bound, "{held} bytes held for a slow reader");

    let mut received = vec![0; sent];
    let mut count = 0;
    while count < sent {
        count += client.read(&mut received[count..]).unwrap();
        guest.settle();
    }
    assert!(received == pattern(0, sent), "bytes changed on the way");
    assert_eq!(guest.device.buffered(), 0, "memory stays behind a reader that has caught up");
    let mut last = None;
    while let Some((header, _)) = guest.receive() {
        last = Some(header.fwd_cnt);
    }
    assert_eq!(last, u32::try_from(sent).ok(), "the guest does not hear that all credit is back");
}

#[test]
fn a_client_gets_buffered_bytes_after_the_guest_has_closed() {
    let (mut guest, mut client, request) = open();
    let sent = send_all_credit(&mut guest, &request);
    guest.send(Header { flags: 3, ..reply(Op::Shutdown, &request) }, &[]);
    guest.expect(Op::Reset);
    let mut received = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let count = client.read(&mut piece).unwrap();
        if count == 0 {
            break;
        }
        received.extend_from_slice(&piece[..count]);
        guest.settle();
    }
    assert!(received == pattern(0, sent), "bytes changed on the way");
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_guest_that_sends_more_than_its_credit_is_reset() {
    let (mut guest, _client, request) = open();
    send_all_credit(&mut guest, &request);
    let payload = pattern(0, usize::try_from(BUFFER_SIZE).unwrap());
    guest.send(data(&request, &payload), &payload);
    guest.expect(Op::Reset);
}

#[test]
fn the_guest_is_sent_no_more_than_its_window() {
    let (mut guest, mut client, request) = open();
    let window = 5000;
    let credit = |forwarded| Header {
        buf_alloc: window,
        fwd_cnt: forwarded,
        ..reply(Op::CreditUpdate, &request)
    };
    guest.send(credit(0), &[]);
    client.write_all(&pattern(0, 12_000)).unwrap();
    let mut received = guest.expect_data(5000);
    guest.expect(Op::CreditRequest);
    guest.settle();
    assert!(guest.receive().is_none(), "the guest gets more than it has room for");
    guest.send(credit(5000), &[]);
    received.extend(guest.expect_data(5000));
    guest.expect(Op::CreditRequest);
    guest.send(credit(10_000), &[]);
    received.extend(guest.expect_data(2000));
    assert!(received == pattern(0, 12_000));
}

#[test]
fn a_credit_request_is_answered() {
    let (mut guest, _client, request) = open();
    guest.send(data(&request, b"four"), b"four");
    guest.send(reply(Op::CreditRequest, &request), &[]);
    let update = guest.expect(Op::CreditUpdate);
    assert_eq!((update.buf_alloc, update.fwd_cnt), (BUFFER_SIZE, 4));
}

/// Gives so much credit that it is of no concern.
fn widen(guest: &mut Guest, request: &Header) {
    guest.send(Header { buf_alloc: 1 << 30, ..reply(Op::CreditUpdate, request) }, &[]);
}

/// Writes until neither the socket nor the guest's buffers take any more. Returns how much they
/// took, the buffers' numbers and what they hold of this client.
fn fill(guest: &mut Guest, client: &mut UnixStream) -> (usize, Vec<u16>, Vec<u8>) {
    client.set_nonblocking(true).unwrap();
    let (mut total, mut kept, mut received) = (0, Vec::new(), Vec::new());
    loop {
        match client.write(&pattern(total, 4096)) {
            Ok(count) => total += count,
            Err(error) if kept.len() == usize::from(QUEUE_SIZE) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                return (total, kept, received);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        guest.settle();
        while let Some((head, (_, payload))) = guest.receive_keeping_buffer() {
            kept.push(head);
            received.extend(payload);
        }
    }
}

#[test]
fn without_receive_buffers_the_client_is_stopped_and_later_loses_nothing() {
    let (mut guest, mut client, request) = open();
    widen(&mut guest, &request);
    let (written, kept, mut received) = fill(&mut guest, &mut client);
    assert_eq!(guest.device.buffered(), 0);
    for head in kept {
        guest.offer_rx(head);
    }
    guest.device.queue_event(RX);
    while received.len() < written {
        received.extend(guest.expect_packet().1);
    }
    assert!(received == pattern(0, written), "bytes changed on the way");
}

#[test]
fn a_busy_client_does_not_keep_others_from_the_guest() {
    let (mut guest, mut busy, first) = open();
    let mut quiet = guest.client(2);
    let second = guest.expect(Op::Request);
    guest.send(reply(Op::Response, &second), &[]);
    widen(&mut guest, &first);
    let (_, mut kept, _) = fill(&mut guest, &mut busy);
    quiet.write_all(b"now me").unwrap();
    guest.settle();
    // Two buffers serve two connections, however much one of them has to say.
    let mut senders = Vec::new();
    for head in kept.drain(..2) {
        guest.offer_rx(head);
        guest.device.queue_event(RX);
        senders.push(guest.receive_keeping_buffer().unwrap().1.0.src_port);
    }
    senders.sort_unstable();
    let mut expected = [first.src_port, second.src_port];
    expected.sort_unstable();
    assert_eq!(senders, expected);
}

#[test]
fn packets_wait_while_too_many_refusals_are_owed() {
    let mut guest = Guest::without_buffers();
    let mut sent = 0;
    while guest.send_unchecked(packet(Op::Data, sent, 1), &[]) {
        sent += 1;
        assert!(sent < 1000, "refusals pile up without a bound");
    }
    guest.offer_buffers();
    for port in 0..=sent {
        assert_eq!(guest.expect(Op::Reset).dst_port, port);
    }
    assert!(guest.receive().is_none());
}
