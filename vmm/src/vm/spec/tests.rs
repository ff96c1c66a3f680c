//! Each thing a wire spec can lack or get wrong gives its own error and class.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use tempfile::TempDir;

use coppice_vmm_protocol::{BootSpec, DiskSpec, VsockSpec};

use super::*;

/// A valid request with everything in it, to be spoiled by each test.
struct Request {
    dir: TempDir,
    wire: MachineSpec,
    fds: Vec<OwnedFd>,
}

const KERNEL: u32 = 0;
const INITRD: u32 = 1;
const DISK: u32 = 2;
const OVERLAY: u32 = 3;
const LISTENER: u32 = 4;
const DIRECTORY: u32 = 5;
const INPUT: u32 = 6;
const OUTPUT: u32 = 7;

fn request() -> Request {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = dir.path().join(name);
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    };
    let mut disk = file("disk");
    disk.write_all(&[0; 512]).unwrap();
    let fds = vec![
        file("kernel").into(),
        file("initrd").into(),
        disk.into(),
        file("overlay").into(),
        UnixListener::bind(dir.path().join("vsock")).unwrap().into(),
        File::open(dir.path()).unwrap().into(),
        File::open("/dev/null").unwrap().into(),
        OpenOptions::new().write(true).open("/dev/null").unwrap().into(),
    ];
    let wire = MachineSpec {
        vcpus: 2,
        memory_mib: 128,
        start: Start::Boot(BootSpec {
            kernel: KERNEL,
            initrd: Some(INITRD),
            cmdline: "console=ttyS0".into(),
        }),
        disks: vec![DiskSpec {
            fd: DISK,
            read_only: false,
            overlay: Some(OVERLAY),
            layers: Vec::new(),
            serial: "root".into(),
        }],
        vsock: Some(VsockSpec {
            cid: 3,
            listener: LISTENER,
            directory: DIRECTORY,
            name: "vsock".into(),
        }),
        console: Some(ConsoleSpec { input: Some(INPUT), output: Some(OUTPUT) }),
        rng: true,
        balloon: Some(BalloonSpec { target_mib: 0, free_page_reporting: true }),
    };
    Request { dir, wire, fds }
}

impl Request {
    fn replace(mut self, index: u32, fd: impl Into<OwnedFd>) -> Self {
        self.fds[usize::try_from(index).unwrap()] = fd.into();
        self
    }

    fn spoil(mut self, change: impl FnOnce(&mut MachineSpec)) -> Self {
        change(&mut self.wire);
        self
    }

    fn error(self) -> (ErrorKind, String) {
        let error = Spec::from_wire(self.wire, self.fds).unwrap_err();
        (error.kind(), error.to_string())
    }
}

#[track_caller]
fn refused(request: Request, kind: ErrorKind, words: &str) {
    let (got, text) = request.error();
    assert_eq!(got, kind, "{text}");
    assert!(text.contains(words), "{text:?} does not say {words:?}");
    assert!(!text.contains('\n'));
}

fn null() -> File {
    OpenOptions::new().read(true).write(true).open("/dev/null").unwrap()
}

#[test]
fn everything_given_is_taken() {
    let request = request();
    let (spec, origin) = Spec::from_wire(request.wire, request.fds).unwrap();
    assert_eq!((spec.vcpus, spec.memory_mib, spec.rng), (2, 128, true));
    assert!(matches!(origin, Origin::Boot(Boot { initrd: Some(_), .. })));
    assert!(spec.vsock.is_some() && spec.balloon.is_some());
    assert!(spec.console_input.is_some() && spec.console_output.is_some());
    assert!(spec.disks[0].overlay.is_some());
}

#[test]
fn the_number_of_vcpus_has_bounds() {
    for vcpus in [0, 9] {
        refused(request().spoil(|w| w.vcpus = vcpus), ErrorKind::BadRequest, "1 to 8");
    }
}

#[test]
fn too_little_memory_is_a_memory_error() {
    refused(request().spoil(|w| w.memory_mib = 63), ErrorKind::Memory, "64 to");
}

#[test]
fn a_long_command_line_says_how_long_it_may_be() {
    let long = request().spoil(|w| w.boot_mut().unwrap().cmdline = "x".repeat(CMDLINE_MAX));
    refused(long, ErrorKind::Cmdline, "at most 2047");
    let longest = request().spoil(|w| w.boot_mut().unwrap().cmdline = "x".repeat(CMDLINE_MAX - 1));
    Spec::from_wire(longest.wire, longest.fds).unwrap();
}

#[test]
fn a_command_line_that_is_not_printable_ascii_is_refused() {
    for bad in ["a\0b", "a\nb", "caf\u{e9}"] {
        refused(
            request().spoil(|w| w.boot_mut().unwrap().cmdline = bad.into()),
            ErrorKind::Cmdline,
            "ASCII",
        );
    }
}

#[test]
fn a_descriptor_that_was_not_passed_is_named() {
    refused(
        request().spoil(|w| w.boot_mut().unwrap().kernel = 99),
        ErrorKind::BadRequest,
        "the kernel is descriptor 99",
    );
}

#[test]
fn a_descriptor_is_not_used_twice() {
    refused(
        request().spoil(|w| w.boot_mut().unwrap().initrd = Some(KERNEL)),
        ErrorKind::BadRequest,
        "the initrd",
    );
}

#[test]
fn kernel_and_initrd_are_readable_regular_files() {
    refused(request().replace(KERNEL, null()), ErrorKind::Kernel, "regular file");
    refused(request().replace(INITRD, null()), ErrorKind::Initrd, "regular file");
    let request = request();
    let write_only = OpenOptions::new().write(true).open(request.dir.path().join("kernel"));
    refused(request.replace(KERNEL, write_only.unwrap()), ErrorKind::Kernel, "reading");
}

#[test]
fn a_disk_the_guest_writes_is_writable_or_has_an_overlay() {
    let request = request();
    let read_only = File::open(request.dir.path().join("disk")).unwrap();
    let request = request.replace(DISK, read_only).spoil(|w| w.disks[0].overlay = None);
    refused(request, ErrorKind::Disk, "reading and writing");
}

#[test]
fn a_disk_is_a_file_or_block_device() {
    refused(request().replace(DISK, null()), ErrorKind::Disk, "block device");
}

#[test]
fn an_overlay_is_empty_and_writable() {
    let request = request();
    let full = request.dir.path().join("disk");
    let full = OpenOptions::new().read(true).write(true).open(full).unwrap();
    refused(request.replace(OVERLAY, full), ErrorKind::Disk, "the overlay of disk 0");
}

#[test]
fn a_read_only_disk_has_no_overlay() {
    refused(request().spoil(|w| w.disks[0].read_only = true), ErrorKind::BadRequest, "overlay");
}

#[test]
fn disk_serials_and_counts_have_bounds() {
    let long = "x".repeat(MAX_SERIAL + 1);
    refused(request().spoil(|w| w.disks[0].serial = long), ErrorKind::BadRequest, "20");
    let many = vec![request().wire.disks[0].clone(); MAX_DISKS + 1];
    refused(request().spoil(|w| w.disks = many), ErrorKind::BadRequest, "number of disks");
}

#[test]
fn the_vsock_listener_listens() {
    let (stream, _peer) = UnixStream::pair().unwrap();
    refused(request().replace(LISTENER, stream), ErrorKind::Vsock, "listening");
}

#[test]
fn the_vsock_directory_is_a_directory() {
    refused(request().replace(DIRECTORY, null()), ErrorKind::Vsock, "a directory");
}

#[test]
fn the_vsock_name_stays_in_its_directory() {
    for name in ["", "../up", "a\0b", &"x".repeat(MAX_VSOCK_NAME + 1)] {
        let request = request().spoil(|w| w.vsock.as_mut().unwrap().name = name.into());
        refused(request, ErrorKind::BadRequest, "file name");
    }
}

#[test]
fn reserved_context_ids_are_refused() {
    for cid in [0, 1, 2, u32::MAX] {
        let request = request().spoil(|w| w.vsock.as_mut().unwrap().cid = cid);
        refused(request, ErrorKind::BadRequest, "context ID");
    }
}

#[test]
fn console_descriptors_have_the_right_direction() {
    let write_only = OpenOptions::new().write(true).open("/dev/null").unwrap();
    refused(request().replace(INPUT, write_only), ErrorKind::BadRequest, "console input");
    let read_only = File::open("/dev/null").unwrap();
    refused(request().replace(OUTPUT, read_only), ErrorKind::BadRequest, "console output");
}

#[test]
fn the_balloon_takes_no_more_than_there_is() {
    let request = request().spoil(|w| w.balloon.as_mut().unwrap().target_mib = 129);
    refused(request, ErrorKind::BadRequest, "0 to 128");
}

proptest! {
    #[test]
    fn any_numbers_give_a_spec_or_an_error(
        vcpus: u8,
        memory_mib: u32,
        indices in proptest::array::uniform8(0u32..12),
        cid: u32,
        target_mib: u32,
    ) {
        let mut request = request();
        let wire = &mut request.wire;
        wire.vcpus = vcpus;
        wire.memory_mib = memory_mib;
        wire.boot_mut().unwrap().kernel = indices[0];
        wire.boot_mut().unwrap().initrd = Some(indices[1]);
        wire.disks[0].fd = indices[2];
        wire.disks[0].overlay = Some(indices[3]);
        wire.vsock = Some(VsockSpec {
            cid,
            listener: indices[4],
            directory: indices[5],
            name: "vsock".into(),
        });
        wire.console = Some(ConsoleSpec { input: Some(indices[6]), output: Some(indices[7]) });
        wire.balloon = Some(BalloonSpec { target_mib, free_page_reporting: false });
        if let Ok((spec, _)) = Spec::from_wire(request.wire, request.fds) {
            prop_assert!((1..=8).contains(&spec.vcpus));
            prop_assert!(spec.memory_mib >= 64);
        }
    }
}
