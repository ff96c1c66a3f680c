//! Random bytes of the system, and identifiers made of bytes.

use std::fmt::Write as _;
use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// As many random bytes as wanted, fit for secrets.
pub(crate) fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while let Some(rest @ [_, ..]) = bytes.get_mut(filled..) {
        filled += getrandom(rest, GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// A UUID (RFC 9562, version 4) of these bytes.
pub(crate) fn uuid_of(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (place, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&place) {
            text.push('-');
        }
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
