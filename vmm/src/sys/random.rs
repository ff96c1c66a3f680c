//! Random bytes from the host's kernel (`getrandom(2)`), by the one call that opens no file.

use std::io;

/// Fills `bytes`.
///
/// # Errors
/// Those of `getrandom`; never `EINTR`.
pub fn fill(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        // SAFETY: pointer and length are those of one live, writable slice.
        let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(count) {
            Ok(count) => bytes = bytes.get_mut(count..).unwrap_or_default(),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_filled_each_time_anew() {
        let (mut one, mut other) = ([0; 64], [0; 64]);
        fill(&mut one).unwrap();
        fill(&mut other).unwrap();
        assert_ne!(one, other);
        assert_ne!(one[48..], [0; 16]);
    }
}
