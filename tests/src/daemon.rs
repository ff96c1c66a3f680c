//! A `coppice serve` of a test's own, on the best lane, reached at an address of this host.
//!
//! All that it makes lies in a process and a mount name space of its own: processes, sockets and
//! the store end with the shell that began them, which ends with the test process, however that
//! ends.

use std::io::{self, PipeWriter, Read as _, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use coppice_lab::{Lab, paths};
use thiserror::Error;

use crate::tunnel;

/// How long the daemon may take to listen.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long the first sandbox may take, for which the built-in template is made.
const FIRST_LIMIT: Duration = Duration::from_secs(300);

/// What runs in the lane. The programs are copied, so that they may be built anew meanwhile. The
/// first process of a name space takes its others with it; this one ends with its standard input.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs -o size=80%,mode=755 tmpfs /run
mkdir /run/home /run/bin
cp "$PROGRAMS/coppice" "$PROGRAMS/coppice-vmm" /run/bin
ln -s "$COPPICE_HOME/kernels" "$COPPICE_HOME/images" /run/home
export COPPICE_HOME=/run/home
for tenant; do /run/bin/coppice key create --tenant "$tenant"; done
exec 3<&0
trap 'exit 1' TERM
(cat <&3 >/dev/null; kill $$) &
/run/bin/coppice serve --listen 127.0.0.1:0 &
wait $!
"#;

/// Why there is no daemon.
#[derive(Debug, Error)]
pub enum Error {
    /// Pipes, sockets or threads of this process.
    #[error("the daemon's surroundings cannot be made")]
    Io(#[from] io::Error),
    /// It printed something else than its keys and its address, ended, or took too long.
    #[error("the daemon does not start ({reason}); it logged:\n{log}")]
    Start {
        /// What is missing.
        reason: &'static str,
        /// What it logged.
        log: String,
    },
    /// It cannot make a sandbox.
    #[error("the daemon answers the first create with:\n{answer}\nit logged:\n{log}")]
    First {
        /// The answer's text.
        answer: String,
        /// What it logged.
        log: String,
    },
}

/// A daemon that listens and has its built-in template.
#[derive(Debug)]
pub struct Daemon {
    address: SocketAddr,
    keys: Vec<String>,
    log: Log,
    /// Its end is the daemon's end.
    _lifeline: PipeWriter,
}

impl Daemon {
    /// Starts a daemon with a key for each of `tenants`, and waits until sandboxes start fast.
    ///
    /// # Errors
    /// [`Error`], with the daemon's log.
    pub fn start(lab: &'static Lab, tenants: &[&str]) -> Result<Self, Error> {
        let (input, lifeline) = io::pipe()?;
        let (lines, printed) = channel();
        let log = Log::default();
        let mut argv = vec!["unshare", "--mount", "--pid", "-f", "--mount-proc"];
        if !lab.lane().is_nested() && !rustix::process::geteuid().is_root() {
            argv.push("-r");
        }
        argv.extend(["sh", "-c", SCRIPT, "sh"]);
        argv.extend(tenants);
        let programs = paths::release_dir().display().to_string();
        let command = lab.command(argv).env("PROGRAMS", programs).stdin(input);
        let mut logged = log.clone();
        thread::Builder::new().name("daemon".into()).spawn(move || {
            let end = command.run_to(&mut Lines::new(lines), &mut logged.clone());
            logged.add(&format!("the daemon ended: {end:?}\n"));
        })?;
        let deadline = Instant::now() + START_LIMIT;
        let next = || line(&printed, deadline).map_err(|reason| log.not_started(reason));
        let keys = tenants.iter().map(|_| next()).collect::<Result<Vec<_>, _>>()?;
        let address = next()?;
        let port = address.rsplit(':').next().and_then(|port| port.parse().ok());
        let Some(port) = port.filter(|_| address.starts_with("http://127.0.0.1:")) else {
            return Err(log.not_started("it printed no address"));
        };
        let address = if lab.lane().is_nested() {
            tunnel::open(lab, port)?
        } else {
            (Ipv4Addr::LOCALHOST, port).into()
        };
        let daemon = Self { address, keys, log, _lifeline: lifeline };
        daemon.make_template()?;
        Ok(daemon)
    }

    /// Where it is reached from this host.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The keys, in the order of the tenants.
    #[must_use]
    pub fn keys(&self) -> &[String] {
        &self.keys
    }

    /// All that it logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// Clients do not wait for a template to be made on an emulated processor; so this does.
    fn make_template(&self) -> Result<(), Error> {
        let Some(key) = self.keys.first() else { return Ok(()) };
        let body = r#"{"templateID":"base"}"#;
        let created = self.ask("POST /v2/sandboxes", key, body)?;
        let id = created.split_once(r#""sandboxID":""#).and_then(|(_, rest)| rest.split_once('"'));
        let (true, Some((id, _))) = (created.starts_with("HTTP/1.1 201"), id) else {
            return Err(Error::First { answer: created, log: self.log() });
        };
        let killed = self.ask(&format!("DELETE /sandboxes/{id}"), key, "")?;
        if !killed.starts_with("HTTP/1.1 204") {
            return Err(Error::First { answer: killed, log: self.log() });
        }
        Ok(())
    }

    /// One request on a connection of its own; the answer's text.
    fn ask(&self, what: &str, key: &str, body: &str) -> Result<String, Error> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(FIRST_LIMIT))?;
        let request = format!(
            "{what} HTTP/1.1\r\nHost: {}\r\nX-API-KEY: {key}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            self.address,
            body.len()
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }
}

/// The next line that the daemon's shell printed.
fn line(printed: &Receiver<String>, deadline: Instant) -> Result<String, &'static str> {
    let left = deadline.saturating_duration_since(Instant::now());
    printed.recv_timeout(left).map_err(|error| match error {
        RecvTimeoutError::Timeout => "it takes too long",
        RecvTimeoutError::Disconnected => "it ended",
    })
}

/// What the daemon logged, shared with the thread that receives it.
#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&mut self, text: &str) {
        self.lock().extend_from_slice(text.as_bytes());
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.lock()).into_owned()
    }

    fn not_started(&self, reason: &'static str) -> Error {
        Error::Start { reason, log: self.text() }
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sends each line written to it.
struct Lines {
    begun: Vec<u8>,
    lines: Sender<String>,
}

impl Lines {
    fn new(lines: Sender<String>) -> Self {
        Self { begun: Vec::new(), lines }
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.begun.extend_from_slice(bytes);
        while let Some(end) = self.begun.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.begun.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            // Nobody listens any more once the daemon is there.
            let _ = self.lines.send(line);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_however_they_are_written() {
        let (sender, lines) = channel();
        let mut writer = Lines::new(sender);
        for part in ["e2b_1\ne2", "b_2\n", "\nhttp"] {
            writer.write_all(part.as_bytes()).unwrap();
        }
        assert_eq!(lines.try_iter().collect::<Vec<_>>(), ["e2b_1", "e2b_2", ""]);
    }
}
