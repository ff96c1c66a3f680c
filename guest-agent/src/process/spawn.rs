//! From a request to a running process.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use coppice_agent_protocol::process::{PtySize, StartRequest};
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::unistd::{Uid, fchown};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, Notify};

use super::pump::{self, Outputs, Source};
use super::{Process, ProcessStream, Processes, Watch, window_size};
use crate::settings::is_variable;
use crate::sys::{self, ChildSetup};
use crate::users::{User, UserError, c_path};
use coppice_agent_protocol::process::Output;

/// `PATH` of every process that brings none of its own.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// `LANG` of every process that brings none of its own: UTF-8 and nothing else that differs from
/// the C locale. glibc and musl have it built in.
const DEFAULT_LANG: &str = "C.UTF-8";

/// Why a process did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpawnError {
    /// The request names no program.
    #[error("the request names no program: set process.cmd")]
    NoProgram,
    /// A name or value with a zero byte, or an environment name with `=`.
    #[error("the command, its arguments, environment or directory hold an impossible character")]
    Text,
    /// The working directory is missing.
    #[error("cwd '{0}' does not exist")]
    NoDirectory(PathBuf),
    /// A terminal size out of range.
    #[error("a terminal has at most 65535 columns and rows")]
    TerminalSize,
    /// The user's groups cannot be read.
    #[error(transparent)]
    User(#[from] UserError),
    /// Pipes or a terminal could not be made.
    #[error("preparing input and output: {0}")]
    Streams(io::Error),
    /// The program could not be executed.
    #[error("error starting process '{program}': {reason}")]
    Exec {
        /// The program.
        program: String,
        /// The operating system's words.
        reason: String,
    },
    /// The machine goes down.
    #[error("the machine is shutting down")]
    Closed,
}

/// The child's ends of its streams, and ours.
struct Streams {
    child: [OwnedFd; 3],
    stdin: Option<AsyncFd<OwnedFd>>,
    terminal: Option<Rc<AsyncFd<OwnedFd>>>,
    outputs: Outputs,
}

impl Processes {
    /// Starts a process and the stream of its events. Its environment is the user's, then `envs`,
    /// then the request's. `timeout` ends process and stream.
    pub(crate) fn start(
        self: &Rc<Self>,
        request: StartRequest,
        user: &User,
        envs: &BTreeMap<String, String>,
        timeout: Option<Duration>,
        watch: Watch,
    ) -> Result<ProcessStream, SpawnError> {
        if self.closed.get() {
            return Err(SpawnError::Closed);
        }
        let terminal_size = request.pty.map(|pty| pty.size.unwrap_or_default());
        let mut command = command(&request, user, envs)?;
        let cwd = working_directory(&request, user)?;
        let setup = ChildSetup {
            uid: user.uid,
            gid: user.gid,
            groups: user.groups()?,
            cwd: c_path(&cwd).map_err(|_| SpawnError::Text)?,
            terminal: terminal_size.is_some(),
            change_user: Uid::effective().is_root(),
        };
        let streams = match terminal_size {
            Some(size) => terminal(size, user)?,
            None => pipes(request.stdin.unwrap_or(true)).map_err(SpawnError::Streams)?,
        };
        let Streams { child: [stdin, stdout, stderr], stdin: input, terminal, outputs } = streams;
        command.stdin(stdin).stdout(stdout).stderr(stderr);
        sys::prepare(&mut command, setup);
        let child = command.spawn().map_err(|error| exec_error(&request.process.cmd, &error))?;
        // The command holds the child's ends; while they are open here, no output ever ends.
        drop(command);
        let process = Rc::new(Process {
            pid: child.id().cast_signed(),
            config: request.process,
            tag: request.tag,
            subscribers: RefCell::default(),
            exit: OnceCell::new(),
            exited: Notify::new(),
            ended: Cell::new(false),
            timed_out: Cell::new(false),
            stdin: Mutex::new(input),
            has_terminal: terminal.is_some(),
            terminal: RefCell::new(terminal),
        });
        self.insert(&process);
        let deadline = timeout.and_then(|timeout| tokio::time::Instant::now().checked_add(timeout));
        if let Some(deadline) = deadline {
            tokio::task::spawn_local(Rc::clone(&process).enforce(deadline));
        }
        let stream = ProcessStream::new(&process, watch, deadline);
        tokio::task::spawn_local(pump::run(process, outputs));
        Ok(stream)
    }
}

/// Where the process starts. As for a login, a home that does not exist is no reason to fail.
fn working_directory(request: &StartRequest, user: &User) -> Result<PathBuf, SpawnError> {
    let named = request.process.cwd.as_deref().unwrap_or_default();
    let cwd = user.resolve(named);
    if cwd.exists() {
        Ok(cwd)
    } else if named.is_empty() {
        Ok(PathBuf::from("/"))
    } else {
        Err(SpawnError::NoDirectory(cwd))
    }
}

fn command(
    request: &StartRequest,
    user: &User,
    envs: &BTreeMap<String, String>,
) -> Result<Command, SpawnError> {
    let config = &request.process;
    if config.cmd.is_empty() {
        return Err(SpawnError::NoProgram);
    }
    let texts = config.args.iter().chain([&config.cmd]).chain(config.cwd.iter());
    let bad_text = texts.into_iter().any(|text| text.contains('\0'));
    if bad_text || config.envs.iter().any(|(name, value)| !is_variable(name, value)) {
        return Err(SpawnError::Text);
    }
    let mut command = Command::new(&config.cmd);
    command
        .args(&config.args)
        .env_clear()
        .env("PATH", DEFAULT_PATH)
        .env("LANG", DEFAULT_LANG)
        .env("HOME", &user.home)
        .env("USER", &user.name)
        .env("LOGNAME", &user.name)
        .env("SHELL", &user.shell)
        .envs(envs)
        .envs(&config.envs);
    Ok(command)
}

fn exec_error(program: &str, error: &io::Error) -> SpawnError {
    let errno = nix::errno::Errno::from_raw(error.raw_os_error().unwrap_or(0));
    let reason = match errno {
        nix::errno::Errno::UnknownErrno => error.to_string(),
        errno => errno.desc().to_lowercase(),
    };
    SpawnError::Exec { program: program.to_owned(), reason }
}

fn pipes(with_stdin: bool) -> io::Result<Streams> {
    let (stdin, input) = if with_stdin {
        let (reader, writer) = io::pipe()?;
        (reader.into(), Some(nonblocking(writer.into())?))
    } else {
        (std::fs::File::open("/dev/null")?.into(), None)
    };
    let (stdout_reader, stdout) = io::pipe()?;
    let (stderr_reader, stderr) = io::pipe()?;
    let outputs = Outputs::new([
        Some(Source::new(Output::Stdout, Rc::new(nonblocking(stdout_reader.into())?))),
        Some(Source::new(Output::Stderr, Rc::new(nonblocking(stderr_reader.into())?))),
    ]);
    Ok(Streams {
        child: [stdin, stdout.into(), stderr.into()],
        stdin: input,
        terminal: None,
        outputs,
    })
}

fn terminal(size: PtySize, user: &User) -> Result<Streams, SpawnError> {
    let size = window_size(size).ok_or(SpawnError::TerminalSize)?;
    let open = || -> io::Result<Streams> {
        let pair = nix::pty::openpty(&size, None)?;
        fcntl(&pair.master, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        fcntl(&pair.slave, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        if Uid::effective().is_root() {
            // Programs open their terminal again by its name.
            fchown(&pair.slave, Some(user.uid), None)?;
        }
        let child = [pair.slave.try_clone()?, pair.slave.try_clone()?, pair.slave];
        let master = Rc::new(nonblocking(pair.master)?);
        let outputs = Outputs::new([Some(Source::new(Output::Pty, Rc::clone(&master))), None]);
        Ok(Streams { child, stdin: None, terminal: Some(master), outputs })
    };
    open().map_err(SpawnError::Streams)
}

fn nonblocking(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    let flags = OFlag::from_bits_truncate(fcntl(&fd, FcntlArg::F_GETFL)?);
    fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    sys::watch(fd)
}
