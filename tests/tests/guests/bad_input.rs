//! What bad input gets: one line that names the thing and the remedy, a code of its own, and no
//! machine left running.

use std::fs::{self, File};
use std::path::Path;

use coppice_manager::failure::Class;

use crate::common::{coppice, finish, home, on_lane};
use crate::cycles::vmm_processes;

/// Runs `coppice run` with this kernel and image and expects this class of failure.
fn expect(class: Class, kernel: &Path, image: &Path, options: &[&str]) {
    let mut command = coppice(&["run"]);
    for (option, usual) in [("--boot-timeout", "60"), ("--memory", "128")] {
        if !options.contains(&option) {
            command.args([option, usual]);
        }
    }
    command.arg("--kernel").arg(kernel).arg("--image").arg(image).args(options);
    let (code, out, err) = finish(command.args(["--", "echo", "never"]));
    assert_eq!(code, i32::from(class.exit_code()), "{err}");
    assert_eq!(out, "");
    let lines: Vec<&str> = err.lines().collect();
    assert_eq!(lines.len(), 1, "{err}");
    assert!(vmm_processes().is_empty());
}

fn micro() -> std::path::PathBuf {
    home().kernel("micro").unwrap()
}

fn tiny() -> std::path::PathBuf {
    home().image("tiny").unwrap()
}

#[test]
fn a_missing_kernel() {
    on_lane!({ expect(Class::KernelMissing, Path::new("/nonexistent/vmlinux"), &tiny(), &[]) });
}

#[test]
fn a_file_that_is_no_kernel() {
    on_lane!({
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kernel");
        fs::write(&file, "not a kernel at all\n".repeat(1000)).unwrap();
        expect(Class::KernelInvalid, &file, &tiny(), &[]);
    });
}

#[test]
fn a_truncated_kernel() {
    on_lane!({
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kernel");
        let whole = fs::read(micro()).unwrap();
        fs::write(&file, &whole[..whole.len() / 3]).unwrap();
        expect(Class::KernelInvalid, &file, &tiny(), &[]);
    });
}

#[test]
fn a_truncated_image() {
    on_lane!({
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("image.ext4");
        let whole = fs::read(tiny()).unwrap();
        fs::write(&file, &whole[..whole.len() / 3]).unwrap();
        expect(Class::ImageInvalid, &micro(), &file, &[]);
    });
}

#[test]
fn an_image_whose_file_system_does_not_mount() {
    on_lane!({
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("image.ext4");
        fs::copy(tiny(), &file).unwrap();
        // An incompatible feature that no kernel knows, in the superblock.
        let image = File::options().write(true).open(&file).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&image, &[0xFF; 4], 1024 + 0x60).unwrap();
        expect(Class::RootfsUnusable, &micro(), &file, &[]);
    });
}

#[test]
fn too_little_memory() {
    on_lane!({ expect(Class::MemoryTooSmall, &micro(), &tiny(), &["--memory", "16"]) });
}

#[test]
fn a_command_line_over_the_limit() {
    on_lane!({
        let long = "x".repeat(5000);
        expect(Class::CmdlineInvalid, &micro(), &tiny(), &["--append", &long]);
    });
}

#[test]
fn a_guest_that_panics() {
    on_lane!({
        expect(Class::GuestPanic, &micro(), &tiny(), &["--append", "init=/bin/true"]);
    });
}

#[test]
fn a_guest_without_an_agent() {
    on_lane!({
        let options = ["--append", "init=/bin/sh", "--boot-timeout", "8"];
        expect(Class::AgentUnreachable, &micro(), &tiny(), &options);
    });
}

#[test]
fn a_kernel_that_does_not_find_its_disk() {
    // Without ACPI this kernel has no way left to discover virtio devices.
    on_lane!({ expect(Class::KernelUnfit, &micro(), &tiny(), &["--append", "acpi=off"]) });
}

#[test]
fn a_kernel_without_vsock() {
    on_lane!({
        let kernel = home().kernel("agent").unwrap();
        let options = ["--memory", "256", "--append", "initcall_blacklist=virtio_vsock_init"];
        expect(Class::KernelUnfit, &kernel, &tiny(), &options);
    });
}
