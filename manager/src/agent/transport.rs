//! HTTP/1.1 over a guest's vsock: one connection per stream, one kept for short calls.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use base64::Engine as _;
use bytes::Bytes;
use coppice_agent_protocol::{Code, ConnectError};
use http::{HeaderValue, Request, Response, StatusCode, request};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::{Body as HttpBody, Frame, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::{CALL_TIMEOUT, Error};
use crate::trace;

/// Longest body of an answer that is read as a whole.
const MAX_ANSWER: usize = 1 << 20;
/// Longest line with which a vsock socket confirms a connection: `OK 4294967295\n`.
const MAX_CONFIRMATION: usize = 14;
/// Size of the pieces in which an upload is read.
const UPLOAD_PIECE: usize = 64 * 1024;

/// Header with the token of a guest that wants one.
const ACCESS_TOKEN: &str = "x-access-token";

/// Body of a request.
pub(super) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Where a service of the agent is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A port of a guest, by way of the Unix socket of its vsock device: the client writes
    /// `CONNECT <port>\n` and is answered `OK <number>\n`.
    Vsock {
        /// The socket.
        socket: PathBuf,
        /// The guest's port.
        port: u32,
    },
    /// A Unix socket that speaks HTTP itself.
    Unix(PathBuf),
}

impl Endpoint {
    /// Opens a byte stream to the service.
    ///
    /// # Errors
    /// [`Error::Connect`] when the socket is not there, [`Error::PortClosed`] when nothing in
    /// the guest listens.
    pub async fn connect(&self) -> Result<UnixStream, Error> {
        match self {
            Self::Unix(path) => UnixStream::connect(path).await.map_err(Error::Connect),
            Self::Vsock { socket, port } => {
                let mut stream = UnixStream::connect(socket).await.map_err(Error::Connect)?;
                let line = format!("CONNECT {port}\n");
                stream.write_all(line.as_bytes()).await.map_err(Error::Connect)?;
                confirm(&mut stream, *port).await?;
                Ok(stream)
            }
        }
    }
}

/// Reads the confirmation byte by byte: what follows it belongs to the stream.
async fn confirm(stream: &mut UnixStream, port: u32) -> Result<(), Error> {
    let mut line = Vec::with_capacity(MAX_CONFIRMATION);
    while line.last() != Some(&b'\n') {
        if line.len() == MAX_CONFIRMATION {
            return Err(Error::Protocol("no confirmation from the vsock socket".into()));
        }
        match stream.read_u8().await {
            Ok(byte) => line.push(byte),
            Err(_) => return Err(Error::PortClosed(port)),
        }
    }
    if line.starts_with(b"OK ") {
        Ok(())
    } else {
        Err(Error::Protocol("no confirmation from the vsock socket".into()))
    }
}

/// One service, with at most one idle connection to it.
#[derive(Debug)]
pub(super) struct Client {
    endpoint: Endpoint,
    /// Sent with every request.
    token: Option<HeaderValue>,
    idle: Mutex<Option<SendRequest<Body>>>,
}

impl Client {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, token: None, idle: Mutex::new(None) }
    }

    /// Where it is.
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Has every request carry this token; one that cannot be in a header is none.
    pub(super) fn set_token(&mut self, token: Option<String>) {
        self.token = token.and_then(|token| HeaderValue::try_from(token).ok());
    }

    fn signed(&self, mut request: Request<Body>) -> Request<Body> {
        if let Some(id) = trace::current() {
            request.headers_mut().insert(trace::HEADER, id);
        }
        if let Some(token) = &self.token {
            request.headers_mut().insert(ACCESS_TOKEN, token.clone());
        }
        request
    }

    /// Makes a call whose answer is short, within [`CALL_TIMEOUT`].
    pub(super) async fn call(&self, request: Request<Body>) -> Result<(StatusCode, Bytes), Error> {
        let answer = timeout(CALL_TIMEOUT, self.call_patiently(request)).await;
        answer.map_err(|_| Error::Silent(CALL_TIMEOUT))?
    }

    /// Makes a call whose answer is short but may wait for a process.
    pub(super) async fn call_patiently(
        &self,
        request: Request<Body>,
    ) -> Result<(StatusCode, Bytes), Error> {
        let request = self.signed(request);
        let mut kept = self.idle.lock().await.take();
        if let Some(sender) = &mut kept
            && sender.ready().await.is_err()
        {
            kept = None;
        }
        let (mut sender, response) = match kept {
            None => self.send_fresh(request).await?,
            Some(mut sender) => match sender.try_send_request(request).await {
                Ok(response) => (sender, response),
                // The agent closed the idle connection before the request was sent.
                Err(mut error) => match error.take_message() {
                    Some(request) => self.send_fresh(request).await?,
                    None => return Err(Error::Http(error.into_error())),
                },
            },
        };
        let status = response.status();
        let body = whole(response.into_body()).await?;
        if sender.ready().await.is_ok() {
            *self.idle.lock().await = Some(sender);
        }
        Ok((status, body))
    }

    /// Makes a call whose request or answer is a stream, on a connection of its own; gives the
    /// answer once the agent has agreed.
    pub(super) async fn open(&self, request: Request<Body>) -> Result<Incoming, Error> {
        let (_sender, response) = self.send_fresh(self.signed(request)).await?;
        match response.status() {
            StatusCode::OK => Ok(response.into_body()),
            status => Err(refused(status, &whole(response.into_body()).await?)),
        }
    }

    async fn send_fresh(
        &self,
        request: Request<Body>,
    ) -> Result<(SendRequest<Body>, Response<Incoming>), Error> {
        let stream = self.endpoint.connect().await?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(Error::Http)?;
        // Its failures surface in the calls that use it.
        tokio::spawn(async move { drop(connection.await) });
        let response = sender.send_request(request).await.map_err(Error::Http)?;
        Ok((sender, response))
    }
}

/// Starts a request; `user` is the guest user it runs as, the agent's default when absent.
pub(super) fn request(method: &str, uri: &str, user: Option<&str>) -> request::Builder {
    let builder = Request::builder().method(method).uri(uri).header("host", "localhost");
    match user {
        Some(user) => {
            let token = base64::engine::general_purpose::STANDARD.encode(format!("{user}:"));
            builder.header("authorization", format!("Basic {token}"))
        }
        None => builder,
    }
}

/// A body without content.
pub(super) fn empty() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// A body of these bytes.
pub(super) fn bytes(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A body that is read, piece by piece, as fast as the peer takes it.
pub(super) fn read_from(reader: impl AsyncRead + Send + Unpin + 'static) -> Body {
    ReaderBody { reader, buffer: vec![0; UPLOAD_PIECE] }.boxed_unsync()
}

/// Reads a body of at most [`MAX_ANSWER`] bytes.
pub(super) async fn whole(body: Incoming) -> Result<Bytes, Error> {
    match Limited::new(body, MAX_ANSWER).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) => match error.downcast::<hyper::Error>() {
            Ok(error) => Err(Error::Http(*error)),
            Err(_) => Err(Error::Protocol(format!("an answer of over {MAX_ANSWER} bytes"))),
        },
    }
}

/// Accepts one status; turns any other into the agent's own error.
pub(super) fn check(status: StatusCode, body: &[u8], wanted: StatusCode) -> Result<(), Error> {
    if status == wanted { Ok(()) } else { Err(refused(status, body)) }
}

/// The error that an unwanted status and its body stand for.
fn refused(status: StatusCode, body: &[u8]) -> Error {
    if status.is_success() {
        return Error::Protocol(format!("status {status}"));
    }
    Error::Refused(refusal(status, body))
}

/// The error in a body; the HTTP routes put a number into `code`, the Connect ones a name.
fn refusal(status: StatusCode, body: &[u8]) -> ConnectError {
    if let Ok(error) = serde_json::from_slice::<ConnectError>(body) {
        return error;
    }
    let by_status = Code::ALL.into_iter().find(|code| code.http_status() == status.as_u16());
    let message = serde_json::from_slice::<serde_json::Value>(body)
        .ok()
        .and_then(|value| Some(value.get("message")?.as_str()?.to_owned()));
    let message = message.unwrap_or_else(|| format!("status {status}"));
    ConnectError::new(by_status.unwrap_or(Code::Unknown), message)
}

struct ReaderBody<R> {
    reader: R,
    buffer: Vec<u8>,
}

impl<R: AsyncRead + Unpin> HttpBody for ReaderBody<R> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let Self { reader, buffer } = &mut *self;
        let mut piece = ReadBuf::new(buffer);
        match ready!(Pin::new(reader).poll_read(context, &mut piece)) {
            Err(error) => Poll::Ready(Some(Err(error))),
            Ok(()) if piece.filled().is_empty() => Poll::Ready(None),
            Ok(()) => Poll::Ready(Some(Ok(Frame::data(Bytes::copy_from_slice(piece.filled()))))),
        }
    }
}
