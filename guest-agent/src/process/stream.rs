//! The stream of one process' events to one client.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use coppice_agent_protocol::process::{EndEvent, ProcessEvent, StartEvent, StreamResponse};
use coppice_agent_protocol::{Code, ConnectError, envelope};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

use super::{Process, Processes};

/// Frames that wait for a slow client, per stream. With [`super::pump`]'s chunks this bounds a
/// stream to under 200 KiB.
const QUEUE: usize = 4;

/// How a client wants to watch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watch {
    /// Time without an event after which a keepalive is sent.
    pub(crate) keepalive: Duration,
}

/// Events of a process, as frames: start, then data and keepalives, then end.
#[derive(Debug)]
pub(crate) struct ProcessStream {
    process: Rc<Process>,
    /// The start event, until it was sent.
    start: Option<Bytes>,
    frames: mpsc::Receiver<Bytes>,
    keepalive: Duration,
    idle: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
    /// Whether the deadline is the process' own.
    owner: bool,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Flowing,
    /// The end event was sent, the last frame is due.
    Ended,
    Closed,
}

impl Process {
    pub(super) fn has_subscribers(&self) -> bool {
        !self.subscribers.borrow().is_empty()
    }

    /// Hands `frame` to every subscriber, waiting for the slow ones and forgetting those that left.
    pub(super) async fn publish(&self, frame: Bytes) {
        let mut index = 0;
        loop {
            let Some(subscriber) = self.subscribers.borrow().get(index).cloned() else { return };
            if subscriber.send(frame.clone()).await.is_ok() {
                index += 1;
                continue;
            }
            let mut subscribers = self.subscribers.borrow_mut();
            subscribers.retain(|other| !other.same_channel(&subscriber));
        }
    }

    /// Ends all streams and closes what belongs to the process.
    pub(super) async fn finish(&self) {
        self.ended.set(true);
        // The streams see their channels close and add the end event by themselves.
        self.subscribers.borrow_mut().clear();
        self.terminal.borrow_mut().take();
        self.stdin.lock().await.take();
    }

    fn subscribe(&self) -> mpsc::Receiver<Bytes> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        if !self.ended.get() {
            let mut subscribers = self.subscribers.borrow_mut();
            // A silent process never publishes, so those that left are forgotten here.
            subscribers.retain(|other| !other.is_closed());
            subscribers.push(sender);
        }
        receiver
    }
}

impl Processes {
    /// Streams a process' events from now on; of an ended process, its end.
    pub(crate) fn connect(
        process: &Rc<Process>,
        timeout: Option<Duration>,
        watch: Watch,
    ) -> ProcessStream {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        ProcessStream { owner: false, ..ProcessStream::new(process, watch, deadline) }
    }
}

impl ProcessStream {
    /// The stream of a process just started, whose deadline is the process' own.
    pub(super) fn new(process: &Rc<Process>, watch: Watch, deadline: Option<Instant>) -> Self {
        let start = ProcessEvent::Start(StartEvent { pid: process.pid() });
        Self {
            process: Rc::clone(process),
            start: Some(frame(start)),
            frames: process.subscribe(),
            keepalive: watch.keepalive,
            idle: Box::pin(tokio::time::sleep(watch.keepalive)),
            deadline: deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline))),
            owner: true,
            state: State::Flowing,
        }
    }

    /// The next frame; `None` after the last.
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if let Some(start) = self.start.take() {
            return Poll::Ready(Some(start));
        }
        match self.state {
            State::Flowing => self.poll_event(cx).map(Some),
            State::Ended => Poll::Ready(Some(self.close(None))),
            State::Closed => Poll::Ready(None),
        }
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Bytes> {
        match self.frames.poll_recv(cx) {
            Poll::Ready(Some(frame)) => {
                self.reset_idle();
                return Poll::Ready(frame);
            }
            Poll::Ready(None) if self.owner && self.process.timed_out.get() => {
                return Poll::Ready(self.close(Some(deadline_exceeded())));
            }
            Poll::Ready(None) => {
                self.state = State::Ended;
                let end = self.process.exit.get().cloned();
                return Poll::Ready(frame(ProcessEvent::End(end.unwrap_or_else(lost))));
            }
            Poll::Pending => {}
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(self.close(Some(deadline_exceeded())));
        }
        if self.idle.as_mut().poll(cx).is_ready() {
            self.reset_idle();
            // The new timer has not been polled; ask to be.
            cx.waker().wake_by_ref();
            return Poll::Ready(frame(ProcessEvent::Keepalive));
        }
        Poll::Pending
    }

    fn reset_idle(&mut self) {
        if let Some(next) = Instant::now().checked_add(self.keepalive) {
            self.idle.as_mut().reset(next);
        }
    }

    fn close(&mut self, error: Option<ConnectError>) -> Bytes {
        self.state = State::Closed;
        self.frames.close();
        envelope::encode_end(error).into()
    }
}

fn frame(event: ProcessEvent) -> Bytes {
    envelope::encode_message(&StreamResponse { event }).unwrap_or_default().into()
}

fn deadline_exceeded() -> ConnectError {
    ConnectError::new(Code::DeadlineExceeded, "the call's time (connect-timeout-ms) is over")
}

/// The end of a process whose status is not known, which cannot happen while all children are
/// reaped by the table; the stream still ends in order.
fn lost() -> EndEvent {
    let status = "exit status unknown".to_owned();
    EndEvent { exit_code: -1, exited: false, error: Some(status.clone()), status }
}
