//! The lab's helper binary: init and agent of the nested machine, and its keeper on the host.
//!
//! One static file plays every part that must outlive, or run outside of, the program that uses
//! the lab. Its first argument, or being PID 1, says which part it plays.

mod exec;
mod init;
mod keeper;
mod pump;
mod qmp;
mod serve;
mod session;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let role = arguments.next();
    let outcome = match role.as_deref() {
        Some("stage2") => init::run(),
        Some("serve") => serve::run(),
        Some("exec") => exec::in_machine(arguments),
        Some("exec-with-parent") => exec::with_parent(arguments),
        Some("keep") => keeper::run(),
        _ if std::process::id() == 1 => init::leave_initramfs(),
        _ => Err("this program is part of `cargo xtask lab` and is not run by hand".into()),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("coppice-lab-guest: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What the parts of this program return: they are the outermost code, so any error will do.
type Outcome = Result<ExitCode, Box<dyn std::error::Error>>;
