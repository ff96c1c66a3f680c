//! Records: what the store knows about a checkpoint and about a sandbox, as JSON.
//!
//! Both say what they stand on: the memory layers and disk layers below, in order. That makes
//! each record whole by itself, so an ancestor can be removed from sight without being read again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coppice_vmm_protocol::BalloonSpec;
use serde::{Deserialize, Serialize};

use super::{Id, Name};
use crate::random::{hex, random_bytes};
use crate::vmm::ProcessId;

/// Version of [`Meta`] as it is stored.
pub(super) const META_VERSION: u16 = 1;

/// A machine's shape without the descriptors of the moment: what a restore must give it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Guest RAM in MiB.
    pub memory_mib: u32,
    /// The kernel it was booted with; for people, a restore does not read it.
    pub kernel: PathBuf,
    /// The kernel's command line.
    pub cmdline: String,
    /// The RAM disk it was booted with, if its root was one; for people too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// The guest's vsock context ID.
    pub cid: u32,
    /// Whether it has an entropy device.
    pub rng: bool,
    /// Its balloon, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonSpec>,
}

/// The image below a disk's layers, and how to tell that it is still the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseImage {
    /// The file, an absolute path.
    pub path: PathBuf,
    /// Its length in bytes.
    pub size: u64,
    /// When its content was changed last, in nanoseconds since 1970.
    pub modified_ns: i128,
}

impl BaseImage {
    /// The image at `path`, open as `file`.
    ///
    /// # Errors
    /// The system's, when the file cannot be looked at.
    pub fn of(path: &Path, file: &File) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        Ok(Self::from_metadata(path, &file.metadata()?))
    }

    fn from_metadata(path: PathBuf, meta: &fs::Metadata) -> Self {
        let modified_ns = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
        Self { path, size: meta.len(), modified_ns }
    }

    /// What is wrong with the file now, if anything.
    pub fn trouble(&self) -> Option<&'static str> {
        match fs::metadata(&self.path) {
            Ok(meta) if Self::from_metadata(self.path.clone(), &meta) == *self => None,
            Ok(_) => Some("was changed since"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some("is not there"),
            Err(_) => Some("cannot be read"),
        }
    }
}

/// One disk: an image and the layers over it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskChain {
    /// What lies at the bottom.
    pub base: BaseImage,
    /// Whether the guest may only read it; it has no layers then.
    pub read_only: bool,
    /// The disk's serial number.
    pub serial: String,
    /// The layers, lowest first. Those of a checkpoint are sealed; the last one of a live sandbox
    /// is the one it writes to.
    pub layers: Vec<Id>,
}

/// Where a machine or a checkpoint stands in the tree.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    /// The checkpoint it was made from; none for a machine that was booted and its first one.
    pub parent: Option<Id>,
    /// The checkpoints whose files hold its memory below its own, root first.
    pub memory: Vec<Id>,
    /// Its disks.
    pub disks: Vec<DiskChain>,
}

/// What is stored with a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// Its ID, also its file's name.
    pub id: Id,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// The sandbox it was made of.
    pub sandbox: Id,
    /// The machine.
    pub machine: Machine,
    /// What it stands on. Its own memory layer is not listed, its disk layers are.
    pub standing: Standing,
}

impl Meta {
    /// Checkpoints whose files hold its memory, root first, its own last.
    pub fn memory_chain(&self) -> Vec<Id> {
        let mut chain = self.standing.memory.clone();
        chain.push(self.id.clone());
        chain
    }

    /// Where a machine stands that goes on from here, with these new layers on top of its
    /// writable disks, in order.
    pub fn continued(&self, tops: &[Id]) -> Standing {
        let mut tops = tops.iter();
        let mut disks = self.standing.disks.clone();
        for disk in disks.iter_mut().filter(|disk| !disk.read_only) {
            disk.layers.extend(tops.next().cloned());
        }
        Standing { parent: Some(self.id.clone()), memory: self.memory_chain(), disks }
    }

    /// When it was made.
    pub fn created(&self) -> SystemTime {
        time(self.created_ms)
    }
}

impl Standing {
    /// How many disks take writes, each into a layer of its own.
    pub fn writable_disks(&self) -> usize {
        self.disks.iter().filter(|disk| !disk.read_only).count()
    }

    /// All disk layers it names.
    pub fn disk_layers(&self) -> impl Iterator<Item = &Id> {
        self.disks.iter().flat_map(|disk| &disk.layers)
    }

    /// The topmost layer of each writable disk.
    pub fn tops(&self) -> impl Iterator<Item = &Id> {
        self.disks.iter().filter(|disk| !disk.read_only).filter_map(|disk| disk.layers.last())
    }
}

/// What is stored with a live sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SandboxRecord {
    /// Its ID, also its directory's name.
    pub id: Id,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// The machine.
    pub machine: Machine,
    /// The machine-id its guest gets, 32 hexadecimal digits.
    pub machine_id: String,
    /// The process that runs the machine, once it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessId>,
    /// Whether its machine was ended to go on later from the checkpoint that it stands on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
    /// What its guest is told besides its identity.
    #[serde(default, skip_serializing_if = "GuestSettings::is_empty")]
    pub guest: GuestSettings,
    /// Where it stands.
    pub standing: Standing,
    /// What is under way. What it names is kept as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<Next>,
}

/// What a guest's agent is told whenever the guest was copied or taken back: its memory has what
/// another one was told.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestSettings {
    /// The token that requests to the agent must carry; without one, it serves all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// Variables that every process has.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
    /// The user that requests act as which name none; the agent's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Where processes start which name no directory, an absolute path; the user's home when
    /// absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
}

impl GuestSettings {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The same for a guest with this token and these variables, which go before its own.
    #[must_use]
    pub fn overlaid(&self, access_token: Option<String>, envs: BTreeMap<String, String>) -> Self {
        let mut settings = Self { access_token, ..self.clone() };
        settings.envs.extend(envs);
        settings
    }
}

/// A change of a sandbox that has begun, and perhaps succeeded already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Next {
    /// Where the sandbox stands afterwards.
    pub standing: Standing,
    /// The checkpoint that is being made; none if the sandbox goes back to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Id>,
    /// The name that the checkpoint will have, which nobody else may take meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
}

impl SandboxRecord {
    /// When it was made.
    pub fn created(&self) -> SystemTime {
        time(self.created_ms)
    }
}

/// Draws a machine-id.
pub(super) fn machine_id() -> io::Result<String> {
    random_bytes::<16>().map(|bytes| hex(&bytes))
}

/// Milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn time(ms: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).unwrap_or(UNIX_EPOCH)
}
