//! Starts one machine under Coppice or under a peer, with its console on a pipe.

use std::fs::File;
use std::io::{BufRead as _, BufReader, PipeReader};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail};
use coppice_vmm_protocol::{
    BootSpec, ConsoleSpec, ControlSocket, DiskSpec, MachineSpec, Op, Reply, Request, ResultBody,
    Start,
};
use serde_json::json;

/// What every contender boots.
#[derive(Debug, Clone)]
pub struct Guest {
    /// ELF kernel.
    pub kernel: PathBuf,
    /// Root file system image, given read-only as the first disk.
    pub root: PathBuf,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
}

/// A VMM that can boot a [`Guest`].
#[derive(Debug, Clone)]
pub enum Contender {
    /// `coppice-vmm` at this path.
    Coppice(PathBuf),
    /// `firecracker` at this path.
    Firecracker(PathBuf),
}

impl Contender {
    /// Name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Coppice(_) => "coppice",
            Self::Firecracker(_) => "firecracker",
        }
    }

    /// Starts the machine; `options` is the kernel command line without the root device.
    ///
    /// # Errors
    /// When the VMM does not start or refuses the machine.
    pub fn start(&self, guest: &Guest, options: &str, scratch: &Path) -> anyhow::Result<Running> {
        match self {
            Self::Coppice(vmm) => start_coppice(vmm, guest, options),
            Self::Firecracker(vmm) => start_firecracker(vmm, guest, options, scratch),
        }
    }
}

/// A started machine; it is killed when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    console: BufReader<PipeReader>,
    // The VMM ends when this closes.
    _control: Option<ControlSocket>,
}

impl Running {
    /// Process ID of the VMM.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Reads the console until a line contains `marker`.
    ///
    /// # Errors
    /// When the console ends before.
    pub fn wait_for(&mut self, marker: &str) -> anyhow::Result<()> {
        let mut seen = String::new();
        let mut line = Vec::new();
        loop {
            line.clear();
            if self.console.read_until(b'\n', &mut line).context("the console broke off")? == 0 {
                bail!("the machine ended before its init ran; its console said:\n{seen}");
            }
            let text = String::from_utf8_lossy(&line);
            if text.contains(marker) {
                return Ok(());
            }
            seen.push_str(&text);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Already gone is as good as killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start_coppice(vmm: &Path, guest: &Guest, options: &str) -> anyhow::Result<Running> {
    let (mut ours, theirs) = ControlSocket::pair()?;
    let (console, output) = std::io::pipe()?;
    let theirs = theirs.into_fd();
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())
        .context("the control socket cannot be passed on")?;
    let child = Command::new(vmm)
        .args(["--control-fd", &theirs.as_raw_fd().to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("{} does not start", vmm.display()))?;
    drop(theirs);
    let files: [OwnedFd; 3] =
        [open(&guest.kernel)?.into(), open(&guest.root)?.into(), OwnedFd::from(output)];
    let spec = MachineSpec {
        vcpus: guest.vcpus,
        memory_mib: guest.memory_mib,
        start: Start::Boot(BootSpec {
            kernel: 0,
            initrd: None,
            cmdline: format!("{options} root=/dev/vda ro"),
        }),
        disks: vec![DiskSpec {
            fd: 1,
            read_only: true,
            overlay: None,
            layers: Vec::new(),
            serial: "root".into(),
        }],
        vsock: None,
        console: Some(ConsoleSpec { input: None, output: Some(2) }),
        rng: false,
        balloon: None,
    };
    let fds: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
    ours.send(&Request { id: 1, op: Op::Create(Box::new(spec)) }, &fds)?;
    expect_done(&mut ours)?;
    ours.send(&Request { id: 2, op: Op::Start {} }, &[])?;
    expect_done(&mut ours)?;
    Ok(Running { child, console: BufReader::new(console), _control: Some(ours) })
}

fn expect_done(socket: &mut ControlSocket) -> anyhow::Result<()> {
    let (reply, _): (Reply, _) = socket.receive()?;
    match reply.result {
        ResultBody::Done => Ok(()),
        ResultBody::Error(error) => bail!("coppice-vmm refused the machine: {}", error.message),
        ResultBody::Status(_) | ResultBody::Checkpoint(_) | ResultBody::Rollback(_) => {
            bail!("coppice-vmm gave an answer to another question")
        }
    }
}

fn start_firecracker(
    vmm: &Path,
    guest: &Guest,
    options: &str,
    scratch: &Path,
) -> anyhow::Result<Running> {
    let config = json!({
        "boot-source": { "kernel_image_path": guest.kernel, "boot_args": options },
        "drives": [{
            "drive_id": "root", "path_on_host": guest.root,
            "is_root_device": true, "is_read_only": true,
        }],
        "machine-config": { "vcpu_count": guest.vcpus, "mem_size_mib": guest.memory_mib },
    });
    let path = scratch.join("firecracker.json");
    std::fs::write(&path, config.to_string()).context("the configuration cannot be written")?;
    let (console, output) = std::io::pipe()?;
    let child = Command::new(vmm)
        .args(["--no-api", "--level", "Error", "--config-file"])
        .arg(&path)
        .stdin(Stdio::null())
        .stdout(output)
        .spawn()
        .with_context(|| format!("{} does not start", vmm.display()))?;
    Ok(Running { child, console: BufReader::new(console), _control: None })
}

fn open(path: &Path) -> anyhow::Result<File> {
    File::open(path).with_context(|| format!("{} cannot be opened", path.display()))
}
