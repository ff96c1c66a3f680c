//! The guest's serial console as the manager sees it: only its end is kept, to say why a boot
//! failed. It is read at once, always, so that the VMM never waits for us.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::{OpenOptions, Receiver};
use tokio::task::JoinHandle;

/// How much of the console's end is kept, in bytes.
const CONSOLE_TAIL: usize = 64 * 1024;

/// Reads the console and keeps its end.
#[derive(Debug)]
pub(super) struct Console {
    tail: Arc<Mutex<Tail>>,
    reader: Option<JoinHandle<()>>,
}

impl Console {
    /// Makes a pipe, starts to read it, and returns the end the guest's output goes to.
    pub(super) fn open() -> io::Result<(Self, OwnedFd)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok((Self::read(Receiver::from_owned_fd(read)?), write))
    }

    /// Starts to read a FIFO, which the guest's output goes to.
    pub(super) fn of_fifo(path: &Path) -> io::Result<Self> {
        Ok(Self::read(OpenOptions::new().open_receiver(path)?))
    }

    fn read(mut pipe: Receiver) -> Self {
        let tail = Arc::new(Mutex::new(Tail::default()));
        let shared = Arc::clone(&tail);
        let reader = tokio::spawn(async move {
            let mut chunk = [0u8; 2048];
            while let Ok(count @ 1..) = pipe.read(&mut chunk).await {
                lock(&shared).push(chunk.get(..count).unwrap_or_default());
            }
        });
        Self { tail, reader: Some(reader) }
    }

    /// The last of what the guest wrote, as text.
    pub(super) fn tail(&self) -> String {
        String::from_utf8_lossy(&lock(&self.tail).bytes).into_owned()
    }

    /// The same once the writer is gone and all it wrote was read.
    pub(super) async fn rest(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            // The task ends by itself; it cannot fail.
            let _ = reader.await;
        }
        self.tail()
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Some(reader) = &self.reader {
            reader.abort();
        }
    }
}

fn lock(tail: &Mutex<Tail>) -> MutexGuard<'_, Tail> {
    tail.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The last [`CONSOLE_TAIL`] bytes pushed.
#[derive(Debug, Default)]
struct Tail {
    bytes: Vec<u8>,
}

impl Tail {
    fn push(&mut self, chunk: &[u8]) {
        self.bytes.extend_from_slice(chunk);
        self.bytes.drain(..self.bytes.len().saturating_sub(CONSOLE_TAIL));
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;

    #[tokio::test]
    async fn the_end_of_a_long_output_is_kept() {
        let (mut console, write) = Console::open().unwrap();
        let writer = tokio::task::spawn_blocking(move || {
            rustix::io::ioctl_fionbio(&write, false).unwrap();
            let mut file = File::from(write);
            for n in 0..20_000 {
                writeln!(file, "line {n}").unwrap();
            }
        });
        let rest = console.rest().await;
        writer.await.unwrap();
        assert_eq!(rest.len(), CONSOLE_TAIL);
        assert!(rest.ends_with("line 19998\nline 19999\n"));
    }
}
