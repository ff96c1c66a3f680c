//! The ways a machine ends, and that nothing is left of it.

use std::process::{Command, Stdio};

use coppice_manager::failure::Class;
use coppice_vmm_protocol::ExitReason;

use crate::common::{bare_machine, block_on, finish, on_lane, shell_machine, tiny};
use crate::cycles::vmm_processes;

#[test]
fn a_reboot_is_told_from_a_power_off() {
    on_lane!({
        block_on(async {
            let (vmm, mut terminal) = shell_machine(Vec::new()).await;
            terminal.type_line("reboot -f");
            assert_eq!(vmm.ended().await.reason, Some(ExitReason::Reset));
        });
    });
}

#[test]
fn a_crash_is_told_from_a_reboot() {
    on_lane!({
        // With this option Linux resets by a triple fault, as a kernel does that lost its stack.
        let options = ["--user", "root", "--append", "reboot=t"];
        let (code, _, err) = finish(&mut tiny(&options, &["reboot", "-f"]));
        assert_eq!(code, i32::from(Class::GuestPanic.exit_code()), "{err}");
        assert!(err.contains("triple fault on vCPU 0"), "{err}");
    });
}

#[test]
fn a_panic_is_reported_as_such() {
    on_lane!({
        block_on(async {
            // An init that ends makes the kernel panic.
            let (vmm, _console) = bare_machine("/bin/true", Vec::new()).await;
            assert_eq!(vmm.ended().await.reason, Some(ExitReason::Panic));
        });
    });
}

#[test]
fn a_termination_signal_ends_the_machine_in_order() {
    on_lane!({
        block_on(async {
            let (vmm, _console) = bare_machine("/bin/sh", Vec::new()).await;
            let pid = vmm.pid().to_string();
            assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
            let end = vmm.ended().await;
            assert_eq!(end.reason, Some(ExitReason::Stopped));
            assert!(end.status.unwrap().success());
        });
    });
}

#[test]
fn a_killed_manager_leaves_no_machine() {
    on_lane!({
        let mut command = tiny(&[], &["sh", "-c", "echo up; sleep 1000"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut up = [0u8; 3];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
        let machines = vmm_processes();
        assert_eq!(machines.len(), 1);
        let watched = crate::cycles::ProcessEnd::watch(machines[0]);
        child.kill().unwrap();
        child.wait().unwrap();
        watched.wait();
        assert!(vmm_processes().is_empty());
    });
}
