//! The codec in software: raw deflate with a window of 4 KB, which the device can read and whose
//! output it could have written.

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

/// Window of the device, as zlib counts: 2^12 bytes.
pub const WINDOW_BITS: u8 = 12;

/// Why software could not do a chunk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The chunk is no raw deflate stream.
    #[error("the chunk is no raw deflate stream: it is damaged")]
    Corrupt,
    /// The stream holds more or less than was said.
    #[error("the chunk holds {found} bytes or more, not {expected}: it is damaged")]
    WrongSize {
        /// Bytes that were expected.
        expected: usize,
        /// Bytes that were found.
        found: usize,
    },
    /// The output has no room.
    #[error("the output of {room} bytes is too small for the compressed chunk")]
    NoRoom {
        /// Bytes of room.
        room: usize,
    },
}

/// A compressor and a decompressor, made once.
#[derive(Debug)]
pub struct Codec {
    deflate: Compress,
    inflate: Decompress,
}

impl Codec {
    /// A codec with zlib's usual effort.
    pub fn new() -> Self {
        Self {
            deflate: Compress::new_with_window_bits(Compression::default(), false, WINDOW_BITS),
            inflate: Decompress::new_with_window_bits(false, WINDOW_BITS),
        }
    }

    /// Compresses `source` into `target`, and says how many bytes it took. A `target` of
    /// [`bound`] bytes always suffices.
    ///
    /// # Errors
    /// [`CodecError::NoRoom`] when `target` is too small.
    pub fn compress(&mut self, source: &[u8], target: &mut [u8]) -> Result<usize, CodecError> {
        self.deflate.reset();
        let room = target.len();
        match self.deflate.compress(source, target, FlushCompress::Finish) {
            Ok(Status::StreamEnd) => {
                usize::try_from(self.deflate.total_out()).or(Err(CodecError::NoRoom { room }))
            }
            _ => Err(CodecError::NoRoom { room }),
        }
    }

    /// Decompresses `source` into exactly `target.len()` bytes.
    ///
    /// # Errors
    /// A stream that is damaged or of another size.
    pub fn decompress(&mut self, source: &[u8], target: &mut [u8]) -> Result<(), CodecError> {
        self.inflate.reset(false);
        let expected = target.len();
        let status = self
            .inflate
            .decompress(source, target, FlushDecompress::Finish)
            .map_err(|_| CodecError::Corrupt)?;
        let found = usize::try_from(self.inflate.total_out()).unwrap_or(usize::MAX);
        match status {
            Status::StreamEnd if found == expected => Ok(()),
            Status::BufError | Status::Ok if found < expected => Err(CodecError::Corrupt),
            _ => Err(CodecError::WrongSize { expected, found }),
        }
    }
}

impl Default for Codec {
    fn default() -> Self {
        Self::new()
    }
}

/// Most bytes that `size` bytes take compressed, by software or with the fixed codes of
/// [`crate::aecs`] (9 bits for a byte at worst).
pub fn bound(size: usize) -> usize {
    size.saturating_add(size / 8).saturating_add(64)
}
