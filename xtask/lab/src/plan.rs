//! Files the parts of a nested machine hand to each other, as plain data: what its init mounts and
//! loads, and what its keeper on the host starts and watches.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where the machine's init finds its [`GuestPlan`].
pub const GUEST_PLAN_PATH: &str = "/etc/coppice-lab.json";

/// What the machine's init does before its agent serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestPlan {
    /// Secret a client must show.
    pub token: String,
    /// Kernel modules to load, in this order, as paths in the initramfs.
    pub modules: Vec<String>,
    /// Host directories to mount.
    pub shares: Vec<Share>,
}

/// A host directory that appears in the machine at the same path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Tag of the virtio-9p device.
    pub tag: String,
    /// Absolute path, on the host and in the machine.
    pub path: PathBuf,
    /// Where in the machine it is mounted, when not at `path`.
    pub mount_at: Option<PathBuf>,
    /// Whether the machine may write to it.
    pub writable: bool,
    /// A file in it never changes under the same name, so the machine may cache without asking.
    pub immutable: bool,
}

/// What a machine's keeper needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeeperPlan {
    /// QEMU's command line, without the parts only the keeper knows (its own channels).
    pub qemu: Vec<String>,
    /// Secret a client must show to the agent.
    pub token: String,
    /// The machine's clock counts instructions: it is stopped while nobody uses it, because an
    /// idle one would leap from timer to timer at full speed.
    pub virtual_time: bool,
    /// Seconds without a user after which the machine is ended.
    pub idle_timeout_s: u64,
    /// Seconds the machine may take until its agent serves.
    pub boot_timeout_s: u64,
}

/// A client's request to the keeper: one JSON line on its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeeperRequest {
    /// Use the machine for as long as this connection lives.
    Lease,
    /// Describe the machine.
    Status,
    /// End the machine and the keeper.
    Stop,
}

/// The keeper's answer: one JSON line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeeperReply {
    /// Port on 127.0.0.1 that reaches the machine's agent.
    pub port: u16,
    /// Secret to show to the agent.
    pub token: String,
    /// Process ID of the machine's QEMU.
    pub qemu_pid: u32,
    /// Clients that hold a lease, the asking one included.
    pub leases: usize,
    /// Seconds since the machine was started.
    pub age_s: u64,
    /// Seconds it took until its agent served.
    pub boot_s: f64,
}

/// Name of the keeper's plan in the machine's directory.
pub const KEEPER_PLAN: &str = "keeper.json";

/// Name of the keeper's socket in the machine's directory.
pub const KEEPER_SOCKET: &str = "keeper.sock";
