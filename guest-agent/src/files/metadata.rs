//! What an uploader says of a file, kept in its extended attributes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

use coppice_agent_protocol::filesystem::METADATA_XATTR_PREFIX;
use http::HeaderMap;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

/// Start of the names of the request headers that carry metadata.
const HEADER_PREFIX: &str = "x-metadata-";

/// Most bytes of an attribute's name, by the kernel.
const MAX_NAME: usize = 255;

/// Most bytes of all names and values of a file; ext4 has a block for them.
const MAX_TOTAL: usize = 4096;

/// Names of attributes fit into this as a rule.
const FEW: usize = 256;

/// Most bytes of the names of a file's attributes, by the kernel.
const MAX_LIST: usize = 64 * 1024;

/// Why metadata is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MetadataError {
    /// A name too long.
    #[error("a metadata key has at most {max} characters", max = MAX_NAME - METADATA_XATTR_PREFIX.len())]
    Key,
    /// A value that is not text every client can read.
    #[error("metadata values are printable ASCII")]
    Value,
    /// Too much in all.
    #[error("the metadata of a file is at most {MAX_TOTAL} bytes in all")]
    Total,
}

/// Keys (in lower case) and values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Metadata(BTreeMap<String, String>);

impl Metadata {
    /// The metadata in a request's headers.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Result<Self, MetadataError> {
        let mut metadata = BTreeMap::new();
        let mut total = 0_usize;
        for name in headers.keys() {
            let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX) else { continue };
            let Some(value) = headers.get(name).filter(|_| !key.is_empty()) else { continue };
            let printable = value.as_bytes().iter().all(|byte| (b' '..=b'~').contains(byte));
            let value = value.to_str().ok().filter(|_| printable).ok_or(MetadataError::Value)?;
            let name_len = METADATA_XATTR_PREFIX.len().saturating_add(key.len());
            if name_len > MAX_NAME {
                return Err(MetadataError::Key);
            }
            total = total.saturating_add(name_len).saturating_add(value.len());
            metadata.insert(key.to_owned(), value.to_owned());
        }
        if total > MAX_TOTAL { Err(MetadataError::Total) } else { Ok(Self(metadata)) }
    }

    /// The metadata of what `path` leads to. What cannot be read is left out: the file is there all
    /// the same. So are values that are no text, and what is more than an upload may bring.
    pub(crate) fn of(path: &Path) -> Self {
        let mut metadata = BTreeMap::new();
        let mut total = 0_usize;
        let mut value = [0; MAX_TOTAL];
        for name in names(|buffer| rustix::fs::listxattr(path, buffer)) {
            let Some(key) = name.strip_prefix(METADATA_XATTR_PREFIX) else { continue };
            let Ok(len) = rustix::fs::getxattr(path, &*name, &mut value) else { continue };
            let text = value.get(..len).and_then(|value| std::str::from_utf8(value).ok());
            let Some(text) = text else { continue };
            total = total.saturating_add(name.len()).saturating_add(len);
            if total > MAX_TOTAL {
                break;
            }
            metadata.insert(key.to_owned(), text.to_owned());
        }
        Self(metadata)
    }

    /// Makes this the metadata of `file`, and nothing else; whether its file system can.
    ///
    /// # Errors
    /// When there is no space for it, or the file system fails.
    pub(crate) fn write(&self, file: &File) -> io::Result<bool> {
        for name in names(|buffer| rustix::fs::flistxattr(file, buffer)) {
            let key = name.strip_prefix(METADATA_XATTR_PREFIX);
            if key.is_some_and(|key| !self.0.contains_key(key)) {
                match rustix::fs::fremovexattr(file, &*name) {
                    Ok(()) | Err(Errno::NODATA) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        for (key, value) in &self.0 {
            let name = format!("{METADATA_XATTR_PREFIX}{key}");
            match rustix::fs::fsetxattr(file, name, value.as_bytes(), XattrFlags::empty()) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP) => return Ok(false),
                Err(Errno::TOOBIG | Errno::RANGE) => return Err(io::ErrorKind::StorageFull.into()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// The keys and values.
    pub(crate) fn into_map(self) -> BTreeMap<String, String> {
        self.0
    }
}

/// The names of attributes that `list` writes, ended by zero bytes each; none if it fails.
fn names(list: impl Fn(&mut [u8]) -> Result<usize, Errno>) -> Vec<String> {
    let mut few = [0; FEW];
    let mut many = Vec::new();
    let listed = match list(&mut few) {
        Ok(len) => few.get(..len),
        Err(Errno::RANGE) => {
            many.resize(MAX_LIST, 0);
            list(&mut many).ok().and_then(|len| many.get(..len))
        }
        Err(_) => None,
    };
    let names = listed.unwrap_or_default().split(|byte| *byte == 0);
    names.filter_map(|name| String::from_utf8(name.to_vec()).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let parse = |(name, value): &(&str, &str)| {
            (http::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap())
        };
        pairs.iter().map(parse).collect()
    }

    #[test]
    fn headers_carry_keys_and_values() {
        let headers =
            headers(&[("X-Metadata-Author", "me"), ("content-type", "x"), ("x-metadata-", "?")]);
        let metadata = Metadata::from_headers(&headers).unwrap();
        assert_eq!(metadata.0, BTreeMap::from([("author".to_owned(), "me".to_owned())]));
    }

    #[test]
    fn what_no_file_could_keep_is_refused() {
        let read = |name: &str, value: &str| Metadata::from_headers(&headers(&[(name, value)]));
        assert_eq!(read(&format!("x-metadata-{}", "k".repeat(247)), ""), Err(MetadataError::Key));
        assert_eq!(read("x-metadata-k", &"v".repeat(4096)), Err(MetadataError::Total));
        assert_eq!(read("x-metadata-k", "\u{e4}"), Err(MetadataError::Value));
    }

    proptest! {
        #[test]
        fn metadata_reads_back_and_replaces_what_was_there(
            first in proptest::collection::btree_map("[a-z]{1,8}", "[ -~]{0,20}", 0..5),
            second in proptest::collection::btree_map("[a-z]{1,8}", "[ -~]{0,20}", 0..5),
        ) {
            let file = tempfile::NamedTempFile::new().unwrap();
            if !Metadata(first.clone()).write(file.as_file()).unwrap() {
                // This file system keeps none.
                return Ok(());
            }
            prop_assert_eq!(Metadata::of(file.path()).0, first);
            Metadata(second.clone()).write(file.as_file()).unwrap();
            prop_assert_eq!(Metadata::of(file.path()).0, second);
        }
    }
}
