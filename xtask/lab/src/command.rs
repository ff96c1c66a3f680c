//! The library's face: open a lab, run commands in it.

use std::collections::BTreeMap;
use std::env;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::lane::{Lane, LaneChoice};
use crate::machine::{self, Description, Lease};
use crate::packages::HostKernel;
use crate::remote::{Conduct, Input};
use crate::wire::{Exit, Run, Status, TerminalSize};
use crate::{direct, lane, paths, remote, terminal};

/// How long a warm machine may take to say hello; ordinarily it takes milliseconds.
const HELLO_LIMIT: Duration = Duration::from_secs(60);

/// Variables of the caller that commands see, by prefix.
const PASSED_PREFIXES: [&str; 3] = ["COPPICE_", "RUST_", "PROPTEST_"];

/// Why a command could not be run, or has no exit status.
#[derive(Debug, Error)]
pub enum Error {
    /// The host could not be probed.
    #[error("cannot tell what this host's /dev/kvm can do")]
    Lane(#[from] lane::Error),
    /// The nested machine could not be started.
    #[error("cannot open the nested lab")]
    Machine(#[from] machine::Error),
    /// The command could not be run in the nested machine, or did not end by itself.
    #[error("in the nested lab (logs in {directory})")]
    Remote {
        /// The machine's directory, with its logs.
        directory: PathBuf,
        /// What went wrong.
        source: remote::Error,
    },
    /// The command could not be run on this host, or did not end by itself.
    #[error("on this host")]
    Direct(#[from] direct::Error),
    /// The options contradict each other.
    #[error("{0}")]
    Options(&'static str),
    /// The caller's terminal cannot be used.
    #[error("cannot use standard input as a terminal")]
    Terminal(#[source] io::Error),
    /// The working directory cannot be told.
    #[error("cannot tell the working directory")]
    WorkingDirectory(#[source] io::Error),
}

/// What the lab's machine should be like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Virtual CPUs of the nested machine that commands run on, 1 to 8; virtual time has one.
    pub cpus: u32,
    /// Memory of the nested machine in MiB, 512 to 65,536.
    pub memory_mib: u32,
    /// Use the nested machine whose clock counts instructions.
    pub virtual_time: bool,
    /// The kernel of the nested machine.
    pub kernel: HostKernel,
    /// Time without a user after which the nested machine ends.
    pub idle_timeout: Duration,
    /// Further host directories the nested machine sees, read-only, at the same path.
    pub shares: Vec<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cpus: 2,
            memory_mib: 6144,
            virtual_time: false,
            kernel: HostKernel::Stable,
            idle_timeout: Duration::from_secs(30 * 60),
            shares: Vec::new(),
        }
    }
}

/// A place to run commands. Dropping it leaves the nested machine warm for the next one.
#[derive(Debug)]
pub struct Lab {
    lane: Lane,
    reason: String,
    nested: Option<(Description, Lease)>,
}

impl Lab {
    /// Opens the lane asked for, starting the nested machine where it is needed and not warm.
    ///
    /// # Errors
    /// [`Error::Options`] for options that contradict each other; otherwise the reason why the
    /// host cannot be probed or the nested machine cannot be started.
    pub fn open(choice: LaneChoice, options: &Options) -> Result<Self, Error> {
        let (lane, reason) = choose(choice, options)?;
        if !lane.is_nested() {
            return Ok(Self { lane, reason, nested: None });
        }
        let description = Description {
            cpus: if options.virtual_time { 1 } else { options.cpus },
            memory_mib: options.memory_mib,
            virtual_time: options.virtual_time,
            kernel: options.kernel,
            idle_timeout_s: options.idle_timeout.as_secs(),
            shares: options.shares.clone(),
        };
        let lease = healthy_lease(&description)?;
        let state = if lease.fresh {
            format!("booted in {:.1} s", lease.reply.boot_s)
        } else {
            format!("warm since {} s", lease.reply.age_s)
        };
        let reason = format!("{reason}; machine {state}");
        Ok(Self { lane, reason, nested: Some((description, lease)) })
    }

    /// The lane commands take.
    #[must_use]
    pub fn lane(&self) -> Lane {
        self.lane
    }

    /// Why this lane, in words for people.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// A directory at the same path for the caller and for commands, writable for both.
    ///
    /// # Errors
    /// [`Error::Machine`] where it cannot be made.
    pub fn scratch(&self) -> Result<PathBuf, Error> {
        let path = match &self.nested {
            Some((description, _)) => description.scratch()?,
            None => paths::lab_dir().join("scratch"),
        };
        std::fs::create_dir_all(&path)
            .map_err(|source| machine::Error::File { path: path.clone(), source })?;
        Ok(path)
    }

    /// A command with this program and these arguments.
    pub fn command<I, S>(&self, argv: I) -> Command<'_>
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        Command {
            lab: self,
            argv: argv.into_iter().map(Into::into).collect(),
            env: passed_environment(self.lane),
            cwd: None,
            input: Input::Nothing,
            terminal: false,
            timeout: None,
        }
    }
}

fn choose(choice: LaneChoice, options: &Options) -> Result<(Lane, String), Error> {
    let nested = if options.virtual_time { Lane::VirtualTime } else { Lane::Nested };
    match choice {
        LaneChoice::Direct if options.virtual_time => {
            Err(Error::Options("virtual time needs the nested lab: leave out --direct"))
        }
        LaneChoice::Nested => Ok((nested, "asked for".into())),
        LaneChoice::Best if options.virtual_time => Ok((nested, "virtual time asked for".into())),
        LaneChoice::Best | LaneChoice::Direct => {
            let (hardware, reason) = lane::host_has_hardware_kvm()?;
            let otherwise = if choice == LaneChoice::Direct { Lane::Host } else { nested };
            Ok((if hardware { Lane::Hardware } else { otherwise }, reason))
        }
    }
}

/// A lease on a machine that answers. One that does not is ended, loudly, and started again once.
fn healthy_lease(description: &Description) -> Result<Lease, Error> {
    let lease = description.lease()?;
    let problem = match remote::hello(&lease.reply, HELLO_LIMIT) {
        Ok(()) => return Ok(lease),
        Err(problem) => problem,
    };
    if lease.fresh {
        return Err(Error::Remote { directory: lease.directory, source: problem });
    }
    eprintln!("lab: WARNING: {problem}; replacing the machine in {}", lease.directory.display());
    machine::stop(&lease.directory)?;
    drop(lease);
    let lease = description.lease()?;
    match remote::hello(&lease.reply, HELLO_LIMIT) {
        Ok(()) => Ok(lease),
        Err(source) => Err(Error::Remote { directory: lease.directory, source }),
    }
}

/// What every command sees of the caller's environment, and what the lab adds.
fn passed_environment(lane: Lane) -> BTreeMap<String, String> {
    let mut passed: BTreeMap<String, String> = env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| PASSED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .collect();
    passed.insert("COPPICE_LAB_LANE".into(), lane.name().into());
    let home = paths::target_dir().join("coppice/home");
    passed.entry("COPPICE_HOME".into()).or_insert_with(|| home.display().to_string());
    let inherited = if lane.is_nested() {
        "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin".into()
    } else {
        env::var("PATH").unwrap_or_default()
    };
    passed.insert("PATH".into(), format!("{}:{inherited}", paths::release_dir().display()));
    passed
}

/// A command to run in a [`Lab`].
pub struct Command<'lab> {
    lab: &'lab Lab,
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    cwd: Option<PathBuf>,
    input: Input,
    terminal: bool,
    timeout: Option<Duration>,
}

/// What a command printed, and how it ended.
#[derive(Clone, Debug)]
pub struct Output {
    /// How it ended.
    pub status: Status,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// Processes it left running in the nested machine, which were then killed.
    pub leftovers: u32,
}

impl Command<'_> {
    /// Sets a variable of the command's environment.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Sets the working directory. The default is the caller's where that lies in the checkout,
    /// else the checkout.
    #[must_use]
    pub fn cwd(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cwd = Some(directory.into());
        self
    }

    /// Gives the command these bytes as standard input. The default is an empty one.
    #[must_use]
    pub fn stdin_bytes(self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin(io::Cursor::new(bytes.into()))
    }

    /// Feeds standard input from `reader`, which is read on a thread of its own.
    #[must_use]
    pub fn stdin(mut self, reader: impl Read + Send + 'static) -> Self {
        self.input = Input::From(Box::new(reader));
        self
    }

    /// Passes the caller's standard input on.
    #[must_use]
    pub fn stdin_inherited(mut self) -> Self {
        self.input = Input::Inherited;
        self
    }

    /// Runs the command on a terminal, with the caller's own as its other end. Only for
    /// [`Self::run`], and only where the caller's standard input is a terminal.
    #[must_use]
    pub fn on_terminal(mut self) -> Self {
        self.terminal = true;
        self
    }

    /// Kills the command, and fails, after this much wall-clock time.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    /// Runs the command with its output on the caller's standard output and error.
    ///
    /// # Errors
    /// Why it could not be run, or did not end by itself. A failing exit status is no error.
    pub fn run(self) -> Result<Exit, Error> {
        let Some((_, lease)) = &self.lab.nested else {
            return self.run_direct(direct::Sink::Inherited);
        };
        let (mut stdout, mut stderr) = (io::stdout(), io::stderr());
        if !self.terminal {
            return self.run_nested(lease, &mut stdout, &mut stderr, None, &mut |_| {});
        }
        let _raw = terminal::Raw::enter().map_err(Error::Terminal)?;
        let size = terminal::size().map_err(Error::Terminal)?;
        self.run_nested(lease, &mut stdout, &mut stderr, Some(size), &mut |sender| {
            terminal::follow_size(sender);
        })
    }

    /// Runs the command with its output written to `stdout` and `stderr` as it comes.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_to(self, stdout: &mut dyn Write, stderr: &mut dyn Write) -> Result<Exit, Error> {
        match &self.lab.nested {
            None => self.run_direct(direct::Sink::To(stdout, stderr)),
            Some((_, lease)) => self.run_nested(lease, stdout, stderr, None, &mut |_| {}),
        }
    }

    /// Runs the command and collects its output.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn output(self) -> Result<Output, Error> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let Exit { status, leftovers } = self.run_to(&mut stdout, &mut stderr)?;
        Ok(Output { status, stdout, stderr, leftovers })
    }

    fn run_direct(self, sink: direct::Sink<'_>) -> Result<Exit, Error> {
        let cwd = self.cwd.map_or_else(default_directory, Ok)?;
        let request = direct::Request { argv: self.argv, env: self.env, cwd };
        Ok(direct::run(&request, self.input, sink, self.timeout)?)
    }

    fn run_nested(
        self,
        lease: &Lease,
        stdout: &mut dyn Write,
        stderr: &mut dyn Write,
        terminal: Option<TerminalSize>,
        on_start: &mut dyn FnMut(remote::Sender),
    ) -> Result<Exit, Error> {
        let cwd = self.cwd.map_or_else(default_directory, Ok)?;
        let cwd = cwd.display().to_string();
        let run = Run { argv: self.argv, env: self.env, cwd, terminal };
        let pings = self.lab.lane == Lane::Nested;
        let conduct =
            Conduct { input: self.input, stdout, stderr, timeout: self.timeout, pings, on_start };
        remote::run(&lease.reply, run, conduct).map_err(|source| {
            if matches!(source, remote::Error::Hung(_))
                && let Err(error) = machine::stop(&lease.directory)
            {
                eprintln!("lab: WARNING: cannot end the hung machine: {error}");
            }
            if matches!(source, remote::Error::Lost(_))
                && let Some(words) = lease.last_words()
            {
                eprintln!("lab: WARNING: the nested machine ended; last in its logs:\n{words}");
            }
            Error::Remote { directory: lease.directory.clone(), source }
        })
    }
}

fn default_directory() -> Result<PathBuf, Error> {
    let current = env::current_dir().map_err(Error::WorkingDirectory)?;
    let checkout = paths::checkout();
    Ok(if current.starts_with(&checkout) { current } else { checkout })
}
