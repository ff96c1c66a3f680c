//! `process.Process`: starting processes, following them, feeding them.

use std::time::Duration;

use bytes::Bytes;
use coppice_agent_protocol::envelope::{self, EndStream, FrameDecoder};
use coppice_agent_protocol::json::Blob;
use coppice_agent_protocol::process::{
    EndEvent, ListResponse, ProcessConfig, ProcessEvent, ProcessInfo, ProcessInput,
    ProcessSelector, Pty, PtySize, SERVICE, SelectRequest, SendInputRequest, SendSignalRequest,
    Signal, StartRequest, StreamResponse, UpdateRequest,
};
use coppice_agent_protocol::{STREAM_CONTENT_TYPE, TIMEOUT_HEADER, UNARY_CONTENT_TYPE};
use http::StatusCode;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Serialize;

use super::transport::{self, check, request};
use super::{Agent, Error};

/// Longest message of a stream; the agent cuts output into far smaller ones.
const MAX_MESSAGE: usize = 1 << 20;

/// What to start and how.
#[derive(Debug, Clone, Default)]
pub struct Start {
    /// Program, arguments, environment and working directory.
    pub process: ProcessConfig,
    /// The guest user it runs as; the agent's default when absent.
    pub user: Option<String>,
    /// The size of the terminal to run it on; no terminal when absent.
    pub pty: Option<PtySize>,
    /// Whether its standard input is open.
    pub stdin: bool,
    /// How long it may run before the agent kills it.
    pub timeout: Option<Duration>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// With an exit code.
    Exited(i32),
    /// By the signal of this number.
    Signaled(u8),
}

impl Outcome {
    /// The outcome that an event tells of.
    pub fn of(end: &EndEvent) -> Self {
        if end.exited {
            return Self::Exited(end.exit_code);
        }
        signal_number(&end.status).map_or(Self::Exited(end.exit_code), Self::Signaled)
    }

    /// The code a shell would give: the exit code's low byte, or 128 plus the signal.
    pub fn shell_code(self) -> u8 {
        match self {
            Self::Exited(code) => code.to_le_bytes()[0],
            Self::Signaled(number) => number.saturating_add(crate::failure::EXIT_SIGNAL_BASE),
        }
    }
}

/// The number of the signal in a status such as `signal: killed (core dumped)`.
fn signal_number(status: &str) -> Option<u8> {
    let name = status.strip_prefix("signal: ")?;
    let name = name.strip_suffix(" (core dumped)").unwrap_or(name);
    coppice_agent_protocol::signal::number(name)
}

/// Events of one process, read as fast as [`ProcessStream::next`] is called.
///
/// Dropping it leaves the process alone.
#[derive(Debug)]
pub struct ProcessStream {
    pid: u32,
    body: Incoming,
    decoder: FrameDecoder,
}

impl ProcessStream {
    /// Process ID in the guest.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The next event, or nothing after the last; may be cancelled without loss.
    ///
    /// # Errors
    /// [`Error::Http`] when the connection breaks, [`Error::Refused`] when the agent ends the
    /// stream with an error.
    pub async fn next(&mut self) -> Result<Option<ProcessEvent>, Error> {
        loop {
            let frame = self.decoder.next_frame().map_err(|e| Error::Protocol(e.to_string()))?;
            if let Some(frame) = frame {
                return match frame.is_end() {
                    true => end_of_stream(&frame.payload).map(|()| None),
                    false => read_event(&frame.payload).map(Some),
                };
            }
            match self.body.frame().await {
                Some(Ok(piece)) => {
                    if let Some(data) = piece.data_ref() {
                        self.decoder.push(data);
                    }
                }
                Some(Err(error)) => return Err(Error::Http(error)),
                None => return Err(Error::Protocol("a stream without its end".into())),
            }
        }
    }
}

fn end_of_stream(payload: &[u8]) -> Result<(), Error> {
    let end: EndStream = serde_json::from_slice(payload).map_err(not_json)?;
    end.error.map_or(Ok(()), |error| Err(Error::Refused(error)))
}

fn read_event(payload: &[u8]) -> Result<ProcessEvent, Error> {
    let response: StreamResponse = serde_json::from_slice(payload).map_err(not_json)?;
    Ok(response.event)
}

fn not_json(error: serde_json::Error) -> Error {
    Error::Protocol(error.to_string())
}

impl Agent {
    /// Starts a process and returns the stream of its events, its start already seen.
    ///
    /// # Errors
    /// [`Error::Refused`] when the program, user or directory is not there.
    pub async fn start(&self, start: Start) -> Result<ProcessStream, Error> {
        let message = StartRequest {
            process: start.process,
            pty: start.pty.map(|size| Pty { size: Some(size) }),
            tag: None,
            stdin: Some(start.stdin),
        };
        self.stream("Start", &message, start.user.as_deref(), start.timeout).await
    }

    /// Follows a process that runs already.
    ///
    /// # Errors
    /// [`Error::Refused`] when there is no such process.
    pub async fn follow(&self, process: ProcessSelector) -> Result<ProcessStream, Error> {
        self.stream("Connect", &SelectRequest { process }, None, None).await
    }

    /// Gives a process input; done once the process's pipe or terminal took all of it.
    ///
    /// # Errors
    /// [`Error::Refused`] when the process is gone or its input is closed.
    pub async fn send_input(&self, pid: u32, data: &[u8], pty: bool) -> Result<(), Error> {
        let blob = Blob(data.to_vec());
        let input = if pty { ProcessInput::Pty(blob) } else { ProcessInput::Stdin(blob) };
        let message = SendInputRequest { process: ProcessSelector::Pid(pid), input };
        let request = unary("SendInput", &message)?;
        let (status, body) = self.envd.call_patiently(request).await?;
        check(status, &body, StatusCode::OK)
    }

    /// Closes a process's standard input.
    ///
    /// # Errors
    /// [`Error::Refused`] when the process is gone.
    pub async fn close_stdin(&self, pid: u32) -> Result<(), Error> {
        let message = SelectRequest { process: ProcessSelector::Pid(pid) };
        self.unary("CloseStdin", &message).await.map(drop)
    }

    /// Sends a signal to a process and those in its process group.
    ///
    /// # Errors
    /// [`Error::Refused`] when the process is gone.
    pub async fn send_signal(&self, pid: u32, signal: Signal) -> Result<(), Error> {
        let message = SendSignalRequest { process: ProcessSelector::Pid(pid), signal };
        self.unary("SendSignal", &message).await.map(drop)
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    /// [`Error::Refused`] when the process is gone or has no terminal.
    pub async fn resize(&self, pid: u32, size: PtySize) -> Result<(), Error> {
        let pty = Some(Pty { size: Some(size) });
        let message = UpdateRequest { process: ProcessSelector::Pid(pid), pty };
        self.unary("Update", &message).await.map(drop)
    }

    /// Processes started through the agent that still run.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn list(&self) -> Result<Vec<ProcessInfo>, Error> {
        let empty = coppice_agent_protocol::process::Empty {};
        let body = self.unary("List", &empty).await?;
        let list: ListResponse = serde_json::from_slice(&body).map_err(not_json)?;
        Ok(list.processes)
    }

    async fn unary(&self, method: &str, message: &impl Serialize) -> Result<Bytes, Error> {
        let (status, body) = self.envd.call(unary(method, message)?).await?;
        check(status, &body, StatusCode::OK)?;
        Ok(body)
    }

    async fn stream(
        &self,
        method: &str,
        message: &impl Serialize,
        user: Option<&str>,
        timeout: Option<Duration>,
    ) -> Result<ProcessStream, Error> {
        let frame = envelope::encode_message(message).map_err(not_json)?;
        let mut builder = request("POST", &format!("{SERVICE}{method}"), user)
            .header("content-type", STREAM_CONTENT_TYPE)
            .header("connect-protocol-version", "1");
        if let Some(timeout) = timeout {
            builder = builder.header(TIMEOUT_HEADER, timeout.as_millis().max(1).to_string());
        }
        let request = builder.body(transport::bytes(frame)).map_err(Error::Request)?;
        let body = self.envd.open(request).await?;
        let decoder = FrameDecoder::new(MAX_MESSAGE);
        let mut stream = ProcessStream { pid: 0, body, decoder };
        match stream.next().await? {
            Some(ProcessEvent::Start(start)) => stream.pid = start.pid,
            _ => return Err(Error::Protocol("a stream without its start".into())),
        }
        Ok(stream)
    }
}

fn unary(method: &str, message: &impl Serialize) -> Result<http::Request<transport::Body>, Error> {
    let body = serde_json::to_vec(message).map_err(not_json)?;
    request("POST", &format!("{SERVICE}{method}"), None)
        .header("content-type", UNARY_CONTENT_TYPE)
        .header("connect-protocol-version", "1")
        .body(transport::bytes(body))
        .map_err(Error::Request)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_signal(status: &str) -> Outcome {
        Outcome::of(&EndEvent { exit_code: -1, status: status.into(), ..EndEvent::default() })
    }

    #[test]
    fn signals_become_128_plus_their_number() {
        assert_eq!(by_signal("signal: killed").shell_code(), 137);
        assert_eq!(by_signal("signal: segmentation fault (core dumped)").shell_code(), 139);
        assert_eq!(by_signal("signal: signal 34").shell_code(), 162);
    }

    #[test]
    fn an_exit_code_is_kept() {
        let end = EndEvent { exit_code: 3, exited: true, ..EndEvent::default() };
        assert_eq!(Outcome::of(&end).shell_code(), 3);
    }
}
