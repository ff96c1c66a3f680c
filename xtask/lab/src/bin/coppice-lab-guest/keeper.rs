//! The keeper: the process on the host that owns a warm machine's QEMU.
//!
//! It boots the machine, hands out leases on a Unix socket in its working directory, and ends the
//! machine after a time without any. QEMU dies with the keeper, so ending one ends both.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use coppice_lab::plan::{KEEPER_PLAN, KEEPER_SOCKET, KeeperPlan, KeeperReply, KeeperRequest};
use coppice_lab::wire::READY_LINE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::json;

use crate::Outcome;
use crate::qmp::Qmp;

/// Socket that QEMU connects its monitor to.
const QMP_SOCKET: &str = "qmp.sock";
/// The console's log stops growing here, in bytes.
const CONSOLE_LIMIT: usize = 16 << 20;
/// How long a client that connected may take to say what it wants, and QEMU to answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// Boots the machine described in the working directory and keeps it until it is not needed.
pub(crate) fn run() -> Outcome {
    // Out of the terminal's session: Ctrl-C there must not end a machine that others share.
    nix::unistd::setsid()?;
    let mut report = io::stdout();
    let (listener, mut keeper) = match boot() {
        Ok(booted) => booted,
        Err(error) => {
            drop(writeln!(report, "failed: {error}"));
            return Ok(ExitCode::FAILURE);
        }
    };
    // Whoever started the keeper may be gone; the machine serves others as well.
    drop(writeln!(report, "ready"));
    let outcome = keeper.serve(&listener);
    drop(std::fs::remove_file(KEEPER_SOCKET));
    drop(keeper.qemu.kill());
    keeper.qemu.wait()?;
    outcome?;
    Ok(ExitCode::SUCCESS)
}

struct Keeper {
    plan: KeeperPlan,
    qemu: Child,
    console: Console,
    qmp: Qmp,
    port: u16,
    started: Instant,
    boot_time: Duration,
    leases: Vec<UnixStream>,
}

fn boot() -> Result<(UnixListener, Keeper), Box<dyn std::error::Error>> {
    let plan: KeeperPlan = serde_json::from_slice(&std::fs::read(KEEPER_PLAN)?)?;
    for socket in [QMP_SOCKET, KEEPER_SOCKET] {
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    let monitor = UnixListener::bind(QMP_SOCKET)?;
    let started = Instant::now();
    let mut qemu = Command::new(std::env::current_exe()?)
        .args(["exec-with-parent", &std::process::id().to_string()])
        .args(&plan.qemu)
        .args(["-chardev", &format!("socket,id=qmp,path={QMP_SOCKET}")])
        .args(["-mon", "chardev=qmp,mode=control"])
        .args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create("qemu.log")?)
        .spawn()?;
    let output = qemu.stdout.take().ok_or("QEMU has no output")?;
    let mut console =
        Console { output, log: File::create("console.log")?, written: 0, tail: vec![] };
    let deadline = started + Duration::from_secs(plan.boot_timeout_s);
    let booted = await_agent(&monitor, &mut console, deadline);
    match booted.and_then(|mut qmp| Ok((qmp.forwarded_port()?, qmp))) {
        Ok((port, mut qmp)) => {
            if plan.virtual_time {
                // With larger translation blocks a guest hung now and then, spinning on a timer
                // lock with interrupts off. Only the machine's own boot, which takes four times
                // as long this way, goes without.
                qmp.monitor("one-insn-per-tb on")?;
                qmp.execute("stop", &json!({}))?;
            }
            let listener = UnixListener::bind(KEEPER_SOCKET)?;
            let boot_time = started.elapsed();
            let leases = Vec::new();
            Ok((listener, Keeper { plan, qemu, console, qmp, port, started, boot_time, leases }))
        }
        Err(error) => {
            drop(qemu.kill());
            drop(qemu.wait());
            Err(error.into())
        }
    }
}

/// Follows the console until the agent says that it serves.
fn await_agent(
    monitor: &UnixListener,
    console: &mut Console,
    deadline: Instant,
) -> io::Result<Qmp> {
    let mut qmp = None;
    loop {
        let ready = wait_readable(&[monitor.as_fd(), console.output.as_fd()], Some(deadline))?;
        let Some(ready) = ready else {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the machine did not boot in time",
            ));
        };
        if ready.first() == Some(&true) && qmp.is_none() {
            let (stream, _) = monitor.accept()?;
            stream.set_read_timeout(Some(ANSWER_TIME))?;
            qmp = Some(Qmp::negotiate(stream)?);
        }
        if ready.get(1) == Some(&true) && !console.read()? {
            return Err(io::Error::other("QEMU ended while the machine booted"));
        }
        if console.agent_is_ready()
            && let Some(qmp) = qmp.take()
        {
            return Ok(qmp);
        }
    }
}

/// Waits until one of `sources` can be read, and says which; `None` at the deadline.
fn wait_readable(
    sources: &[BorrowedFd<'_>],
    deadline: Option<Instant>,
) -> io::Result<Option<Vec<bool>>> {
    let mut waiting: Vec<PollFd<'_>> =
        sources.iter().map(|source| PollFd::new(*source, PollFlags::POLLIN)).collect();
    loop {
        let timeout = match deadline {
            None => PollTimeout::NONE,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(None);
                }
                // Rounded up, so that the loop does not spin through the last millisecond.
                PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
            }
        };
        match poll(&mut waiting, timeout) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            Ok(_) => {
                return Ok(Some(waiting.iter().map(|fd| fd.any().unwrap_or(true)).collect()));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

impl Keeper {
    fn serve(&mut self, listener: &UnixListener) -> io::Result<()> {
        let idle_time = Duration::from_secs(self.plan.idle_timeout_s);
        let mut idle_since = Instant::now();
        loop {
            let deadline = self.leases.is_empty().then(|| idle_since + idle_time);
            let mut sources = vec![listener.as_fd(), self.console.output.as_fd()];
            sources.extend(self.leases.iter().map(AsFd::as_fd));
            let Some(ready) = wait_readable(&sources, deadline)? else { return Ok(()) };
            // A lease's connection becomes readable only when its client goes.
            let mut ended = ready.iter().skip(2).copied();
            let before = self.leases.len();
            self.leases.retain(|_| !ended.next().unwrap_or(false));
            if self.leases.is_empty() && before > 0 {
                idle_since = Instant::now();
                if self.plan.virtual_time {
                    self.qmp.execute("stop", &json!({}))?;
                }
            }
            if ready.get(1) == Some(&true) && !self.console.read()? {
                let status = self.qemu.wait()?;
                return Err(io::Error::other(format!("QEMU ended: {status}")));
            }
            if ready.first() == Some(&true) {
                let (stream, _) = listener.accept()?;
                match self.answer(stream) {
                    Ok(true) => return Ok(()),
                    Ok(false) => {}
                    Err(error) => eprintln!("coppice-lab-guest: a client's request: {error}"),
                }
            }
        }
    }

    /// Answers one client; whether it asked for the end.
    fn answer(&mut self, stream: UnixStream) -> io::Result<bool> {
        stream.set_read_timeout(Some(ANSWER_TIME))?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        let request: KeeperRequest = serde_json::from_str(&line)?;
        if request == KeeperRequest::Lease {
            if self.plan.virtual_time && self.leases.is_empty() {
                self.qmp.execute("cont", &json!({}))?;
            }
            self.leases.push(stream.try_clone()?);
        }
        let reply = KeeperReply {
            port: self.port,
            token: self.plan.token.clone(),
            qemu_pid: self.qemu.id(),
            leases: self.leases.len(),
            age_s: self.started.elapsed().as_secs(),
            boot_s: self.boot_time.as_secs_f64(),
        };
        let mut text = serde_json::to_string(&reply)?;
        text.push('\n');
        (&stream).write_all(text.as_bytes())?;
        let stop = request == KeeperRequest::Stop;
        if stop {
            // Closed with the process, once QEMU is gone: that is what the client waits for.
            self.leases.push(stream);
        }
        Ok(stop)
    }
}

/// The machine's serial console: logged, and watched for the agent's line.
struct Console {
    output: ChildStdout,
    log: File,
    written: usize,
    /// What came since the last line break, at most a few KiB.
    tail: Vec<u8>,
}

impl Console {
    /// Reads what is there; `false` at the end of the stream.
    fn read(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        let count = self.output.read(&mut buffer)?;
        let chunk = buffer.get(..count).unwrap_or_default();
        if self.written < CONSOLE_LIMIT {
            self.log.write_all(chunk)?;
            self.written = self.written.saturating_add(count);
        }
        let excess = self.tail.len().saturating_sub(buffer.len());
        self.tail.drain(..excess);
        self.tail.extend_from_slice(chunk);
        Ok(count > 0)
    }

    fn agent_is_ready(&self) -> bool {
        String::from_utf8_lossy(&self.tail).contains(READY_LINE)
    }
}
