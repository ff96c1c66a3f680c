//! The serial console: a 16550 UART (COM1) between the guest and two host descriptors.
//!
//! **Output** is written at once, byte by byte as the guest sends it, and never stalls a vCPU:
//! what the reader does not take is buffered up to [`OUTPUT_BUFFER`] bytes; beyond that bytes are
//! dropped and counted, and a line that says how many follows when the reader catches up.
//!
//! **Input** is not lost: bytes are read from the host only when the guest listens (receive
//! interrupt enabled) and the UART's FIFO has room, so that the pipe or terminal holds the rest.
//! The vCPU that empties the FIFO refills it.
//!
//! Both descriptors are watched through one epoll descriptor, [`Serial::host_fd`]. They are
//! edge-triggered inside it, so that input the guest does not want yet wakes nobody.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use vm_superio::serial::NoEvents;
use vm_superio::{Serial as Uart, Trigger};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::devices::BusDevice;

use output::Output;

mod output;
mod panic_tail;
mod state;
mod sys;
#[cfg(test)]
mod tests;

/// Register offsets and bits (16550 data sheet) that decide whether the guest listens.
const DATA: u8 = 0;
const INTERRUPT_ENABLE: u8 = 1;
const LINE_CONTROL: u8 = 3;
const MODEM_CONTROL: u8 = 4;
const RECEIVE_INTERRUPT: u8 = 1 << 0;
const DIVISOR_ACCESS: u8 = 1 << 7;
const LOOPBACK: u8 = 1 << 4;

/// Bytes of the UART's receive FIFO; never more are read from the host at once.
const FIFO: usize = 64;

const INPUT_TOKEN: u64 = 0;
const OUTPUT_TOKEN: u64 = 1;

/// The UART's interrupt line, an irqfd.
#[derive(Debug, Clone)]
struct Line(Arc<EventFd>);

impl Trigger for Line {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        // A full counter means that the interrupt is pending already.
        let _ = self.0.write(1);
        Ok(())
    }
}

/// The host's side of the receive path.
#[derive(Debug)]
struct Input {
    file: File,
    /// Whether bytes may be waiting in `file`: set by an event, cleared by an empty read.
    ready: bool,
    /// Whether epoll watches it. Plain files cannot be watched and are always ready.
    watched: bool,
}

/// The serial console.
#[derive(Debug)]
pub struct Serial {
    uart: Uart<Line, NoEvents, Output>,
    input: Option<Input>,
    epoll: Epoll,
}

impl Serial {
    /// Number of consecutive ports, from [`crate::memory::layout::SERIAL_PORT`] on.
    pub const PORTS: u16 = 8;

    /// Makes the console. `line` is the irqfd of [`crate::memory::layout::SERIAL_GSI`].
    ///
    /// The flags of the descriptors are left as they are, since other processes may share them.
    ///
    /// # Errors
    /// When the process is out of descriptors or one of those given is not open.
    pub fn new(
        line: Arc<EventFd>,
        input: Option<OwnedFd>,
        output: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        if let Some(fd) = &output {
            watch(&epoll, fd.as_raw_fd(), EventSet::OUT, OUTPUT_TOKEN)?;
        }
        let input = match input {
            Some(fd) => {
                let watched = watch(&epoll, fd.as_raw_fd(), EventSet::IN, INPUT_TOKEN)?;
                Some(Input { file: File::from(fd), ready: !watched, watched })
            }
            None => None,
        };
        let output = Output::new(output)?;
        Ok(Self { uart: Uart::new(Line(line), output), input, epoll })
    }

    /// The descriptor that is readable when [`Serial::host_event`] has work.
    pub fn host_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// The input has bytes, or the output takes bytes again.
    pub fn host_event(&mut self) {
        let mut events = [EpollEvent::default(); 2];
        // No event, or an interrupted call: the descriptor stays readable if there is work.
        let count = self.epoll.wait(0, &mut events).unwrap_or(0);
        for event in events.iter().take(count) {
            match event.data() {
                INPUT_TOKEN => {
                    if let Some(input) = &mut self.input {
                        input.ready = true;
                    }
                    self.refill();
                }
                _ => self.uart.writer_mut().drain(),
            }
        }
    }

    /// The reason the kernel gave for a panic, if its announcement was seen in the output.
    pub fn panic_text(&self) -> Option<String> {
        self.uart.writer().panic_text()
    }

    /// Bytes of output dropped so far because the reader was too slow.
    pub fn dropped(&self) -> u64 {
        self.uart.writer().dropped()
    }

    /// Whether the guest wants input now. None of these reads changes the UART's state.
    fn listens(&mut self) -> bool {
        self.uart.read(LINE_CONTROL) & DIVISOR_ACCESS == 0
            && self.uart.read(INTERRUPT_ENABLE) & RECEIVE_INTERRUPT != 0
            && self.uart.read(MODEM_CONTROL) & LOOPBACK == 0
    }

    /// Moves input to the FIFO, if there is any, the guest wants it and there is room.
    fn refill(&mut self) {
        while self.input.as_ref().is_some_and(|input| input.ready) && self.listens() {
            let room = self.uart.fifo_capacity().min(FIFO);
            let mut bytes = [0u8; FIFO];
            let Some(room) = bytes.get_mut(..room).filter(|room| !room.is_empty()) else {
                return;
            };
            match self.input.as_mut().map_or(Ok(None), |input| input.read(room)) {
                Ok(Some(0)) | Err(_) => self.close_input(),
                Ok(None) => return,
                // It takes all: there is room and the loopback is off.
                Ok(Some(count)) => {
                    let _ = self.uart.enqueue_raw_bytes(room.get(..count).unwrap_or_default());
                }
            }
        }
    }

    fn close_input(&mut self) {
        if let Some(input) = self.input.take().filter(|input| input.watched) {
            // Taken out by hand: epoll would go on watching it through other open copies.
            let event = EpollEvent::default();
            let _ = self.epoll.ctl(ControlOperation::Delete, input.file.as_raw_fd(), event);
        }
    }
}

impl Input {
    /// Reads without waiting; `None` when nothing is there now.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        // Asked first because the descriptor may be one whose reads wait.
        if !sys::is_ready(self.file.as_fd(), libc::POLLIN)? {
            // A later arrival is a new edge.
            self.ready = false;
            return Ok(None);
        }
        match self.file.read(buffer) {
            Ok(count) => Ok(Some(count)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.ready = false;
                Ok(None)
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Watches `fd`; false when it is a kind that is always ready (a plain file).
fn watch(epoll: &Epoll, fd: RawFd, events: EventSet, token: u64) -> io::Result<bool> {
    let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, token);
    match epoll.ctl(ControlOperation::Add, fd, event) {
        Ok(()) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => Ok(false),
        Err(e) => Err(e),
    }
}

impl BusDevice for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (Ok(register), [value]) = (u8::try_from(offset), data) {
            *value = self.uart.read(register);
            if register == DATA && self.uart.fifo_capacity() == FIFO {
                self.refill();
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let (Ok(register), [value]) = (u8::try_from(offset), data) {
            // Neither the output nor the interrupt line ever fails.
            let _ = self.uart.write(register, *value);
            if matches!(register, INTERRUPT_ENABLE | LINE_CONTROL | MODEM_CONTROL) {
                self.refill();
            }
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
