//! The control connection: requests in every state, packets that are none, and each way in which
//! a manager can go away.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Command, Stdio};

use coppice_vmm_protocol::{
    ControlSocket, ErrorKind, ExitReason, Incoming, Op, ResultBody, SocketError, VmState,
};

use coppice_micro::{Code, Vmm, command_with_socket, kvm, null, plain_spec, run, vmm};

#[test]
fn requests_out_of_turn_are_refused_and_change_nothing() {
    if !kvm() {
        return;
    }
    let mut vmm = Vmm::start();
    for op in [Op::Start {}, Op::Pause {}, Op::Resume {}] {
        assert_eq!(vmm.refused(op, &[]).kind, ErrorKind::State);
    }
    let mut console = vmm.create(&Code::new().print_for_ever(b'x'), |_| {});
    assert_eq!(vmm.status().state, VmState::Created);
    for op in [Op::Pause {}, Op::Resume {}] {
        assert_eq!(vmm.refused(op, &[]).kind, ErrorKind::State);
    }
    let again = Op::Create(Box::new(plain_spec()));
    assert_eq!(vmm.refused(again, &[]).kind, ErrorKind::State);
    vmm.done(Op::Start {});
    console.byte();
    assert_eq!(vmm.status().state, VmState::Running);
    assert_eq!(vmm.refused(Op::Start {}, &[]).kind, ErrorKind::State);
    vmm.done(Op::Stop {});
    vmm.end().expect(&ExitReason::Stopped, 0);
}

#[test]
fn a_balloon_is_set_only_where_there_is_one_and_within_memory() {
    if !kvm() {
        return;
    }
    let mut vmm = Vmm::start();
    assert_eq!(vmm.refused(Op::SetBalloon { target_mib: 1 }, &[]).kind, ErrorKind::State);
    let _console = vmm.create(&Code::new().halt(), |_| {});
    let error = vmm.refused(Op::SetBalloon { target_mib: 1 }, &[]);
    assert_eq!(error.kind, ErrorKind::BadRequest, "{}", error.message);

    let mut vmm = Vmm::start();
    let balloon = coppice_vmm_protocol::BalloonSpec { target_mib: 0, free_page_reporting: false };
    let _console = vmm.create(&Code::new().halt(), |spec| spec.balloon = Some(balloon));
    vmm.done(Op::SetBalloon { target_mib: 64 });
    let error = vmm.refused(Op::SetBalloon { target_mib: 65 }, &[]);
    assert_eq!(error.kind, ErrorKind::BadRequest, "{}", error.message);
}

#[test]
fn a_packet_that_is_no_request_is_answered_and_the_connection_goes_on() {
    let mut vmm = Vmm::start();
    for packet in [
        serde_json::json!({"id": 7, "op": {"create": {"vcpus": 1, "surprise": true}}}),
        serde_json::json!({"id": 7, "op": "explode"}),
        serde_json::json!({"id": 7}),
    ] {
        vmm.socket.send(&packet, &[]).unwrap();
        let (reply, _) = vmm.socket.receive::<Incoming>().unwrap();
        let Incoming::Reply(reply) = reply else { panic!("{reply:?}") };
        assert_eq!(reply.id, 7);
        let ResultBody::Error(error) = reply.result else { panic!("{:?}", reply.result) };
        assert_eq!(error.kind, ErrorKind::BadRequest);
    }
    assert_eq!(vmm.status().state, VmState::Empty);
}

#[test]
fn sigterm_and_sigint_stop_the_machine() {
    if !kvm() {
        return;
    }
    for signal in ["TERM", "INT"] {
        let (vmm, mut console) = Vmm::boot(&Code::new().print("x").spin(), |_| {});
        console.byte();
        send_signal(signal, vmm.child.id());
        vmm.end().expect(&ExitReason::Stopped, 0);
    }
}

#[test]
fn the_end_of_the_socket_ends_the_machine() {
    if !kvm() {
        return;
    }
    let (mut vmm, mut console) = Vmm::boot(&Code::new().print("x").spin(), |_| {});
    console.byte();
    vmm.done(Op::Pause {});
    drop(vmm.socket);
    assert_eq!(vmm.child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_manager_that_is_killed_takes_its_machine_with_it() {
    if !kvm() {
        return;
    }
    // A shell stands for the manager. This test keeps the manager's end of the socket open, so
    // only the death of the parent can end the machine. The pipe reports it: it is inherited by
    // the machine's process and by nothing else that outlives the shell.
    let (ours, theirs) = ControlSocket::pair().unwrap();
    let program = format!("true; '{}' --control-fd 3 & echo started; wait", vmm());
    let mut manager = Command::new("sh")
        .args(["-c", &format!("exec 3<&0 0</dev/null; {program}")])
        .stdin(theirs.into_fd())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut alive = manager.stdout.take().unwrap();
    let mut started = [0; 8];
    alive.read_exact(&mut started).unwrap();
    let mut vmm = Vmm::with(manager, ours);
    let mut console = vmm.create(&Code::new().print_for_ever(b'x'), |_| {});
    vmm.done(Op::Start {});
    console.byte();
    vmm.child.kill().unwrap();
    vmm.child.wait().unwrap();
    alive.read_to_end(&mut Vec::new()).unwrap();
    console.rest();
    loop {
        match vmm.socket.receive::<Incoming>() {
            Ok(_) => {}
            Err(SocketError::Closed) => break,
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn the_end_of_the_thread_that_started_it_does_not_end_a_machine() {
    if !kvm() {
        return;
    }
    let start = || {
        let mut vmm = Vmm::start();
        // It answers, so it has asked to be told of its parent's end.
        vmm.status();
        vmm
    };
    let mut vmm = std::thread::spawn(start).join().unwrap();
    let mut console = vmm.create(&Code::new().print_for_ever(b'x'), |_| {});
    vmm.done(Op::Start {});
    console.byte();
    assert_eq!(vmm.status().state, VmState::Running);
}

#[test]
fn descriptors_leaked_by_the_manager_are_not_kept() {
    // A pipe that the process inherits by mistake must end when our copy does.
    let (ours, theirs) = ControlSocket::pair().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let program = format!("'{}' --control-fd 3 7>&1 8>&1 1>/dev/null", vmm());
    let mut command = command_with_socket(&program, theirs.into_fd());
    let child = command.stdout(writer).spawn().unwrap();
    drop(command);
    let mut vmm = Vmm::with(child, ours);
    assert_eq!(vmm.status().state, VmState::Empty);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

/// Sends `spec` after `change` to a fresh process and gives the class of the refusal.
#[track_caller]
fn refusal(
    fds: &[BorrowedFd<'_>],
    change: impl FnOnce(&mut coppice_vmm_protocol::MachineSpec),
) -> (ErrorKind, String) {
    let mut vmm = Vmm::start();
    let mut spec = plain_spec();
    spec.console = None;
    change(&mut spec);
    let error = vmm.refused(Op::Create(Box::new(spec)), fds);
    // A refusal leaves the process as it was, ready for a better request.
    assert_eq!(vmm.status().state, VmState::Empty);
    assert!(!error.message.contains('\n'));
    (error.kind, error.message)
}

#[test]
fn a_machine_that_cannot_be_described_is_refused_by_class() {
    let kernel = Code::new().halt().kernel();
    let kernel = kernel.as_fd();
    let null = null();
    let null = null.as_fd();
    let disk = coppice_vmm_protocol::DiskSpec {
        fd: 1,
        read_only: true,
        overlay: None,
        layers: Vec::new(),
        serial: String::new(),
    };
    let vsock =
        coppice_vmm_protocol::VsockSpec { cid: 3, listener: 1, directory: 2, name: "vsock".into() };
    assert_eq!(refusal(&[kernel], |s| s.vcpus = 0).0, ErrorKind::BadRequest);
    assert_eq!(refusal(&[kernel], |s| s.memory_mib = 1).0, ErrorKind::Memory);
    assert_eq!(
        refusal(&[kernel], |s| s.boot_mut().unwrap().cmdline = "x".repeat(4096)).0,
        ErrorKind::Cmdline
    );
    assert_eq!(refusal(&[kernel, null], |s| s.disks.push(disk)).0, ErrorKind::Disk);
    assert_eq!(refusal(&[kernel, null, null], |s| s.vsock = Some(vsock)).0, ErrorKind::Vsock);
    assert_eq!(
        refusal(&[kernel, null], |s| s.boot_mut().unwrap().initrd = Some(1)).0,
        ErrorKind::Initrd
    );
    assert_eq!(refusal(&[null], |_| {}).0, ErrorKind::Kernel);
    assert_eq!(refusal(&[], |_| {}).0, ErrorKind::BadRequest);
}

#[test]
fn a_kernel_that_cannot_be_loaded_is_refused_by_class() {
    if !kvm() {
        return;
    }
    let file = |bytes: &[u8]| {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, bytes).unwrap();
        file
    };
    let elf = Code::new().halt().elf();
    let truncated = file(&elf[..elf.len() - 1]);
    let text = file(b"#!/bin/sh\nexit 0\n");
    let empty = file(b"");
    for bad in [&truncated, &text, &empty] {
        let (kind, message) = refusal(&[bad.as_fd()], |_| {});
        assert_eq!(kind, ErrorKind::Kernel, "{message}");
    }
    let kernel = Code::new().halt().kernel();
    let (kind, message) =
        refusal(&[kernel.as_fd(), empty.as_fd()], |s| s.boot_mut().unwrap().initrd = Some(1));
    assert_eq!(kind, ErrorKind::Initrd, "{message}");
    let large = file(b"");
    large.set_len(65 << 20).unwrap();
    let (kind, message) =
        refusal(&[kernel.as_fd(), large.as_fd()], |s| s.boot_mut().unwrap().initrd = Some(1));
    assert_eq!(kind, ErrorKind::Memory, "{message}");
}

#[test]
fn a_process_that_was_refused_can_still_make_a_machine() {
    if !kvm() {
        return;
    }
    let mut vmm = Vmm::start();
    let null = null();
    vmm.refused(Op::Create(Box::new(plain_spec())), &[null.as_fd(), null.as_fd()]);
    let _console = vmm.create(&Code::new().power_off(), |_| {});
    vmm.done(Op::Start {});
    vmm.end().expect(&ExitReason::PowerOff, 0);
}

#[test]
fn the_command_line_teaches_and_refuses() {
    let (status, help, _) = run(&["--help"]);
    assert!(status.success() && help.contains("--control-fd N"));
    let (status, version, _) = run(&["--version"]);
    assert!(status.success() && version.starts_with("coppice-vmm "));
    let (status, _, error) = run(&["--nonsense"]);
    assert_eq!(status.code(), Some(2));
    assert!(error.contains("--nonsense") && error.contains("--help"), "{error}");
}

#[test]
fn a_descriptor_that_is_no_control_socket_is_refused() {
    let (status, _, error) = run(&["--control-fd", "99"]);
    assert_eq!(status.code(), Some(1));
    assert!(error.contains("99") && error.lines().count() == 1, "{error}");
    let output = Command::new("sh")
        .args(["-c", &format!("'{}' --control-fd 3 3</dev/null", vmm())])
        .output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("SOCK_SEQPACKET"));
}

#[test]
fn the_probe_prints_one_json_object() {
    let (status, report, _) = run(&["probe"]);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["kvm"].as_bool(), Some(status.success()));
    if kvm() {
        let mode = report["kernel_mode"].as_str().unwrap();
        assert!(["hardware", "emulated"].contains(&mode), "{mode}");
        assert_eq!(report["api_version"], 12);
    } else {
        assert!(report["error"].as_str().unwrap().contains("/dev/kvm"));
    }
}

fn send_signal(name: &str, pid: u32) {
    let status = Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(status.success());
}
