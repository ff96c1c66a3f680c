//! Lists a directory and those within it.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use coppice_agent_protocol::filesystem::{EntryInfo, FileType};
use coppice_agent_protocol::{Code, ConnectError};

use super::{describe, failure};
use crate::users::Names;

/// Most bytes of a listing, and of the names that wait to be looked at.
const MAX_BYTES: usize = 16 * 1024 * 1024;

/// A directory of which some names are still to be looked at.
struct Open {
    path: PathBuf,
    /// Last first.
    names: Vec<OsString>,
    bytes: usize,
}

/// The JSON of a `ListDirResponse` with what is in `path`, and in directories within it down to
/// `depth` levels. The text is written at once, so that nothing but it takes memory.
pub(crate) fn list(path: &Path, depth: u32) -> Result<Vec<u8>, ConnectError> {
    let fail = |error: io::Error| failure("listing", path, &error);
    let metadata = path.metadata().map_err(fail)?;
    if !metadata.is_dir() {
        let message = format!("path '{}' is not a directory", path.display());
        return Err(ConnectError::new(Code::InvalidArgument, message));
    }
    let names = Names::read();
    let mut text = br#"{"entries":["#.to_vec();
    let mut waiting = 0_usize;
    let mut open = vec![read(path, &mut waiting)?];
    while let Some(directory) = open.last_mut() {
        let Some(name) = directory.names.pop() else {
            waiting = waiting.saturating_sub(directory.bytes);
            open.pop();
            continue;
        };
        let path = directory.path.join(name);
        let entry = match describe(&path, &names) {
            Ok(entry) => entry,
            // It was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failure("listing", &path, &error)),
        };
        append(&mut text, &entry)?;
        let descend = entry.kind == FileType::Directory && !entry.is_symlink;
        if descend && u32::try_from(open.len()).is_ok_and(|level| level < depth) {
            match read(&path, &mut waiting) {
                Ok(directory) => open.push(directory),
                Err(error) if error.code == Code::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    text.extend_from_slice(b"]}");
    Ok(text)
}

fn read(path: &Path, waiting: &mut usize) -> Result<Open, ConnectError> {
    let fail = |error: io::Error| failure("listing", path, &error);
    let (mut names, mut bytes) = (Vec::new(), 0_usize);
    for entry in std::fs::read_dir(path).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name();
        bytes = bytes.saturating_add(name.len()).saturating_add(size_of::<OsString>());
        if bytes.saturating_add(*waiting) > MAX_BYTES {
            return Err(too_large());
        }
        names.push(name);
    }
    *waiting = waiting.saturating_add(bytes);
    names.sort_unstable_by(|left, right| right.cmp(left));
    Ok(Open { path: path.to_owned(), names, bytes })
}

fn append(text: &mut Vec<u8>, entry: &EntryInfo) -> Result<(), ConnectError> {
    if !text.ends_with(b"[") {
        text.push(b',');
    }
    serde_json::to_writer(&mut *text, entry)
        .map_err(|error| ConnectError::new(Code::Internal, error.to_string()))?;
    if text.len() > MAX_BYTES { Err(too_large()) } else { Ok(()) }
}

fn too_large() -> ConnectError {
    let message = format!(
        "the listing is larger than the limit of {MAX_BYTES} bytes: list with less depth, or \
         directories on their own"
    );
    ConnectError::new(Code::ResourceExhausted, message)
}
