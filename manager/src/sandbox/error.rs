//! What can go wrong with a sandbox, and what to do about each.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coppice_vmm_protocol::{ErrorBody, ErrorKind};
use rustix::fs::{Access, access};
use thiserror::Error;

use super::diagnosis::{self, Cause};
use super::parts::Names;
use crate::failure::{Class, Failure, chain};
use crate::store::{self, Id};
use crate::vmm::End;
use crate::{agent, image, vmm, workdir};

/// Failures of a sandbox.
#[derive(Debug, Error)]
pub enum Error {
    /// The guest would have less memory than any can do with.
    #[error("{mib} MiB of memory are too little for a guest")]
    Memory {
        /// As asked for.
        mib: u32,
    },
    /// The kernel cannot be opened.
    #[error("the kernel {} cannot be opened", path.display())]
    Kernel {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The image cannot be opened.
    #[error("the image {} cannot be opened", path.display())]
    ImageOpen {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The image cannot be used.
    #[error("{} is not a usable image", path.display())]
    Image {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: image::Error,
    },
    /// The private directory cannot be made.
    #[error("no private directory for the sandbox")]
    WorkDir(#[from] workdir::Error),
    /// The file for the guest's writes cannot be made.
    #[error("no file for the guest's writes can be made in {}", directory.display())]
    Scratch {
        /// Where.
        directory: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The disk for the guest's writes is full.
    #[error("the disk that holds {} is full", directory.display())]
    NoSpace {
        /// Where the guest's writes would go.
        directory: PathBuf,
    },
    /// A socket or descriptor could not be made.
    #[error("the sandbox's sockets cannot be set up")]
    Socket(#[source] io::Error),
    /// The console's pipe could not be made.
    #[error("the sandbox's console cannot be set up")]
    Console(#[source] io::Error),
    /// [`super::Sandbox::boot`] was called again.
    #[error("the sandbox was booted already")]
    BootedTwice,
    /// The VMM refused to build or run the machine.
    #[error("the machine cannot be made from the kernel {} and the image {}",
            kernel.display(), image.display())]
    Refused {
        /// The VMM's class and text.
        #[source]
        source: vmm::Error,
        /// The kernel it was to run.
        kernel: PathBuf,
        /// The root file system.
        image: PathBuf,
    },
    /// The VMM process failed.
    #[error("the VMM failed")]
    Vmm(#[from] vmm::Error),
    /// The guest ended before its agent reported.
    #[error("{}", boot_text(cause, kernel, image))]
    Boot {
        /// Why.
        cause: Cause,
        /// The kernel.
        kernel: PathBuf,
        /// The root file system.
        image: PathBuf,
        /// The guest's memory.
        memory_mib: u32,
    },
    /// The agent did not report in time.
    #[error("the guest did not reach its agent within {} s{}", after.as_secs(), saw(last_line))]
    NoReport {
        /// The time it had.
        after: Duration,
        /// The last line on its console.
        last_line: String,
    },
    /// The guest ended while it was in use.
    #[error("the guest ended ({what})")]
    Ended {
        /// How.
        what: String,
        /// Whether its kernel panicked.
        panicked: bool,
    },
    /// The store failed.
    #[error("the sandbox's files cannot be used")]
    Store(#[from] store::Error),
    /// A layer of a checkpoint cannot be opened.
    #[error("the layer {} cannot be opened", path.display())]
    Layer {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A checkpoint stands on more layers than a machine can be handed.
    #[error("the checkpoint stands on too many others")]
    TooDeep,
    /// The machine of a sandbox is gone.
    #[error("the machine of sandbox {id} has ended")]
    Gone {
        /// The sandbox.
        id: Id,
    },
    /// A sandbox cannot go on, because it was not suspended.
    #[error("sandbox {id} is not suspended")]
    NotSuspended {
        /// The sandbox.
        id: Id,
    },
    /// A sandbox cannot go back to a checkpoint of another tree.
    #[error("the checkpoint {checkpoint} is not in the tree that sandbox {sandbox} grew from")]
    OtherTree {
        /// The checkpoint.
        checkpoint: Id,
        /// The sandbox.
        sandbox: Id,
    },
    /// The VMM refused to do something with a checkpoint.
    #[error("{what} failed")]
    Checkpoint {
        /// What was to be done.
        what: String,
        /// The VMM's class and text.
        #[source]
        source: vmm::Error,
    },
    /// A signal ended the wait.
    #[error("interrupted by signal {signal}")]
    Interrupted {
        /// Its number.
        signal: u8,
    },
    /// A process that does not end by itself cannot be ended by force.
    #[error("the machine of sandbox {id} cannot be ended")]
    Kill {
        /// The sandbox.
        id: Id,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The agent refused or the connection broke.
    #[error("the agent failed")]
    Agent(#[from] agent::Error),
}

fn saw(last_line: &str) -> String {
    if last_line.is_empty() {
        return "; its console shows nothing".into();
    }
    format!("; the last line on its console: {last_line}")
}

fn boot_text(cause: &Cause, kernel: &Path, image: &Path) -> String {
    let (kernel, image) = (kernel.display(), image.display());
    match cause {
        Cause::NoDisk => format!("the kernel {kernel} does not find its disk"),
        Cause::RootNotMounted(says) => {
            format!("the kernel cannot mount the root file system of {image}: {says}")
        }
        Cause::NoInit(says) => format!("the image {image} has no usable init: {says}"),
        Cause::AgentFailed(says) => format!("the guest's agent gave up: {says}"),
        Cause::OutOfMemory(says) => format!("the guest ran out of memory while booting: {says}"),
        Cause::Panic(says) => format!("the guest's kernel panicked: {says}"),
        Cause::Crashed { fault, last_line } => {
            format!("the guest's kernel crashed ({fault}){}", saw(last_line))
        }
        Cause::Ended { how, last_line } => {
            format!("the guest ended before its agent reported ({how}){}", saw(last_line))
        }
        Cause::Vmm(says) => format!("the VMM failed: {says}"),
    }
}

impl Names {
    pub(super) fn refusal(&self, source: vmm::Error) -> Error {
        match source.kind() {
            Some(_) => {
                Error::Refused { source, kernel: self.kernel.clone(), image: self.image.clone() }
            }
            None => Error::Vmm(source),
        }
    }

    pub(super) fn failed_boot(&self, cause: Cause) -> Error {
        Error::Boot {
            cause,
            kernel: self.kernel.clone(),
            image: self.image.clone(),
            memory_mib: self.memory_mib,
        }
    }
}

impl Error {
    pub(super) fn scratch(directory: PathBuf, source: io::Error) -> Self {
        if is_full(&source) {
            Self::NoSpace { directory }
        } else {
            Self::Scratch { directory, source }
        }
    }

    /// The end of a guest that was in use.
    pub(super) fn ended(end: &End, console: &str) -> Self {
        let (what, panicked) = match diagnosis::explain(end, console) {
            Cause::Vmm(says) => return Self::Vmm(vmm::Error::Failed(says)),
            Cause::Panic(says) | Cause::OutOfMemory(says) | Cause::AgentFailed(says) => {
                (format!("panic: {says}"), true)
            }
            Cause::Crashed { fault, .. } => (fault, true),
            _ => (diagnosis::how(end.reason.as_ref()).into(), end.panicked),
        };
        Self::Ended { what, panicked }
    }

    /// The failure as users see it.
    pub fn failure(&self) -> Failure {
        if let Self::Store(error) = self {
            return error.failure();
        }
        let (class, remedy) = self.advice();
        if let Self::Refused { source: vmm::Error::Refused(body), kernel, image } = self {
            return refusal(class, body, remedy, kernel, image);
        }
        Failure::new(class, chain(self), remedy)
    }

    fn advice(&self) -> (Class, String) {
        match self {
            Self::Memory { .. } => (
                Class::MemoryTooSmall,
                format!("give it at least {} with --memory", super::MIN_MEMORY_MIB),
            ),
            Self::Kernel { .. } => (
                Class::KernelMissing,
                "name an ELF vmlinux or bzImage that this user can read with --kernel".into(),
            ),
            Self::ImageOpen { .. } => {
                (Class::ImageMissing, "name an image that this user can read with --image".into())
            }
            Self::Image { .. } => {
                (Class::ImageInvalid, "copy or build the image again (cargo xtask rootfs)".into())
            }
            Self::WorkDir(error) => match error.io() {
                Some(source) if is_full(source) => (Class::DiskFull, MAKE_ROOM.into()),
                _ => (
                    Class::Host,
                    "point XDG_RUNTIME_DIR to a directory that only this user can write".into(),
                ),
            },
            Self::NoSpace { .. } => (Class::DiskFull, MAKE_ROOM.into()),
            Self::Scratch { .. } => {
                (Class::Host, "point COPPICE_HOME to a directory this user can write".into())
            }
            Self::Socket(_) | Self::Console(_) => {
                (Class::Host, "see `ulimit -n` and free descriptors".into())
            }
            Self::BootedTwice => (Class::Internal, REPORT.into()),
            Self::Refused { source, .. } => refusal_advice(source.kind()),
            Self::Vmm(vmm::Error::Spawn { .. }) => (
                Class::ProgramMissing,
                "put coppice-vmm next to coppice or name it with --vmm".into(),
            ),
            Self::Vmm(_) => (Class::Internal, REPORT.into()),
            Self::Boot { cause, memory_mib, .. } => boot_advice(cause, *memory_mib),
            Self::NoReport { .. } => (
                Class::AgentUnreachable,
                "check that the image's /sbin/init is coppice-agent and the kernel has \
                 virtio-vsock, or allow more time with --boot-timeout"
                    .into(),
            ),
            Self::Ended { panicked: true, .. } => (Class::GuestPanic, MORE_MEMORY.into()),
            Self::Ended { .. } => {
                (Class::GuestEnded, "look for what in the guest powers it off".into())
            }
            Self::Agent(error) => agent_advice(error),
            Self::Store(_) => (Class::StoreDamaged, "see `coppice fsck`".into()),
            Self::Layer { .. } => (Class::StoreDamaged, "see `coppice fsck`".into()),
            Self::TooDeep => {
                (Class::Conflict, "clone or roll back to a checkpoint nearer to the root".into())
            }
            Self::Gone { .. } => (Class::GuestEnded, "remove it with `coppice rm`".into()),
            Self::NotSuspended { .. } => (Class::Conflict, "see `coppice ls`".into()),
            Self::OtherTree { .. } => (
                Class::Conflict,
                "start a sandbox from that checkpoint with `coppice clone`".into(),
            ),
            Self::Checkpoint { source, .. } => refusal_advice(source.kind()),
            Self::Interrupted { .. } => (Class::Internal, "run it again".into()),
            Self::Kill { .. } => (Class::Host, "end it as the user it belongs to".into()),
        }
    }
}

const MAKE_ROOM: &str = "free some space or point COPPICE_HOME to another disk";
const REPORT: &str = "run `coppice doctor`, and report this if all is well there";
const MORE_MEMORY: &str = "try another kernel, or more memory with --memory";

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The VMM's words, with the name of the file it only knows as a descriptor. They end with a
/// remedy of their own after a semicolon where there is a better one than ours.
fn refusal(class: Class, body: &ErrorBody, remedy: String, kernel: &Path, image: &Path) -> Failure {
    let (what, remedy) = match body.message.rsplit_once("; ") {
        Some((what, theirs)) => (what, theirs.to_owned()),
        None => (body.message.as_str(), remedy),
    };
    match body.kind {
        ErrorKind::Kernel => Failure::new(class, format!("{}: {what}", kernel.display()), remedy),
        ErrorKind::Initrd | ErrorKind::Disk => {
            Failure::new(class, format!("{}: {what}", image.display()), remedy)
        }
        _ => Failure::new(class, what, remedy),
    }
}

fn refusal_advice(kind: Option<ErrorKind>) -> (Class, String) {
    match kind {
        Some(ErrorKind::Kernel) => {
            (Class::KernelInvalid, "give a whole ELF vmlinux or bzImage for x86-64".into())
        }
        Some(ErrorKind::Initrd | ErrorKind::Disk) => {
            (Class::ImageInvalid, "copy or build the image again (cargo xtask rootfs)".into())
        }
        Some(ErrorKind::Memory) => {
            (Class::MemoryTooSmall, "give the guest more memory with --memory".into())
        }
        Some(ErrorKind::Cmdline) => (Class::CmdlineInvalid, "change what --append adds".into()),
        Some(ErrorKind::Kvm) => kvm_advice(),
        Some(ErrorKind::Checkpoint) => (
            Class::CheckpointUnfit,
            "see `coppice fsck`, or use a host like the one it was made on".into(),
        ),
        Some(ErrorKind::NoBackgroundCopy) => {
            (Class::Host, "leave out --async, or give the VMM CAP_SYS_PTRACE".into())
        }
        Some(ErrorKind::State) => (Class::Conflict, "see what it does with `coppice ls`".into()),
        Some(ErrorKind::Vsock | ErrorKind::Host) => {
            (Class::Host, "run `coppice doctor` to see what the host lacks".into())
        }
        _ => (Class::Internal, REPORT.into()),
    }
}

/// Which of the reasons for a KVM failure it is; asked only after the VMM failed.
fn kvm_advice() -> (Class, String) {
    match access("/dev/kvm", Access::READ_OK | Access::WRITE_OK) {
        Ok(()) => (
            Class::KvmUnfit,
            "run `coppice doctor` to see what KVM lacks here, or use `cargo xtask lab`".into(),
        ),
        Err(rustix::io::Errno::NOENT) => (
            Class::KvmAbsent,
            "load kvm_intel or kvm_amd, turn virtualization on in the firmware, or use \
             `cargo xtask lab`"
                .into(),
        ),
        Err(_) => (
            Class::KvmDenied,
            "add this user to the group of /dev/kvm (usermod -aG kvm USER) and log in again".into(),
        ),
    }
}

fn boot_advice(cause: &Cause, memory_mib: u32) -> (Class, String) {
    match cause {
        Cause::NoDisk => (
            Class::KernelUnfit,
            "use a kernel with virtio-mmio, virtio-blk and ACPI built in (cargo xtask kernel)"
                .into(),
        ),
        Cause::RootNotMounted(_) => (
            Class::RootfsUnusable,
            "check the image with fsck and that the kernel has its file system built in".into(),
        ),
        Cause::NoInit(_) => (
            Class::RootfsUnusable,
            "install coppice-agent as /sbin/init in the image (cargo xtask rootfs)".into(),
        ),
        Cause::AgentFailed(_) => (
            Class::KernelUnfit,
            "use a kernel with virtio-vsock built in (cargo xtask kernel)".into(),
        ),
        Cause::OutOfMemory(_) => {
            (Class::MemoryTooSmall, format!("give it more than {memory_mib} MiB with --memory"))
        }
        Cause::Panic(_) | Cause::Crashed { .. } => (Class::GuestPanic, MORE_MEMORY.into()),
        Cause::Ended { .. } => {
            (Class::GuestEnded, "check that the image's /sbin/init is coppice-agent".into())
        }
        Cause::Vmm(_) => (Class::Internal, REPORT.into()),
    }
}

fn agent_advice(error: &agent::Error) -> (Class, String) {
    match error {
        agent::Error::Refused(_) => {
            (Class::RequestRefused, "check the command, --user and --cwd".into())
        }
        agent::Error::Request(_) => {
            (Class::Usage, "use a user name without control characters".into())
        }
        _ => (
            Class::AgentUnreachable,
            "the agent may have been killed or the guest have run out of memory; see --memory"
                .into(),
        ),
    }
}
