//! Short-lived roles that arrange a process's surroundings and then become the program asked for.

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use nix::sys::signal::Signal;

use coppice_lab::sys;

use crate::Outcome;

/// Exit code for a program that was not found, as shells have it.
const NOT_FOUND: u8 = 127;
/// Exit code for a program that cannot be executed, as shells have it.
const NOT_EXECUTABLE: u8 = 126;

/// `exec CGROUP pipes|terminal PROGRAM ARGUMENTS...`: joins the command's cgroup, opens a session
/// for it and executes it. The environment and working directory are the caller's.
pub(crate) fn in_machine(mut arguments: impl Iterator<Item = String>) -> Outcome {
    let cgroup = arguments.next().ok_or("no cgroup given")?;
    let terminal = arguments.next().as_deref() == Some("terminal");
    let program = arguments.next().ok_or("no program given")?;
    std::fs::write(format!("{cgroup}/cgroup.procs"), "0")?;
    nix::unistd::setsid()?;
    if terminal {
        sys::make_controlling_terminal(std::io::stdin().as_fd())?;
    }
    let error = Command::new(&program).args(arguments).exec();
    eprintln!("coppice-lab: {program}: {error}");
    let code = match error.kind() {
        std::io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    };
    Ok(ExitCode::from(code))
}

/// `exec-with-parent PID PROGRAM ARGUMENTS...`: executes the program so that it dies with the
/// process PID that started it, however that one ends.
pub(crate) fn with_parent(mut arguments: impl Iterator<Item = String>) -> Outcome {
    let parent: i32 = arguments.next().ok_or("no parent given")?.parse()?;
    let program = arguments.next().ok_or("no program given")?;
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    // The parent may have died before the request above took effect.
    if nix::unistd::getppid().as_raw() != parent {
        return Err("the parent is gone".into());
    }
    Err(format!("{program}: {}", Command::new(&program).args(arguments).exec()).into())
}
