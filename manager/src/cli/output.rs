//! What `coppice run` prints: the command's plain output, or one JSON event per line.
//!
//! Every write is waited for, so a slow reader holds the guest back.

use std::io;
use std::time::Duration;

use base64::Engine as _;
use coppice_manager::agent::Outcome;
use coppice_manager::failure::Failure;
use coppice_manager::sandbox::BootTime;
use serde::Serialize;
use tokio::io::{AsyncWrite, AsyncWriteExt};

/// Which of the command's outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    /// Standard output, or its terminal.
    Out,
    /// Standard error.
    Err,
}

/// One line of `--json`.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    Booting {},
    Started {
        boot_ms: f64,
        guest_init_ms: f64,
    },
    Stdout(Data<'a>),
    Stderr(Data<'a>),
    Exit {
        code: u8,
        #[serde(skip_serializing_if = "Option::is_none")]
        signal: Option<u8>,
        timed_out: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        first_output_ms: Option<f64>,
        run_ms: f64,
    },
    Error {
        code: u8,
        class: &'a str,
        message: &'a str,
        remedy: &'a str,
    },
}

/// Output of the command: text where it is valid UTF-8, base64 where it is not.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Data<'a> {
    Data(&'a str),
    DataBase64(String),
}

/// How a command ended, for the `exit` event.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exit {
    /// Exit code of `coppice`.
    pub(super) code: u8,
    /// How the command itself ended, if it did.
    pub(super) outcome: Option<Outcome>,
    /// Whether it was ended by `--timeout`.
    pub(super) timed_out: bool,
    /// From the start of the VMM to the first output.
    pub(super) first_output: Option<Duration>,
    /// How long the command ran.
    pub(super) ran: Duration,
}

/// The printer.
#[derive(Debug)]
pub(super) struct Output {
    json: bool,
    stdout: tokio::io::Stdout,
    stderr: tokio::io::Stderr,
    /// Bytes of a character whose rest has not come yet, per stream.
    rest: [Vec<u8>; 2],
}

impl Output {
    pub(super) fn new(json: bool) -> Self {
        let (stdout, stderr) = (tokio::io::stdout(), tokio::io::stderr());
        Self { json, stdout, stderr, rest: [Vec::new(), Vec::new()] }
    }

    /// The machine is about to be made.
    pub(super) async fn booting(&mut self) {
        self.event(&Event::Booting {}).await.ok();
    }

    /// The agent serves.
    pub(super) async fn started(&mut self, time: BootTime) {
        let (boot_ms, guest_init_ms) = (ms(time.until_ready), ms(time.guest_clock));
        self.event(&Event::Started { boot_ms, guest_init_ms }).await.ok();
    }

    /// The command wrote.
    pub(super) async fn data(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        if self.json {
            return self.json_data(stream, bytes).await;
        }
        match stream {
            Stream::Out => write(&mut self.stdout, bytes).await,
            Stream::Err => write(&mut self.stderr, bytes).await,
        }
    }

    /// The command ended.
    pub(super) async fn exit(&mut self, exit: Exit) {
        for stream in [Stream::Out, Stream::Err] {
            let rest = std::mem::take(self.rest_of(stream));
            self.emit_data(stream, &rest).await.ok();
        }
        let signal = match exit.outcome {
            Some(Outcome::Signaled(number)) => Some(number),
            _ => None,
        };
        let event = Event::Exit {
            code: exit.code,
            signal,
            timed_out: exit.timed_out,
            first_output_ms: exit.first_output.map(ms),
            run_ms: ms(exit.ran),
        };
        self.event(&event).await.ok();
    }

    /// A failure of ours.
    async fn error(&mut self, failure: &Failure) {
        if self.json {
            let event = Event::Error {
                code: failure.class.exit_code(),
                class: failure.class.name(),
                message: &failure.message,
                remedy: &failure.remedy,
            };
            self.event(&event).await.ok();
        } else {
            self.note(&failure.to_string()).await;
        }
    }

    /// A line for people; nothing in `--json`.
    pub(super) async fn note(&mut self, text: &str) {
        if !self.json {
            write(&mut self.stderr, format!("coppice: {text}\n").as_bytes()).await.ok();
        }
    }

    /// Reports how a command line went, brings out what was written, and gives the exit code.
    pub(super) async fn conclude(mut self, outcome: Result<u8, Failure>) -> u8 {
        let code = match outcome {
            Ok(code) => code,
            Err(failure) => {
                self.error(&failure).await;
                failure.class.exit_code()
            }
        };
        self.finish().await;
        code
    }

    /// Sees everything written.
    async fn finish(&mut self) {
        // There is nobody to tell when this fails.
        self.stdout.flush().await.ok();
        self.stderr.flush().await.ok();
    }

    async fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        if !self.json {
            return Ok(());
        }
        let mut line = serde_json::to_vec(event)?;
        line.push(b'\n');
        write(&mut self.stdout, &line).await
    }

    fn rest_of(&mut self, stream: Stream) -> &mut Vec<u8> {
        let [out, err] = &mut self.rest;
        match stream {
            Stream::Out => out,
            Stream::Err => err,
        }
    }

    async fn json_data(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        let mut all = std::mem::take(self.rest_of(stream));
        all.extend_from_slice(bytes);
        let rest = all.split_off(all.len() - unfinished(&all));
        *self.rest_of(stream) = rest;
        self.emit_data(stream, &all).await
    }

    async fn emit_data(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let data = match std::str::from_utf8(bytes) {
            Ok(text) => Data::Data(text),
            Err(_) => Data::DataBase64(base64::engine::general_purpose::STANDARD.encode(bytes)),
        };
        let event = match stream {
            Stream::Out => Event::Stdout(data),
            Stream::Err => Event::Stderr(data),
        };
        self.event(&event).await
    }
}

/// How many bytes at the end are the start of a character that is not complete.
fn unfinished(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => bytes.len() - error.valid_up_to(),
        _ => 0,
    }
}

async fn write(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

/// Milliseconds with three digits.
fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_their_documented_form() {
        let line = |event| serde_json::to_string(&event).unwrap();
        assert_eq!(line(Event::Booting {}), r#"{"event":"booting"}"#);
        assert_eq!(line(Event::Stdout(Data::Data("a\n"))), r#"{"event":"stdout","data":"a\n"}"#);
        assert_eq!(
            line(Event::Stderr(Data::DataBase64("/w==".into()))),
            r#"{"event":"stderr","data_base64":"/w=="}"#
        );
    }

    #[test]
    fn a_character_cut_in_two_waits_for_its_rest() {
        assert_eq!(unfinished("aü".as_bytes()), 0);
        assert_eq!(unfinished(&"aü".as_bytes()[..2]), 1);
        assert_eq!(unfinished(&"€".as_bytes()[..2]), 2);
        assert_eq!(unfinished(b"a\xff"), 0);
    }
}
