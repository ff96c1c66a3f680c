//! What only a path or a privilege leads to, opened before the process gives up both: KVM, with
//! plain words for what is wrong when it does not open, and the means to follow memory.

use std::ffi::CString;
use std::io;
use std::sync::Arc;

use kvm_ioctls::{Cap, Kvm};
use thiserror::Error;

use crate::sys::pagemap::Pagemap;
use crate::sys::uffd::Userfaultfd;

/// The one version of the KVM interface there has been since 2007.
pub(super) const KVM_API_VERSION: i32 = 12;

/// Where KVM is.
pub(super) const KVM_PATH: &str = "/dev/kvm";

/// Why the host's KVM cannot be used.
#[derive(Debug, Clone, Error)]
pub enum KvmError {
    /// There is no device node.
    #[error(
        "{path} does not exist: load the kvm_intel or kvm_amd module, enable virtualization in \
         the firmware, or allow nested virtualization for this machine"
    )]
    Missing {
        /// The path tried.
        path: String,
    },
    /// The device node may not be opened.
    #[error("{path} may not be opened by this user: add it to the group kvm or run as root")]
    NotPermitted {
        /// The path tried.
        path: String,
    },
    /// It opened, but does not answer as KVM does.
    #[error("{path} is not a KVM device: remove it and load the kvm_intel or kvm_amd module")]
    NotKvm {
        /// The path tried.
        path: String,
    },
    /// Another version of the interface.
    #[error("KVM has interface version {0} where this program needs {KVM_API_VERSION}")]
    Version(i32),
    /// The device node cannot be opened for another reason.
    #[error("{path} cannot be opened")]
    Open {
        /// The path tried.
        path: String,
        /// What the host said.
        #[source]
        source: Arc<io::Error>,
    },
    /// A capability that every machine needs is absent.
    #[error("KVM on this host lacks {0:?}: use a newer kernel")]
    Capability(Cap),
}

/// What a host offers, or why it does not. A lack is told to whoever asks for what needs it.
pub(super) struct Host {
    pub(super) kvm: Result<Kvm, KvmError>,
    pub(super) pagemap: Result<Arc<Pagemap>, Arc<io::Error>>,
    /// For background checkpoints.
    pub(super) write_protection: Result<Arc<Userfaultfd>, Arc<io::Error>>,
}

impl Host {
    /// Opens what there is.
    pub(super) fn open() -> Self {
        Self {
            kvm: open_kvm(),
            pagemap: Pagemap::open().map(Arc::new).map_err(Arc::new),
            write_protection: Userfaultfd::new().map(Arc::new).map_err(Arc::new),
        }
    }
}

/// Opens the host's KVM.
///
/// # Errors
/// [`KvmError`], whose text names the remedy.
pub(super) fn open_kvm() -> Result<Kvm, KvmError> {
    open_at(KVM_PATH)
}

fn open_at(path: &str) -> Result<Kvm, KvmError> {
    let path = path.to_owned();
    let Ok(c_path) = CString::new(path.as_str()) else {
        return Err(KvmError::Missing { path });
    };
    let kvm = match Kvm::new_with_path(c_path) {
        Ok(kvm) => kvm,
        Err(error) => {
            return Err(match error.errno() {
                libc::ENOENT | libc::ENODEV | libc::ENXIO => KvmError::Missing { path },
                libc::EACCES | libc::EPERM => KvmError::NotPermitted { path },
                code => {
                    let source = Arc::new(io::Error::from_raw_os_error(code));
                    KvmError::Open { path, source }
                }
            });
        }
    };
    match kvm.get_api_version() {
        KVM_API_VERSION => Ok(kvm),
        version if version < 0 => Err(KvmError::NotKvm { path }),
        version => Err(KvmError::Version(version)),
    }
}

/// Checks for everything a machine needs from KVM.
///
/// # Errors
/// [`KvmError::Capability`] for the first thing that is absent.
pub(super) fn check_capabilities(kvm: &Kvm) -> Result<(), KvmError> {
    const NEEDED: [Cap; 7] = [
        Cap::UserMemory,
        Cap::Irqchip,
        Cap::Irqfd,
        Cap::Ioeventfd,
        Cap::ImmediateExit,
        Cap::ExtCpuid,
        Cap::MpState,
    ];
    match NEEDED.into_iter().find(|cap| !kvm.check_extension(*cap)) {
        Some(cap) => Err(KvmError::Capability(cap)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_lack_is_told_apart() {
        assert!(matches!(open_at("/nonexistent"), Err(KvmError::Missing { .. })));
        assert!(matches!(open_at("/dev/null"), Err(KvmError::NotKvm { .. })));
        assert!(matches!(open_at("/proc/self"), Err(KvmError::Open { .. })));
    }
}
