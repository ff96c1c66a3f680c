//! The console's way out: straight to the descriptor, through a bounded buffer when that is full.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};

use super::panic_tail::PanicTail;
use super::sys;

/// Most bytes held for a slow reader.
pub(super) const OUTPUT_BUFFER: usize = 64 * 1024;
/// Most bytes written at once to a descriptor whose writes may wait: readiness of a pipe or
/// socket promises at least this much room.
const PIPE_CHUNK: usize = 4096;

/// Where the bytes go.
#[derive(Debug)]
struct Sink {
    file: File,
    /// Most bytes that can be written without waiting once the descriptor is ready.
    chunk: usize,
    /// Whether readiness must be asked for, because a write might wait.
    ask: bool,
}

/// The guest's output.
#[derive(Debug)]
pub(super) struct Output {
    sink: Option<Sink>,
    pending: VecDeque<u8>,
    dropped: u64,
    /// Dropped bytes that the reader was not told of yet.
    untold: u64,
    tail: PanicTail,
}

impl Output {
    /// Output to `fd`, or to nowhere.
    pub(super) fn new(fd: Option<OwnedFd>) -> io::Result<Self> {
        let sink = match fd {
            Some(fd) => {
                let ask = !sys::is_nonblocking(fd.as_fd())?;
                let file = File::from(fd);
                // A ready terminal promises room for one byte only.
                let chunk = if !ask {
                    OUTPUT_BUFFER
                } else if file.is_terminal() {
                    1
                } else {
                    PIPE_CHUNK
                };
                Some(Sink { file, chunk, ask })
            }
            None => None,
        };
        let tail = PanicTail::default();
        Ok(Self { sink, pending: VecDeque::new(), dropped: 0, untold: 0, tail })
    }

    /// Takes bytes from the guest.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.tail.push(*byte));
        let Some(sink) = &mut self.sink else { return };
        let mut rest = bytes;
        if self.pending.is_empty() {
            match sink.write(bytes) {
                Ok(written) => rest = bytes.get(written..).unwrap_or_default(),
                Err(_) => {
                    self.close();
                    return;
                }
            }
        }
        let room = OUTPUT_BUFFER.saturating_sub(self.pending.len());
        let (kept, lost) = rest.split_at(rest.len().min(room));
        self.pending.extend(kept);
        let lost = u64::try_from(lost.len()).unwrap_or(u64::MAX);
        self.dropped = self.dropped.saturating_add(lost);
        self.untold = self.untold.saturating_add(lost);
    }

    /// The descriptor takes bytes again.
    pub(super) fn drain(&mut self) {
        while let Some(sink) = &mut self.sink {
            if self.pending.is_empty() {
                if self.untold == 0 {
                    // Bursts are rare: give the memory back.
                    self.pending = VecDeque::new();
                    return;
                }
                let note = format!("\r\n[{} bytes of console output lost]\r\n", self.untold);
                self.untold = 0;
                self.pending.extend(note.as_bytes());
            }
            match sink.write(self.pending.as_slices().0) {
                Ok(0) => return,
                Ok(written) => drop(self.pending.drain(..written)),
                Err(_) => self.close(),
            }
        }
    }

    /// Forgets what the guest said of a panic; what waits for the reader stays.
    pub(super) fn forget_panic(&mut self) {
        self.tail = PanicTail::default();
    }

    pub(super) fn panic_text(&self) -> Option<String> {
        self.tail.text()
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The reader is gone: the guest's console goes on without it.
    fn close(&mut self) {
        self.sink = None;
        self.pending = VecDeque::new();
    }
}

impl Sink {
    /// Writes what can be written without waiting.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.ask && !sys::is_ready(self.file.as_fd(), libc::POLLOUT)? {
            return Ok(0);
        }
        let chunk = bytes.get(..self.chunk).unwrap_or(bytes);
        match self.file.write(chunk) {
            Ok(written) => Ok(written),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(0),
            // It will be tried again with the next byte or the next event.
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(e) => Err(e),
        }
    }
}
