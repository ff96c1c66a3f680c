//! Bytes that wait for a slow reader.

use std::collections::VecDeque;

/// A queue of bytes that costs nothing while it is empty.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    bytes: VecDeque<u8>,
}

impl Buffer {
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// The oldest bytes that lie together; empty only when the buffer is.
    pub(crate) fn front(&self) -> &[u8] {
        self.bytes.as_slices().0
    }

    /// Drops the `count` oldest bytes.
    pub(crate) fn consume(&mut self, count: usize) {
        self.bytes.drain(..count.min(self.bytes.len()));
        if self.bytes.is_empty() {
            self.bytes = VecDeque::new();
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}
