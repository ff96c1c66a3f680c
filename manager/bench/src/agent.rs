//! The client that has a guest's agent run a command: the same code, byte for byte, for every
//! contender, whatever way leads to the agent. It speaks envd's process API over HTTP/1.1.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::time::{Duration, Instant};

use coppice_agent_protocol::STREAM_CONTENT_TYPE;
use coppice_agent_protocol::envelope::{FrameDecoder, encode_message};
use coppice_agent_protocol::process::{
    ProcessConfig, ProcessEvent, SERVICE, StartRequest, StreamResponse,
};

use crate::clock::Clock;
use crate::contender::Vm;
use crate::error::{Doing as _, Error};

/// Longest message of a stream.
const MAX_MESSAGE: usize = 1 << 20;

/// Longest line of an HTTP head; longer ones are not of any agent.
const MAX_LINE: u64 = 16 << 10;

/// The user `root` with no password, as envd is told of users.
const AS_ROOT: &str = "authorization: Basic cm9vdDo=\r\n";

/// Most of an output that is kept to show what a wrong answer was.
const SHOWN: usize = 200;

/// A command as the agent is asked for it, made before any clock starts.
#[derive(Debug, Clone)]
pub struct Command {
    body: Vec<u8>,
    root: bool,
}

impl Command {
    /// A program with its arguments.
    ///
    /// # Errors
    /// When it cannot be encoded.
    pub fn new(argv: &[&str]) -> Result<Self, Error> {
        let (cmd, args) = argv.split_first().unwrap_or((&"", &[]));
        let start = StartRequest {
            process: ProcessConfig {
                cmd: (*cmd).to_owned(),
                args: args.iter().map(|&argument| argument.to_owned()).collect(),
                ..ProcessConfig::default()
            },
            pty: None,
            tag: None,
            stdin: Some(false),
        };
        let body = encode_message(&start)
            .map_err(|error| Error::Agent(format!("cannot be asked: {error}")))?;
        Ok(Self { body, root: false })
    }

    /// The same by the guest's root, and not by its usual user.
    #[must_use]
    pub fn as_root(self) -> Self {
        Self { root: true, ..self }
    }

    /// A shell's command line.
    ///
    /// # Errors
    /// When it cannot be encoded.
    pub fn shell(script: &str) -> Result<Self, Error> {
        Self::new(&["/bin/sh", "-c", script])
    }
}

/// A command that answers with a token which nobody can know before: only a machine that really
/// runs, and that was asked in this very round, gives it.
#[derive(Debug)]
pub struct Question {
    token: String,
    command: Command,
}

impl Question {
    /// Draws a token and prepares the command.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn new() -> Result<Self, Error> {
        let token = token()?;
        let command = Command::new(&["/bin/echo", &token])?;
        Ok(Self { token, command })
    }

    /// Asks a machine; the clock marks `first_output` when the first byte of the answer is there.
    /// Gives the time of it.
    ///
    /// # Errors
    /// When there is no answer, or not the token.
    pub fn ask(&self, vm: &dyn Vm, clock: &mut Clock) -> Result<f64, Error> {
        let mut first = None;
        let mut said = Vec::new();
        vm.run(&self.command, &mut |bytes| {
            first.get_or_insert_with(|| clock.mark("first_output"));
            said.extend_from_slice(bytes.get(..SHOWN).unwrap_or(bytes));
        })?;
        let found = String::from_utf8_lossy(&said);
        match first {
            Some(ms) if found == format!("{}\n", self.token) => Ok(ms),
            Some(_) => Err(Error::Token { found: found.trim_end().to_owned() }),
            None => Err(Error::Agent("says that the command ended, which printed nothing".into())),
        }
    }
}

/// A fresh token: 128 random bits in hexadecimal.
///
/// # Errors
/// When the system has no random numbers.
pub fn token() -> Result<String, Error> {
    let mut bytes = [0u8; 16];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())
            .doing("drawing a random token")?;
    }
    let mut token = String::with_capacity(32);
    for byte in bytes {
        let _ = write!(token, "{byte:02x}");
    }
    Ok(token)
}

/// What the head of a request says besides what every request says.
#[derive(Debug, Clone, Default)]
pub struct Head {
    /// The host asked.
    pub host: String,
    /// Whole lines, each with its end.
    pub more: String,
}

/// Runs a command over a connection to the agent, whose reads have a limit; `on_output` gets the command's standard output
/// as it comes.
///
/// # Errors
/// When the agent does not answer as it should, or the command fails.
pub fn run(
    stream: impl Read + Write,
    head: &Head,
    command: &Command,
    limit: Duration,
    on_output: &mut dyn FnMut(&[u8]),
) -> Result<(), Error> {
    let started = Instant::now();
    let mut stream = BufReader::new(stream);
    let host = if head.host.is_empty() { "localhost" } else { &head.host };
    let mut request = format!(
        "POST {SERVICE}Start HTTP/1.1\r\nhost: {host}\r\ncontent-type: {STREAM_CONTENT_TYPE}\r\n\
         connect-protocol-version: 1\r\ncontent-length: {}\r\n{}{}\r\n",
        command.body.len(),
        head.more,
        if command.root { AS_ROOT } else { "" },
    )
    .into_bytes();
    request.extend_from_slice(&command.body);
    stream.get_mut().write_all(&request).doing("asking the guest's agent")?;
    let status = line(&mut stream)?;
    if !status.starts_with("HTTP/1.1 200") {
        return Err(Error::Agent(format!("answers {:?}{}", status.trim_end(), rest(&mut stream))));
    }
    let mut chunked = false;
    loop {
        let header = line(&mut stream)?.to_ascii_lowercase();
        match header.trim_end() {
            "" => break,
            header => chunked |= header.starts_with("transfer-encoding:"),
        }
    }
    if !chunked {
        return Err(Error::Agent("answers without a stream".into()));
    }
    let mut events = Events { decoder: FrameDecoder::new(MAX_MESSAGE), ended: false };
    while let Some(chunk) = chunk(&mut stream)? {
        events.take(&chunk, on_output)?;
        // Whoever sends keepalives for ever does not answer.
        if started.elapsed() > limit {
            return Err(Error::Late(format!("the command ran for over {} s", limit.as_secs())));
        }
    }
    if events.ended { Ok(()) } else { Err(Error::Agent("breaks off before the end".into())) }
}

/// The command's events out of the pieces of a stream.
struct Events {
    decoder: FrameDecoder,
    ended: bool,
}

impl Events {
    fn take(&mut self, piece: &[u8], on_output: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        self.decoder.push(piece);
        let nonsense = |error: &dyn std::fmt::Display| Error::Agent(format!("sends {error}"));
        while let Some(frame) = self.decoder.next_frame().map_err(|error| nonsense(&error))? {
            if frame.is_end() {
                continue;
            }
            let response: StreamResponse =
                serde_json::from_slice(&frame.payload).map_err(|error| nonsense(&error))?;
            match response.event {
                ProcessEvent::Data(data) => {
                    if let Some(bytes) = data.stdout {
                        on_output(&bytes.0);
                    }
                }
                ProcessEvent::End(end) => {
                    if !end.exited || end.exit_code != 0 {
                        return Err(Error::Agent(format!("had a failure: {}", end.status)));
                    }
                    self.ended = true;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// One line of a head.
fn line(stream: &mut impl BufRead) -> Result<String, Error> {
    let mut line = String::new();
    stream.by_ref().take(MAX_LINE).read_line(&mut line).doing("waiting for the guest's agent")?;
    if line.ends_with('\n') { Ok(line) } else { Err(Error::Agent("hangs up".into())) }
}

/// Some of what comes after the first line, for an error's text.
fn rest(stream: &mut impl BufRead) -> String {
    let mut rest = Vec::new();
    // What cannot be read is not shown.
    let _ = stream.take(1024).read_to_end(&mut rest);
    let text = String::from_utf8_lossy(&rest).into_owned();
    text.split_once("\r\n\r\n").map_or_else(String::new, |(_, body)| format!(": {body}"))
}

/// Reads one chunk of a chunked body; nothing at its end.
fn chunk(stream: &mut impl BufRead) -> Result<Option<Vec<u8>>, Error> {
    let line = line(stream)?;
    let length = usize::from_str_radix(line.trim_end(), 16)
        .ok()
        .filter(|length| *length <= MAX_MESSAGE)
        .ok_or_else(|| Error::Agent(format!("sends a chunk of {:?} bytes", line.trim_end())))?;
    let mut chunk = vec![0; length + 2];
    stream.read_exact(&mut chunk).doing("reading what the command prints")?;
    chunk.truncate(length);
    Ok((length > 0).then_some(chunk))
}
