//! Blocks of words that tell whether they are exactly what was written.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Words of a block: two pages, so that a block can be torn between them.
pub(crate) const WORDS: usize = 1024;

/// What a block was last written with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// How many writes the thread had done.
    pub(crate) number: u64,
    /// Drawn for this write.
    pub(crate) nonce: u64,
}

impl Stamp {
    /// For write `number`.
    pub(crate) fn draw(number: u64) -> io::Result<Self> {
        let mut nonce = [0; 8];
        getrandom(&mut nonce, GetRandomFlags::empty())?;
        Ok(Self { number, nonce: u64::from_le_bytes(nonce) })
    }

    fn word(self, at: u64) -> u64 {
        match at {
            0 => self.number,
            1 => self.nonce,
            _ => (self.nonce ^ at).wrapping_mul(0x9E37_79B9_7F4A_7C15),
        }
    }

    /// Fills a block.
    pub(crate) fn fill(self, block: &mut [u64]) {
        for (at, word) in (0..).zip(block) {
            *word = self.word(at);
        }
    }

    /// What is wrong with a block that should have this stamp.
    pub(crate) fn check(self, block: impl Iterator<Item = u64>) -> Result<(), String> {
        for (at, word) in (0..).zip(block) {
            if word != self.word(at) {
                return Err(format!("word {at} is {word:#x}, not {:#x}: {self:?}", self.word(at)));
            }
        }
        Ok(())
    }
}

/// A cheap sequence of numbers to choose places with.
#[derive(Debug)]
pub(crate) struct Places(u64);

impl Places {
    /// `seed` is anything but zero.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.max(1))
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 8).unwrap_or_default() % end
    }
}
