//! `GET /files`: reads a file.
//!
//! File systems may block (a guest can mount anything), so they are only touched on helper threads.
//! A file is read in chunks as fast as the client takes them.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use tokio::sync::mpsc;

use super::query::parameter;
use super::{HttpError, headers};
use crate::agent::Agent;
use crate::body::Body;
use crate::settings::Settings;
use crate::users::{User, UserError};

/// Bytes read at once. Files up to this size take one read.
const CHUNK: usize = 64 * 1024;

/// The user a request about a file acts as: the one of its query, or else of its authorization.
pub(super) fn user_of<B>(agent: &Agent, request: &Request<B>) -> Result<User, HttpError> {
    let settings = agent.settings.borrow();
    let Some(name) = parameter(request.uri(), "username").filter(|name| !name.is_empty()) else {
        return headers::user(&settings, request.headers())
            .map_err(|error| HttpError::new(StatusCode::UNAUTHORIZED, error.message));
    };
    named(&settings, &name)
}

/// The user of that name; without a name, the default user.
pub(super) fn named(settings: &Settings, name: &str) -> Result<User, HttpError> {
    settings.user(Some(name)).map_err(|error| {
        let status = match error {
            UserError::Unknown(_) => StatusCode::UNAUTHORIZED,
            UserError::Read { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        HttpError::new(status, error.to_string())
    })
}

/// Answers a download.
pub(super) async fn download<B>(
    agent: &Agent,
    request: &Request<B>,
) -> Result<Response<Body>, HttpError> {
    let user = user_of(agent, request)?;
    let path = user.resolve(&parameter(request.uri(), "path").unwrap_or_default());
    let body = match blocking(move || Opened::new(&path)).await? {
        Opened { file: None, first, .. } => Body::Full(first),
        Opened { file: Some(file), first, len } => {
            let (sender, receiver) = mpsc::channel(1);
            let rest = len.map(|len| len.saturating_sub(first.len().try_into().unwrap_or(len)));
            tokio::task::spawn_local(async move {
                if sender.send(Ok(first)).await.is_ok() {
                    send_rest(file, rest, &sender).await;
                }
            });
            Body::File(receiver, len)
        }
    };
    let mut response = Response::new(body);
    let content_type = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    Ok(response)
}

/// Runs `work` on a helper thread.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HttpError> + Send + 'static,
) -> Result<T, HttpError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, "the agent failed on this file"))
    })
}

/// A file with its first bytes.
struct Opened {
    /// The file, unless the first bytes are all.
    file: Option<File>,
    first: Bytes,
    /// Length of the whole file, when it says so.
    len: Option<u64>,
}

impl Opened {
    fn new(path: &Path) -> Result<Self, HttpError> {
        let mut file = open_regular(path)?;
        let len = file.metadata().map_err(|error| read_error(path, &error))?.len();
        let (first, ended) =
            read_full(&mut file, CHUNK).map_err(|error| read_error(path, &error))?;
        // Files of the kernel have a length of 0, or one that is not theirs.
        let (file, len) = match (ended, len) {
            (true, _) => (None, None),
            (false, 0) => (Some(file), None),
            (false, len) => (Some(file), Some(len)),
        };
        Ok(Self { file, first, len })
    }
}

pub(super) fn open_regular(path: &Path) -> Result<File, HttpError> {
    // Without O_NONBLOCK a FIFO would hold the thread until someone writes.
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            let message = format!("path '{}' does not exist", path.display());
            HttpError::new(StatusCode::NOT_FOUND, message)
        }
        _ => read_error(path, &error),
    })?;
    let kind = file.metadata().map_err(|error| read_error(path, &error))?.file_type();
    let problem = match kind {
        kind if kind.is_file() => return Ok(file),
        kind if kind.is_dir() => "is a directory",
        _ => "is not a regular file",
    };
    let message = format!("path '{}' {problem}", path.display());
    Err(HttpError::new(StatusCode::BAD_REQUEST, message))
}

fn read_error(path: &Path, error: &io::Error) -> HttpError {
    let message = match error.kind() {
        io::ErrorKind::InvalidInput => {
            let message = format!("path '{}' is not a path", path.display());
            return HttpError::new(StatusCode::BAD_REQUEST, message);
        }
        _ => format!("reading '{}': {error}", path.display()),
    };
    HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
}

/// Reads until `size` bytes are there or the file ends; whether it ended.
fn read_full(file: &mut File, size: usize) -> io::Result<(Bytes, bool)> {
    let mut buffer = Vec::with_capacity(size);
    let limit = u64::try_from(size).unwrap_or(u64::MAX);
    let got = file.by_ref().take(limit).read_to_end(&mut buffer)?;
    Ok((buffer.into(), got < size))
}

/// Sends `rest` bytes of the file, or all when the length is not known.
async fn send_rest(file: File, rest: Option<u64>, sender: &mpsc::Sender<io::Result<Bytes>>) {
    let mut file = file;
    let mut rest = rest.unwrap_or(u64::MAX);
    while rest > 0 {
        let size = usize::try_from(rest).unwrap_or(usize::MAX).min(CHUNK);
        let read = tokio::task::spawn_blocking(move || {
            let piece = read_full(&mut file, size);
            (file, piece)
        });
        let (piece, ended) = match read.await {
            Ok((back, Ok(piece))) => {
                file = back;
                piece
            }
            Ok((_, Err(error))) => return drop(sender.send(Err(error)).await),
            Err(_) => return drop(sender.send(Err(io::ErrorKind::Other.into())).await),
        };
        rest = rest.saturating_sub(piece.len().try_into().unwrap_or(rest));
        if !piece.is_empty() && sender.send(Ok(piece)).await.is_err() {
            return;
        }
        if ended {
            // When this is short of the announced length, the connection is cut: the client must
            // not take the file for whole.
            return;
        }
    }
}

/// The absolute path a request means by its `path` parameter, if it has one.
pub(super) fn path_of<B>(request: &Request<B>, user: &User) -> Option<PathBuf> {
    parameter(request.uri(), "path").map(|path| user.resolve(&path))
}
