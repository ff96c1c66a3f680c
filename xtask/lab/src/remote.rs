//! The host's side of a command in the nested machine.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use thiserror::Error;

use crate::plan::KeeperReply;
use crate::wire::{
    Exit, Kind, Opening, Request, Run, STDIN_WINDOW, VERSION, read_frame, write_frame, write_json,
};

/// Silence after which the machine is asked whether it lives.
const PING_AFTER: Duration = Duration::from_secs(15);

/// Silence after that question, or within a frame, that counts as a hang.
const HUNG_AFTER: Duration = Duration::from_secs(120);

/// Why a command in the nested machine has no exit status.
#[derive(Debug, Error)]
pub enum Error {
    /// The machine's agent refused the request.
    #[error("the nested machine refused: {0}")]
    Refused(String),
    /// The machine stopped answering.
    #[error("the nested machine hung: no answer for {} seconds", .0.as_secs())]
    Hung(Duration),
    /// The command ran longer than its caller allows, and was killed.
    #[error("the command ran longer than {} seconds and was killed", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The machine went away.
    #[error("the connection to the nested machine broke")]
    Lost(#[from] io::Error),
    /// The caller's own output stream failed.
    #[error("cannot write the command's output")]
    Output(#[source] io::Error),
}

/// A command's standard input.
pub(crate) enum Input {
    Nothing,
    Inherited,
    From(Box<dyn Read + Send>),
}

/// Everything about a run that is not part of the request itself.
pub(crate) struct Conduct<'a> {
    pub(crate) input: Input,
    pub(crate) stdout: &'a mut dyn Write,
    pub(crate) stderr: &'a mut dyn Write,
    /// Wall-clock limit.
    pub(crate) timeout: Option<Duration>,
    /// Whether to ask a silent machine if it lives. Not in virtual time, where the answer would
    /// add to what is being measured.
    pub(crate) pings: bool,
    /// Told the connection, for terminal sizes.
    pub(crate) on_start: &'a mut dyn FnMut(Sender),
}

/// The sending direction of a connection, shared by the threads that use it.
#[derive(Clone)]
pub(crate) struct Sender(Arc<Mutex<TcpStream>>);

impl Sender {
    pub(crate) fn send(&self, kind: Kind, payload: &[u8]) -> io::Result<()> {
        write_frame(&mut *lock(&self.0), kind, payload)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect(machine: &KeeperReply, request: Request) -> Result<TcpStream, Error> {
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, machine.port);
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HUNG_AFTER))?;
    let opening = Opening { version: VERSION, token: machine.token.clone(), request };
    write_json(&mut stream, Kind::Request, &opening)?;
    Ok(stream)
}

fn hung_or_lost(error: io::Error, limit: Duration) -> Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Hung(limit),
        _ => Error::Lost(error),
    }
}

/// Checks that the machine's agent answers within `limit`.
pub(crate) fn hello(machine: &KeeperReply, limit: Duration) -> Result<(), Error> {
    let mut stream = connect(machine, Request::Hello)?;
    stream.set_read_timeout(Some(limit))?;
    let mut payload = Vec::new();
    match read_frame(&mut stream, &mut payload).map_err(|error| hung_or_lost(error, limit))? {
        Some(Kind::Pong) => Ok(()),
        Some(Kind::Failed) => Err(Error::Refused(text(&payload))),
        Some(_) => Err(Error::Lost(io::ErrorKind::InvalidData.into())),
        None => Err(Error::Lost(io::ErrorKind::UnexpectedEof.into())),
    }
}

fn text(payload: &[u8]) -> String {
    String::from_utf8_lossy(payload).into_owned()
}

/// Runs a command to its end.
pub(crate) fn run(machine: &KeeperReply, run: Run, conduct: Conduct<'_>) -> Result<Exit, Error> {
    let stream = connect(machine, Request::Run(run))?;
    let sender = Sender(Arc::new(Mutex::new(stream.try_clone()?)));
    let window = Arc::new(Window::default());
    let outcome = follow(&stream, &sender, &window, conduct);
    window.close();
    // Ends the thread that feeds input where it waits to send; also what kills a command whose
    // caller gave up.
    drop(stream.shutdown(Shutdown::Both));
    outcome
}

/// Receives frames until the command's end.
fn follow(
    mut stream: &TcpStream,
    sender: &Sender,
    window: &Arc<Window>,
    conduct: Conduct<'_>,
) -> Result<Exit, Error> {
    let Conduct { input, stdout, stderr, timeout, pings, on_start } = conduct;
    let mut watch = Watch::new(timeout, pings);
    let mut input = Some(input);
    let mut payload = Vec::new();
    loop {
        match watch.wait(stream)? {
            Wait::Readable => {}
            Wait::Ping => {
                sender.send(Kind::Ping, b"")?;
                continue;
            }
            Wait::TimedOut => {
                sender.send(Kind::Kill, b"")?;
                continue;
            }
        }
        let received = read_frame(&mut stream, &mut payload);
        let Some(kind) = received.map_err(|error| hung_or_lost(error, HUNG_AFTER))? else {
            return Err(Error::Lost(io::ErrorKind::UnexpectedEof.into()));
        };
        match kind {
            Kind::Started => {
                on_start(sender.clone());
                if let Some(input) = input.take() {
                    feed(input, sender.clone(), Arc::clone(window))?;
                }
            }
            Kind::Stdout => forward(stdout, &payload)?,
            Kind::Stderr => forward(stderr, &payload)?,
            Kind::StdinTaken => window.taken(&payload),
            Kind::Pong => {}
            Kind::Failed => return Err(Error::Refused(text(&payload))),
            Kind::Exit => {
                if let (true, Some(limit)) = (watch.expired, timeout) {
                    return Err(Error::TimedOut(limit));
                }
                return serde_json::from_slice(&payload).map_err(|error| Error::Lost(error.into()));
            }
            _ => return Err(Error::Lost(io::ErrorKind::InvalidData.into())),
        }
    }
}

fn forward(output: &mut dyn Write, bytes: &[u8]) -> Result<(), Error> {
    output.write_all(bytes).and_then(|()| output.flush()).map_err(Error::Output)
}

/// Decides, while nothing comes, when to ask and when to give up.
struct Watch {
    deadline: Option<Instant>,
    expired: bool,
    pings: bool,
    asked: Option<Instant>,
}

enum Wait {
    Readable,
    Ping,
    TimedOut,
}

impl Watch {
    fn new(timeout: Option<Duration>, pings: bool) -> Self {
        let deadline = timeout.and_then(|limit| Instant::now().checked_add(limit));
        Self { deadline, expired: false, pings, asked: None }
    }

    fn wait(&mut self, stream: &TcpStream) -> Result<Wait, Error> {
        let now = Instant::now();
        // A killed command or a question must be answered; the deadline no longer matters then.
        let limit = match (self.asked, self.pings) {
            (Some(asked), _) => Some(asked + HUNG_AFTER),
            (None, true) => Some(now + PING_AFTER),
            (None, false) => None,
        };
        let deadline = self.deadline.filter(|_| !self.expired);
        let next = match (limit, deadline) {
            (Some(limit), Some(deadline)) => Some(limit.min(deadline)),
            (limit, deadline) => limit.or(deadline),
        };
        if readable(stream, next)? {
            if !self.expired {
                self.asked = None;
            }
            return Ok(Wait::Readable);
        }
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            self.expired = true;
            self.asked = Some(now);
            return Ok(Wait::TimedOut);
        }
        if self.asked.is_some() {
            return Err(Error::Hung(HUNG_AFTER));
        }
        self.asked = Some(now);
        Ok(Wait::Ping)
    }
}

/// Waits until the stream can be read; `false` at the deadline.
fn readable(stream: &TcpStream, deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let timeout = match deadline {
            None => PollTimeout::NONE,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut waiting = [PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waiting, timeout) {
            Ok(0) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                return Ok(false);
            }
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Bytes of standard input under way.
#[derive(Default)]
struct Window {
    state: Mutex<WindowState>,
    changed: Condvar,
}

#[derive(Default)]
struct WindowState {
    under_way: usize,
    closed: bool,
}

impl Window {
    /// Waits for room and takes it; `false` once the command has ended.
    fn take(&self, count: usize) -> bool {
        let mut state = lock(&self.state);
        while !state.closed && state.under_way.saturating_add(count) > STDIN_WINDOW {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.under_way = state.under_way.saturating_add(count);
        !state.closed
    }

    fn taken(&self, payload: &[u8]) {
        let count = payload.try_into().map(u32::from_le_bytes).unwrap_or_default();
        let mut state = lock(&self.state);
        state.under_way =
            state.under_way.saturating_sub(usize::try_from(count).unwrap_or(usize::MAX));
        self.changed.notify_all();
    }

    fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }
}

/// Starts the thread that sends standard input. It may outlive the command, waiting for input
/// that nobody wants any more, and then ends at its next attempt to send.
fn feed(input: Input, sender: Sender, window: Arc<Window>) -> io::Result<()> {
    let mut reader: Box<dyn Read + Send> = match input {
        Input::Nothing => return sender.send(Kind::StdinEnd, b""),
        Input::Inherited => Box::new(io::stdin()),
        Input::From(reader) => reader,
    };
    thread::Builder::new().name("lab-stdin".into()).spawn(move || {
        let mut buffer = vec![0; 32 * 1024];
        loop {
            let count = match reader.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => break,
                Ok(count) => count,
            };
            let chunk = buffer.get(..count).unwrap_or_default();
            if !window.take(count) || sender.send(Kind::Stdin, chunk).is_err() {
                return;
            }
        }
        // The connection may be gone: then nobody needs to know.
        drop(sender.send(Kind::StdinEnd, b""));
    })?;
    Ok(())
}
