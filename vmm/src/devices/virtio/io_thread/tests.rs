//! Tests of the I/O thread with a device that tells what it was called for.

use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::super::{ActivateError, Activation, QueuePosition};
use super::*;
use crate::devices::{OwnState, StateError};

#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Queue(usize),
    Host,
}

/// A device that tells the test what it was called for.
struct Probe {
    host: EventFd,
    seen: Sender<Seen>,
}

impl VirtioDevice for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }
    fn device_id(&self) -> u32 {
        42
    }
    fn features(&self) -> u64 {
        0
    }
    fn queue_sizes(&self) -> &[u16] {
        &[16, 16]
    }
    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    fn activate(&mut self, _activation: Activation) -> Result<(), ActivateError> {
        Ok(())
    }
    fn reset(&mut self) {}
    fn queue_positions(&self) -> Option<Vec<QueuePosition>> {
        None
    }
    fn save(&self) -> Result<OwnState, StateError> {
        OwnState::encode("probe", 1, &())
    }
    fn restore(&mut self, _: &OwnState, _: Option<Activation>) -> Result<(), StateError> {
        Ok(())
    }
    fn queue_event(&mut self, index: usize) {
        self.seen.send(Seen::Queue(index)).unwrap();
    }
    fn host_fd(&self) -> Option<RawFd> {
        Some(self.host.as_raw_fd())
    }
    fn host_event(&mut self) {
        self.host.read().unwrap();
        self.seen.send(Seen::Host).unwrap();
    }
}

struct Fixture {
    kicks: Vec<Arc<EventFd>>,
    host: EventFd,
    device: Arc<Mutex<dyn VirtioDevice>>,
    seen: Receiver<Seen>,
    thread: IoThread,
}

fn fixture() -> Fixture {
    let (sender, seen) = channel();
    let host = EventFd::new(EFD_NONBLOCK).unwrap();
    let device: Arc<Mutex<dyn VirtioDevice>> =
        Arc::new(Mutex::new(Probe { host: host.try_clone().unwrap(), seen: sender }));
    let kicks: Vec<_> = (0..2).map(|_| Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())).collect();
    let queue_events = kicks.clone();
    let source = Source { device: Arc::clone(&device), queue_events };
    let thread = IoThread::spawn("test-io", vec![source]).unwrap();
    Fixture { kicks, host, device, seen, thread }
}

#[test]
fn a_kick_reaches_its_queue() {
    let fixture = fixture();
    fixture.kicks[1].write(1).unwrap();
    assert_eq!(fixture.seen.recv().unwrap(), Seen::Queue(1));
}

#[test]
fn the_host_descriptor_reaches_the_device() {
    let fixture = fixture();
    fixture.host.write(1).unwrap();
    assert_eq!(fixture.seen.recv().unwrap(), Seen::Host);
}

#[test]
fn a_taken_lock_keeps_the_device_quiet_and_loses_no_kick() {
    let fixture = fixture();
    let guard = fixture.device.lock().unwrap();
    fixture.kicks[0].write(1).unwrap();
    assert!(fixture.seen.try_recv().is_err());
    drop(guard);
    assert_eq!(fixture.seen.recv().unwrap(), Seen::Queue(0));
}

#[test]
fn a_paused_thread_keeps_kicks_for_later() {
    let fixture = fixture();
    fixture.thread.pause();
    fixture.kicks[0].write(1).unwrap();
    fixture.host.write(1).unwrap();
    assert!(fixture.seen.try_recv().is_err());
    fixture.thread.resume();
    let mut seen = [fixture.seen.recv().unwrap(), fixture.seen.recv().unwrap()];
    seen.sort_by_key(|event| matches!(event, Seen::Host));
    assert_eq!(seen, [Seen::Queue(0), Seen::Host]);
}

#[test]
fn a_paused_thread_can_be_dropped() {
    let fixture = fixture();
    fixture.thread.pause();
    drop(fixture.thread);
}

#[test]
fn dropping_joins_and_lets_go_of_the_device() {
    let fixture = fixture();
    let device = Arc::downgrade(&fixture.device);
    drop(fixture.thread);
    drop(fixture.device);
    assert!(device.upgrade().is_none());
}

#[test]
fn a_descriptor_given_twice_is_refused() {
    let (seen, _receiver) = channel();
    let host = EventFd::new(EFD_NONBLOCK).unwrap();
    let device: Arc<Mutex<dyn VirtioDevice>> = Arc::new(Mutex::new(Probe { host, seen }));
    let sources =
        (0..2).map(|_| Source { device: Arc::clone(&device), queue_events: Vec::new() }).collect();
    assert!(matches!(IoThread::spawn("test-io", sources), Err(IoThreadError::Watch { .. })));
}
