//! Messages of the service `process.Process`, in their proto3 JSON form.
//!
//! Calls are `POST /process.Process/<name>`; `Start` and `Connect` stream [`StreamResponse`]s back,
//! `StreamInput` streams [`StreamInputRequest`]s in, the others are unary. Replies without content
//! are `{}` ([`Empty`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::envelope;
use crate::json::{self, Blob};

/// Path prefix of the service.
pub const SERVICE: &str = "/process.Process/";

/// A message without content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

/// What to execute.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessConfig {
    /// The program: a path, or a name looked up in `PATH`.
    #[serde(deserialize_with = "json::nullable")]
    pub cmd: String,
    /// Its arguments, without the program's own name.
    #[serde(deserialize_with = "json::nullable")]
    pub args: Vec<String>,
    /// Environment on top of the default one.
    #[serde(deserialize_with = "json::nullable")]
    pub envs: BTreeMap<String, String>,
    /// Working directory; relative to the default one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PtySize {
    /// Columns.
    #[serde(deserialize_with = "json::uint32")]
    pub cols: u32,
    /// Rows.
    #[serde(deserialize_with = "json::uint32")]
    pub rows: u32,
}

/// A terminal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pty {
    /// Its size; absent means unknown (0 by 0).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<PtySize>,
}

/// `Start`: executes a process and streams what it does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    /// What to execute.
    #[serde(deserialize_with = "json::nullable")]
    pub process: ProcessConfig,
    /// Run it on a terminal of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
    /// A name to select it by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Whether its standard input is open; absent means true. Without it, it reads `/dev/null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdin: Option<bool>,
}

/// Names a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", try_from = "SelectorWire")]
pub enum ProcessSelector {
    /// By its process ID.
    Pid(u32),
    /// By the tag it was started with.
    Tag(String),
}

#[derive(Deserialize)]
struct SelectorWire {
    #[serde(default, deserialize_with = "optional_uint32")]
    pid: Option<u32>,
    tag: Option<String>,
}

fn optional_uint32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    json::uint32(deserializer).map(Some)
}

impl TryFrom<SelectorWire> for ProcessSelector {
    type Error = &'static str;

    fn try_from(wire: SelectorWire) -> Result<Self, Self::Error> {
        match (wire.pid, wire.tag) {
            (Some(pid), None) => Ok(Self::Pid(pid)),
            // `"pid":null` is "not set", which arrives as 0.
            (None | Some(0), Some(tag)) => Ok(Self::Tag(tag)),
            (Some(_), Some(_)) => Err("a process is selected by pid or by tag, not by both"),
            (None, None) => Err("a process is selected by pid or by tag; neither is given"),
        }
    }
}

/// Bytes for a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", try_from = "InputWire")]
pub enum ProcessInput {
    /// For its standard input.
    Stdin(Blob),
    /// For its terminal.
    Pty(Blob),
}

#[derive(Deserialize)]
struct InputWire {
    stdin: Option<Blob>,
    pty: Option<Blob>,
}

impl TryFrom<InputWire> for ProcessInput {
    type Error = &'static str;

    fn try_from(wire: InputWire) -> Result<Self, Self::Error> {
        match (wire.stdin, wire.pty) {
            (Some(data), None) => Ok(Self::Stdin(data)),
            (None, Some(data)) => Ok(Self::Pty(data)),
            (Some(_), Some(_)) => Err("input is for stdin or for pty, not for both"),
            (None, None) => Err("input is for stdin or for pty; neither is given"),
        }
    }
}

/// `Connect` and `CloseStdin`: only name a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelectRequest {
    /// Which process.
    pub process: ProcessSelector,
}

/// `Update`: resizes a process' terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateRequest {
    /// Which process.
    pub process: ProcessSelector,
    /// The terminal's new size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
}

/// `SendInput`: answered once the process' pipe or terminal took all bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendInputRequest {
    /// Which process.
    pub process: ProcessSelector,
    /// The bytes.
    pub input: ProcessInput,
}

/// One message of `StreamInput`; the first is `Start`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", from = "StreamInputWire")]
pub enum StreamInputRequest {
    /// Names the process the stream feeds.
    Start(SelectRequest),
    /// The next bytes.
    Data(InputData),
    /// Nothing; keeps intermediaries from closing the stream.
    Keepalive(Empty),
}

/// Bytes in a `StreamInput` call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputData {
    /// The bytes.
    pub input: ProcessInput,
}

#[derive(Deserialize)]
struct StreamInputWire {
    start: Option<SelectRequest>,
    data: Option<InputData>,
}

impl From<StreamInputWire> for StreamInputRequest {
    fn from(wire: StreamInputWire) -> Self {
        match (wire.start, wire.data) {
            (Some(start), _) => Self::Start(start),
            (None, Some(data)) => Self::Data(data),
            (None, None) => Self::Keepalive(Empty {}),
        }
    }
}

/// Signals a caller may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Signal {
    /// `SIGTERM`, 15.
    #[serde(rename = "SIGNAL_SIGTERM")]
    Term,
    /// `SIGKILL`, 9.
    #[serde(rename = "SIGNAL_SIGKILL")]
    Kill,
}

impl<'de> Deserialize<'de> for Signal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Wire {
            Number(i64),
            Name(String),
        }
        match Wire::deserialize(deserializer)? {
            Wire::Number(15) => Ok(Self::Term),
            Wire::Number(9) => Ok(Self::Kill),
            Wire::Name(name) if name == "SIGNAL_SIGTERM" => Ok(Self::Term),
            Wire::Name(name) if name == "SIGNAL_SIGKILL" => Ok(Self::Kill),
            _ => Err(serde::de::Error::custom("signal is SIGNAL_SIGTERM or SIGNAL_SIGKILL")),
        }
    }
}

/// `SendSignal`: the signal reaches the process and those it started in its process group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendSignalRequest {
    /// Which process.
    pub process: ProcessSelector,
    /// The signal.
    pub signal: Signal,
}

/// A running process in a [`ListResponse`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessInfo {
    /// What it was started with.
    #[serde(deserialize_with = "json::nullable")]
    pub config: ProcessConfig,
    /// Its process ID.
    #[serde(deserialize_with = "json::uint32")]
    pub pid: u32,
    /// The tag it was started with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Reply to `List`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListResponse {
    /// Processes that run, by process ID.
    #[serde(deserialize_with = "json::nullable")]
    pub processes: Vec<ProcessInfo>,
}

/// Reply of `Start` and `Connect`, once per event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamResponse {
    /// What happened.
    pub event: ProcessEvent,
}

/// Something a process did.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "EventWire")]
pub enum ProcessEvent {
    /// It runs; the first event of every stream.
    Start(StartEvent),
    /// It wrote.
    Data(DataEvent),
    /// It ended; the last event of every stream.
    End(EndEvent),
    /// Nothing happened for a while.
    Keepalive,
    /// An event of a later version; to be ignored.
    Unknown,
}

/// A process runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StartEvent {
    /// Its process ID.
    #[serde(deserialize_with = "json::uint32")]
    pub pid: u32,
}

/// A process wrote. At most one field is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataEvent {
    /// To its standard output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout: Option<Blob>,
    /// To its standard error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr: Option<Blob>,
    /// To its terminal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<Blob>,
}

/// A process ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndEvent {
    /// Its exit code; -1 when a signal ended it.
    #[serde(alias = "exit_code", deserialize_with = "json::sint32")]
    pub exit_code: i32,
    /// Whether it exited by itself rather than by a signal.
    #[serde(deserialize_with = "json::nullable")]
    pub exited: bool,
    /// `exit status 3`, `signal: killed`, with ` (core dumped)` where it applies.
    #[serde(deserialize_with = "json::nullable")]
    pub status: String,
    /// `status` again unless it exited with 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Deserialize)]
struct EventWire {
    start: Option<StartEvent>,
    data: Option<DataEvent>,
    end: Option<EndEvent>,
    keepalive: Option<Empty>,
}

impl From<EventWire> for ProcessEvent {
    fn from(wire: EventWire) -> Self {
        match wire {
            EventWire { start: Some(start), .. } => Self::Start(start),
            EventWire { data: Some(data), .. } => Self::Data(data),
            EventWire { end: Some(end), .. } => Self::End(end),
            EventWire { keepalive: Some(_), .. } => Self::Keepalive,
            _ => Self::Unknown,
        }
    }
}

impl Serialize for ProcessEvent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap as _;
        let mut map = serializer.serialize_map(None)?;
        match self {
            Self::Start(start) => map.serialize_entry("start", start)?,
            Self::Data(data) => map.serialize_entry("data", data)?,
            Self::End(end) => map.serialize_entry("end", end)?,
            Self::Keepalive => map.serialize_entry("keepalive", &Empty {})?,
            Self::Unknown => {}
        }
        map.end()
    }
}

/// Where output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The terminal.
    Pty,
}

/// A whole frame with a data event, the same bytes as a serialized [`StreamResponse`] would give,
/// without the intermediate text.
#[must_use]
pub fn encode_data(output: Output, data: &[u8]) -> Vec<u8> {
    let before = match output {
        Output::Stdout => r#"{"event":{"data":{"stdout":""#,
        Output::Stderr => r#"{"event":{"data":{"stderr":""#,
        Output::Pty => r#"{"event":{"data":{"pty":""#,
    };
    envelope::encode_bytes(before, data, r#""}}}"#)
}

#[cfg(test)]
mod tests;
