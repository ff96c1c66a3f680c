//! Writing down which system calls each thread of a program makes.
//!
//! A line for each different call: the thread's name, how many filters it had installed itself
//! (`seccomp(2)`), the call's number, and its arguments; those that do not fit into 32 bits, which
//! are addresses, are written as 0.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};

use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use nix::libc::{self, user_regs_struct};
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::calls::Word;
use crate::sys;

/// The program's one descriptor beside standard input, output and error, which must not stay open
/// here.
const PASSED: i32 = 3;

/// The signal of a stop at a call, as it is asked for (`PTRACE_O_TRACESYSGOOD`).
const CALL: i32 = libc::SIGTRAP | 0x80;

/// Entry of the auxiliary vector that says where the vDSO is, and one that says nothing
/// (`getauxval(3)`).
const AT_SYSINFO_EHDR: i64 = 33;
const AT_IGNORE: i64 = 1;

/// What is known of a thread.
#[derive(Default)]
struct Thread {
    name: Option<String>,
    /// It is in a call.
    inside: bool,
    filters: usize,
}

struct Recorder {
    process: Pid,
    threads: HashMap<Pid, Thread>,
    seen: BTreeSet<(String, usize, u64, [u64; 6])>,
    /// The shell has become the program.
    begun: bool,
    end: Option<i32>,
}

/// Runs a program to its end, as one that has no vDSO, so that it reads clocks by calls as well,
/// and writes its calls to `file`. Gives the program's exit code.
pub(crate) fn record(file: &str, program: &str, arguments: &[String]) -> Result<u8> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "kill -STOP $$; exec \"$@\"", "sh", program]).args(arguments);
    let child = command.spawn().context("cannot start a shell")?;
    // It fails if nothing was passed.
    let _ = nix::unistd::close(PASSED);
    let process = Pid::from_raw(i32::try_from(child.id())?);
    match waitpid(process, Some(WaitPidFlag::WUNTRACED))? {
        WaitStatus::Stopped(..) => {}
        other => bail!("the shell did not stop: {other:?}"),
    }
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_EXITKILL;
    ptrace::seize(process, options).context("cannot follow the program")?;
    kill(process, Signal::SIGCONT).context("cannot continue the shell")?;
    let threads = HashMap::new();
    let mut recorder =
        Recorder { process, threads, seen: BTreeSet::new(), begun: false, end: None };
    while recorder.step()? {}
    let lines = recorder.seen.iter().map(|(name, filters, call, arguments)| {
        let arguments = arguments.map(|argument| argument.to_string()).join(" ");
        format!("{name} {filters} {call} {arguments}\n")
    });
    fs::write(file, lines.collect::<String>()).context("cannot write the calls down")?;
    let status = ExitStatus::from_raw(recorder.end.context("the program has no end")?);
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(u8::try_from(code.unwrap_or(1))?)
}

impl Recorder {
    /// Waits for the next stop of any thread and lets it go on; `false` when there is none left.
    fn step(&mut self) -> Result<bool> {
        let Some((thread, status)) = sys::wait().context("cannot wait for the program")? else {
            return Ok(false);
        };
        if !libc::WIFSTOPPED(status) {
            self.threads.remove(&thread);
            if thread == self.process {
                self.end = Some(status);
            }
            return Ok(true);
        }
        let mut signal = libc::WSTOPSIG(status);
        let event = status >> 16;
        if signal == CALL {
            unless_gone(self.call(thread))?;
            signal = 0;
        } else if event == libc::PTRACE_EVENT_EXEC {
            self.begun = true;
            unless_gone(hide_vdso(thread))?;
        }
        if event != 0 {
            signal = 0;
        }
        unless_gone(sys::resume(thread, signal))?;
        Ok(true)
    }

    /// A thread is about to make a call, or has made it.
    fn call(&mut self, thread: Pid) -> Result<(), Errno> {
        let known = self.threads.entry(thread).or_default();
        known.inside = !known.inside;
        if !known.inside || !self.begun {
            return Ok(());
        }
        let registers = ptrace::getregs(thread)?;
        let name = known.name.get_or_insert_with(|| {
            let path = format!("/proc/{thread}/comm");
            fs::read_to_string(path).unwrap_or_default().trim().replace(' ', "_")
        });
        let call = (name.clone(), known.filters, registers.orig_rax, arguments(&registers));
        self.seen.insert(call);
        match registers.orig_rax.cast_signed() {
            libc::SYS_seccomp => known.filters += 1,
            // It may get a name.
            libc::SYS_prctl => known.name = None,
            _ => {}
        }
        Ok(())
    }
}

fn arguments(registers: &user_regs_struct) -> [u64; 6] {
    let all =
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9];
    all.map(|argument| u32::try_from(argument).map_or(0, u64::from))
}

/// Takes the vDSO from a program that was just loaded: its stack pointer is at the number of its
/// arguments, behind which are their addresses, those of the environment, and the auxiliary vector.
fn hide_vdso(thread: Pid) -> Result<(), Errno> {
    let mut at = ptrace::getregs(thread)?.rsp;
    for _ in 0..2 {
        // To behind the zero that ends the arguments, and then the environment.
        at += 8;
        while Word::read(thread, at)?.value() != 0 {
            at += 8;
        }
    }
    at += 8;
    loop {
        let kind = Word::read(thread, at)?;
        match kind.value() {
            0 => return Ok(()),
            AT_SYSINFO_EHDR => return kind.with(AT_IGNORE).write(thread),
            _ => at += 16,
        }
    }
}

/// A thread may be killed while it is stopped.
fn unless_gone(result: Result<(), Errno>) -> Result<()> {
    match result {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).context("cannot follow a thread"),
    }
}
