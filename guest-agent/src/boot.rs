//! What init prepares so that a userland works.
//!
//! Everything is tolerant: what is mounted or set already stays, what the kernel was built without
//! is left out, and what fails in any other way is told on the console and left out. Only that is
//! told: on a serial console a line costs as much time as starting a process.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, symlink};
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::set_cad_enabled;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{AccessFlags, access};

use crate::{log, sys};

/// Open files a process may have, and may raise itself to.
const OPEN_FILES: (u64, u64) = (65_536, 1_048_576);

/// Host name of an image that has none.
const DEFAULT_HOSTNAME: &str = "coppice";

struct Mount {
    target: &'static str,
    kind: &'static str,
    flags: MsFlags,
    data: Option<&'static str>,
}

const PROTECTED: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

/// In the order they build upon each other.
const MOUNTS: [Mount; 7] = [
    Mount { target: "/proc", kind: "proc", flags: PROTECTED, data: None },
    Mount { target: "/sys", kind: "sysfs", flags: PROTECTED, data: None },
    Mount { target: "/dev", kind: "devtmpfs", flags: MsFlags::MS_NOSUID, data: Some("mode=0755") },
    Mount {
        target: "/dev/pts",
        kind: "devpts",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC),
        data: Some("gid=5,mode=0620,ptmxmode=0666"),
    },
    Mount {
        target: "/dev/shm",
        kind: "tmpfs",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV),
        data: Some("mode=1777"),
    },
    Mount {
        target: "/run",
        kind: "tmpfs",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV),
        data: Some("mode=0755"),
    },
    Mount { target: "/sys/fs/cgroup", kind: "cgroup2", flags: PROTECTED, data: None },
];

/// Names programs expect beside the device nodes.
const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

/// Prepares the userland.
pub(crate) fn prepare() {
    for entry in &MOUNTS {
        note(entry.target, mount_once(entry));
    }
    for (target, link) in LINKS {
        note(link, ignore(io::ErrorKind::AlreadyExists, symlink(target, link)));
    }
    note("/tmp", make_tmp());
    note("the host name", set_hostname());
    note("the loopback interface", unless_absent(sys::bring_up("lo"), Errno::EAFNOSUPPORT));
    note("the limit of open files", raise_open_files());
    // Ctrl-Alt-Del comes as SIGINT then. In a PID namespace there is none to disable.
    let _ = set_cad_enabled(false);
}

/// Raises the hard limit too, unless a container forbids that.
fn raise_open_files() -> io::Result<()> {
    let (soft, hard) = OPEN_FILES;
    if setrlimit(Resource::RLIMIT_NOFILE, soft, hard).is_err() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard)?;
    }
    Ok(())
}

fn note(what: &str, outcome: io::Result<()>) {
    if let Err(error) = outcome {
        log::warn(format_args!("preparing {what}: {error}"));
    }
}

fn ignore(kind: io::ErrorKind, outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == kind => Ok(()),
        outcome => outcome,
    }
}

/// Lets pass that the kernel was built without what was asked for, which it tells by `code`.
fn unless_absent(outcome: io::Result<()>, code: Errno) -> io::Result<()> {
    match outcome {
        Err(error) if error.raw_os_error() == Some(code as i32) => Ok(()),
        outcome => outcome,
    }
}

fn mount_once(entry: &Mount) -> io::Result<()> {
    if !Path::new(entry.target).exists() {
        if entry.target.starts_with("/sys/") {
            // The kernel makes these directories, and this one has nothing to mount there.
            return Ok(());
        }
        fs::DirBuilder::new().mode(0o755).create(entry.target)?;
    } else if is_mount_point(entry.target)? {
        return Ok(());
    }
    let mounted = mount(Some(entry.kind), entry.target, Some(entry.kind), entry.flags, entry.data);
    unless_absent(mounted.map_err(io::Error::from), Errno::ENODEV)
}

/// A mounted file system has another device number than the directory it is mounted in.
fn is_mount_point(target: &str) -> io::Result<bool> {
    let parent = Path::new(target).parent().unwrap_or(Path::new("/"));
    Ok(fs::metadata(target)?.dev() != fs::metadata(parent)?.dev())
}

/// Every userland may write to /tmp, on a read-only root too.
fn make_tmp() -> io::Result<()> {
    let created = fs::DirBuilder::new().mode(0o755).create("/tmp");
    if created.is_ok() {
        // Not subject to the umask, unlike the mode above.
        return fs::set_permissions("/tmp", std::os::unix::fs::PermissionsExt::from_mode(0o1777));
    }
    if access("/tmp", AccessFlags::W_OK).is_ok() {
        return Ok(());
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("tmpfs"), "/tmp", Some("tmpfs"), flags, Some("mode=1777"))?;
    Ok(())
}

fn set_hostname() -> io::Result<()> {
    let text = fs::read_to_string("/etc/hostname").unwrap_or_default();
    let name = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    nix::unistd::sethostname(name.unwrap_or(DEFAULT_HOSTNAME))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_kernel_was_built_without_passes_in_silence() {
        let failed = |code: Errno| Err(io::Error::from(code));
        unless_absent(failed(Errno::ENODEV), Errno::ENODEV).unwrap();
        unless_absent(failed(Errno::EPERM), Errno::ENODEV).unwrap_err();
    }

    #[test]
    fn a_directory_that_the_kernel_does_not_have_is_not_made() {
        let nowhere = Mount { target: "/sys/coppice", kind: "proc", flags: PROTECTED, data: None };
        mount_once(&nowhere).unwrap();
    }
}
