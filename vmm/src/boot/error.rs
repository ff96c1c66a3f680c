//! Why a guest cannot be booted, in words for whoever gave the kernel, initrd or command line.

use std::io;

use coppice_vmm_protocol::ErrorKind;
use linux_loader::loader::Error as LoaderError;
use thiserror::Error;
use vm_memory::GuestMemoryError;

/// Why a guest cannot be booted.
#[derive(Debug, Error)]
pub enum BootError {
    /// The kernel file is something else, or a kernel this machine cannot start.
    #[error("the kernel file cannot be booted, {0}; give an x86-64 vmlinux or bzImage")]
    NotAKernel(&'static str),
    /// The kernel file ends before its last part.
    #[error("the kernel file is truncated, it has {len} of at least {needed} bytes; copy it again")]
    Truncated {
        /// The file's length in bytes.
        len: u64,
        /// The length its headers ask for.
        needed: u64,
    },
    /// The kernel file cannot be read.
    #[error("the kernel file cannot be read")]
    ReadKernel(#[source] io::Error),
    /// The loader refused what the checks before it let pass.
    #[error("the kernel file cannot be loaded")]
    Loader(#[source] LoaderError),
    /// The kernel does not fit in guest memory.
    #[error("the kernel needs at least {needed_mib} MiB of memory, the guest has {have_mib} MiB")]
    KernelMemory {
        /// Memory needed, in MiB.
        needed_mib: u64,
        /// Memory below the hole that the guest has, in MiB.
        have_mib: u64,
    },
    /// The initrd file is empty or not a plain file.
    #[error("the initrd is {0}; give a cpio archive, compressed or not")]
    BadInitrd(&'static str),
    /// The initrd cannot be read.
    #[error("the initrd cannot be read")]
    ReadInitrd(#[source] io::Error),
    /// The initrd cannot be read into guest memory.
    #[error("the initrd cannot be read into guest memory; is something writing to the file?")]
    LoadInitrd(#[source] GuestMemoryError),
    /// Kernel and initrd do not fit in guest memory together.
    #[error(
        "kernel and initrd need at least {needed_mib} MiB of memory, the guest has {have_mib} MiB"
    )]
    InitrdMemory {
        /// Memory needed, in MiB.
        needed_mib: u64,
        /// Memory below the hole that the guest has, in MiB.
        have_mib: u64,
    },
    /// The kernel's own limit for the initrd's place leaves no room for it.
    #[error("the initrd is too large for this kernel, which wants it below {limit:#x}")]
    InitrdLimit {
        /// First address above the kernel's limit.
        limit: u64,
    },
    /// The command line is too long.
    #[error("the kernel command line has {len} bytes, at most {limit} fit; shorten it")]
    CmdlineTooLong {
        /// Its length in bytes.
        len: usize,
        /// The limit, without the terminating zero.
        limit: usize,
    },
    /// The command line has a character other than printable ASCII.
    #[error("the kernel command line has a character that is not printable ASCII at byte {at}")]
    CmdlineCharacter {
        /// Offset of the first such byte.
        at: usize,
    },
    /// The machine asks for more processors or devices than the tables can list.
    #[error("the ACPI tables have {len} bytes, at most {limit} fit")]
    AcpiTooLarge {
        /// Length of the tables in bytes.
        len: usize,
        /// Room for them.
        limit: u64,
    },
    /// Boot data cannot be written to guest memory.
    #[error("{what} cannot be written to guest memory")]
    Write {
        /// What was to be written.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: GuestMemoryError,
    },
}

impl BootError {
    /// The class of failure as the manager knows it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotAKernel(_)
            | Self::Truncated { .. }
            | Self::ReadKernel(_)
            | Self::Loader(_) => ErrorKind::Kernel,
            Self::KernelMemory { .. } | Self::InitrdMemory { .. } => ErrorKind::Memory,
            Self::BadInitrd(_)
            | Self::ReadInitrd(_)
            | Self::LoadInitrd(_)
            | Self::InitrdLimit { .. } => ErrorKind::Initrd,
            Self::CmdlineTooLong { .. } | Self::CmdlineCharacter { .. } => ErrorKind::Cmdline,
            Self::AcpiTooLarge { .. } | Self::Write { .. } => ErrorKind::Host,
        }
    }
}
