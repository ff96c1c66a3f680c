//! What a machine is made of, as it travels over the control socket.
//!
//! These are wire types: the VMM converts them to its own internal form and checks every value
//! there. A newer manager may add fields with defaults; unknown fields are refused, so that a
//! wish the VMM does not know is never silently dropped.

use serde::{Deserialize, Serialize};

/// Position of a descriptor among those passed with the packet, from 0.
pub type FdIndex = u32;

/// Everything needed to build one machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSpec {
    /// Number of vCPUs, 1 to 8.
    pub vcpus: u8,
    /// Guest RAM in MiB, from 64; above 3,072 the rest is placed over the 4 GiB line.
    pub memory_mib: u32,
    /// What the machine starts from.
    pub start: Start,
    /// Block devices in the order the guest sees them (`vda`, `vdb`, ...), at most 8.
    #[serde(default)]
    pub disks: Vec<DiskSpec>,
    /// The vsock device, if the machine has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockSpec>,
    /// The serial console; without it the UART is there but its output is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console: Option<ConsoleSpec>,
    /// Whether a virtio entropy device is present.
    #[serde(default)]
    pub rng: bool,
    /// The memory balloon, if the machine has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonSpec>,
}

impl MachineSpec {
    /// What the machine boots, unless it starts from a checkpoint.
    pub fn boot_mut(&mut self) -> Option<&mut BootSpec> {
        match &mut self.start {
            Start::Boot(boot) => Some(boot),
            Start::Checkpoint(_) => None,
        }
    }
}

/// What a machine starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// A kernel that boots.
    Boot(BootSpec),
    /// A checkpoint of a machine with the same vCPUs, memory and devices.
    Checkpoint(ChainSpec),
}

/// A kernel and what goes with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootSpec {
    /// The kernel image: an ELF `vmlinux` or a `bzImage`, open for reading.
    pub kernel: FdIndex,
    /// An initial RAM disk, open for reading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<FdIndex>,
    /// Kernel command line as the user wants it; the VMM adds nothing to it.
    pub cmdline: String,
}

/// A checkpoint and all it stands on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChainSpec {
    /// Name of the checkpoint, for `VmStatus::checkpoint`; at most 64 bytes.
    pub id: String,
    /// Checkpoint files, open for reading: the root first, the checkpoint itself last.
    pub layers: Vec<FdIndex>,
    /// What an earlier machine of this checkpoint used soon after its start
    /// (`Op::RecordWorkingSet`), open for reading: brought in ahead of the guest. Not for a
    /// rollback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set: Option<FdIndex>,
    /// Whether the machine is another one than the one that was saved: its kernel then makes a
    /// boot ID of its own. Random numbers are always new. Not for a rollback.
    #[serde(default)]
    pub new_identity: bool,
}

/// One block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// The backing file; opened read-write unless `read_only` or an `overlay` is given.
    pub fd: FdIndex,
    /// Whether the guest may only read it.
    pub read_only: bool,
    /// An empty file that takes all writes, block by block, while `fd` is only read; for a
    /// disk that is not `read_only`. The backing file can then be shared by any number of
    /// machines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<FdIndex>,
    /// Sealed layers between `fd` and `overlay`, the lowest first, open for reading: those of the
    /// checkpoint the machine starts from, whose files say which clusters each one holds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<FdIndex>,
    /// What GET_ID answers, at most 20 bytes of ASCII.
    pub serial: String,
}

/// The vsock device and its host side, a Unix socket with the hybrid convention.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockSpec {
    /// The guest's context ID, from 3.
    pub cid: u32,
    /// A listening Unix stream socket: a host client connects and writes `CONNECT <port>\n`.
    pub listener: FdIndex,
    /// An `O_PATH` descriptor of the directory that holds the sockets for guest-initiated streams.
    pub directory: FdIndex,
    /// The socket's file name in that directory; a guest stream to host port P is connected to
    /// `<name>_<P>`.
    pub name: String,
}

/// Where the serial console reads and writes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsoleSpec {
    /// Read for console input; end of file just ends the input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<FdIndex>,
    /// Written with console output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<FdIndex>,
}

/// The memory balloon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonSpec {
    /// How much the balloon takes from the guest at first, in MiB.
    #[serde(default)]
    pub target_mib: u32,
    /// Whether the guest reports free pages, which are then given back to the host.
    pub free_page_reporting: bool,
}
