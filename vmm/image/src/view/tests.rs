//! A view against the plainest model: one entry per page.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const PAGES: u64 = 60;

/// Extents of one layer, from gaps, lengths and whether they have data. Data of neighbours is
/// consecutive in the file now and then, so that coalescing over extents is met.
fn layer() -> impl Strategy<Value = PageIndex> {
    vec((0u64..6, 1u32..8, 0u64..3), 0..12).prop_map(|parts| {
        let (mut next, mut file_page) = (0, 16);
        let mut bytes = Vec::new();
        for (gap, count, place) in parts {
            let first = next + gap;
            next = first + u64::from(count);
            if next > PAGES {
                break;
            }
            let data = (place > 0).then_some(file_page + place - 1);
            file_page = data.map_or(file_page, |page| page + u64::from(count));
            Extent { first, count: count.into(), data, checksum: 0 }.encode(&mut bytes);
        }
        PageIndex::decode(&bytes, PAGES, 16..1000).unwrap()
    })
}

/// What each page is, from the layers in order.
fn model(layers: &[PageIndex]) -> Vec<Source> {
    let mut pages = vec![Source::Zero; usize::try_from(PAGES).unwrap()];
    for (layer, index) in (0..).zip(layers) {
        for extent in index.extents() {
            for offset in 0..extent.count {
                let page = usize::try_from(extent.first + offset).unwrap();
                pages[page] = extent
                    .data
                    .map_or(Source::Zero, |data| Source::Layer { layer, page: data + offset });
            }
        }
    }
    pages
}

proptest! {
    #[test]
    fn a_view_is_the_latest_layer_at_each_page(
        layers in vec(layer(), 0..6),
        from in 0..PAGES + 5,
        length in 0..PAGES + 5,
    ) {
        let mut view = View::empty(PAGES);
        for (number, index) in (0..).zip(&layers) {
            view.push(number, index).unwrap();
        }
        let pages = model(&layers);

        let mut at = from;
        let mut before: Option<Run> = None;
        for run in view.runs(from..from + length) {
            prop_assert_eq!(run.first, at, "a gap between runs");
            prop_assert!(run.count > 0);
            if let Some(before) = before {
                prop_assert_ne!(before.source.skip(before.count), run.source, "not coalesced");
            }
            for offset in 0..run.count {
                let page = usize::try_from(run.first + offset).unwrap();
                prop_assert_eq!(run.source.skip(offset), pages[page], "page {}", page);
            }
            at = run.end();
            before = Some(run);
        }
        prop_assert_eq!(at, from.max((from + length).min(PAGES)), "the runs end early");
    }
}

#[test]
fn a_layer_of_a_larger_machine_is_refused_and_changes_nothing() {
    let mut bytes = Vec::new();
    Extent { first: 9, count: 2, data: Some(16), checksum: 0 }.encode(&mut bytes);
    let index = PageIndex::decode(&bytes, 11, 16..18).unwrap();
    let mut view = View::empty(10);
    assert_eq!(view.push(0, &index), Err(ViewError::OutsideRam { page: 10, ram_pages: 10 }));
    assert_eq!(view, View::empty(10));
}

#[test]
fn thousands_of_extents_stay_quick_to_push() {
    // One extent on every other page, twice, shifted by one: with a quadratic merge this takes
    // minutes, not milliseconds.
    const EXTENTS: u64 = 200_000;
    let layer = |shift: u64| {
        let mut bytes = Vec::new();
        for number in 0..EXTENTS {
            let data = Some(16 + 2 * number);
            let first = 2 * number + shift;
            Extent { first, count: 1, data, checksum: 0 }.encode(&mut bytes);
        }
        PageIndex::decode(&bytes, 2 * EXTENTS, 16..16 + 2 * EXTENTS).unwrap()
    };
    let mut view = View::empty(2 * EXTENTS);
    view.push(0, &layer(0)).unwrap();
    view.push(1, &layer(1)).unwrap();
    assert_eq!(view.span_count(), 400_000);
}
