//! Random bytes of the system.

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
