//! A file as the loader wants it: a reader with a position of its own.
//!
//! The descriptor comes from the manager, and machines started at the same time may share its
//! file position; so every read here names its offset.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use vm_memory::bitmap::BitmapSlice;
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice};

use super::sys;

/// A plain file and a position in it.
#[derive(Debug)]
pub(super) struct BootFile<'a> {
    file: &'a File,
    len: u64,
    position: u64,
}

impl<'a> BootFile<'a> {
    /// Takes a plain file; `None` for any other kind, whose length says nothing.
    pub(super) fn new(file: &'a File) -> io::Result<Option<Self>> {
        let metadata = file.metadata()?;
        Ok(metadata.is_file().then_some(Self { file, len: metadata.len(), position: 0 }))
    }

    /// The length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Fills `buffer` from `offset` as far as the file goes; gives the bytes read.
    pub(super) fn read_at<'b>(&self, offset: u64, buffer: &'b mut [u8]) -> io::Result<&'b [u8]> {
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = u64::try_from(done).ok().and_then(|done| offset.checked_add(done));
            let Some(at) = at else { break };
            match self.file.read_at(rest, at) {
                Ok(0) => break,
                Ok(count) => done = done.saturating_add(count),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(buffer.get(..done).unwrap_or_default())
    }

    fn advance(&mut self, count: usize) {
        self.position = self.position.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
    }
}

impl Read for BootFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.position)?;
        self.advance(count);
        Ok(count)
    }
}

impl ReadVolatile for BootFile<'_> {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        buffer: &mut VolatileSlice<B>,
    ) -> Result<usize, VolatileMemoryError> {
        // One read may give less than is there (network file systems do); callers that want
        // an exact count do not ask again, so only the end of the file may cut it short.
        let mut done = 0;
        while done < buffer.len() {
            let mut rest = buffer.offset(done)?;
            match sys::read_at(self.file, self.position, &mut rest) {
                Ok(0) => break,
                Ok(count) => {
                    self.advance(count);
                    done = done.saturating_add(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(VolatileMemoryError::IOError(error)),
            }
        }
        Ok(done)
    }
}

impl Seek for BootFile<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::End(offset) => self.len.checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}
