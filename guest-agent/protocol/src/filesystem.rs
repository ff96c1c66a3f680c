//! Messages of the service `filesystem.Filesystem`, in their proto3 JSON form.
//!
//! Calls are `POST /filesystem.Filesystem/<name>`; `WatchDir` streams [`WatchDirResponse`]s back,
//! the others are unary. Replies without content are `{}` ([`crate::process::Empty`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::json;
use crate::process::Empty;
use crate::timestamp::Timestamp;

/// Path prefix of the service.
pub const SERVICE: &str = "/filesystem.Filesystem/";

/// `Stat`, `MakeDir` and `Remove`: only name a path.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PathRequest {
    /// The path; relative ones start at the default working directory.
    #[serde(deserialize_with = "json::nullable")]
    pub path: String,
}

/// `Move`: renames, replacing what the destination names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MoveRequest {
    /// What to move.
    #[serde(deserialize_with = "json::nullable")]
    pub source: String,
    /// Its new path.
    #[serde(deserialize_with = "json::nullable")]
    pub destination: String,
}

/// `ListDir`: lists a directory and those within.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListDirRequest {
    /// The directory.
    #[serde(deserialize_with = "json::nullable")]
    pub path: String,
    /// How many levels to list; 0 is as good as 1: the directory's own entries.
    #[serde(deserialize_with = "json::uint32")]
    pub depth: u32,
}

/// `WatchDir` and `CreateWatcher`: what to watch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WatchRequest {
    /// The directory.
    #[serde(deserialize_with = "json::nullable")]
    pub path: String,
    /// Whether to watch all directories within as well.
    #[serde(deserialize_with = "json::nullable")]
    pub recursive: bool,
    /// Whether events tell about the file they are about.
    #[serde(deserialize_with = "json::nullable", alias = "include_entry")]
    pub include_entry: bool,
    /// Whether the directory may be on a network file system, which tells only of changes made
    /// on this machine.
    #[serde(deserialize_with = "json::nullable", alias = "allow_network_mounts")]
    pub allow_network_mounts: bool,
}

/// `GetWatcherEvents` and `RemoveWatcher`: only name a watcher. Also the reply to `CreateWatcher`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Watcher {
    /// The watcher.
    #[serde(deserialize_with = "json::nullable", alias = "watcher_id")]
    pub watcher_id: String,
}

/// Reply to `Stat`, `MakeDir` and `Move`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EntryResponse {
    /// What is at the path now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// Reply to `ListDir`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListDirResponse {
    /// What was found, a directory before what is in it, names in order.
    #[serde(deserialize_with = "json::nullable")]
    pub entries: Vec<EntryInfo>,
}

/// Reply to `GetWatcherEvents`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GetWatcherEventsResponse {
    /// What happened since the last call, oldest first.
    #[serde(deserialize_with = "json::nullable")]
    pub events: Vec<FilesystemEvent>,
}

/// A file, a directory or a link.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EntryInfo {
    /// Last component of its path.
    #[serde(deserialize_with = "json::nullable")]
    pub name: String,
    /// What it is; for a link, what it leads to, or [`FileType::Symlink`] if it leads nowhere.
    #[serde(rename = "type", deserialize_with = "json::nullable")]
    pub kind: FileType,
    /// Its absolute path.
    #[serde(deserialize_with = "json::nullable")]
    pub path: String,
    /// Bytes; for a link, those of the path it holds.
    #[serde(with = "json::int64")]
    pub size: i64,
    /// The permission bits (`0o777`); for a link, those of what it leads to.
    #[serde(deserialize_with = "json::uint32")]
    pub mode: u32,
    /// Its own type and permissions as text, such as `-rw-r--r--`, `drwxr-xr-x`, `Lrwxrwxrwx`.
    #[serde(deserialize_with = "json::nullable")]
    pub permissions: String,
    /// Name of its owner; the number, if that has no name.
    #[serde(deserialize_with = "json::nullable")]
    pub owner: String,
    /// Name of its group; the number, if that has no name.
    #[serde(deserialize_with = "json::nullable")]
    pub group: String,
    /// When its content was last changed.
    #[serde(skip_serializing_if = "Option::is_none", alias = "modified_time")]
    pub modified_time: Option<Timestamp>,
    /// For a link, the absolute path it leads to; of one that leads nowhere, its own path.
    #[serde(skip_serializing_if = "Option::is_none", alias = "symlink_target")]
    pub symlink_target: Option<String>,
    /// What the uploader said of the file, in the extended attributes `user.e2b.*`.
    #[serde(deserialize_with = "json::nullable", skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Whether it is a link.
    #[serde(
        deserialize_with = "json::nullable",
        skip_serializing_if = "std::ops::Not::not",
        alias = "is_symlink"
    )]
    pub is_symlink: bool,
}

/// Namespace of the extended attributes that hold [`EntryInfo::metadata`].
pub const METADATA_XATTR_PREFIX: &str = "user.e2b.";

/// What an entry is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FileType {
    /// None of the others: a device, a socket, a FIFO.
    #[default]
    Unspecified,
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A link.
    Symlink,
}

impl FileType {
    const NAMES: [(Self, &'static str); 4] = [
        (Self::Unspecified, "FILE_TYPE_UNSPECIFIED"),
        (Self::File, "FILE_TYPE_FILE"),
        (Self::Directory, "FILE_TYPE_DIRECTORY"),
        (Self::Symlink, "FILE_TYPE_SYMLINK"),
    ];
}

/// What happened to an entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EventType {
    /// Something this version does not know.
    #[default]
    Unspecified,
    /// It was created, or moved here.
    Create,
    /// Its content changed.
    Write,
    /// It was removed.
    Remove,
    /// It was moved away; its new name, if that is watched, has a [`Self::Create`].
    Rename,
    /// Its permissions, owner, times or extended attributes changed.
    Chmod,
}

impl EventType {
    const NAMES: [(Self, &'static str); 6] = [
        (Self::Unspecified, "EVENT_TYPE_UNSPECIFIED"),
        (Self::Create, "EVENT_TYPE_CREATE"),
        (Self::Write, "EVENT_TYPE_WRITE"),
        (Self::Remove, "EVENT_TYPE_REMOVE"),
        (Self::Rename, "EVENT_TYPE_RENAME"),
        (Self::Chmod, "EVENT_TYPE_CHMOD"),
    ];
}

/// Enums go by their names; numbers are read too, and what is not known is the default.
macro_rules! by_name {
    ($type:ty) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                json::write_enum(&Self::NAMES, *self, serializer)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                json::read_enum(&Self::NAMES, deserializer)
            }
        }
    };
}

by_name!(FileType);
by_name!(EventType);

/// Something that happened in a watched directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FilesystemEvent {
    /// Path of the entry, relative to the watched directory; `.` is the directory itself.
    #[serde(deserialize_with = "json::nullable")]
    pub name: String,
    /// What happened.
    #[serde(rename = "type", deserialize_with = "json::nullable")]
    pub kind: EventType,
    /// The entry, if it was asked for and is still there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<Box<EntryInfo>>,
}

/// One message of `WatchDir`; the first is `Start`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "WatchWire")]
pub enum WatchDirResponse {
    /// Whatever happens from now on is told.
    Start,
    /// Something happened.
    Filesystem(FilesystemEvent),
    /// Nothing happened for a while.
    Keepalive,
    /// Something this version does not know.
    Unknown,
}

#[derive(Deserialize)]
struct WatchWire {
    start: Option<Empty>,
    filesystem: Option<FilesystemEvent>,
    keepalive: Option<Empty>,
}

impl From<WatchWire> for WatchDirResponse {
    fn from(wire: WatchWire) -> Self {
        match wire {
            WatchWire { start: Some(_), .. } => Self::Start,
            WatchWire { filesystem: Some(event), .. } => Self::Filesystem(event),
            WatchWire { keepalive: Some(_), .. } => Self::Keepalive,
            _ => Self::Unknown,
        }
    }
}

impl Serialize for WatchDirResponse {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap as _;
        let mut map = serializer.serialize_map(None)?;
        match self {
            Self::Start => map.serialize_entry("start", &Empty {})?,
            Self::Filesystem(event) => map.serialize_entry("filesystem", event)?,
            Self::Keepalive => map.serialize_entry("keepalive", &Empty {})?,
            Self::Unknown => {}
        }
        map.end()
    }
}

#[cfg(test)]
mod tests;
