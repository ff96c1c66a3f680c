//! What the guest tests share: the programs under test and small guests made of them.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use coppice_lab::paths;
use coppice_manager::home::Home;
use coppice_manager::sandbox::Config;
use coppice_manager::vmm::{Passed, Vmm};
use coppice_vmm_protocol::{BalloonSpec, BootSpec, ConsoleSpec, DiskSpec, MachineSpec, Start};

/// Runs a test's body on the best lane, under the test's own name.
macro_rules! on_lane {
    ($body:block) => {{
        let name = {
            fn here() {}
            let path = std::any::type_name_of_val(&here);
            let path = path.strip_suffix("::here").unwrap();
            path.split_once("::").unwrap().1.to_owned()
        };
        coppice_tests::lane::on_best_lane(&name, || $body);
    }};
}
pub(crate) use on_lane;

/// A release binary of this checkout.
pub(crate) fn program(name: &str) -> PathBuf {
    paths::release_dir().join(name)
}

/// Kernels and images of this checkout.
pub(crate) fn home() -> Home {
    Home::at(paths::target_dir().join("coppice/home"))
}

/// `coppice` with these arguments.
pub(crate) fn coppice(args: &[&str]) -> Command {
    let mut command = Command::new(program("coppice"));
    command.args(args).env("COPPICE_HOME", home().path()).stdin(Stdio::null());
    command
}

/// `coppice run` with the smallest guest, these options, and this command line.
pub(crate) fn tiny(options: &[&str], argv: &[&str]) -> Command {
    let mut command = coppice(&["run", "--kernel", "micro", "--image", "tiny"]);
    command.args(options);
    if !options.contains(&"--memory") {
        command.args(["--memory", "128"]);
    }
    command.arg("--").args(argv);
    command
}

/// Runs a command to its end; its output as text.
pub(crate) fn finish(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let code = status.code().unwrap_or(-1);
    (code, String::from_utf8(stdout).unwrap(), String::from_utf8_lossy(&stderr).into_owned())
}

/// Standard output of a command that must succeed.
pub(crate) fn stdout(command: &mut Command) -> String {
    let (code, stdout, stderr) = finish(command);
    assert_eq!(code, 0, "stdout:\n{stdout}\nstderr:\n{stderr}");
    stdout
}

/// Configuration of a small sandbox for the manager's library.
pub(crate) fn config(runtime: &Path) -> Config {
    Config {
        vmm: program("coppice-vmm"),
        kernel: home().kernel("micro").unwrap(),
        image: home().image("tiny").unwrap(),
        memory_mib: 192,
        vcpus: 2,
        append: None,
        scratch: runtime.to_owned(),
        runtime: runtime.to_owned(),
        boot_timeout: Duration::from_secs(120),
    }
}

/// Runs a future on a runtime of its own.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap().block_on(future)
}

/// A bare machine without an agent: `init` runs on the serial console, whose other end is
/// returned.
pub(crate) async fn bare_machine(init: &str, disks: Vec<File>) -> (Vmm, UnixStream) {
    let vmm = Vmm::start(&program("coppice-vmm")).unwrap();
    let mut passed = Passed::default();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let input = passed.add(OwnedFd::from(theirs.try_clone().unwrap())).unwrap();
    let output = passed.add(OwnedFd::from(theirs)).unwrap();
    let kernel = passed.add(File::open(home().kernel("micro").unwrap()).unwrap()).unwrap();
    let root = passed.add(File::open(home().image("tiny").unwrap()).unwrap()).unwrap();
    let mut specs = vec![DiskSpec {
        fd: root,
        read_only: true,
        overlay: None,
        layers: Vec::new(),
        serial: "root".into(),
    }];
    for disk in disks {
        let fd = passed.add(disk).unwrap();
        specs.push(DiskSpec {
            fd,
            read_only: false,
            overlay: None,
            layers: Vec::new(),
            serial: "data".into(),
        });
    }
    let spec = MachineSpec {
        vcpus: 1,
        memory_mib: 384,
        start: Start::Boot(BootSpec {
            kernel,
            initrd: None,
            cmdline: format!("console=ttyS0 quiet panic=-1 reboot=k root=/dev/vda ro init={init}"),
        }),
        disks: specs,
        vsock: None,
        console: Some(ConsoleSpec { input: Some(input), output: Some(output) }),
        rng: true,
        balloon: Some(BalloonSpec { target_mib: 0, free_page_reporting: true }),
    };
    vmm.create(spec, passed).await.unwrap();
    vmm.run().await.unwrap();
    (vmm, ours)
}

/// A bare machine whose shell on the serial console has shown its prompt. What is typed before
/// that would be lost: the guest's driver clears the UART when it takes it over.
pub(crate) async fn shell_machine(disks: Vec<File>) -> (Vmm, Terminal) {
    let (vmm, stream) = bare_machine("/bin/sh", disks).await;
    let mut terminal = Terminal::new(stream);
    terminal.expect_text("# ");
    (vmm, terminal)
}

/// The other end of a serial console; a guest that falls silent fails the test by itself.
pub(crate) struct Terminal {
    stream: UnixStream,
    seen: Vec<u8>,
}

impl Terminal {
    fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        Self { stream, seen: Vec::new() }
    }

    /// Sends raw bytes.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Types a line.
    pub(crate) fn type_line(&mut self, line: &str) {
        self.send(line.as_bytes());
        self.send(b"\n");
    }

    /// Reads until a whole line is exactly `wanted`; the echo of what was typed never is.
    pub(crate) fn expect_line(&mut self, wanted: &str) {
        loop {
            while let Some(end) = self.seen.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.seen.drain(..=end).collect();
                if String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']) == wanted {
                    return;
                }
            }
            self.read_more(wanted);
        }
    }

    /// Reads until the output has `wanted` in it, which need not be a whole line.
    pub(crate) fn expect_text(&mut self, wanted: &str) {
        while !self.seen.windows(wanted.len()).any(|part| part == wanted.as_bytes()) {
            self.read_more(wanted);
        }
    }

    fn read_more(&mut self, wanted: &str) {
        let mut piece = [0u8; 512];
        match self.stream.read(&mut piece) {
            Ok(got) if got > 0 => self.seen.extend_from_slice(&piece[..got]),
            other => {
                let seen = String::from_utf8_lossy(&self.seen);
                panic!("no {wanted:?} on the console ({other:?}); it says: {seen}");
            }
        }
    }
}
