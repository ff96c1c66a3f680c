//! Child processes of the long commands: output kept for an error message, interruption passed on.
//!
//! An interrupt (Ctrl-C, SIGTERM, SIGHUP) ends the running child and makes every later step fail,
//! so that the ordinary error path removes temporary directories; the process never dies with them
//! left behind. Where there is nothing to remove, an interrupt has its ordinary effect.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, ErrorKind, Read};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Lines of a failed child's output shown with the error.
const TAIL_LINES: usize = 15;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static HOLDERS: AtomicUsize = AtomicUsize::new(0);
static RUNNING: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Watches for interrupts from here on. Calling it again does nothing.
pub(crate) fn watch_interrupts() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        // Without the watch an interrupt merely leaves a temporary directory for the next run.
        let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGHUP, SIGINT, SIGTERM]) else {
            return;
        };
        std::thread::spawn(move || {
            for signal in signals.forever() {
                if HOLDERS.load(Ordering::SeqCst) == 0 && running().is_empty() {
                    // Nothing would be left half done; should this fail, the next signal may not.
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
                INTERRUPTED.store(true, Ordering::SeqCst);
                for pid in running().iter().filter_map(|&pid| i32::try_from(pid).ok()) {
                    // A child that ended by itself needs no signal.
                    let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
                }
            }
        });
    });
}

/// While it lives an interrupt does not end the process at once: there is something to remove.
pub(crate) struct HoldInterrupts(());

impl HoldInterrupts {
    /// Begins to hold.
    pub(crate) fn new() -> Self {
        HOLDERS.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for HoldInterrupts {
    fn drop(&mut self) {
        HOLDERS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Fails once the user has interrupted the command.
pub(crate) fn check_interrupted() -> Result<()> {
    if INTERRUPTED.load(Ordering::SeqCst) {
        bail!("interrupted; what was half built has been removed");
    }
    Ok(())
}

fn running() -> MutexGuard<'static, Vec<u32>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A child that an interrupt ends.
struct Tracked(Child);

impl Tracked {
    fn spawn(command: &mut Command) -> Result<Self> {
        check_interrupted()?;
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().map_err(|error| match error.kind() {
            ErrorKind::NotFound => anyhow::anyhow!("{name} is not installed"),
            _ => anyhow::Error::new(error).context(format!("cannot start {name}")),
        })?;
        running().push(child.id());
        // An interrupt between the check and the push would otherwise miss this child.
        let tracked = Self(child);
        check_interrupted()?;
        Ok(tracked)
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        // Already waited for on the ordinary path; else this is an error path.
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
        let id = self.0.id();
        running().retain(|&pid| pid != id);
    }
}

/// Runs `command` to its end and gives `on_line` each line of its output (both streams).
///
/// # Errors
/// When it cannot be started, fails (the end of its output is part of the text) or is interrupted.
pub(crate) fn run_lines(command: &mut Command, mut on_line: impl FnMut(&str)) -> Result<()> {
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let second = writer.try_clone().context("cannot make a pipe")?;
    command.stdin(Stdio::null()).stdout(writer).stderr(second);
    let mut child = Tracked::spawn(command)?;
    // The command holds the pipe's write ends; the reader ends only once they are gone.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut tail = VecDeque::with_capacity(TAIL_LINES);
    for line in BufReader::new(reader).split(b'\n') {
        let line = line.context("cannot read a child's output")?;
        let line = String::from_utf8_lossy(&line);
        on_line(&line);
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        tail.push_back(line.into_owned());
    }
    finish(&mut child, command, &Vec::from(tail).join("\n"))
}

/// Runs `command` to its end without showing its output.
///
/// # Errors
/// As [`run_lines`].
pub(crate) fn run(command: &mut Command) -> Result<()> {
    run_lines(command, |_| ())
}

/// Runs `command` and returns its standard output as text.
///
/// # Errors
/// As [`run_lines`].
pub(crate) fn output(command: &mut Command) -> Result<String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Tracked::spawn(command)?;
    let stderr = child.0.stderr.take();
    // Drained beside standard output, so that neither pipe can fill and block the child.
    let errors = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What could be read is all there is to show.
        let _ = stderr.map(|mut stderr| stderr.read_to_end(&mut bytes));
        bytes
    });
    let mut text = Vec::new();
    if let Some(mut stdout) = child.0.stdout.take() {
        stdout.read_to_end(&mut text).context("cannot read a child's output")?;
    }
    let errors = errors.join().unwrap_or_default();
    finish(&mut child, command, String::from_utf8_lossy(&errors).trim_end())?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn finish(child: &mut Tracked, command: &Command, said: &str) -> Result<()> {
    let status = child.0.wait().context("cannot wait for a child")?;
    check_interrupted()?;
    if status.success() {
        return Ok(());
    }
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    let mut line = words.join(" ");
    if line.len() > 160 {
        line = format!("{} ...", line.chars().take(160).collect::<String>());
    }
    bail!("`{line}` failed ({status}){}{said}", if said.is_empty() { "" } else { ":\n" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn both_streams_arrive_line_by_line() {
        let mut lines = Vec::new();
        run_lines(&mut shell("echo out; echo err >&2; printf end"), |line| {
            lines.push(line.to_owned());
        })
        .unwrap();
        assert_eq!(lines, ["out", "err", "end"]);
    }

    #[test]
    fn a_failure_shows_the_end_of_the_output() {
        let error = run(&mut shell("seq 1 100; exit 3")).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.ends_with("99\n100"), "{error}");
        assert!(!error.contains("\n50\n"), "only the end: {error}");
    }

    #[test]
    fn standard_output_comes_back_while_errors_fill_their_pipe() {
        let text = output(&mut shell("seq 1 100000 >&2; echo fine")).unwrap();
        assert_eq!(text, "fine\n");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = run(&mut Command::new("no-such-program-here")).unwrap_err().to_string();
        assert_eq!(error, "no-such-program-here is not installed");
    }
}
