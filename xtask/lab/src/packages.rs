//! Tools and kernels from Debian's archive.
//!
//! The lab uses an apt configuration of its own, below the cache directory: the host's sources
//! plus backports, so that a recent QEMU can be installed without editing the host's.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::paths;

/// Oldest QEMU release known to keep two virtual CPUs alive over a long session.
const WANTED_QEMU: u32 = 10;

/// Kernel package that has virtio-9p, which the smaller cloud kernel lacks.
const KERNEL_PACKAGE: &str = "linux-image-amd64";

/// Which of Debian's kernels the nested machine runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostKernel {
    /// The one of the host's Debian release: 6.1 on Debian 12.
    #[default]
    Stable,
    /// The one of Debian 12's backports (6.12), which has newer features of KVM; on other
    /// releases the release's own.
    Backports,
}

impl HostKernel {
    /// Where kernels of this kind are kept.
    fn store(self) -> PathBuf {
        paths::lab_dir().join(match self {
            Self::Stable => "kernels",
            Self::Backports => "kernels-backports",
        })
    }
}

/// Why a tool or kernel could not be had.
#[derive(Debug, Error)]
pub enum Error {
    /// A program is missing and this user may not install it.
    #[error("{program} is missing: install the Debian package {package}, or run this as root")]
    Missing {
        /// The program.
        program: &'static str,
        /// The package that holds it.
        package: &'static str,
    },
    /// The host has no apt.
    #[error("apt-get is missing: the lab takes its kernel and QEMU from Debian's archive")]
    NoApt,
    /// A program could not be run or reported failure.
    #[error("`{command}` failed ({reason}): {detail}")]
    Failed {
        /// The command line.
        command: String,
        /// Exit status.
        reason: String,
        /// Last lines of its output.
        detail: String,
    },
    /// Files of the cache could not be written or read.
    #[error("{path}")]
    File {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// A kernel as unpacked from its package.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    /// Release, such as `6.1.0-57-amd64`.
    pub(crate) release: String,
    /// Root of the unpacked package: holds `boot/` and `lib/modules/`.
    pub(crate) root: PathBuf,
}

impl Kernel {
    /// The kernel as an ELF file, as QEMU enters it by the PVH protocol.
    pub(crate) fn image(&self) -> PathBuf {
        self.root.join("boot").join(format!("vmlinux-{}", self.release))
    }

    pub(crate) fn modules(&self) -> PathBuf {
        self.root.join("lib/modules").join(&self.release)
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    |source| Error::File { path, source }
}

/// Runs a program to its end, with its output kept for the error.
fn run(command: &mut Command) -> Result<Output, Error> {
    let line = || format!("{command:?}").replace('"', "");
    let text = line();
    let output = command.stdin(Stdio::null()).output().map_err(|error| Error::Failed {
        command: text.clone(),
        reason: error.to_string(),
        detail: String::new(),
    })?;
    if output.status.success() {
        return Ok(output);
    }
    let shown = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
    let lines = String::from_utf8_lossy(shown);
    let last: Vec<&str> = lines.lines().rev().take(3).collect();
    Err(Error::Failed {
        command: text,
        reason: output.status.to_string(),
        detail: last.into_iter().rev().collect::<Vec<_>>().join(" / "),
    })
}

/// Finds a program where it is searched for, and where administrative tools are.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .map(|directory| directory.join(program))
        .find(|file| file.is_file())
}

fn on_path(program: &str) -> bool {
    find(program).is_some()
}

/// The statically linked busybox, which is the machine's userland.
pub(crate) fn busybox() -> Result<PathBuf, Error> {
    find("busybox").ok_or(Error::Missing { program: "busybox", package: "busybox-static" })
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// The lab's own apt configuration.
struct Apt {
    options: Vec<String>,
    backports: Option<String>,
}

impl Apt {
    fn prepare() -> Result<Self, Error> {
        if !on_path("apt-get") {
            return Err(Error::NoApt);
        }
        let root = paths::lab_dir().join("apt");
        let sources = root.join("sources");
        let lists = root.join("lists");
        let archives = root.join("archives");
        for directory in [&sources, &lists.join("partial"), &archives.join("partial")] {
            fs::create_dir_all(directory).map_err(at(directory))?;
        }
        copy_sources(&sources)?;
        let backports = codename().filter(|name| name == "bookworm").map(|name| {
            let suite = format!("{name}-backports");
            (
                suite.clone(),
                format!(
                    "Types: deb\nURIs: http://deb.debian.org/debian\nSuites: {suite}\n\
                 Components: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
                ),
            )
        });
        if let Some((_, text)) = &backports {
            let file = sources.join("coppice-backports.sources");
            fs::write(&file, text).map_err(at(&file))?;
        }
        let options = [
            "-q".to_owned(),
            "-oDPkg::Lock::Timeout=600".to_owned(),
            "-oDir::Etc::sourcelist=/dev/null".to_owned(),
            format!("-oDir::Etc::sourceparts={}", sources.display()),
            format!("-oDir::State::lists={}", lists.display()),
            format!("-oDir::Cache::archives={}", archives.display()),
            // The lists lie in a user's cache, where apt's own unprivileged user cannot go.
            "-oAPT::Sandbox::User=root".to_owned(),
        ];
        let apt = Self { options: options.into(), backports: backports.map(|(suite, _)| suite) };
        run(apt.command("apt-get").arg("update"))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options).env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
        command
    }

    /// The option that prefers backports, where they are wanted and there are any.
    fn suite(&self, from_backports: bool) -> Option<String> {
        let suite = self.backports.as_ref().filter(|_| from_backports)?;
        Some(format!("-oAPT::Default-Release={suite}"))
    }

    fn install(&self, package: &str, from_backports: bool) -> Result<(), Error> {
        let mut command = self.command("apt-get");
        command.args(["install", "-y", "--no-install-recommends"]);
        command.args(self.suite(from_backports));
        eprintln!("lab: installing the Debian package {package}");
        run(command.arg(package)).map(drop)
    }
}

/// Copies the host's apt sources, so that its mirrors and proxies stay in use.
fn copy_sources(to: &Path) -> Result<(), Error> {
    let from = Path::new("/etc/apt/sources.list.d");
    let listed = fs::read_dir(from).map(|entries| entries.flatten().collect()).unwrap_or(vec![]);
    let names = listed.iter().map(fs::DirEntry::path);
    for file in names.chain([PathBuf::from("/etc/apt/sources.list")]) {
        let known = file.extension().is_some_and(|kind| kind == "list" || kind == "sources");
        if let (true, true, Some(name)) = (known, file.is_file(), file.file_name()) {
            let copy = to.join(name);
            fs::copy(&file, &copy).map_err(at(&copy))?;
        }
    }
    Ok(())
}

fn codename() -> Option<String> {
    let text = fs::read_to_string("/etc/os-release").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
    Some(line.trim_matches('"').to_owned())
}

/// Makes sure of QEMU and the small tools; installs them where this user may.
pub(crate) fn ensure_tools() -> Result<(), Error> {
    let mut apt = None;
    let mut prepared = || -> Result<Apt, Error> { apt.take().map_or_else(Apt::prepare, Ok) };
    for (program, package) in
        [("busybox", "busybox-static"), ("depmod", "kmod"), ("xz", "xz-utils"), ("zstd", "zstd")]
    {
        if on_path(program) {
            continue;
        }
        if !is_root() {
            return Err(Error::Missing { program, package });
        }
        prepared()?.install(package, false)?;
    }
    let found = qemu_version();
    if found.is_some_and(|major| major >= WANTED_QEMU) {
        return Ok(());
    }
    if is_root() {
        prepared()?.install("qemu-system-x86", true)?;
    }
    match qemu_version() {
        None => Err(Error::Missing {
            program: "qemu-system-x86_64",
            package: "qemu-system-x86 (from bookworm-backports on Debian 12)",
        }),
        Some(major) if major < WANTED_QEMU => {
            eprintln!(
                "lab: warning: QEMU {major} may hang in a long session with more than one CPU; \
                 install QEMU {WANTED_QEMU} or later (bookworm-backports on Debian 12)"
            );
            Ok(())
        }
        Some(_) => Ok(()),
    }
}

fn qemu_version() -> Option<u32> {
    let output = Command::new("qemu-system-x86_64").arg("--version").output().ok()?;
    parse_qemu_version(&String::from_utf8_lossy(&output.stdout))
}

fn parse_qemu_version(text: &str) -> Option<u32> {
    let version = text.strip_prefix("QEMU emulator version ")?;
    version.split('.').next()?.parse().ok()
}

/// The kernel of the nested machine: the newest one in the cache, else fetched.
pub(crate) fn ensure_kernel(wanted: HostKernel) -> Result<Kernel, Error> {
    let store = wanted.store();
    fs::create_dir_all(&store).map_err(at(&store))?;
    let entries = fs::read_dir(&store).map_err(at(&store))?;
    let newest = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .map(|release| Kernel { root: store.join(&release), release })
        .filter(|kernel| kernel.image().is_file())
        .max_by(|one, other| one.release.cmp(&other.release));
    if let Some(kernel) = newest {
        return Ok(kernel);
    }
    let apt = Apt::prepare()?;
    let release = kernel_release(&apt, wanted)?;
    eprintln!("lab: fetching the kernel {release} from Debian's archive");
    let work = store.join(format!(".fetch-{}", std::process::id()));
    fs::create_dir_all(&work).map_err(at(&work))?;
    let package = format!("linux-image-{release}");
    run(apt.command("apt-get").arg("download").arg(&package).current_dir(&work))?;
    let archive = fs::read_dir(&work)
        .map_err(at(&work))?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|kind| kind == "deb"))
        .ok_or_else(|| Error::File {
            path: work.clone(),
            source: io::ErrorKind::NotFound.into(),
        })?;
    let unpacked = work.join("root");
    run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&unpacked))?;
    unpack_image(&unpacked.join("boot"), &release)?;
    run(Command::new("depmod").arg("-b").arg(&unpacked).arg(&release).env("PATH", tool_path()))?;
    let root = store.join(&release);
    fs::rename(&unpacked, &root).map_err(at(&root))?;
    fs::remove_dir_all(&work).map_err(at(&work))?;
    Ok(Kernel { release, root })
}

/// Unpacks the kernel proper from the `bzImage` of a package: the emulated CPU would take longer
/// over it than over the rest of the boot.
fn unpack_image(boot: &Path, release: &str) -> Result<(), Error> {
    let source = boot.join(format!("vmlinuz-{release}"));
    let image = fs::read(&source).map_err(at(&source))?;
    let invalid = |reason: &str| Error::File {
        path: source.clone(),
        source: io::Error::new(io::ErrorKind::InvalidData, reason),
    };
    let payload = payload(&image).ok_or_else(|| invalid("not a bzImage"))?;
    let unpacker = unpacker(payload).ok_or_else(|| invalid("neither xz nor zstd compressed it"))?;
    let packed = boot.join("payload");
    fs::write(&packed, payload).map_err(at(&packed))?;
    let target = boot.join(format!("vmlinux-{release}"));
    let output = File::create(&target).map_err(at(&target))?;
    let unpacked = Command::new(unpacker)
        .args(["--decompress", "--stdout"])
        .stdin(File::open(&packed).map_err(at(&packed))?)
        .stdout(output)
        .stderr(Stdio::null())
        .status();
    if !unpacked.map_err(at(Path::new(unpacker)))?.success() {
        return Err(invalid("its payload cannot be unpacked"));
    }
    fs::remove_file(&packed).map_err(at(&packed))
}

/// The program that unpacks `payload`, by the first bytes that its format prescribes.
fn unpacker(payload: &[u8]) -> Option<&'static str> {
    if payload.starts_with(b"\xfd7zXZ\0") {
        Some("xz")
    } else if payload.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Some("zstd")
    } else {
        None
    }
}

/// The compressed kernel in a `bzImage`, without its unpacked size, which follows it in four
/// bytes (kernel `Documentation/arch/x86/boot.rst`:
/// `setup_sects` at 0x1f1, `payload_offset` at 0x248, `payload_length` at 0x24c).
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = image.get(at..at.checked_add(4)?)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let setup_sectors = match *image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = word(0x248)?.checked_add((setup_sectors + 1) * 512)?;
    image.get(start..start.checked_add(word(0x24c)?.checked_sub(4)?)?)
}

/// `PATH` with the directories of administrative tools, which a user's may lack.
fn tool_path() -> String {
    format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

fn kernel_release(apt: &Apt, wanted: HostKernel) -> Result<String, Error> {
    let mut command = apt.command("apt-cache");
    command.args(apt.suite(wanted == HostKernel::Backports));
    let output = run(command.args(["depends", KERNEL_PACKAGE]))?;
    let text = String::from_utf8_lossy(&output.stdout);
    parse_kernel_release(&text).ok_or_else(|| Error::Failed {
        command: format!("apt-cache depends {KERNEL_PACKAGE}"),
        reason: "no kernel listed".into(),
        detail: text.trim().to_owned(),
    })
}

fn parse_kernel_release(depends: &str) -> Option<String> {
    let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: "))?;
    Some(package.trim().strip_prefix("linux-image-")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_found_by_the_header_alone() {
        let mut image = vec![0_u8; 4096];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x1f1] = 1;
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&7_u32.to_le_bytes());
        image[1040..1043].copy_from_slice(b"abc");
        assert_eq!(payload(&image), Some(b"abc".as_slice()));
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(payload(&image), None);
        assert_eq!(payload(b"not a kernel"), None);
    }

    #[test]
    fn versions_are_read_from_the_tools_output() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)\n";
        assert_eq!(parse_qemu_version(text), Some(10));
        assert_eq!(parse_qemu_version("bash: command not found"), None);
        let text = "linux-image-amd64\n  Depends: linux-image-6.1.0-57-amd64\n";
        assert_eq!(parse_kernel_release(text).as_deref(), Some("6.1.0-57-amd64"));
        assert_eq!(parse_kernel_release("N: Unable to locate package\n"), None);
    }
}
