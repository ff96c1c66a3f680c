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

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// A UUID (RFC 9562, version 4) of these bytes.
pub(crate) fn uuid_of(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let (first, rest) = bytes.split_at(4);
    let (parts, last) = rest.split_at(6);
    let middle: Vec<String> = parts.chunks(2).map(hex).collect();
    format!("{}-{}-{}", hex(first), middle.join("-"), hex(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_has_its_version_and_all_other_bits() {
        assert_eq!(uuid_of([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        let bytes = std::array::from_fn(|place| u8::try_from(place).unwrap());
        assert_eq!(uuid_of(bytes), "00010203-0405-4607-8809-0a0b0c0d0e0f");
    }
}
