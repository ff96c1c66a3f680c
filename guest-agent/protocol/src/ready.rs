//! The line with which an agent reports that it serves.

use serde::{Deserialize, Serialize};

/// Written once by the agent, as one line of JSON, to [`crate::READY_PORT`] of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyLine {
    /// Version of the agent.
    pub version: String,
    /// Microseconds of `CLOCK_BOOTTIME` at which the agent's `main` began.
    pub uptime_us: u64,
}

impl ReadyLine {
    /// The most bytes a reader needs to accept, newline included.
    pub const MAX_LEN: usize = 256;

    /// The line as it is sent, with its newline.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line
    }

    /// Reads a line, with or without its newline.
    ///
    /// # Errors
    /// When the bytes are not such an object.
    pub fn decode(line: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_reads_back() {
        let ready = ReadyLine { version: "0.1.0".into(), uptime_us: 61_100 };
        let line = ready.encode();
        assert_eq!(line, b"{\"version\":\"0.1.0\",\"uptime_us\":61100}\n");
        assert_eq!(ReadyLine::decode(&line).unwrap(), ready);
    }
}
