//! Bodies of responses.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::sync::mpsc;

use crate::process::ProcessStream;
use crate::watch::WatchStream;

/// A response's body.
#[derive(Debug)]
pub(crate) enum Body {
    /// Known bytes.
    Full(Bytes),
    /// The events of a process.
    Process(Box<ProcessStream>),
    /// The events of a directory.
    Watch(Box<WatchStream>),
    /// Pieces of a file, with its length when that is known.
    File(mpsc::Receiver<io::Result<Bytes>>, Option<u64>),
}

impl Body {
    /// No bytes.
    pub(crate) const EMPTY: Self = Self::Full(Bytes::new());
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let next = match self.get_mut() {
            Self::Full(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Full(bytes) => Poll::Ready(Some(Ok(std::mem::take(bytes)))),
            Self::Process(stream) => stream.poll_frame(cx).map(|frame| frame.map(Ok)),
            Self::Watch(stream) => stream.poll_frame(cx).map(|frame| frame.map(Ok)),
            Self::File(pieces, _) => pieces.poll_recv(cx),
        };
        next.map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Full(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.len().try_into().unwrap_or(u64::MAX)),
            Self::File(_, Some(len)) => SizeHint::with_exact(*len),
            Self::Process(_) | Self::Watch(_) | Self::File(_, None) => SizeHint::default(),
        }
    }
}
