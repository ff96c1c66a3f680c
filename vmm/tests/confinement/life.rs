//! Lives of machines, from their start to their end, under the filters that they always have.
//! `record` runs them again, with each machine followed call by call.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use coppice_micro::tree::{Machine, memory_file};
use coppice_micro::{Code, Interpreter, Vmm, command_with_socket, kvm, plain_spec, vmm};
use coppice_vmm_protocol::{
    BalloonSpec, CheckpointSpec, ConsoleSpec, ControlSocket, DiskSpec, ExitReason, MachineSpec, Op,
    ResultBody, VsockSpec,
};

use crate::devices::{Driver, put};

const MEMORY: u32 = 64;
const PAGES: u32 = 0x100_0000;
const BUFFER: u32 = 0x20_0000;

/// Where each device's queues are.
const DISK: u32 = 0x40_0000;
const RAW: u32 = 0x41_0000;
const VSOCK: u32 = 0x42_0000;
const RNG: u32 = 0x43_0000;
const BALLOON: u32 = 0x44_0000;

struct Whole {
    vmm: Vmm,
    guest: Interpreter,
    sockets: tempfile::TempDir,
}

/// A machine with everything, made of what was prepared or at once.
fn whole(prepared: bool) -> Whole {
    let mut vmm = Vmm::start();
    if prepared {
        vmm.done(Op::Prepare { vcpus: 2, memory_mib: MEMORY });
    }
    let (guest, input, output) = Interpreter::pipes();
    let kernel = Code::new().interpreter().kernel();
    let sockets = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(sockets.path().join("vsock")).unwrap();
    let directory = File::open(sockets.path()).unwrap();
    let disk = || {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file
    };
    // In memory, where a file system cannot zero a range: zeroes are written then.
    let (base, top, raw) = (disk(), memory_file(), disk());
    let disk = |fd, overlay| DiskSpec {
        fd,
        read_only: false,
        overlay,
        layers: Vec::new(),
        serial: "disk".into(),
    };
    let spec = MachineSpec {
        vcpus: 2,
        memory_mib: MEMORY,
        disks: vec![disk(5, Some(6)), disk(7, None)],
        vsock: Some(VsockSpec { cid: 3, listener: 3, directory: 4, name: "vsock".into() }),
        console: Some(ConsoleSpec { input: Some(1), output: Some(2) }),
        rng: true,
        balloon: Some(BalloonSpec { target_mib: 0, free_page_reporting: true }),
        ..plain_spec()
    };
    let fds = [
        kernel.as_fd(),
        input.as_fd(),
        output.as_fd(),
        listener.as_fd(),
        directory.as_fd(),
        base.as_fd(),
        top.as_fd(),
        raw.as_fd(),
    ];
    assert_eq!(vmm.request_with(Op::Create(Box::new(spec)), &fds), ResultBody::Done);
    vmm.done(Op::Start {});
    Whole { vmm, guest, sockets }
}

/// Has a disk do all that disks do.
fn use_disk(guest: &mut Interpreter, window: u32, memory: u32) {
    const IN: u32 = 0;
    const OUT: u32 = 1;
    const FLUSH: u32 = 4;
    const DISCARD: u32 = 11;
    const WRITE_ZEROES: u32 = 13;
    const UNMAP: u32 = 1;
    // Flush, discard, write zeroes.
    let mut disk = Driver::start(guest, window, 1 << 9 | 1 << 13 | 1 << 14, 1, memory);
    let (header, status, data) = (memory + 0x8000, memory + 0x9000, BUFFER);
    let mut ask = |guest: &mut Interpreter, kind, sector, body: &[(u32, u32, bool)]| {
        put(guest, header, &[kind, 0, sector, 0]);
        guest.write(status, 0xFF);
        let mut pieces = vec![(header, 16, false)];
        pieces.extend(body);
        pieces.push((status, 1, true));
        disk.ask(guest, 0, &pieces);
        assert_eq!(guest.read(status) & 0xFF, 0, "request {kind}");
    };
    ask(guest, OUT, 0, &[(data, 8192, false)]);
    // Not a whole cluster: the rest of it is copied.
    ask(guest, OUT, 33, &[(data, 512, false)]);
    ask(guest, IN, 0, &[(data, 8192, true)]);
    ask(guest, FLUSH, 0, &[]);
    put(guest, data, &[64, 0, 8, 0]);
    ask(guest, DISCARD, 0, &[(data, 16, false)]);
    ask(guest, WRITE_ZEROES, 0, &[(data, 16, false)]);
    put(guest, data, &[80, 0, 9, UNMAP]);
    ask(guest, WRITE_ZEROES, 0, &[(data, 16, false)]);
}

/// Has the guest and the host connect to each other.
fn use_vsock(guest: &mut Interpreter, sockets: &std::path::Path) {
    const REQUEST: u32 = 1;
    const RESPONSE: u32 = 2;
    const SHUTDOWN: u32 = 4;
    const DATA: u32 = 5;
    let mut vsock = Driver::start(guest, 2, 0, 3, VSOCK);
    let (packet, received) = (VSOCK + 0x8000, VSOCK + 0xA000);
    let send = |guest: &mut Interpreter, vsock: &mut Driver, ports: (u32, u32), op, flags| {
        let length = if op == DATA { 4 } else { 0 };
        let kind_and_op = 1u32 | op << 16;
        let header = [3, 0, 2, 0, ports.0, ports.1, length, kind_and_op, flags, 65536, 0];
        put(guest, packet, &header);
        guest.write(packet + 44, u32::from_le_bytes(*b"ping"));
        vsock.ask(guest, 1, &[(packet, 44 + length, false)]);
    };
    let receive = |guest: &mut Interpreter, vsock: &mut Driver| {
        vsock.ask(guest, 0, &[(received, 4096, true)]);
        (guest.read(received + 28) >> 16, guest.read(received + 16))
    };
    // To the host.
    let listener = UnixListener::bind(sockets.join("vsock_1000")).unwrap();
    send(guest, &mut vsock, (5, 1000), REQUEST, 0);
    let (mut stream, _) = listener.accept().unwrap();
    assert_eq!(receive(guest, &mut vsock).0, RESPONSE);
    send(guest, &mut vsock, (5, 1000), DATA, 0);
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"ping");
    stream.write_all(b"pong").unwrap();
    while receive(guest, &mut vsock).0 != DATA {}
    assert_eq!(guest.read(received + 44), u32::from_le_bytes(*b"pong"));
    send(guest, &mut vsock, (5, 1000), SHUTDOWN, 3);
    assert_eq!(stream.read(&mut bytes).unwrap(), 0);
    // To nobody.
    send(guest, &mut vsock, (6, 1001), REQUEST, 0);
    // To the guest.
    let mut client = UnixStream::connect(sockets.join("vsock")).unwrap();
    client.write_all(b"CONNECT 7\n").unwrap();
    let port = loop {
        let (op, port) = receive(guest, &mut vsock);
        if op == REQUEST {
            break port;
        }
    };
    send(guest, &mut vsock, (7, port), RESPONSE, 0);
    let mut ok = [0; 3];
    client.read_exact(&mut ok).unwrap();
    assert_eq!(&ok, b"OK ");
    // The guest sends no more, then the client goes.
    send(guest, &mut vsock, (7, port), SHUTDOWN, 2);
    drop(client);
    receive(guest, &mut vsock);
}

#[test]
fn of_all_devices() {
    if kvm() {
        use_all_devices(whole(false));
    }
}

#[test]
fn of_all_devices_of_a_prepared_machine() {
    if kvm() {
        use_all_devices(whole(true));
    }
}

fn use_all_devices(machine: Whole) {
    let Whole { mut vmm, mut guest, sockets } = machine;
    use_disk(&mut guest, 0, DISK);
    use_disk(&mut guest, 1, RAW);
    use_vsock(&mut guest, sockets.path());
    let mut rng = Driver::start(&mut guest, 3, 0, 1, RNG);
    rng.ask(&mut guest, 0, &[(BUFFER, 64, true)]);
    vmm.done(Op::SetBalloon { target_mib: 1 });
    let mut balloon = Driver::start(&mut guest, 4, 1 << 1, 3, BALLOON);
    guest.fill(PAGES, 1, 4);
    put(&mut guest, BUFFER, &[PAGES / 4096, PAGES / 4096 + 1]);
    balloon.ask(&mut guest, 0, &[(BUFFER, 8, false)]);
    vmm.done(Op::Pause {});
    vmm.done(Op::Resume {});
    vmm.status();
    vmm.done(Op::Stop {});
    vmm.end().expect(&ExitReason::Stopped, 0);
}

#[test]
fn of_checkpoints_clones_and_rollbacks() {
    if !kvm() {
        return;
    }
    let base = memory_file();
    base.set_len(1 << 20).unwrap();
    let mut machine = Machine::boot_with_disk(MEMORY, base);
    machine.guest.fill(PAGES, 1, 1000);
    let (first, _) = machine.checkpoint("one", false);
    machine.guest.fill(PAGES, 2, 300);
    let (second, _) = machine.checkpoint("two", false);
    machine.roll_back(&first);
    machine.guest.fill(PAGES, 3, 20);
    machine.roll_back(&second);
    let mut node = second.clone();
    let mut clone = Machine::clone_of(&first);
    clone.guest.fill(PAGES, 4, 500);
    clone.checkpoint("three", false);
    clone.roll_back(&first);
    let record = memory_file();
    let op = Op::RecordWorkingSet { file: 0 };
    assert_eq!(clone.vmm.request_with(op, &[record.as_fd()]), ResultBody::Done);
    node.working_set = Some(Arc::new(record));
    for prepared in [false, true] {
        let mut vmm = Vmm::start();
        if prepared {
            vmm.done(Op::Prepare { vcpus: 1, memory_mib: MEMORY });
        }
        let mut clone = Machine::clone_in(vmm, &node);
        assert_eq!(clone.guest.read(PAGES), 2);
        clone.vmm.done(Op::Stop {});
        clone.vmm.end().expect(&ExitReason::Stopped, 0);
    }
}

#[test]
fn of_a_checkpoint_in_the_background() {
    if !kvm() {
        return;
    }
    let mut machine = Machine::boot(MEMORY);
    machine.guest.fill(PAGES, 1, 4000);
    let spec = CheckpointSpec {
        id: "one".into(),
        file: 0,
        overlays: Vec::new(),
        meta: String::new(),
        background: true,
    };
    let file = tempfile::tempfile().unwrap();
    machine.vmm.send(Op::Checkpoint(spec), &[file.as_fd()]).unwrap();
    machine.guest.fill(PAGES, 2, 4000);
    let ResultBody::Checkpoint(_) = machine.vmm.answer().unwrap() else { panic!() };
    machine.commit("one", file);
    machine.checkpoint("two", true);
    machine.vmm.done(Op::Stop {});
    machine.vmm.end().expect(&ExitReason::Stopped, 0);
}

#[test]
fn of_guests_that_end_by_themselves() {
    if !kvm() {
        return;
    }
    let (vmm, _console) = Vmm::boot(&Code::new().power_off(), |_| {});
    vmm.end().expect(&ExitReason::PowerOff, 0);
    let (vmm, _console) = Vmm::boot(&Code::new().triple_fault(), |_| {});
    assert!(matches!(vmm.end().reason(), ExitReason::TripleFault { .. }));
}

#[test]
fn of_one_whose_console_is_closed() {
    if !kvm() {
        return;
    }
    let mut machine = Machine::boot(MEMORY);
    // More than the console holds: the guest's processor reads on.
    machine.guest.fill_each(&[PAGES; 400], 1, 1);
    machine.guest.print_for_ever();
    let Machine { mut vmm, guest, .. } = machine;
    drop(guest);
    // Its writes fail before so many more exits are over.
    let exits = vmm.status().exits;
    while vmm.status().exits < exits + 100 {}
    vmm.done(Op::Stop {});
    vmm.end().expect(&ExitReason::Stopped, 0);
}

#[test]
fn of_one_that_outlives_its_managers() {
    if !kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let program = format!("'{}' --listen-fd 3", vmm());
    let listener = listen(&path);
    let child = command_with_socket(&program, listener).spawn().unwrap();
    let mut first = Vmm::with(child, connect(&path));
    let mut console = first.create(&Code::new().print_for_ever(b'x'), |_| {});
    first.done(Op::Start {});
    console.byte();
    let Vmm { child, socket, .. } = first;
    drop(socket);
    let mut second = Vmm::with(child, connect(&path));
    second.done(Op::Stop {});
    second.end().expect(&ExitReason::Stopped, 0);
}

fn address(path: &std::path::Path) -> rustix::net::SocketAddrUnix {
    rustix::net::SocketAddrUnix::new(path).unwrap()
}

fn socket() -> OwnedFd {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let flags = SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

fn listen(path: &std::path::Path) -> OwnedFd {
    let socket = socket();
    rustix::net::bind(&socket, &address(path)).unwrap();
    rustix::net::listen(&socket, 4).unwrap();
    socket
}

fn connect(path: &std::path::Path) -> ControlSocket {
    let socket = socket();
    rustix::net::connect(&socket, &address(path)).unwrap();
    ControlSocket::new(socket)
}
