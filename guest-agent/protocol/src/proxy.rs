//! The lines with which the host opens a connection to a TCP port of the guest, on
//! [`crate::PROXY_PORT`].
//!
//! The host connects and sends `CONNECT <port>` and a newline. The agent connects to that port on
//! the guest's loopback, 127.0.0.1 first and then [::1], and answers with one line: `OK`, or
//! `ERR <reason>` and closes. After `OK`, and already after its own line, what the host sends goes to
//! the port and back; the end of one direction is passed on and leaves the other open.

/// The most bytes of a request, newline included.
pub const MAX_REQUEST: usize = 14;

/// The most bytes of a reply that a reader needs to accept, newline included.
pub const MAX_REPLY: usize = 256;

/// The request for `port`, with its newline.
#[must_use]
pub fn encode_request(port: u16) -> Vec<u8> {
    format!("CONNECT {port}\n").into_bytes()
}

/// The port in a request without its newline, unless it is malformed; never 0.
#[must_use]
pub fn decode_request(line: &[u8]) -> Option<u16> {
    let port = line.strip_prefix(b"CONNECT ")?;
    if !port.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(port).ok()?.parse().ok().filter(|port| *port > 0)
}

/// What the agent answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The connection is open.
    Connected,
    /// Nothing listens on the port.
    Refused,
    /// It did not work for this reason: one line.
    Failed(String),
}

impl Reply {
    /// The reply as it is sent, with its newline.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut line = match self {
            Self::Connected => b"OK".to_vec(),
            Self::Refused => b"ERR refused".to_vec(),
            Self::Failed(reason) => {
                let printable = |byte: u8| if byte.is_ascii_control() { b' ' } else { byte };
                let mut line = b"ERR ".to_vec();
                line.extend(reason.bytes().map(printable));
                line.truncate(MAX_REPLY.saturating_sub(1));
                line
            }
        };
        line.push(b'\n');
        line
    }

    /// Reads a reply without its newline, unless it is malformed.
    #[must_use]
    pub fn decode(line: &[u8]) -> Option<Self> {
        match line {
            b"OK" => Some(Self::Connected),
            b"ERR refused" => Some(Self::Refused),
            _ => {
                let reason = line.strip_prefix(b"ERR ")?;
                Some(Self::Failed(String::from_utf8_lossy(reason).into_owned()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(encoded: &[u8]) -> &[u8] {
        encoded.strip_suffix(b"\n").unwrap()
    }

    #[test]
    fn malformed_requests_are_refused() {
        for text in
            ["CONNECT 0", "CONNECT 65536", "CONNECT +80", "CONNECT ", "CONNECT 80 ", "GET /"]
        {
            assert_eq!(decode_request(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn a_reason_stays_in_its_line() {
        let reply = Reply::Failed(format!("a\nb{}", "c".repeat(MAX_REPLY))).encode();
        assert_eq!(reply.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(reply.len(), MAX_REPLY);
    }

    proptest! {
        #[test]
        fn requests_read_back(port in 1_u16..) {
            let request = encode_request(port);
            prop_assert!(request.len() <= MAX_REQUEST);
            prop_assert_eq!(decode_request(line(&request)), Some(port));
        }

        #[test]
        fn replies_read_back(reason in "[a-z ]{0,40}") {
            prop_assume!(reason != "refused");
            for reply in [Reply::Connected, Reply::Refused, Reply::Failed(reason)] {
                prop_assert_eq!(Reply::decode(line(&reply.encode())), Some(reply));
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = (decode_request(&bytes), Reply::decode(&bytes));
        }
    }
}
