//! userfaultfd in write-protect mode: guest RAM that a background copy still needs is protected,
//! and whoever writes to it waits until the copy has it
//! (`Documentation/admin-guide/mm/userfaultfd.rst`).

use std::fs::File;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iowr_nr};

use super::check;

const UFFDIO: u32 = 0xAA;
/// The device's one request, for a new descriptor; its argument are flags.
const IOC_NEW: libc::Ioctl = 0xAA00;
const FLAGS: libc::c_int = libc::O_CLOEXEC | libc::O_NONBLOCK;
const API: u64 = 0xAA;
const FEATURE_WRITE_PROTECT: u64 = 1 << 0;
const FEATURE_PROTECT_ABSENT: u64 = 1 << 13;
const REGISTER_WRITE_PROTECT: u64 = 1 << 1;
const PROTECT: u64 = 1 << 0;
const EVENT_PAGEFAULT: u8 = 0x12;

#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct UffdRange {
    start: u64,
    len: u64,
}

#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct Register {
    range: UffdRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct WriteProtect {
    range: UffdRange,
    mode: u64,
}

/// A message of the kernel; only page faults are asked for.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

/// Request numbers; the macros make functions of them.
#[allow(missing_docs, reason = "the kernel's documentation says what each request does")]
mod request {
    use super::*;

    ioctl_iowr_nr!(UFFDIO_API, UFFDIO, 0x3F, Api);
    ioctl_iowr_nr!(UFFDIO_REGISTER, UFFDIO, 0x00, Register);
    ioctl_ior_nr!(UFFDIO_UNREGISTER, UFFDIO, 0x01, UffdRange);
    ioctl_iowr_nr!(UFFDIO_WRITEPROTECT, UFFDIO, 0x06, WriteProtect);
}
use request::*;

/// A userfaultfd of this process. When it is dropped, all protection ends and all who wait go on.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    protects_absent: bool,
}

impl Userfaultfd {
    /// Makes a descriptor that can write-protect, and serve faults of the kernel itself (KVM's
    /// are such).
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_PTRACE` unless `vm.unprivileged_userfaultfd` is 1 or
    /// `/dev/userfaultfd` (Linux 6.1) may be opened; `EINVAL` and `ENOSYS` on kernels without the
    /// feature.
    pub fn new() -> io::Result<Self> {
        match Self::with(FEATURE_WRITE_PROTECT | FEATURE_PROTECT_ABSENT) {
            Ok(fd) => Ok(Self { fd, protects_absent: true }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Self::with(FEATURE_WRITE_PROTECT).map(|fd| Self { fd, protects_absent: false })
            }
            Err(error) => Err(error),
        }
    }

    fn with(features: u64) -> io::Result<OwnedFd> {
        let fd = Self::by_privilege().or_else(|refused| Self::by_device().map_err(|_| refused))?;
        let mut api = Api { api: API, features, ioctls: 0 };
        // SAFETY: the structure is the one this request takes.
        check(unsafe { ioctl_with_mut_ref(&fd, UFFDIO_API(), &mut api) })?;
        Ok(fd)
    }

    fn by_privilege() -> io::Result<OwnedFd> {
        // SAFETY: takes flags only.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS) };
        let fd = check(libc::c_int::try_from(fd).unwrap_or(-1))?;
        // SAFETY: the call succeeded, so the descriptor is open and owned by nobody else.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// By the right to open a device, which an administrator may give to a group.
    fn by_device() -> io::Result<OwnedFd> {
        let device = File::options().read(true).write(true).open("/dev/userfaultfd")?;
        // SAFETY: the request takes flags by value and makes a descriptor.
        let fd = check(unsafe { libc::ioctl(device.as_raw_fd(), IOC_NEW, FLAGS) })?;
        // SAFETY: the call succeeded, so the descriptor is open and owned by nobody else.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Whether [`Userfaultfd::protect`] leaves out pages that nothing was written to, or that
    /// were given back (kernels before 6.4).
    pub fn protects_only_present(&self) -> bool {
        !self.protects_absent
    }

    /// Makes a range of this process's memory subject to [`Userfaultfd::protect`].
    ///
    /// # Errors
    /// `EINVAL` for mappings that are neither anonymous nor of shared memory.
    pub fn register(&self, range: &Range<usize>) -> io::Result<()> {
        let mut register =
            Register { range: uffd_range(range), mode: REGISTER_WRITE_PROTECT, ioctls: 0 };
        // SAFETY: the structure is the one this request takes; registering changes no memory.
        check(unsafe { ioctl_with_mut_ref(&self.fd, UFFDIO_REGISTER(), &mut register) }).map(drop)
    }

    /// Ends [`Userfaultfd::register`]; the range is no longer protected and who waits goes on.
    ///
    /// # Errors
    /// Those of `UFFDIO_UNREGISTER`.
    pub fn unregister(&self, range: &Range<usize>) -> io::Result<()> {
        let range = uffd_range(range);
        // SAFETY: the structure is the one this request takes.
        check(unsafe { ioctl_with_ref(&self.fd, UFFDIO_UNREGISTER(), &range) }).map(drop)
    }

    /// Makes writers to the pages of a registered range that are present wait.
    ///
    /// # Errors
    /// Those of `UFFDIO_WRITEPROTECT`.
    pub fn protect(&self, range: &Range<usize>) -> io::Result<()> {
        self.write_protect(range, PROTECT)
    }

    /// Lets writers to the range go on, those who wait as well.
    ///
    /// # Errors
    /// As for [`Userfaultfd::protect`].
    pub fn release(&self, range: &Range<usize>) -> io::Result<()> {
        self.write_protect(range, 0)
    }

    fn write_protect(&self, range: &Range<usize>, mode: u64) -> io::Result<()> {
        let mut request = WriteProtect { range: uffd_range(range), mode };
        loop {
            // SAFETY: the structure is the one this request takes; it changes who may write.
            match check(unsafe {
                ioctl_with_mut_ref(&self.fd, UFFDIO_WRITEPROTECT(), &mut request)
            }) {
                // The address space is being changed by another thread at this moment.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other.map(drop),
            }
        }
    }

    /// The address of a write that waits, if there is one that was not told yet.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn fault(&self) -> io::Result<Option<usize>> {
        let mut message = MaybeUninit::<Message>::zeroed();
        // SAFETY: the buffer has room for one message, all that is asked for.
        let count = unsafe {
            libc::read(self.fd.as_raw_fd(), message.as_mut_ptr().cast(), size_of::<Message>())
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        // SAFETY: it was zeroed before, and any bytes are a message.
        let message = unsafe { message.assume_init() };
        if message.event != EVENT_PAGEFAULT {
            return Ok(None);
        }
        usize::try_from(message.address).map(Some).map_err(io::Error::other)
    }
}

impl AsRawFd for Userfaultfd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn uffd_range(range: &Range<usize>) -> UffdRange {
    UffdRange { start: range.start as u64, len: range.len() as u64 }
}
