//! A machine's console on a pipe.

use std::io::{PipeReader, Read as _};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{Doing as _, Error};

/// How much of the console an error shows.
const SHOWN: usize = 2000;

/// The reading end.
#[derive(Debug)]
pub(super) struct Console {
    pipe: PipeReader,
    seen: Vec<u8>,
}

impl Console {
    pub(super) fn new(pipe: PipeReader) -> Self {
        Self { pipe, seen: Vec::new() }
    }

    /// Reads until the console said `token`.
    pub(super) fn wait_for(&mut self, token: &str, limit: Duration) -> Result<(), Error> {
        let started = Instant::now();
        let mut piece = [0; 4096];
        loop {
            let left = limit.checked_sub(started.elapsed()).filter(|left| !left.is_zero());
            if left.is_none_or(|left| !readable(&self.pipe, left).unwrap_or(true)) {
                return Err(Error::Late(format!(
                    "the machine's init did not run within {} s; its console said:\n{}",
                    limit.as_secs(),
                    self.tail()
                )));
            }
            let count = self.pipe.read(&mut piece).doing("reading the console")?;
            self.seen.extend_from_slice(piece.get(..count).unwrap_or_default());
            if self.seen.windows(token.len()).any(|window| window == token.as_bytes()) {
                return Ok(());
            }
            if count == 0 {
                return Err(Error::Ended { console: self.tail() });
            }
        }
    }

    fn tail(&self) -> String {
        let from = self.seen.len().saturating_sub(SHOWN);
        String::from_utf8_lossy(self.seen.get(from..).unwrap_or_default()).into_owned()
    }
}

/// Waits until a descriptor can be read; whether that was within the limit.
pub(super) fn readable(fd: &impl AsFd, limit: Duration) -> Result<bool, Error> {
    let limit =
        Timespec::try_from(limit).map_err(|_| Error::Missing("the limit is too long".into()))?;
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    loop {
        match poll(&mut fds, Some(&limit)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).doing("waiting for a descriptor"),
        }
    }
}
