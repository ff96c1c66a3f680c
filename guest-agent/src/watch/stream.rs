//! The stream of a watched directory's events to one client.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use coppice_agent_protocol::filesystem::WatchDirResponse;
use coppice_agent_protocol::{Code, ConnectError, envelope};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

use super::{Watch, Watches};
use crate::files::{Progress, Scope};

/// Bytes of events collected at once.
const CHUNK: usize = 32 * 1024;

/// Collected chunks that wait for a slow client.
const QUEUE: usize = 2;

/// Events of a directory, as frames: start, then events and keepalives, until the client leaves,
/// its time is over or the watch fails.
#[derive(Debug)]
pub(crate) struct WatchStream {
    /// The start message, until it was sent.
    start: Option<Bytes>,
    frames: mpsc::Receiver<Result<Bytes, ConnectError>>,
    keepalive: Duration,
    idle: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
    closed: bool,
}

impl Watches {
    /// Watches a directory for as long as the stream lives, and at most for `timeout`.
    pub(crate) async fn stream(
        &self,
        scope: Scope,
        timeout: Option<Duration>,
        keepalive: Duration,
    ) -> Result<WatchStream, ConnectError> {
        let watch = self.open(scope).await?;
        let (sender, frames) = mpsc::channel(QUEUE);
        tokio::task::spawn_local(send(watch, sender));
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Ok(WatchStream {
            start: Some(frame(WatchDirResponse::Start).into()),
            frames,
            keepalive,
            idle: Box::pin(tokio::time::sleep(keepalive)),
            deadline: deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline))),
            closed: false,
        })
    }
}

/// Sends on what is collected. A slow client makes this wait, and events wait in the kernel.
async fn send(watch: Watch, sender: mpsc::Sender<Result<Bytes, ConnectError>>) {
    let watch = Rc::new(watch);
    loop {
        let progress = tokio::select! {
            progress = watch.next(CHUNK) => progress,
            () = sender.closed() => return,
        };
        let (events, failure) = watch.take();
        let frames: Vec<u8> = events
            .into_iter()
            .flat_map(|event| frame(WatchDirResponse::Filesystem(event)))
            .collect();
        if !frames.is_empty() && sender.send(Ok(frames.into())).await.is_err() {
            return;
        }
        if progress == Progress::Failed {
            let lost = || ConnectError::new(Code::Internal, "the watch ended");
            // A client that left needs no reason.
            let _ = sender.send(Err(failure.unwrap_or_else(lost))).await;
            return;
        }
    }
}

impl WatchStream {
    /// The next frames; `None` after the last.
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if let Some(start) = self.start.take() {
            return Poll::Ready(Some(start));
        }
        if self.closed {
            return Poll::Ready(None);
        }
        match self.frames.poll_recv(cx) {
            Poll::Ready(Some(Ok(frames))) => {
                self.reset_idle();
                return Poll::Ready(Some(frames));
            }
            Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(self.close(Some(error)))),
            Poll::Ready(None) => return Poll::Ready(Some(self.close(None))),
            Poll::Pending => {}
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            let message = "the call's time (connect-timeout-ms) is over";
            let error = ConnectError::new(Code::DeadlineExceeded, message);
            return Poll::Ready(Some(self.close(Some(error))));
        }
        if self.idle.as_mut().poll(cx).is_ready() {
            self.reset_idle();
            // The new timer has not been polled; ask to be.
            cx.waker().wake_by_ref();
            return Poll::Ready(Some(frame(WatchDirResponse::Keepalive).into()));
        }
        Poll::Pending
    }

    fn reset_idle(&mut self) {
        if let Some(next) = Instant::now().checked_add(self.keepalive) {
            self.idle.as_mut().reset(next);
        }
    }

    fn close(&mut self, error: Option<ConnectError>) -> Bytes {
        self.closed = true;
        self.frames.close();
        envelope::encode_end(error).into()
    }
}

fn frame(message: WatchDirResponse) -> Vec<u8> {
    envelope::encode_message(&message).unwrap_or_default()
}
