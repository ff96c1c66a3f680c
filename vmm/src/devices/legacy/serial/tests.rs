//! The console as a driver and a terminal see it, with real sockets and files at its ends.

mod state;

use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use vmm_sys_util::eventfd::EFD_NONBLOCK;

use super::output::OUTPUT_BUFFER;
use super::*;

struct Console {
    serial: Serial,
    line: Arc<EventFd>,
    /// Where the guest's input is written.
    keyboard: Option<UnixStream>,
    /// Where the guest's output is read.
    screen: UnixStream,
}

fn console() -> Console {
    let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let (keyboard, input) = UnixStream::pair().unwrap();
    let (screen, output) = UnixStream::pair().unwrap();
    screen.set_nonblocking(true).unwrap();
    let serial = Serial::new(Arc::clone(&line), Some(input.into()), Some(output.into())).unwrap();
    Console { serial, line, keyboard: Some(keyboard), screen }
}

impl Console {
    fn type_in(&mut self, bytes: &[u8]) {
        self.keyboard.as_mut().unwrap().write_all(bytes).unwrap();
        self.serial.host_event();
    }

    fn put(&mut self, register: u8, value: u8) {
        self.serial.write(u64::from(register), &[value]);
    }

    fn get(&mut self, register: u8) -> u8 {
        let mut value = [0];
        self.serial.read(u64::from(register), &mut value);
        value[0]
    }

    fn listen(&mut self) {
        self.put(INTERRUPT_ENABLE, RECEIVE_INTERRUPT);
    }

    /// Reads what a driver would: while the line status says that data is ready.
    fn receive(&mut self) -> Vec<u8> {
        let mut got = Vec::new();
        while self.get(5) & 1 != 0 {
            got.push(self.get(DATA));
        }
        got
    }

    fn shown(&mut self) -> Vec<u8> {
        let mut got = Vec::new();
        let _ = self.screen.read_to_end(&mut got);
        got
    }
}

#[test]
fn output_appears_at_once() {
    let mut console = console();
    b"login: ".iter().for_each(|byte| console.put(DATA, *byte));
    assert_eq!(console.shown(), b"login: ");
}

#[test]
fn output_to_nowhere_is_accepted() {
    let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let mut serial = Serial::new(line, None, None).unwrap();
    serial.write(0, b"x");
    assert_eq!(serial.dropped(), 0);
}

#[test]
fn input_waits_until_the_guest_listens() {
    let mut console = console();
    console.type_in(b"early");
    assert_eq!(console.receive(), b"");
    console.listen();
    assert_eq!(console.receive(), b"early");
}

#[test]
fn input_raises_the_interrupt() {
    let mut console = console();
    console.listen();
    let _ = console.line.read();
    console.type_in(b"x");
    assert!(console.line.read().is_ok());
}

#[test]
fn input_is_not_mixed_into_a_loopback_test() {
    let mut console = console();
    console.put(MODEM_CONTROL, LOOPBACK);
    console.listen();
    console.type_in(b"typed");
    console.put(DATA, b'!');
    assert_eq!(console.receive(), b"!");
    console.put(MODEM_CONTROL, 0);
    assert_eq!(console.receive(), b"typed");
}

#[test]
fn the_end_of_input_closes_only_the_input() {
    let mut console = console();
    console.listen();
    console.type_in(b"bye");
    console.keyboard = None;
    console.serial.host_event();
    assert_eq!(console.receive(), b"bye");
    assert!(console.serial.input.is_none());
    console.put(DATA, b'.');
    assert_eq!(console.shown(), b".");
}

#[test]
fn unwanted_input_wakes_nobody_twice() {
    let mut console = console();
    console.type_in(b"nobody listens");
    let owner = Epoll::new().unwrap();
    let event = EpollEvent::new(EventSet::IN, 0);
    owner.ctl(ControlOperation::Add, console.serial.host_fd(), event).unwrap();
    assert_eq!(owner.wait(0, &mut [EpollEvent::default()]).unwrap(), 0);
}

#[test]
fn a_plain_file_can_be_input_and_output() {
    let mut typed = tempfile::tempfile().unwrap();
    typed.write_all(&[b'a'; 200]).unwrap();
    std::io::Seek::rewind(&mut typed).unwrap();
    let shown = tempfile::NamedTempFile::new().unwrap();
    let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let output = shown.as_file().try_clone().unwrap();
    let serial = Serial::new(Arc::clone(&line), Some(typed.into()), Some(output.into())).unwrap();
    let (screen, _other) = UnixStream::pair().unwrap();
    let mut console = Console { serial, line, keyboard: None, screen };
    console.listen();
    assert_eq!(console.receive(), [b'a'; 200]);
    console.put(DATA, b'z');
    assert_eq!(std::fs::read(shown.path()).unwrap(), b"z");
}

#[test]
fn a_stuck_reader_stalls_nothing_and_is_told_what_it_missed() {
    let mut console = console();
    // Far more than a socket and the buffer hold together.
    let sent = 2 * 1024 * 1024u64;
    for _ in 0..sent {
        console.put(DATA, b'y');
    }
    let dropped = console.serial.dropped();
    assert!(dropped > 0);
    let mut shown = console.shown();
    loop {
        console.serial.host_event();
        let more = console.shown();
        if more.is_empty() {
            break;
        }
        shown.extend(more);
    }
    let text = String::from_utf8(shown).unwrap();
    assert_eq!(text.matches('y').count() as u64, sent - dropped + 1, "one in the word bytes");
    assert!(text.ends_with(&format!("\r\n[{dropped} bytes of console output lost]\r\n")));
}

#[test]
fn a_reader_that_went_away_is_forgotten() {
    let Console { mut serial, screen, .. } = console();
    drop(screen);
    for _ in 0..OUTPUT_BUFFER {
        serial.write(0, b"x");
    }
    assert_eq!(serial.dropped(), 0);
    assert!(serial.uart.writer().panic_text().is_none());
}

#[test]
fn a_panic_is_recognised_in_the_output() {
    let mut console = console();
    let text = b"\n[ 1.0] Kernel panic - not syncing: No working init found.\n";
    text.iter().for_each(|byte| console.put(DATA, *byte));
    assert_eq!(console.serial.panic_text().as_deref(), Some("No working init found."));
}

proptest! {
    #[test]
    fn no_byte_of_input_is_lost_or_reordered(
        pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..200), 1..20),
    ) {
        let mut console = console();
        console.listen();
        let mut got = Vec::new();
        for piece in &pieces {
            console.type_in(piece);
            // A driver that takes only some of what is there before the next piece comes.
            for _ in 0..piece.len() / 2 {
                if console.get(5) & 1 != 0 {
                    got.push(console.get(DATA));
                }
            }
        }
        got.extend(console.receive());
        prop_assert_eq!(got, pieces.concat());
    }

    #[test]
    fn any_accesses_are_survived(
        accesses in proptest::collection::vec(
            (any::<bool>(), 0..8u64, proptest::collection::vec(any::<u8>(), 1..=8)),
            0..200,
        ),
    ) {
        let mut console = console();
        console.type_in(b"some input");
        for (write, offset, mut data) in accesses {
            if write {
                console.serial.write(offset, &data);
            } else {
                console.serial.read(offset, &mut data);
            }
        }
    }
}
