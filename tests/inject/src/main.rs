//! Has one system call of a program fail, fall short, or be the end of the program, for tests of
//! what is left on disk then.
//!
//! `coppice-inject FAULT N attach PID` follows a process that runs already, all its threads but
//! those of vCPUs, which only leave and enter guests. It says `ready` once none can get past it,
//! and lets go when its standard input ends.
//! `coppice-inject FAULT N run PROGRAM ARGUMENTS` follows a program from its first call to its end.
//!
//! `coppice-inject record FILE PROGRAM ARGUMENTS` does nothing but write down the calls; see
//! [`record`].
//!
//! Only calls count that change files, from 1 on; for an end also those that send messages. The last
//! line on standard output says what became of number N.

mod calls;
mod record;
mod sys;
mod tracer;

use std::io::{self, Read as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::tracer::{Progress, Shared, Tracer};

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The process is killed before it.
    Kill,
    /// It does nothing and fails.
    Fails(Errno),
    /// It writes half of what it should. Only calls that write bytes count then.
    Short,
}

impl Fault {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "kill" => Self::Kill,
            "enospc" => Self::Fails(Errno::ENOSPC),
            "eio" => Self::Fails(Errno::EIO),
            "short" => Self::Short,
            _ => return None,
        })
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<u8> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [way, file, program, arguments @ ..] = arguments.as_slice()
        && way == "record"
    {
        return record::record(file, program, arguments);
    }
    let [fault, number, way, what @ ..] = arguments.as_slice() else {
        bail!(
            "usage: coppice-inject FAULT N (attach PID | run PROGRAM ARGUMENTS), or \
             coppice-inject record FILE PROGRAM ARGUMENTS"
        );
    };
    let fault = Fault::parse(fault).context("FAULT is kill, enospc, eio or short")?;
    let number = number.parse().context("N is a number")?;
    match (way.as_str(), what) {
        ("attach", [pid]) => attach(fault, number, pid.parse().context("PID is a number")?),
        ("run", [program, arguments @ ..]) => follow(fault, number, program, arguments),
        _ => bail!("say `attach PID` or `run PROGRAM ARGUMENTS`"),
    }?;
    Ok(0)
}

/// The last line, for those who asked.
fn report(progress: &Progress) {
    match progress.done {
        Some(name) => println!("{name}"),
        None => println!("none of {}", progress.seen),
    }
}

fn attach(fault: Fault, number: usize, pid: i32) -> Result<()> {
    let shared = Arc::new(Shared::default());
    let mut tracer = Tracer::new(fault, number, Pid::from_raw(pid), Arc::clone(&shared));
    tracer.seize_all()?;
    println!("ready");
    std::thread::spawn(move || {
        // Whatever the input has to say, only its end matters.
        let _ = io::stdin().read_to_end(&mut Vec::new());
        // Not between the two halves of a call that is to fail.
        let settled = shared.settled();
        report(&settled);
        // With the tracer gone all threads run on by themselves.
        let _ = kill(Pid::this(), Signal::SIGKILL);
    });
    tracer.trace()?;
    // The process is gone; the other thread tells when it is asked.
    loop {
        std::thread::park();
    }
}

fn follow(fault: Fault, number: usize, program: &str, arguments: &[String]) -> Result<()> {
    // Waits to be followed before it becomes the program.
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "read go && exec \"$@\" </dev/null", "sh", program]).args(arguments);
    let mut child: Child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .context("cannot start a shell")?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let shared = Arc::new(Shared::default());
    let mut tracer = Tracer::new(fault, number, pid, Arc::clone(&shared));
    tracer.seize_all()?;
    child.stdin.take().context("no input")?.write_all(b"go\n")?;
    let status = tracer.trace()?;
    let status = std::process::ExitStatus::from_raw(status.context("the program has no end")?);
    eprintln!("{status}");
    report(&shared.settled());
    Ok(())
}
