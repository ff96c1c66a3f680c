//! A set of pages of guest RAM as a bitmap: what the dirty log gives, and what a checkpoint or a
//! rollback works through run by run.

use std::ops::Range;

const WORD: u64 = u64::BITS as u64;

/// A set of page numbers below a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    pages: u64,
}

impl PageSet {
    /// The empty set over pages 0 to `pages` - 1. Takes `pages` / 8 bytes of memory.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        let words = usize::try_from(pages.div_ceil(WORD)).unwrap_or(usize::MAX);
        Self { words: vec![0; words], pages }
    }

    /// The set whose bitmap is `words`, the lowest bit of the first word being page 0. Bits from
    /// `pages` on are dropped, missing words are taken as zero.
    #[must_use]
    pub fn from_words(words: Vec<u64>, pages: u64) -> Self {
        let mut set = Self { words, pages };
        set.words.resize(usize::try_from(pages.div_ceil(WORD)).unwrap_or(usize::MAX), 0);
        set.trim();
        set
    }

    /// The limit: page numbers are below it.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.pages
    }

    /// The bitmap, the lowest bit of the first word being page 0.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Adds a page; one from the limit on is ignored.
    pub fn insert(&mut self, page: u64) {
        self.insert_run(page, 1);
    }

    /// Adds `count` pages from `first` on; those from the limit on are ignored.
    pub fn insert_run(&mut self, first: u64, count: u64) {
        self.each_word(first, count, |word, mask| *word |= mask);
    }

    /// Takes a page out, if it is there.
    pub fn remove(&mut self, page: u64) {
        self.remove_run(page, 1);
    }

    /// Takes out those of the `count` pages from `first` on that are there.
    pub fn remove_run(&mut self, first: u64, count: u64) {
        self.each_word(first, count, |word, mask| *word &= !mask);
    }

    /// Gives each word with pages of the run, and the mask of their bits.
    fn each_word(&mut self, first: u64, count: u64, mut change: impl FnMut(&mut u64, u64)) {
        let end = first.saturating_add(count).min(self.pages);
        let mut page = first;
        while page < end {
            let bit = page % WORD;
            let bits = (WORD - bit).min(end - page);
            if let Some(word) = word_of(page).and_then(|word| self.words.get_mut(word)) {
                change(word, (u64::MAX >> (WORD - bits)) << bit);
            }
            page += bits;
        }
    }

    /// Adds every page of `other`; those from this set's limit on are ignored.
    pub fn union(&mut self, other: &Self) {
        self.union_words(0, &other.words);
    }

    /// Adds the pages of a bitmap whose lowest bit is page `first`, such as the dirty log of one
    /// memory slot; those from the limit on are ignored.
    pub fn union_words(&mut self, first: u64, words: &[u64]) {
        let (Some(start), shift) = (word_of(first), first % WORD) else { return };
        let mut carry = 0;
        let mut from = words.iter();
        for to in self.words.iter_mut().skip(start) {
            let next = from.next().copied();
            if next.is_none() && carry == 0 {
                break;
            }
            let word = next.unwrap_or(0);
            *to |= (word << shift) | carry;
            carry = if shift == 0 { 0 } else { word >> (WORD - shift) };
        }
        self.trim();
    }

    /// Takes all pages out.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Whether the page is in the set.
    #[must_use]
    pub fn contains(&self, page: u64) -> bool {
        let word = word_of(page).and_then(|word| self.words.get(word)).copied().unwrap_or(0);
        word >> (page % WORD) & 1 == 1
    }

    /// Number of pages in the set.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Whether no page is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The runs of pages in the set, in ascending order; no two of them touch.
    #[must_use]
    pub fn runs(&self) -> Runs<'_> {
        self.runs_with_gaps(0)
    }

    /// Runs that cover the set, in ascending order: gaps of at most `max_gap` pages are taken in,
    /// so that there are fewer. Every run starts and ends with a page of the set.
    #[must_use]
    pub fn runs_with_gaps(&self, max_gap: u64) -> Runs<'_> {
        let mut runs = Runs { set: self, max_gap, next: None };
        runs.next = self.run_from(0);
        runs
    }

    /// The first run of the set that starts at `from` or later.
    fn run_from(&self, from: u64) -> Option<Range<u64>> {
        let start = self.find(from, 0)?;
        Some(start..self.find(start, u64::MAX).unwrap_or(self.pages))
    }

    /// The first page from `from` on whose bit differs from those of `skip`, which is all zeroes
    /// or all ones.
    fn find(&self, from: u64, skip: u64) -> Option<u64> {
        let start = word_of(from)?;
        let mut mask = u64::MAX << (from % WORD);
        for (word, base) in self.words.get(start..)?.iter().zip((from - from % WORD..).step_by(64))
        {
            let differ = (word ^ skip) & mask;
            if differ != 0 {
                let page = base + u64::from(differ.trailing_zeros());
                return (page < self.pages).then_some(page);
            }
            mask = u64::MAX;
        }
        None
    }

    /// Clears the bits of the last word that stand for no page.
    fn trim(&mut self) {
        let rest = self.pages % WORD;
        if let Some(last) = self.words.last_mut()
            && rest != 0
        {
            *last &= u64::MAX >> (WORD - rest);
        }
    }
}

fn word_of(page: u64) -> Option<usize> {
    usize::try_from(page / WORD).ok()
}

/// Iterator over the runs of a [`PageSet`].
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    set: &'a PageSet,
    max_gap: u64,
    next: Option<Range<u64>>,
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let mut run = self.next.take()?;
        loop {
            let following = self.set.run_from(run.end);
            match following {
                Some(more) if more.start - run.end <= self.max_gap => run.end = more.end,
                _ => {
                    self.next = following;
                    return Some(run);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
