//! Moves a process' output to its subscribers until it has ended.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bytes::Bytes;
use coppice_agent_protocol::process::{Output, encode_data};
use tokio::io::unix::AsyncFd;

use super::Process;
use crate::sys;

/// Most bytes taken from a pipe or terminal at once; half a pipe's capacity.
const CHUNK: usize = 32 * 1024;

/// How long a terminal may take to hang up once its session's leader has ended. The kernel does it
/// in the leader's exit; only a leader that gave its terminal away makes this bound matter.
const HANGUP_GRACE: std::time::Duration = std::time::Duration::from_millis(500);

thread_local! {
    /// One buffer for all processes: it is filled and emptied without an await in between.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; CHUNK]);
}

/// Something output comes from.
#[derive(Debug)]
pub(super) struct Source {
    kind: Output,
    fd: Rc<AsyncFd<OwnedFd>>,
}

/// One piece of output.
struct Chunk {
    /// Bytes it was read from.
    len: usize,
    /// The frame for subscribers; empty when there were none.
    frame: Bytes,
}

impl Source {
    /// The reading end of a pipe, or the controlling side of a terminal.
    pub(super) const fn new(kind: Output, fd: Rc<AsyncFd<OwnedFd>>) -> Self {
        Self { kind, fd }
    }

    /// Waits for output and takes `at_most` bytes of it. `None` at the end. Nothing is lost when
    /// the future is dropped.
    async fn next(&self, audience: &Process, at_most: usize) -> Option<Chunk> {
        loop {
            let mut guard = self.fd.readable().await.ok()?;
            let outcome = guard.try_io(|fd| {
                read_chunk(fd, at_most, |data| {
                    let watched = audience.has_subscribers();
                    let frame = if watched { encode_data(self.kind, data) } else { Vec::new() };
                    Chunk { len: data.len(), frame: frame.into() }
                })
            });
            match outcome {
                Ok(Ok(chunk)) => return chunk,
                // A terminal whose processes are gone reports EIO.
                Ok(Err(_)) => return None,
                Err(_would_block) => {}
            }
        }
    }
}

/// Reads once and hands what came to `use_it`. `None` at the end of the file.
fn read_chunk<T>(
    fd: &AsyncFd<OwnedFd>,
    at_most: usize,
    use_it: impl FnOnce(&[u8]) -> T,
) -> io::Result<Option<T>> {
    SCRATCH.with_borrow_mut(|buffer| {
        let len = buffer.len().min(at_most);
        let free = buffer.get_mut(..len).unwrap_or_default();
        let got = nix::unistd::read(fd.get_ref(), free)?;
        let data = free.get(..got).unwrap_or_default();
        Ok(if data.is_empty() { None } else { Some(use_it(data)) })
    })
}

/// All output of a process.
#[derive(Debug)]
pub(super) struct Outputs {
    sources: [Option<Source>; 2],
}

impl Outputs {
    pub(super) const fn new(sources: [Option<Source>; 2]) -> Self {
        Self { sources }
    }

    /// The next frame of either source; `None` when both have ended.
    async fn next(&mut self, audience: &Process) -> Option<Bytes> {
        loop {
            let (index, chunk) = match &self.sources {
                [Some(first), Some(second)] => tokio::select! {
                    chunk = first.next(audience, CHUNK) => (0, chunk),
                    chunk = second.next(audience, CHUNK) => (1, chunk),
                },
                [Some(only), None] => (0, only.next(audience, CHUNK).await),
                [None, Some(only)] => (1, only.next(audience, CHUNK).await),
                [None, None] => return None,
            };
            if let Some(chunk) = chunk {
                return Some(chunk.frame);
            }
            if let Some(source) = self.sources.get_mut(index) {
                *source = None;
            }
        }
    }

    /// Forwards what the pipes hold now: all that an ended process wrote is among it.
    async fn forward_pending(&self, process: &Process) {
        for source in self.sources.iter().flatten() {
            let mut pending = sys::pending_bytes(source.fd.get_ref()).unwrap_or(0);
            while pending > 0 {
                let Some(chunk) = source.next(process, pending).await else { break };
                pending = pending.saturating_sub(chunk.len);
                process.publish(chunk.frame).await;
            }
        }
    }
}

/// Runs until the process and all who hold its output have ended.
pub(super) async fn run(process: Rc<Process>, mut outputs: Outputs) {
    loop {
        tokio::select! {
            // Its exit first: what it left running may write for ever.
            biased;
            () = process.wait() => break,
            frame = outputs.next(&process) => match frame {
                Some(frame) => process.publish(frame).await,
                None => break,
            },
        }
    }
    process.wait().await;
    if process.has_terminal {
        let rest = async {
            while let Some(frame) = outputs.next(&process).await {
                process.publish(frame).await;
            }
        };
        let _ = tokio::time::timeout(HANGUP_GRACE, rest).await;
        process.finish().await;
        return;
    }
    outputs.forward_pending(&process).await;
    process.finish().await;
    // What the process left running may go on writing: closing its pipe would kill it.
    while outputs.next(&process).await.is_some() {}
}
