//! Signals: those that ask the process to end, read from a descriptor, and the one that gets a
//! vCPU thread out of `KVM_RUN`.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use vmm_sys_util::signal::{SIGRTMIN, create_sigset, register_signal_handler};

use super::check;

/// A descriptor from which blocked signals are read.
#[derive(Debug)]
pub struct SignalFd {
    fd: OwnedFd,
}

impl SignalFd {
    /// Blocks `signals` for this thread, and for those it will start, and opens a non-blocking
    /// descriptor for them.
    ///
    /// # Errors
    /// When a number is no signal or the process is out of descriptors.
    pub fn new(signals: &[libc::c_int]) -> io::Result<Self> {
        let set = create_sigset(signals).map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        // SAFETY: `set` is an initialised set; the old mask is not asked for.
        let ret =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) };
        if ret != 0 {
            return Err(io::Error::from_raw_os_error(ret));
        }
        // SAFETY: `set` is an initialised set; -1 asks for a new descriptor.
        let fd = check(unsafe {
            libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        })?;
        // SAFETY: the call succeeded, so the descriptor is open and owned by nobody else.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Takes one pending signal, if there is one.
    ///
    /// # Errors
    /// Those of `read`, but for `WouldBlock`.
    pub fn take(&self) -> io::Result<Option<libc::c_int>> {
        // SAFETY: all-zero bytes are a valid `signalfd_siginfo`, which is plain data.
        let mut info = unsafe { zeroed::<libc::signalfd_siginfo>() };
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: `info` has room for the `size` bytes that the kernel may write.
        let ret = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut info).cast(), size) };
        if ret < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        Ok(libc::c_int::try_from(info.ssi_signo).ok())
    }
}

impl AsRawFd for SignalFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// The real-time signal that gets a vCPU thread out of `KVM_RUN`.
pub fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}

/// Installs the handler for [`kick_signal`]. It does nothing: the signal has done its work once
/// the system call it met returns.
///
/// # Errors
/// Those of `sigaction`.
pub fn install_kick_handler() -> io::Result<()> {
    handle(kick_signal())
}

/// Makes a write over the limit for the size of files (`RLIMIT_FSIZE`) an error like any other,
/// instead of the end of the process.
///
/// # Errors
/// Those of `sigaction`.
pub fn survive_file_limit() -> io::Result<()> {
    handle(libc::SIGXFSZ)
}

/// Has a signal do nothing but interrupt system calls.
fn handle(signal: libc::c_int) -> io::Result<()> {
    extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(signal, ignore).map_err(|e| io::Error::from_raw_os_error(e.errno()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_signal_is_read_from_the_descriptor() {
        std::thread::spawn(|| {
            let signals = SignalFd::new(&[libc::SIGUSR1]).unwrap();
            assert_eq!(signals.take().unwrap(), None);
            // SAFETY: sends a blocked signal to this very thread.
            unsafe { libc::raise(libc::SIGUSR1) };
            assert_eq!(signals.take().unwrap(), Some(libc::SIGUSR1));
        })
        .join()
        .unwrap();
    }
}
