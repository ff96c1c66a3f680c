//! `POST /files/compose`: makes one file of several, which vanish. That is how a client uploads a
//! large file in parts.
//!
//! The whole is written beside its destination and then takes its place, so a failure leaves all
//! files as they were.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use nix::unistd::{Uid, fchown};
use serde::Deserialize;

use super::HttpError;
use super::files::{blocking, named, open_regular, user_of};
use super::upload::{Written, bad_request, write_error};
use crate::agent::Agent;
use crate::body::Body;
use crate::files::{Metadata, ensure_directories};
use crate::users::User;

/// Most bytes of a request's body.
const MAX_BODY: usize = 1024 * 1024;

/// What to compose.
#[derive(Debug, Deserialize)]
struct Compose {
    /// The parts, in order.
    source_paths: Vec<String>,
    destination: String,
    /// Who is to own the whole.
    username: Option<String>,
}

/// Answers one request.
pub(super) async fn compose(
    agent: &Agent,
    request: Request<Incoming>,
) -> Result<Response<Body>, HttpError> {
    let caller = user_of(agent, &request)?;
    let limited = http_body_util::Limited::new(request.into_body(), MAX_BODY);
    let body = limited.collect().await.map_err(|error| bad_request(error.to_string()))?;
    let compose: Compose = serde_json::from_slice(&body.to_bytes())
        .map_err(|error| bad_request(format!("the body is not what composing takes: {error}")))?;
    let user = match compose.username.as_deref() {
        None | Some("") => caller,
        Some(name) => named(&agent.settings.borrow(), name)?,
    };
    if compose.source_paths.is_empty() || compose.destination.is_empty() {
        return Err(bad_request("source_paths and destination must not be empty"));
    }
    let written = blocking(move || run(&compose, &user)).await?;
    Ok(super::json(StatusCode::OK, &written))
}

fn run(compose: &Compose, user: &User) -> Result<Written, HttpError> {
    let destination = user.resolve(&compose.destination);
    let sources: Vec<PathBuf> =
        compose.source_paths.iter().map(|path| user.resolve(path)).collect();
    for source in &sources {
        if *source == destination {
            let path = source.display();
            return Err(bad_request(format!("source '{path}' is the destination as well")));
        }
        open_regular(source)?;
    }
    let fail = |error: io::Error| write_error(&destination, &error);
    if let Some(parent) = destination.parent() {
        ensure_directories(parent, user).map_err(fail)?;
    }
    let mut whole = Whole::create(&destination).map_err(fail)?;
    for source in &sources {
        let mut part = open_regular(source)?;
        io::copy(&mut part, &mut whole.file).map_err(fail)?;
    }
    if Uid::effective().is_root() {
        let chowned = fchown(&whole.file, Some(user.uid), Some(user.gid));
        chowned.map_err(io::Error::from).map_err(fail)?;
    }
    let identity = whole.put_in_place(&destination).map_err(fail)?;
    for source in sources {
        // By way of a link a source may have been the destination after all.
        if source.symlink_metadata().is_ok_and(|found| (found.dev(), found.ino()) != identity) {
            // The whole is there; a part that stays is no reason to say otherwise.
            let _ = std::fs::remove_file(source);
        }
    }
    Ok(Written::new(&destination, Metadata::default()))
}

/// The whole while it is not in its place; removed if it never gets there.
struct Whole {
    file: File,
    path: Option<PathBuf>,
}

impl Whole {
    fn create(destination: &Path) -> io::Result<Self> {
        let directory = destination.parent().ok_or(io::ErrorKind::IsADirectory)?;
        let mut number = 0_u32;
        loop {
            let path = directory.join(format!(".compose-{}-{number}", std::process::id()));
            let file = File::options()
                .write(true)
                .create_new(true)
                .mode(0o666)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path);
            match file {
                Ok(file) => return Ok(Self { file, path: Some(path) }),
                // Another one is at work here.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    number = number.checked_add(1).ok_or(error)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Device and inode of the file that is at `destination` then.
    fn put_in_place(mut self, destination: &Path) -> io::Result<(u64, u64)> {
        let metadata = self.file.metadata()?;
        if let Some(path) = &self.path {
            std::fs::rename(path, destination)?;
            self.path = None;
        }
        Ok((metadata.dev(), metadata.ino()))
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}
