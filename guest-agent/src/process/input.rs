//! Bytes for a process' standard input or terminal.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use coppice_agent_protocol::process::ProcessInput;
use tokio::io::unix::AsyncFd;

use super::Process;

/// Why input did not arrive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    /// `stdin` for a process on a terminal.
    #[error("process {0} runs on a terminal: send its input as pty")]
    IsTerminal(i32),
    /// `pty` for a process without a terminal.
    #[error("process {0} has no terminal: send its input as stdin")]
    NoTerminal(i32),
    /// Its standard input was never open, or was closed.
    #[error("process {0} has no open stdin: start it with stdin, and send before closing it")]
    Closed(i32),
    /// The process ended, or closed its side.
    #[error("process {0} takes no more input: it has ended or closed its side")]
    Ended(i32),
    /// Closing the input of a terminal.
    #[error("process {0} runs on a terminal: send Ctrl-D (0x04) instead of closing stdin")]
    CloseTerminal(i32),
    /// Writing failed.
    #[error("writing to process {pid}: {source}")]
    Write {
        /// Which process.
        pid: i32,
        /// Why.
        source: io::Error,
    },
}

impl Process {
    /// Writes all of `input`, as fast as the process takes it.
    pub(crate) async fn send(&self, input: &ProcessInput) -> Result<(), InputError> {
        match input {
            ProcessInput::Stdin(_) if self.has_terminal => Err(InputError::IsTerminal(self.pid)),
            ProcessInput::Pty(_) if !self.has_terminal => Err(InputError::NoTerminal(self.pid)),
            ProcessInput::Stdin(data) => {
                let stdin = self.stdin.lock().await;
                let stdin = stdin.as_ref().ok_or(InputError::Closed(self.pid))?;
                self.write_all(stdin, &data.0).await
            }
            ProcessInput::Pty(data) => {
                // Two writers' keystrokes must not mix either; the lock is free of a pipe here.
                let _whole = self.stdin.lock().await;
                let terminal = self.terminal.borrow().as_ref().map(Rc::clone);
                let terminal = terminal.ok_or(InputError::Ended(self.pid))?;
                self.write_all(&terminal, &data.0).await
            }
        }
    }

    /// Closes its standard input, after writes under way. Closing twice is no error.
    pub(crate) async fn close_stdin(&self) -> Result<(), InputError> {
        if self.has_terminal {
            return Err(InputError::CloseTerminal(self.pid));
        }
        self.stdin.lock().await.take();
        Ok(())
    }

    async fn write_all(&self, fd: &AsyncFd<OwnedFd>, data: &[u8]) -> Result<(), InputError> {
        let mut rest = data;
        while !rest.is_empty() {
            // What the process left running may hold the other end for ever; its exit decides.
            let mut guard = tokio::select! {
                guard = fd.writable() => guard.map_err(|source| self.write_error(source))?,
                () = self.wait() => return Err(InputError::Ended(self.pid)),
            };
            let written = guard.try_io(|fd| Ok(nix::unistd::write(fd.get_ref(), rest)?));
            if let Ok(written) = written {
                let written = written.map_err(|source| self.write_error(source))?;
                rest = rest.get(written..).unwrap_or_default();
            }
        }
        Ok(())
    }

    fn write_error(&self, source: io::Error) -> InputError {
        match source.raw_os_error() {
            Some(libc::EPIPE | libc::EIO) => InputError::Ended(self.pid),
            _ => InputError::Write { pid: self.pid, source },
        }
    }
}
