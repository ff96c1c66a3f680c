//! `POST /files`: writes files.
//!
//! Pieces of the body run through decompression and the form's reader straight into the file, on a
//! helper thread, so memory is constant whatever is sent. A file that exists is overwritten in
//! place: it keeps its inode, mode and links. A new file that does not arrive whole is removed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use flate2::write::MultiGzDecoder;
use http::{HeaderMap, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use nix::unistd::{Uid, fchown};
use serde::Serialize;

use super::HttpError;
use super::connect::{has_content_type, next_piece};
use super::files::{blocking, path_of, user_of};
use super::multipart::{Multipart, PartHeaders, Parts};
use crate::agent::Agent;
use crate::body::Body;
use crate::files::{Metadata, ensure_directories};
use crate::users::User;

/// How long a client may pause within an upload.
const IDLE: std::time::Duration = std::time::Duration::from_secs(120);

/// A file written, as the response lists it.
#[derive(Debug, Serialize)]
pub(super) struct Written {
    path: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl Written {
    pub(super) fn new(path: &Path, metadata: Metadata) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = path.to_string_lossy().into_owned();
        Self { path, name, kind: "file", metadata: metadata.into_map() }
    }
}

/// Answers an upload.
pub(super) async fn upload(
    agent: &Agent,
    request: Request<Incoming>,
) -> Result<Response<Body>, HttpError> {
    let user = user_of(agent, &request)?;
    let path = path_of(&request, &user);
    let (parts, mut body) = request.into_parts();
    let written = store(&parts.headers, user, path, &mut body).await;
    if written.is_err() {
        tokio::task::spawn_local(tokio::time::timeout(IDLE, discard(body)));
    }
    Ok(super::json(StatusCode::OK, &written?))
}

/// Reads the rest of a body. Many clients look for an answer only when they have sent everything,
/// and would see a broken connection instead of the reason.
async fn discard(mut body: Incoming) {
    while let Ok(Some(_)) = next_piece(&mut body).await {}
}

async fn store(
    headers: &HeaderMap,
    user: User,
    path: Option<PathBuf>,
    body: &mut Incoming,
) -> Result<Vec<Written>, HttpError> {
    let metadata =
        Metadata::from_headers(headers).map_err(|error| bad_request(error.to_string()))?;
    let (headers, plan) = (headers.clone(), Plan { user, path, metadata });
    let mut pipeline = blocking(move || Pipeline::new(&headers, plan)).await?;
    loop {
        let next = tokio::time::timeout(IDLE, next_piece(body)).await;
        let piece = match next {
            Ok(Ok(Some(piece))) => piece,
            Ok(Ok(None)) => break,
            Ok(Err(error)) => return Err(bad_request(error.message)),
            Err(_) => return Err(HttpError::new(StatusCode::REQUEST_TIMEOUT, "no data comes")),
        };
        pipeline = blocking(move || {
            pipeline.write_all(&piece).map_err(HttpError::from)?;
            Ok(pipeline)
        })
        .await?;
    }
    blocking(move || pipeline.finish().map_err(HttpError::from)).await
}

/// What a request says of the files in its body.
struct Plan {
    user: User,
    /// The path of the one file; without it each part of a form names its own.
    path: Option<PathBuf>,
    metadata: Metadata,
}

/// What the body runs through.
enum Pipeline {
    Plain(Form),
    Gzip(Box<MultiGzDecoder<Form>>),
}

impl Pipeline {
    fn new(headers: &HeaderMap, plan: Plan) -> Result<Self, HttpError> {
        let encoding = headers.get(header::CONTENT_ENCODING).map(|value| value.as_bytes());
        let form = Form::new(headers, plan)?;
        match encoding {
            None | Some(b"" | b"identity") => Ok(Self::Plain(form)),
            Some(b"gzip") => Ok(Self::Gzip(Box::new(MultiGzDecoder::new(form)))),
            Some(_) => Err(bad_request("the content encoding is neither gzip nor identity")),
        }
    }

    fn write_all(&mut self, piece: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(form) => form.write_all(piece),
            Self::Gzip(decoder) => decoder.write_all(piece),
        }
    }

    fn finish(self) -> io::Result<Vec<Written>> {
        match self {
            Self::Plain(form) => form.finish(),
            Self::Gzip(decoder) => decoder.finish()?.finish(),
        }
    }
}

/// The body without its compression.
enum Form {
    Raw(Target, Metadata),
    Multipart(Box<Multipart<FormFiles>>),
}

impl Form {
    fn new(headers: &HeaderMap, plan: Plan) -> Result<Self, HttpError> {
        if has_content_type(headers, "application/octet-stream") {
            let Plan { user, path, metadata } = plan;
            let path = path.ok_or_else(|| bad_request("the path parameter is missing"))?;
            return Ok(Self::Raw(Target::create(path, &user)?, metadata));
        }
        let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        match content_type {
            Some(text) if text.trim_start().to_ascii_lowercase().starts_with("multipart/") => {
                let files = FormFiles { plan, open: None, written: Vec::new() };
                Multipart::new(text, files).map(|form| Self::Multipart(Box::new(form)))
            }
            _ => Err(bad_request(
                "the content type is neither multipart/form-data nor application/octet-stream",
            )),
        }
    }

    fn finish(self) -> io::Result<Vec<Written>> {
        match self {
            Self::Raw(target, metadata) => Ok(vec![target.complete(&metadata)?]),
            Self::Multipart(form) => Ok(form.finish()?.written),
        }
    }
}

impl Write for Form {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        match self {
            Self::Raw(target, _) => target.write_all(piece)?,
            Self::Multipart(form) => form.push(piece)?,
        }
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The files of a form.
struct FormFiles {
    plan: Plan,
    open: Option<Target>,
    written: Vec<Written>,
}

impl Parts for FormFiles {
    fn begin(&mut self, part: PartHeaders) -> io::Result<()> {
        if part.name.as_deref() != Some("file") {
            return Ok(());
        }
        let path = match (&self.plan.path, part.file_name) {
            (Some(path), _) => path.clone(),
            (None, Some(name)) => self.plan.user.resolve(&name),
            (None, None) => {
                return Err(io::Error::other(bad_request(
                    "a file has no name: give the path parameter or a filename per part",
                )));
            }
        };
        if self.written.iter().any(|written| Path::new(&written.path) == path) {
            let message = format!("two files of one request have the path '{}'", path.display());
            return Err(io::Error::other(bad_request(message)));
        }
        self.open = Some(Target::create(path, &self.plan.user).map_err(io::Error::other)?);
        Ok(())
    }

    fn data(&mut self, data: &[u8]) -> io::Result<()> {
        self.open.as_mut().map_or(Ok(()), |target| target.write_all(data))
    }

    fn end(&mut self) -> io::Result<()> {
        if let Some(target) = self.open.take() {
            self.written.push(target.complete(&self.plan.metadata)?);
        }
        Ok(())
    }
}

/// A file being written.
#[derive(Debug)]
struct Target {
    file: File,
    path: PathBuf,
    /// Whether to remove it when it stays incomplete.
    fresh: bool,
}

impl Target {
    fn create(path: PathBuf, user: &User) -> Result<Self, HttpError> {
        let fail = |error: io::Error| write_error(&path, &error);
        if let Some(parent) = path.parent() {
            ensure_directories(parent, user).map_err(fail)?;
        }
        let (file, fresh) = open(&path).map_err(fail)?;
        // From here on a fresh file is removed on failure.
        let target = Self { file, path, fresh };
        let fail = |error: io::Error| write_error(&target.path, &error);
        let metadata = target.file.metadata().map_err(fail)?;
        if !metadata.is_file() {
            let message = format!("path '{}' is not a regular file", target.path.display());
            return Err(bad_request(message));
        }
        if metadata.len() > 0 {
            // Whoever watches is told of a change even where there is none.
            target.file.set_len(0).map_err(fail)?;
        }
        if Uid::effective().is_root() {
            let chowned = fchown(&target.file, Some(user.uid), Some(user.gid));
            chowned.map_err(io::Error::from).map_err(fail)?;
        }
        Ok(target)
    }

    fn write_all(&mut self, data: &[u8]) -> io::Result<()> {
        let written = self.file.write_all(data);
        written.map_err(|error| io::Error::other(write_error(&self.path, &error)))
    }

    /// The file is whole: what it had of metadata is replaced. A file system that keeps none is no
    /// reason to fail; the answer then tells of none.
    fn complete(mut self, metadata: &Metadata) -> io::Result<Written> {
        let kept = metadata.write(&self.file);
        let kept = kept.map_err(|error| io::Error::other(write_error(&self.path, &error)))?;
        self.fresh = false;
        Ok(Written::new(&self.path, if kept { metadata.clone() } else { Metadata::default() }))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.fresh {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Opens for writing without truncating; whether the file is new.
fn open(path: &Path) -> io::Result<(File, bool)> {
    // A FIFO must not hold the thread, a terminal must not become the agent's.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let options = || {
        let mut options = File::options();
        options.write(true).custom_flags(flags).mode(0o666);
        options
    };
    match options().open(path) {
        Ok(file) => return Ok((file, false)),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) => {}
    }
    match options().create_new(true).open(path) {
        Ok(file) => Ok((file, true)),
        // A link that leads nowhere yet.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Ok((options().create(true).truncate(false).open(path)?, false))
        }
        Err(error) => Err(error),
    }
}

pub(super) fn bad_request(message: impl Into<String>) -> HttpError {
    HttpError::new(StatusCode::BAD_REQUEST, message)
}

pub(super) fn write_error(path: &Path, error: &io::Error) -> HttpError {
    let path = path.display();
    let (status, problem) = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            (StatusCode::INSUFFICIENT_STORAGE, "not enough disk space".to_owned())
        }
        io::ErrorKind::IsADirectory => (StatusCode::BAD_REQUEST, "it is a directory".to_owned()),
        io::ErrorKind::NotADirectory => {
            (StatusCode::BAD_REQUEST, "a part of the path is not a directory".to_owned())
        }
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidFilename => {
            (StatusCode::BAD_REQUEST, "it is not a path".to_owned())
        }
        _ => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    };
    HttpError::new(status, format!("writing '{path}': {problem}"))
}

/// Errors cross `io::Write` wrapped; others are complaints of the decompression.
impl From<io::Error> for HttpError {
    fn from(error: io::Error) -> Self {
        error
            .downcast::<Self>()
            .unwrap_or_else(|error| bad_request(format!("the gzip data is damaged: {error}")))
    }
}
