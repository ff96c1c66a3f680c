//! QEMU's control socket: JSON objects, one a line (QMP).

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::console::readable;
use super::vsock::limit_reads;
use crate::error::{Doing as _, Error};

/// A connection, on which commands are allowed.
#[derive(Debug)]
pub(super) struct Qmp {
    stream: BufReader<UnixStream>,
}

/// Where QEMU connects to.
#[derive(Debug)]
pub(super) struct Listener(UnixListener);

impl Listener {
    /// Listens at a path, before QEMU is started.
    pub(super) fn new(path: &Path) -> Result<Self, Error> {
        UnixListener::bind(path).map(Self).doing("making the control socket for QEMU")
    }

    /// Waits for QEMU's greeting, and has it take commands.
    pub(super) fn accept(&self, limit: Duration) -> Result<Qmp, Error> {
        if !readable(&self.0, limit)? {
            return Err(Error::Late("QEMU did not connect to its control socket".into()));
        }
        let (stream, _) = self.0.accept().doing("waiting for QEMU")?;
        limit_reads(&stream, limit)?;
        let mut qmp = Qmp { stream: BufReader::new(stream) };
        qmp.line()?;
        qmp.ask("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }
}

impl Qmp {
    /// Gives a command and waits for its answer.
    pub(super) fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value, Error> {
        let request = json!({ "execute": command, "arguments": arguments });
        let text = format!("{request}\n");
        self.stream.get_mut().write_all(text.as_bytes()).doing("asking QEMU")?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                return Err(refused(command, error));
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Waits for the end of a migration, of which events tell.
    pub(super) fn wait_for_migration(&mut self) -> Result<(), Error> {
        loop {
            let event = self.line()?;
            if event["event"] != "MIGRATION" {
                continue;
            }
            match event["data"]["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => return Err(refused("migrate", &event)),
                _ => {}
            }
        }
    }

    fn line(&mut self) -> Result<Value, Error> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).doing("waiting for QEMU")? == 0 {
            return Err(Error::Missing("QEMU hung up its control socket".into()));
        }
        serde_json::from_str(&line).map_err(|error| refused("to speak JSON", &error))
    }
}

fn refused(what: &str, answer: &dyn std::fmt::Display) -> Error {
    Error::Refused { who: "QEMU".into(), what: what.into(), answer: answer.to_string() }
}
