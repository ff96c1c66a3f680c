//! One command in the nested machine: its processes, its streams and its end.
//!
//! A command lives in a cgroup of its own, so that ending it ends everything it started. The
//! connection's thread reads what the client sends; one thread each pumps the output streams,
//! feeds standard input and waits for the end.

use std::fs::{self, File};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use coppice_lab::sys;
use coppice_lab::wire::{
    Exit, Kind, Run, Status, TerminalSize, read_frame, write_frame, write_json,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use crate::pump;

/// Search path of commands in the machine.
const PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";

/// The client's end of the connection, for frames from several threads.
pub(crate) type Client = Arc<Mutex<TcpStream>>;

/// Locks what a panicking thread may have held: nothing here is left half-changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cgroup of one command.
struct Group {
    path: PathBuf,
}

impl Group {
    fn create() -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = PathBuf::from(format!("/sys/fs/cgroup/command-{number}"));
        fs::create_dir(&path)?;
        Ok(Self { path })
    }

    fn kill(&self) {
        // The group is gone once the command has ended: nothing is left to kill then.
        drop(fs::write(self.path.join("cgroup.kill"), "1"));
    }

    /// Kills what is left in the group, waits until it is gone and returns how many there were.
    fn finish(&self) -> io::Result<u32> {
        let left = fs::read_to_string(self.path.join("cgroup.procs"))?.lines().count();
        self.kill();
        let events = File::open(self.path.join("cgroup.events"))?;
        loop {
            let text = fs::read_to_string(self.path.join("cgroup.events"))?;
            if text.lines().any(|line| line == "populated 0") {
                break;
            }
            // A change since `events` was last read makes this return at once.
            let mut waiting = [PollFd::new(events.as_fd(), PollFlags::POLLPRI)];
            poll(&mut waiting, PollTimeout::from(1000_u16))?;
        }
        remove_tree(&self.path)?;
        Ok(u32::try_from(left).unwrap_or(u32::MAX))
    }
}

/// Removes a cgroup and those below it, innermost first.
fn remove_tree(path: &PathBuf) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}

/// The running process that the client's requests act on.
struct Running {
    pid: Pid,
    group: Group,
    /// Set, under the lock, before the process is reaped and its number may go to another.
    ended: Mutex<bool>,
}

impl Running {
    fn signal(&self, number: i32) {
        let ended = lock(&self.ended);
        if !*ended && let Ok(signal) = Signal::try_from(number) {
            let _ = killpg(self.pid, signal);
        }
    }

    fn kill(&self) {
        let ended = lock(&self.ended);
        if !*ended {
            // It may not have joined its cgroup yet.
            let _ = kill(self.pid, Signal::SIGKILL);
            self.group.kill();
        }
    }
}

/// The command's streams as this side holds them.
struct Streams {
    input: Option<File>,
    outputs: Vec<(Kind, OwnedFd)>,
    terminal: Option<File>,
}

/// Runs one command for one client, to its end.
pub(crate) fn run(run: &Run, stream: TcpStream) -> io::Result<()> {
    let client: Client = Arc::new(Mutex::new(stream.try_clone()?));
    let (child, group, streams) = match start(run) {
        Ok(started) => started,
        Err(error) => return write_frame(&mut *lock(&client), Kind::Failed, error.as_bytes()),
    };
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    let running = Arc::new(Running { pid: Pid::from_raw(pid), group, ended: Mutex::new(false) });
    write_frame(&mut *lock(&client), Kind::Started, b"")?;

    let (ended_reader, ended_writer) = io::pipe()?;
    let ended_reader = Arc::new(OwnedFd::from(ended_reader));
    let mut pumps = Vec::new();
    for (kind, output) in streams.outputs {
        let (client, ended) = (Arc::clone(&client), Arc::clone(&ended_reader));
        pumps.push(thread::spawn(move || pump::output(kind, output, &ended, &client)));
    }
    let input = streams.input.map(|input| {
        let (sender, receiver) = mpsc::channel();
        let client = Arc::clone(&client);
        let on_terminal = streams.terminal.is_some();
        thread::spawn(move || pump::input(&receiver, input, on_terminal, &client));
        sender
    });
    let waiter = {
        let (client, running) = (Arc::clone(&client), Arc::clone(&running));
        thread::spawn(move || {
            if let Err(error) = wait(child, &running, ended_writer.into(), pumps, &client) {
                eprintln!("coppice-lab: end of a command: {error}");
            }
        })
    };
    let outcome = obey(stream, &client, &running, input, streams.terminal.as_ref());
    // The client is gone, or has read the exit status.
    running.kill();
    if waiter.join().is_err() {
        return Err(io::Error::other("the waiting thread panicked"));
    }
    outcome
}

/// Waits for the command, ends what it left behind and reports its status.
fn wait(
    mut child: Child,
    running: &Running,
    ended_writer: OwnedFd,
    pumps: Vec<JoinHandle<()>>,
    client: &Client,
) -> io::Result<()> {
    waitid(Id::Pid(running.pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)?;
    let status = {
        let mut ended = lock(&running.ended);
        *ended = true;
        child.wait()?
    };
    let leftovers = running.group.finish()?;
    // The pumps send what the pipes still hold and stop, even if a process that left the
    // cgroup keeps the other end open.
    drop(ended_writer);
    for pump in pumps {
        drop(pump.join());
    }
    let status = match (status.code(), status.signal()) {
        (Some(code), _) => Status::Exited(code),
        (None, signal) => Status::Signalled(signal.unwrap_or_default()),
    };
    let mut client = lock(client);
    write_json(&mut *client, Kind::Exit, &Exit { status, leftovers })?;
    // Only this direction: closing with unread input would reset the connection and could
    // destroy the exit status on its way.
    client.shutdown(Shutdown::Write)
}

/// Does what the client asks until it closes the connection.
fn obey(
    mut stream: TcpStream,
    client: &Client,
    running: &Running,
    mut input: Option<mpsc::Sender<Vec<u8>>>,
    terminal: Option<&File>,
) -> io::Result<()> {
    let mut payload = Vec::new();
    while let Some(kind) = read_frame(&mut stream, &mut payload)? {
        match kind {
            Kind::Stdin => {
                if let Some(input) = &input
                    && !payload.is_empty()
                {
                    // The client's window bounds what is queued.
                    drop(input.send(std::mem::take(&mut payload)));
                }
            }
            Kind::StdinEnd => input = None,
            Kind::Signal => running.signal(payload.first().copied().map_or(0, i32::from)),
            Kind::Kill => running.kill(),
            Kind::Ping => write_frame(&mut *lock(client), Kind::Pong, b"")?,
            Kind::Resize => {
                if let (Some(terminal), Ok(size)) =
                    (terminal, serde_json::from_slice::<TerminalSize>(&payload))
                {
                    let _ = sys::set_terminal_size(terminal, size);
                }
            }
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "unexpected frame")),
        }
    }
    Ok(())
}

fn start(run: &Run) -> Result<(Child, Group, Streams), String> {
    if run.argv.is_empty() {
        return Err("no command given".into());
    }
    if !fs::metadata(&run.cwd).is_ok_and(|metadata| metadata.is_dir()) {
        return Err(format!("the working directory {} does not exist in the lab", run.cwd));
    }
    let group = Group::create().map_err(|error| format!("cannot make a cgroup: {error}"))?;
    let started = spawn(run, &group);
    match started {
        Ok((child, streams)) => Ok((child, group, streams)),
        Err(error) => {
            drop(fs::remove_dir(&group.path));
            Err(format!("cannot start the command: {error}"))
        }
    }
}

fn spawn(run: &Run, group: &Group) -> io::Result<(Child, Streams)> {
    let mut command = Command::new("/init");
    command.arg("exec").arg(&group.path);
    command.arg(if run.terminal.is_some() { "terminal" } else { "pipes" });
    command.args(&run.argv).current_dir(&run.cwd).env_clear();
    command.env("PATH", PATH).env("HOME", "/root").env("USER", "root").env("TERM", "linux");
    command.envs(&run.env);
    let Some(size) = run.terminal else {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut outputs = Vec::new();
        outputs.extend(child.stdout.take().map(|pipe| (Kind::Stdout, pipe.into())));
        outputs.extend(child.stderr.take().map(|pipe| (Kind::Stderr, pipe.into())));
        let input = child.stdin.take().map(|pipe| File::from(OwnedFd::from(pipe)));
        return Ok((child, Streams { input, outputs, terminal: None }));
    };
    let pair = nix::pty::openpty(None, None)?;
    sys::set_terminal_size(&pair.master, size)?;
    command.stdin(pair.slave.try_clone()?).stdout(pair.slave.try_clone()?).stderr(pair.slave);
    let child = command.spawn()?;
    // `command` still holds the slave side, which would keep the master from ever ending.
    drop(command);
    let terminal = File::from(pair.master);
    let streams = Streams {
        input: Some(terminal.try_clone()?),
        outputs: vec![(Kind::Stdout, terminal.try_clone()?.into())],
        terminal: Some(terminal),
    };
    Ok((child, streams))
}

/// Acknowledges standard input that the command has taken.
pub(crate) fn acknowledge(client: &Client, taken: usize) -> io::Result<()> {
    let taken = u32::try_from(taken).map_err(io::Error::other)?;
    write_frame(&mut *lock(client), Kind::StdinTaken, &taken.to_le_bytes())
}
