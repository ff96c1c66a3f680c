//! What the host and the agent in the nested machine say to each other.
//!
//! One TCP connection carries one request. The client sends a [`Request`] frame; a command then
//! streams its output back until an [`Exit`] frame ends the connection. A client that goes away
//! ends its command: the agent takes the closed connection for a kill.
//!
//! A frame is one kind byte, a little-endian `u32` length and that many bytes.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// Version of this protocol. A machine that speaks another one is replaced.
pub const VERSION: u32 = 2;

/// TCP port in the nested machine that its agent listens on.
pub const AGENT_PORT: u16 = 7700;

/// Line the agent prints on the machine's console once it accepts connections.
pub const READY_LINE: &str = "coppice-lab: ready";

/// Longest payload of one frame, in bytes.
pub const MAX_FRAME: usize = 64 * 1024;

/// Standard input that may be under way to a command without an acknowledgement, in bytes.
pub const STDIN_WINDOW: usize = 256 * 1024;

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Client to agent, first frame: a [`Request`] as JSON.
    Request = 1,
    /// Client to agent: bytes for the command's standard input.
    Stdin = 2,
    /// Client to agent: standard input has ended.
    StdinEnd = 3,
    /// Client to agent: send the signal (one byte, its number) to the command's process group.
    Signal = 4,
    /// Client to agent: kill the command and everything it started.
    Kill = 5,
    /// Client to agent: the terminal's size changed; a [`TerminalSize`] as JSON.
    Resize = 6,
    /// Client to agent: answer with [`Kind::Pong`] at once.
    Ping = 7,
    /// Agent to client: the command runs.
    Started = 16,
    /// Agent to client: bytes of standard output (of the terminal, where there is one).
    Stdout = 17,
    /// Agent to client: bytes of standard error.
    Stderr = 18,
    /// Agent to client: this many bytes (a little-endian `u32`) of standard input were taken.
    StdinTaken = 19,
    /// Agent to client, last frame: an [`Exit`] as JSON.
    Exit = 20,
    /// Agent to client, last frame: the request failed; the reason as text.
    Failed = 21,
    /// Agent to client: the answer to [`Kind::Ping`] or [`Request::Hello`].
    Pong = 22,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        const ALL: [Kind; 14] = [
            Kind::Request,
            Kind::Stdin,
            Kind::StdinEnd,
            Kind::Signal,
            Kind::Kill,
            Kind::Resize,
            Kind::Ping,
            Kind::Started,
            Kind::Stdout,
            Kind::Stderr,
            Kind::StdinTaken,
            Kind::Exit,
            Kind::Failed,
            Kind::Pong,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// The first frame of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// The client's [`VERSION`].
    pub version: u32,
    /// The machine's secret, which only its owner can read.
    pub token: String,
    /// What is asked for.
    pub request: Request,
}

/// What a client asks of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Answer with [`Kind::Pong`]: is anybody there?
    Hello,
    /// Run a command.
    Run(Run),
}

/// A command to run in the nested machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Program and arguments; the program is looked up in the command's `PATH`.
    pub argv: Vec<String>,
    /// Variables added to the machine's own small environment.
    pub env: BTreeMap<String, String>,
    /// Working directory; `/` where it does not exist in the machine.
    pub cwd: String,
    /// Run on a terminal of this size instead of pipes.
    pub terminal: Option<TerminalSize>,
}

/// Size of a terminal in character cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Rows.
    pub rows: u16,
    /// Columns.
    pub columns: u16,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Its status.
    pub status: Status,
    /// Processes it left running, which were then killed.
    pub leftovers: u32,
}

/// Exit status of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It exited with this code, 0 to 255.
    Exited(i32),
    /// This signal ended it.
    Signalled(i32),
}

impl Status {
    /// Whether the command exited with code 0.
    #[must_use]
    pub fn success(self) -> bool {
        self == Self::Exited(0)
    }

    /// The status as a shell reports it: the exit code, or 128 plus the signal's number.
    #[must_use]
    pub fn shell_code(self) -> u8 {
        let code = match self {
            Self::Exited(code) => code,
            Self::Signalled(signal) => 128_i32.saturating_add(signal),
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Signalled(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// Writes one frame.
///
/// # Errors
/// `InvalidInput` for a payload above [`MAX_FRAME`]; otherwise the writer's own error.
pub fn write_frame(writer: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len())
        .ok()
        .filter(|_| payload.len() <= MAX_FRAME)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "frame too long"))?;
    // One write per frame: two would cost a second packet on every chunk of output.
    let mut frame = Vec::with_capacity(5 + payload.len());
    frame.push(kind as u8);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(payload);
    writer.write_all(&frame)
}

/// Writes one frame whose payload is `value` as JSON.
///
/// # Errors
/// As [`write_frame`].
pub fn write_json(writer: &mut impl Write, kind: Kind, value: &impl Serialize) -> io::Result<()> {
    write_frame(writer, kind, &serde_json::to_vec(value)?)
}

/// Reads one frame into `payload`, or returns `None` where the stream ends between frames.
///
/// # Errors
/// `InvalidData` for an unknown kind or a payload above [`MAX_FRAME`]; `UnexpectedEof` where the
/// stream ends within a frame; otherwise the reader's own error.
pub fn read_frame(reader: &mut impl Read, payload: &mut Vec<u8>) -> io::Result<Option<Kind>> {
    let mut kind = [0_u8; 1];
    loop {
        match reader.read(&mut kind) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let mut length = [0_u8; 4];
    reader.read_exact(&mut length)?;
    let kind = Kind::from_byte(kind[0])
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "unknown frame kind"))?;
    let length = usize::try_from(u32::from_le_bytes(length))
        .ok()
        .filter(|length| *length <= MAX_FRAME)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "frame too long"))?;
    payload.resize(length, 0);
    reader.read_exact(payload)?;
    Ok(Some(kind))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_come_back_as_written(payload in prop::collection::vec(any::<u8>(), 0..2048)) {
            let mut bytes = Vec::new();
            write_frame(&mut bytes, Kind::Stdout, &payload).unwrap();
            let mut read = Vec::new();
            let mut rest = bytes.as_slice();
            prop_assert_eq!(read_frame(&mut rest, &mut read).unwrap(), Some(Kind::Stdout));
            prop_assert_eq!(read, payload);
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
            let mut payload = Vec::new();
            let mut rest = bytes.as_slice();
            while let Ok(Some(_)) = read_frame(&mut rest, &mut payload) {
                prop_assert!(payload.len() <= MAX_FRAME);
            }
        }
    }

    #[test]
    fn a_frame_over_the_limit_is_refused_on_both_sides() {
        let mut bytes = Vec::new();
        assert!(write_frame(&mut bytes, Kind::Stdin, &vec![0; MAX_FRAME + 1]).is_err());
        bytes.push(Kind::Stdin as u8);
        bytes.extend_from_slice(&u32::MAX.to_le_bytes());
        let error = read_frame(&mut bytes.as_slice(), &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_cut_frame_is_an_error_and_a_clean_end_is_not() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, Kind::Stdin, b"abc").unwrap();
        let mut payload = Vec::new();
        assert!(read_frame(&mut &bytes[..6], &mut payload).is_err());
        assert_eq!(read_frame(&mut &bytes[..0], &mut payload).unwrap(), None);
    }

    #[test]
    fn statuses_map_to_shell_codes() {
        assert_eq!(Status::Exited(3).shell_code(), 3);
        assert_eq!(Status::Signalled(9).shell_code(), 137);
    }
}
