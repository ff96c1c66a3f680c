//! The few QEMU monitor commands the keeper needs.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

/// A negotiated QMP connection.
pub(crate) struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Negotiates on a connection that QEMU has just opened.
    pub(crate) fn negotiate(stream: UnixStream) -> io::Result<Self> {
        let mut qmp = Self { stream: BufReader::new(stream) };
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns its result.
    pub(crate) fn execute(&mut self, command: &str, arguments: &Value) -> io::Result<Value> {
        let mut request = json!({ "execute": command, "arguments": arguments }).to_string();
        request.push('\n');
        self.stream.get_mut().write_all(request.as_bytes())?;
        loop {
            let mut line = String::new();
            if self.stream.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // The greeting and events come between: they are not answers.
            let mut answer: Value = serde_json::from_str(&line)?;
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(format!("QEMU refused {command}: {error}")));
            }
        }
    }

    /// Executes a command of the monitor for people, and returns what it prints.
    pub(crate) fn monitor(&mut self, line: &str) -> io::Result<String> {
        let text = self.execute("human-monitor-command", &json!({ "command-line": line }))?;
        text.as_str().map(str::to_owned).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// The host port that QEMU's user-mode network picked for its one forwarding rule.
    pub(crate) fn forwarded_port(&mut self) -> io::Result<u16> {
        let table = self.monitor("info usernet")?;
        forwarded_port(&table)
            .ok_or_else(|| io::Error::other(format!("QEMU forwards no port: {table}")))
    }
}

/// Finds the row `TCP[HOST_FORWARD] fd 127.0.0.1 PORT ...`.
fn forwarded_port(table: &str) -> Option<u16> {
    let row = table.lines().find(|line| line.contains("TCP[HOST_FORWARD]"))?;
    row.split_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_forwarded_port_is_read_from_the_table() {
        let table = "Hub -1 (net):\r\n  Protocol[State]    FD  Source Address  Port   Dest. Address  \
                     Port RecvQ SendQ\r\n  TCP[HOST_FORWARD]  14       127.0.0.1 45613       \
                     10.0.2.15  7700     0     0\r\n";
        assert_eq!(super::forwarded_port(table), Some(45613));
        assert_eq!(super::forwarded_port("Hub -1 (net):\r\n"), None);
    }
}
