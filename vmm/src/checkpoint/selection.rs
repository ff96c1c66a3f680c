//! Which pages a checkpoint holds, and in which runs they are written.
//!
//! Every run of the file becomes a mapping in each clone, so there must not be too many: small
//! gaps are taken in. In the first checkpoint of a machine gaps are zero pages and cost nothing;
//! in later ones they are copies of what the parent has there.

use std::ops::Range;

use coppice_image::PageSet;

/// Gaps up to this many pages are closed in a first checkpoint. What a clone reads there is a
/// hole of the file.
const ZERO_GAP: u64 = 64;

/// A later checkpoint has no more runs than this, as far as closing gaps can bring it about.
const MAX_RUNS: usize = 2048;
/// The longest gap closed for that, in pages.
const MAX_GAP: u64 = 32;

/// Pages to be written, and the runs they are written in.
#[derive(Debug)]
pub struct Selection {
    pages: PageSet,
    runs: Vec<Range<u64>>,
}

impl Selection {
    /// For a machine's first checkpoint: `pages` and nothing else is not zero.
    pub fn first(pages: PageSet) -> Self {
        let runs = pages.runs_with_gaps(ZERO_GAP).collect();
        Self { pages, runs }
    }

    /// For a checkpoint with a parent: `pages` were written since.
    pub fn later(mut pages: PageSet) -> Self {
        let mut gap = 0;
        let mut runs: Vec<_> = pages.runs().collect();
        while runs.len() > MAX_RUNS && gap < MAX_GAP {
            gap = gap * 2 + 1;
            runs = pages.runs_with_gaps(gap).collect();
        }
        for run in &runs {
            pages.insert_run(run.start, run.end - run.start);
        }
        Self { pages, runs }
    }

    /// Number of pages whose content is needed.
    pub fn page_count(&self) -> u64 {
        self.pages.len()
    }

    /// The pages whose content is needed.
    pub fn pages(&self) -> &PageSet {
        &self.pages
    }

    /// The runs to write, in ascending order.
    pub fn runs(&self) -> &[Range<u64>] {
        &self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(pages: impl IntoIterator<Item = u64>) -> PageSet {
        let mut set = PageSet::new(1 << 16);
        pages.into_iter().for_each(|page| set.insert(page));
        set
    }

    #[test]
    fn a_first_checkpoint_closes_gaps_without_taking_their_pages() {
        let selection = Selection::first(set([1, 40, 200]));
        assert_eq!((selection.runs(), selection.page_count()), (&[1..41, 200..201][..], 3));
    }

    #[test]
    fn a_later_checkpoint_with_few_runs_takes_what_was_written_and_no_more() {
        let selection = Selection::later(set([1, 3]));
        assert_eq!((selection.runs(), selection.page_count()), (&[1..2, 3..4][..], 2));
    }

    #[test]
    fn scattered_writes_are_brought_together_until_there_are_few_runs() {
        let selection = Selection::later(set((0..1 << 16).step_by(4)));
        assert!(selection.runs().len() <= MAX_RUNS, "{}", selection.runs().len());
        assert_eq!(
            selection.page_count(),
            selection.runs().iter().map(|r| r.end - r.start).sum::<u64>()
        );
    }
}
