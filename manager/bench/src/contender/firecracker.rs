//! The peer's side: Firecracker over its API socket.

use std::fs;
use std::io::{Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, bail};
use rustix::fs::inotify;
use serde_json::{Value, json};

use super::Setup;

/// Files of one guest and its snapshot. The snapshot refers to them by path, so there is one
/// machine at a time.
#[derive(Debug)]
pub(super) struct Files {
    /// The guest's vsock socket.
    pub(super) vsock: PathBuf,
    api: PathBuf,
    disk: PathBuf,
    saved_disk: PathBuf,
    spare_disk: PathBuf,
    config: PathBuf,
    state: PathBuf,
    memory: PathBuf,
    /// Tells of new files beside these. It is kept: to close it takes the kernel many milliseconds.
    watch: OwnedFd,
}

impl Files {
    /// Names them, in the scratch directory.
    ///
    /// # Errors
    /// When that cannot be watched.
    pub(super) fn new(setup: &Setup) -> anyhow::Result<Self> {
        let name = |name: &str| setup.scratch.join(name);
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC)?;
        inotify::add_watch(&watch, &setup.scratch, inotify::WatchFlags::CREATE)?;
        Ok(Self {
            vsock: name("firecracker.vsock"),
            api: name("firecracker.api"),
            disk: name("firecracker.disk"),
            saved_disk: name("firecracker.disk.saved"),
            spare_disk: name("firecracker.disk.spare"),
            config: name("firecracker.json"),
            state: name("firecracker.state"),
            memory: name("firecracker.memory"),
            watch,
        })
    }

    /// Puts a copy of the disk as it was at the snapshot aside, for the next restore.
    ///
    /// # Errors
    /// When it cannot be copied.
    pub(super) fn copy_disk(&self) -> anyhow::Result<()> {
        fs::copy(&self.saved_disk, &self.spare_disk).context("the disk cannot be copied")?;
        Ok(())
    }
}

/// A `firecracker` process.
#[derive(Debug)]
pub(super) struct Vmm {
    child: Child,
}

impl Vmm {
    /// Boots the guest.
    pub(super) fn boot(
        setup: &Setup,
        program: &Path,
        files: &Files,
        cmdline: &str,
    ) -> anyhow::Result<Self> {
        fs::copy(&setup.image, &files.disk).context("the image cannot be copied")?;
        let config = json!({
            "boot-source": { "kernel_image_path": setup.kernel, "boot_args": cmdline },
            "drives": [{
                "drive_id": "root", "path_on_host": files.disk,
                "is_root_device": true, "is_read_only": false,
            }],
            "machine-config": {
                "vcpu_count": setup.vcpus, "mem_size_mib": setup.memory_mib,
            },
            "vsock": { "guest_cid": 3, "uds_path": files.vsock },
        });
        fs::write(&files.config, config.to_string())
            .context("the configuration cannot be written")?;
        Self::start(program, files, &["--config-file", &files.config.to_string_lossy()])
    }

    /// Makes a machine from the snapshot, with the disk put aside for it, and lets it run.
    pub(super) fn restore(program: &Path, files: &Files) -> anyhow::Result<Self> {
        fs::rename(&files.spare_disk, &files.disk).context("the disk cannot be brought back")?;
        let _ = fs::remove_file(&files.vsock);
        let vmm = Self::start(program, files, &[])?;
        let load = json!({
            "snapshot_path": files.state,
            "mem_backend": { "backend_type": "File", "backend_path": files.memory },
            "resume_vm": true,
        });
        call(&files.api, "PUT", "/snapshot/load", &load)?;
        Ok(vmm)
    }

    /// Executes the VMM and waits until its API socket is there.
    fn start(program: &Path, files: &Files, args: &[&str]) -> anyhow::Result<Self> {
        let _ = fs::remove_file(&files.api);
        let child = Command::new(program)
            .args(["--level", "Error", "--api-sock"])
            .arg(&files.api)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("{} does not start", program.display()))?;
        let vmm = Self { child };
        let mut buffer = [MaybeUninit::uninit(); 1024];
        let mut created = inotify::Reader::new(&files.watch, &mut buffer);
        while !files.api.exists() {
            created.next().context("the API socket cannot be waited for")?;
        }
        Ok(vmm)
    }

    /// Takes a full snapshot; gives the milliseconds of pause, snapshot and resume.
    pub(super) fn snapshot(&self, files: &Files) -> anyhow::Result<f64> {
        let paused = Instant::now();
        call(&files.api, "PATCH", "/vm", &json!({ "state": "Paused" }))?;
        let create = json!({
            "snapshot_type": "Full",
            "snapshot_path": files.state,
            "mem_file_path": files.memory,
        });
        call(&files.api, "PUT", "/snapshot/create", &create)?;
        let pause_ms = super::millis(paused);
        fs::copy(&files.disk, &files.saved_disk).context("the disk cannot be copied")?;
        call(&files.api, "PATCH", "/vm", &json!({ "state": "Resumed" }))?;
        Ok(pause_ms)
    }

    /// Ends the process; returns when it is gone.
    pub(super) fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().context("the VMM cannot be killed")?;
        self.child.wait().context("the VMM cannot be waited for")?;
        Ok(())
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        // Already gone is as good as killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes a call of the API that answers without a body.
fn call(api: &Path, method: &str, path: &str, body: &Value) -> anyhow::Result<()> {
    let body = body.to_string();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\naccept: application/json\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    // Between its creation and the first accept the socket may refuse.
    let mut stream = loop {
        match UnixStream::connect(api) {
            Ok(stream) => break stream,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                std::thread::yield_now();
            }
            Err(error) => return Err(error).context("the API socket does not answer"),
        }
    };
    stream.write_all(request.as_bytes()).context("the API takes no request")?;
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    while !answer.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut piece).context("the API does not answer")? {
            0 => break,
            count => answer.extend_from_slice(piece.get(..count).unwrap_or_default()),
        }
    }
    if !answer.starts_with(b"HTTP/1.1 204 ") {
        bail!("{method} {path} failed: {}", String::from_utf8_lossy(&answer));
    }
    Ok(())
}
