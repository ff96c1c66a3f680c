//! A page set against an ordered set of numbers.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Not a multiple of 64, so that the last word has bits that stand for no page.
const PAGES: u64 = 300;

fn set_and_model(runs: &[(u64, u64)]) -> (PageSet, BTreeSet<u64>) {
    let mut set = PageSet::new(PAGES);
    let mut model = BTreeSet::new();
    for (first, count) in runs {
        set.insert_run(*first, *count);
        model.extend((*first..first + count).filter(|page| *page < PAGES));
    }
    (set, model)
}

fn runs() -> impl Strategy<Value = Vec<(u64, u64)>> {
    vec((0..PAGES + 70, prop_oneof![0u64..4, 0u64..150]), 0..12)
}

/// Runs of the model, gaps of at most `max_gap` taken in.
fn model_runs(model: &BTreeSet<u64>, max_gap: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for page in model {
        match runs.last_mut() {
            Some(run) if page - run.end <= max_gap => run.end = page + 1,
            _ => runs.push(*page..page + 1),
        }
    }
    runs
}

proptest! {
    #[test]
    fn a_set_holds_what_was_put_in(parts in runs()) {
        let (set, model) = set_and_model(&parts);
        prop_assert_eq!(set.len(), model.len() as u64);
        prop_assert_eq!(set.is_empty(), model.is_empty());
        for page in 0..PAGES + 70 {
            prop_assert_eq!(set.contains(page), model.contains(&page), "page {}", page);
        }
    }

    #[test]
    fn runs_cover_the_set_and_take_in_small_gaps(parts in runs(), max_gap in 0u64..80) {
        let (set, model) = set_and_model(&parts);
        prop_assert_eq!(set.runs().collect::<Vec<_>>(), model_runs(&model, 0));
        let with_gaps: Vec<_> = set.runs_with_gaps(max_gap).collect();
        prop_assert_eq!(with_gaps, model_runs(&model, max_gap));
    }

    #[test]
    fn a_union_has_the_pages_of_both(a in runs(), b in runs()) {
        let (mut set, mut model) = set_and_model(&a);
        let (other, other_model) = set_and_model(&b);
        set.union(&other);
        model.extend(&other_model);
        prop_assert_eq!(set.runs().collect::<Vec<_>>(), model_runs(&model, 0));
    }

    #[test]
    fn a_bitmap_goes_in_at_its_first_page(
        a in runs(),
        first in 0..PAGES + 70,
        words in vec(any::<u64>(), 0..7),
    ) {
        let (mut set, mut model) = set_and_model(&a);
        set.union_words(first, &words);
        for (page, bit) in (first..).zip(words.iter().flat_map(|w| (0..64).map(move |b| w >> b))) {
            if bit & 1 == 1 && page < PAGES {
                model.insert(page);
            }
        }
        prop_assert_eq!(set.len(), model.len() as u64);
        prop_assert_eq!(set.runs().collect::<Vec<_>>(), model_runs(&model, 0));
    }

    #[test]
    fn what_was_taken_out_is_gone(a in runs(), b in runs()) {
        let (mut set, mut model) = set_and_model(&a);
        for (first, count) in b {
            set.remove_run(first, count);
            model.retain(|page| !(first..first + count).contains(page));
        }
        prop_assert_eq!(set.runs().collect::<Vec<_>>(), model_runs(&model, 0));
    }

    #[test]
    fn words_out_are_words_in(parts in runs(), more in vec(any::<u64>(), 0..7)) {
        let (set, _) = set_and_model(&parts);
        prop_assert_eq!(&PageSet::from_words(set.words().to_vec(), PAGES), &set);
        // Bits and words that stand for no page do not count.
        let other = PageSet::from_words(more, PAGES);
        prop_assert!(other.runs().all(|run| run.end <= PAGES));
        prop_assert_eq!(other.len(), other.runs().map(|run| run.end - run.start).sum::<u64>());
    }
}

#[test]
fn a_cleared_set_is_empty() {
    let (mut set, _) = set_and_model(&[(3, 200)]);
    set.clear();
    assert_eq!(set, PageSet::new(PAGES));
}
