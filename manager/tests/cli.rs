//! The real `coppice` and `coppice-vmm` where no Linux guest is needed: arguments, files, and what
//! the host lacks.
//!
//! Hosts without /dev/kvm, without permission or without disk space are made with mount
//! namespaces, so the tests need `unshare`, `setpriv` and `mount` of util-linux.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coppice_manager::failure::Class;

const COPPICE: &str = env!("CARGO_BIN_EXE_coppice");

/// A directory for files, sockets and the home of one test.
struct Place {
    dir: tempfile::TempDir,
    vmm: PathBuf,
}

/// How a `coppice` ended and what it printed.
struct Ended {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("run")).unwrap();
        fs::create_dir_all(dir.path().join("home")).unwrap();
        fs::write(dir.path().join("text"), "this is no kernel\n").unwrap();
        fs::write(dir.path().join("disk"), ext4()).unwrap();
        Self { dir, vmm: common::program("coppice-vmm") }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// Arguments of a run whose only fault is its kernel.
    fn run(&self) -> Vec<String> {
        let (kernel, image) = (self.path("text"), self.path("disk"));
        ["run", "--kernel", &kernel, "--image", &image].map(str::to_owned).to_vec()
    }

    fn finish(&self, mut command: Command) -> Ended {
        let output = command
            .env("COPPICE_VMM", &self.vmm)
            .env("COPPICE_HOME", self.dir.path().join("home"))
            .env("XDG_RUNTIME_DIR", self.dir.path().join("run"))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let left = fs::read_dir(self.dir.path().join("run/coppice"));
        assert_eq!(left.map_or(0, Iterator::count), 0, "something is left behind");
        Ended {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    fn coppice(&self, args: &[&str]) -> Ended {
        let mut command = Command::new(COPPICE);
        command.args(args);
        self.finish(command)
    }

    /// Runs with the changes `prepare` makes in a mount namespace of its own, without
    /// capabilities, which would pass over permissions.
    fn elsewhere(&self, prepare: &str) -> Ended {
        let user = rustix::process::geteuid();
        let mut command = Command::new("unshare");
        command.arg(if user.is_root() { "-m" } else { "-Urm" });
        let script = format!(
            "{prepare} && exec setpriv --bounding-set=-all --inh-caps=-all \"$0\" \"$@\" -- true"
        );
        command.args(["sh", "-ec", &script, COPPICE]).args(self.run());
        self.finish(command)
    }

    /// A /dev with nothing but /dev/null.
    fn bare_dev(&self) -> String {
        let null = self.path("null");
        fs::write(&null, "").unwrap();
        format!(
            "mount --bind /dev/null {null} && mount -t tmpfs none /dev && touch /dev/null && \
             mount --bind {null} /dev/null"
        )
    }
}

/// The superblock of an ext4 file system of 64 KiB, and no file system.
fn ext4() -> Vec<u8> {
    let mut bytes = vec![0u8; 65_536];
    bytes[1024 + 0x04..][..4].copy_from_slice(&16u32.to_le_bytes());
    bytes[1024 + 0x18..][..4].copy_from_slice(&2u32.to_le_bytes());
    bytes[1024 + 0x38..][..2].copy_from_slice(&[0x53, 0xEF]);
    bytes
}

/// The failure is of this class and is told in one line that has `text`.
fn assert_failed(ended: &Ended, class: Class, text: &str) {
    assert_eq!(ended.code, i32::from(class.exit_code()), "{}", ended.stderr);
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    assert!(ended.stderr.contains(text), "{}", ended.stderr);
}

#[test]
fn help_teaches_with_examples_and_exit_codes() {
    let ended = Place::new().coppice(&["run", "--help"]);
    assert_eq!(ended.code, 0);
    assert!(ended.stdout.contains("coppice run -it -- bash"), "{}", ended.stdout);
    assert!(ended.stdout.contains("75  the guest's kernel panicked"), "{}", ended.stdout);
}

#[test]
fn an_unknown_option_is_a_usage_error() {
    let ended = Place::new().coppice(&["run", "--no-such-option"]);
    assert_eq!(ended.code, i32::from(Class::Usage.exit_code()), "{}", ended.stderr);
}

#[test]
fn options_after_the_command_are_the_commands() {
    let ended = Place::new().coppice(&["run", "--kernel", "./none", "ls", "--no-such-option"]);
    assert_eq!(ended.code, i32::from(Class::ImageMissing.exit_code()), "{}", ended.stderr);
}

#[test]
fn a_command_is_required() {
    let ended = Place::new().coppice(&["run"]);
    assert_eq!(ended.code, i32::from(Class::Usage.exit_code()), "{}", ended.stderr);
}

#[test]
fn a_kernel_name_that_is_not_there_is_missing_and_others_are_offered() {
    let place = Place::new();
    fs::create_dir_all(place.path("home/kernels/other")).unwrap();
    fs::write(place.path("home/kernels/other/vmlinux"), "").unwrap();
    let ended = place.coppice(&["run", "--", "true"]);
    assert_failed(&ended, Class::KernelMissing, "choose other");
}

#[test]
fn an_image_that_is_not_there_is_missing() {
    let place = Place::new();
    let kernel = place.path("text");
    let ended = place.coppice(&["run", "--kernel", &kernel, "--image", "./none", "--", "true"]);
    assert_failed(&ended, Class::ImageMissing, "./none");
}

#[test]
fn a_vmm_that_is_not_there_is_missing() {
    let mut place = Place::new();
    place.vmm = "/nonexistent/coppice-vmm".into();
    let mut command = Command::new(COPPICE);
    command.args(place.run()).args(["--", "true"]);
    let ended = place.finish(command);
    assert_failed(&ended, Class::ProgramMissing, "/nonexistent/coppice-vmm");
}

#[test]
fn json_tells_a_failure_as_an_event() {
    let place = Place::new();
    let (kernel, image) = (place.path("text"), place.path("none"));
    let ended =
        place.coppice(&["run", "--json", "--kernel", &kernel, "--image", &image, "--", "true"]);
    let line = ended.stdout.lines().last().unwrap();
    let event: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!((&event["event"], &event["class"]), (&"error".into(), &"image_missing".into()));
    assert_eq!((ended.code, ended.stderr.as_str()), (67, ""));
}

#[test]
fn a_host_without_kvm_is_told_so() {
    let place = Place::new();
    let ended = place.elsewhere(&place.bare_dev());
    assert_failed(&ended, Class::KvmAbsent, "/dev/kvm");
}

#[test]
fn a_kvm_that_may_not_be_opened_is_told_apart() {
    let place = Place::new();
    let ended =
        place.elsewhere(&format!("{} && install -m 0 /dev/null /dev/kvm", place.bare_dev()));
    assert_failed(&ended, Class::KvmDenied, "/dev/kvm");
}

#[test]
fn a_full_disk_is_told_before_anything_runs() {
    let place = Place::new();
    let home = place.path("home");
    let ended = place.elsewhere(&format!("mount -t tmpfs -o size=1m none {home}"));
    assert_failed(&ended, Class::DiskFull, &home);
}

#[test]
fn what_a_killed_run_left_is_swept_by_the_next() {
    let place = Place::new();
    let stale = place.path("run/coppice/1-1");
    fs::create_dir_all(&stale).unwrap();
    fs::write(Path::new(&stale).join("vsock"), "").unwrap();
    // That nothing is left is what every run here is checked for.
    let mut command = Command::new(COPPICE);
    command.args(place.run()).args(["--", "true"]);
    place.finish(command);
}

#[test]
fn doctor_says_what_is_missing_and_fails() {
    let mut place = Place::new();
    place.vmm = "/nonexistent/coppice-vmm".into();
    let ended = place.coppice(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["ok"], false);
    assert_eq!(ended.code, i32::from(Class::ProgramMissing.exit_code()));
}

#[test]
fn an_empty_store_is_shown_and_is_clean() {
    let place = Place::new();
    for args in [["tree", "--json"], ["ls", "--json"], ["fsck", "--deep"]] {
        let ended = place.coppice(&args);
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{args:?}");
    }
}

#[test]
fn a_sandbox_that_is_not_there_is_named() {
    let place = Place::new();
    let cases: [&[&str]; 7] = [
        &["exec", "nobody", "--", "true"],
        &["checkpoint", "nobody"],
        &["rollback", "nobody", "nothing"],
        &["clone", "nobody"],
        &["pause", "nobody"],
        &["kill", "nobody"],
        &["rm", "nobody"],
    ];
    for args in cases {
        assert_failed(&place.coppice(args), Class::NotFound, "nobody");
    }
}

#[test]
fn json_tells_a_failure_of_a_session_as_an_object() {
    let ended = Place::new().coppice(&["checkpoint", "nobody", "--json"]);
    let event: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&event["event"], &event["class"]), (&"error".into(), &"not_found".into()));
    assert_eq!((ended.code, ended.stderr.as_str()), (84, ""));
}

#[test]
fn a_name_that_could_hurt_is_a_usage_error() {
    let place = Place::new();
    for name in ["../x", "-x", "a b", "0123456789ab"] {
        let ended = place.coppice(&["run", "--detach", &format!("--name={name}")]);
        assert_eq!(ended.code, i32::from(Class::Usage.exit_code()), "{name}: {}", ended.stderr);
    }
}

#[test]
fn a_detached_machine_takes_no_command() {
    let ended = Place::new().coppice(&["run", "--detach", "--", "true"]);
    assert_eq!(ended.code, i32::from(Class::Usage.exit_code()), "{}", ended.stderr);
}

#[test]
fn a_detached_machine_that_cannot_be_made_leaves_nothing() {
    let mut place = Place::new();
    place.vmm = "/nonexistent/coppice-vmm".into();
    let mut command = Command::new(COPPICE);
    command.args(place.run()).arg("--detach");
    let ended = place.finish(command);
    assert_failed(&ended, Class::ProgramMissing, "/nonexistent/coppice-vmm");
    for part in ["checkpoints", "layers", "sandboxes"] {
        let left = fs::read_dir(place.path(&format!("home/{part}"))).unwrap();
        assert_eq!(left.count(), 0, "something is left in {part}");
    }
}

#[test]
fn a_damaged_checkpoint_is_told_of_and_set_aside() {
    let place = Place::new();
    place.coppice(&["ls"]);
    let path = place.path("home/checkpoints/0123456789ab.ckpt");
    fs::write(&path, vec![7; 10_000]).unwrap();
    let code = i32::from(Class::StoreDamaged.exit_code());
    let ended = place.coppice(&["fsck"]);
    assert_eq!(ended.code, code);
    assert!(ended.stdout.contains(&path), "{}", ended.stdout);
    assert_eq!(place.coppice(&["fsck", "--repair"]).code, code);
    assert_eq!(place.coppice(&["fsck"]).code, 0);
    assert!(Path::new(&path).with_extension("bad").exists());
}
