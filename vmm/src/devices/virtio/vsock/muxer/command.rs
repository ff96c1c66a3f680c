//! The line with which a host client names the guest port it wants.

/// Longest command in bytes, its newline included: `CONNECT 4294967295\r\n`.
pub(crate) const COMMAND_MAX: usize = 20;

/// What the bytes received so far amount to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// A beginning; more may come.
    Incomplete,
    /// Not a command, and no further byte can make it one.
    Invalid,
    /// `CONNECT <port>`; the line has this length in bytes.
    Connect { port: u32, length: usize },
}

/// Parses the command at the start of `bytes`: `CONNECT`, one space, a decimal port below
/// 2^32 - 1 (the port that means "any"), and a newline that a carriage return may precede.
pub(crate) fn parse(bytes: &[u8]) -> Command {
    let Some(end) = bytes.iter().take(COMMAND_MAX).position(|&byte| byte == b'\n') else {
        let hopeless = bytes.len() >= COMMAND_MAX;
        return if hopeless { Command::Invalid } else { Command::Incomplete };
    };
    let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
    let port = line
        .strip_prefix(b"CONNECT ")
        .filter(|digits| digits.iter().all(u8::is_ascii_digit))
        .and_then(|digits| str::from_utf8(digits).ok())
        .and_then(|digits| digits.parse().ok())
        .filter(|&port| port != u32::MAX);
    match port {
        Some(port) => Command::Connect { port, length: end + 1 },
        None => Command::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_well_formed_commands_name_a_port() {
        let cases: [(&[u8], Command); 11] = [
            (b"CONNECT 1024\n", Command::Connect { port: 1024, length: 13 }),
            (b"CONNECT 5\r\nrest", Command::Connect { port: 5, length: 11 }),
            (b"CONNECT 4294967294\r\n", Command::Connect { port: u32::MAX - 1, length: 20 }),
            (b"CONNECT 10", Command::Incomplete),
            (b"", Command::Incomplete),
            (b"CONNECT 4294967295\n", Command::Invalid),
            (b"CONNECT 4294967296\n", Command::Invalid),
            (b"CONNECT +5\n", Command::Invalid),
            (b"CONNECT \n", Command::Invalid),
            (b"connect 5\n", Command::Invalid),
            (b"CONNECT 00000000000000000005\n", Command::Invalid),
        ];
        for (bytes, expected) in cases {
            assert_eq!(parse(bytes), expected, "{:?}", String::from_utf8_lossy(bytes));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged_within_the_limit(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            match parse(&bytes) {
                Command::Incomplete => prop_assert!(bytes.len() < COMMAND_MAX),
                Command::Connect { length, .. } => prop_assert!(length <= COMMAND_MAX.min(bytes.len())),
                Command::Invalid => {}
            }
        }
    }
}
