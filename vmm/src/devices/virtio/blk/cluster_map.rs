//! Which layer of a disk holds each cluster.
//!
//! One number per cluster, in leaves that are made when first needed: finding a cluster takes one
//! look however many layers there are, and a sparsely written disk costs little memory whatever
//! its size. The map also knows where the top layer is, so that sealing it takes time by what was
//! written and not by the disk's size.

use std::ops::Range;

use coppice_image::{ClusterRun as Run, SealedMap};

/// Bytes per cluster. Guests write whole pages almost always, so with clusters of a page hardly
/// any write has to copy from below first.
pub(super) const CLUSTER: u64 = 4096;

const LEAF_CLUSTERS: usize = 1024;
const CLUSTERS_PER_LEAF: u64 = LEAF_CLUSTERS as u64;

/// Number of a layer: 0 is the base, 1 the lowest layer over it.
pub(super) type LayerNumber = u16;
/// The base.
pub(super) const BASE: LayerNumber = 0;

#[derive(Debug)]
struct Leaf {
    layers: Box<[LayerNumber; LEAF_CLUSTERS]>,
    /// The top layer holds none but some of these places.
    top: Range<usize>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct ClusterMap {
    clusters: u64,
    /// For each leaf 1 plus its place in `leaves`, or 0 where the base holds all. Allocated
    /// zeroed, so that most of it takes no memory.
    table: Vec<u32>,
    leaves: Vec<Leaf>,
    /// Places in `table` of the leaves that the top layer is in, in any order.
    with_top: Vec<usize>,
    top: LayerNumber,
}

impl ClusterMap {
    /// The map of a disk of `clusters` clusters with `layers` over its base, the lowest first,
    /// and an empty top layer. Nothing if there are more layers than can be counted.
    pub(super) fn new<'a>(
        clusters: u64,
        layers: impl IntoIterator<Item = &'a SealedMap>,
    ) -> Option<Self> {
        let table = vec![0; usize::try_from(clusters.div_ceil(CLUSTERS_PER_LEAF)).ok()?];
        let mut map = Self { clusters, table, leaves: Vec::new(), with_top: Vec::new(), top: 1 };
        for layer in layers {
            for run in layer.runs() {
                map.fill(run.first, run.end());
            }
            map.next_top()?;
        }
        Some(map)
    }

    /// Which layer holds `cluster`.
    pub(super) fn layer(&self, cluster: u64) -> LayerNumber {
        let (leaf, place) = position(cluster);
        let layer = leaf.and_then(|leaf| self.leaf(leaf)).and_then(|leaf| leaf.layers.get(place));
        layer.copied().unwrap_or(BASE)
    }

    /// Whether the top layer holds `cluster`.
    pub(super) fn is_in_top(&self, cluster: u64) -> bool {
        self.layer(cluster) == self.top
    }

    /// The top layer holds the clusters from `first` to `end` (not included) from now on. Those
    /// past the end of the disk are ignored.
    pub(super) fn insert(&mut self, first: u64, end: u64) {
        self.fill(first, end.min(self.clusters));
    }

    /// Which layer holds `cluster`, and up to which cluster (not included, at most `end`) that
    /// answer holds.
    pub(super) fn run(&self, cluster: u64, end: u64) -> (LayerNumber, u64) {
        let wanted = self.layer(cluster);
        let mut next = cluster;
        while next < end {
            let (leaf, place) = position(next);
            let leaf_end = (next / CLUSTERS_PER_LEAF + 1) * CLUSTERS_PER_LEAF;
            match leaf.and_then(|leaf| self.leaf(leaf)) {
                None if wanted != BASE => return (wanted, next),
                None => next = leaf_end,
                Some(leaf) => {
                    let rest = leaf.layers.get(place..).unwrap_or_default();
                    match (next..leaf_end).zip(rest).find(|(_, layer)| **layer != wanted) {
                        Some((other, _)) => return (wanted, other.min(end)),
                        None => next = leaf_end,
                    }
                }
            }
        }
        (wanted, end)
    }

    /// What the top layer holds. An empty layer becomes the top. Nothing, and no change, if there
    /// are more layers than can be counted.
    pub(super) fn seal(&mut self) -> Option<SealedMap> {
        let top = self.top;
        self.top.checked_add(1)?;
        let mut with_top = self.with_top.clone();
        with_top.sort_unstable();
        let mut runs: Vec<Run> = Vec::new();
        for index in with_top {
            let (Some(leaf), Ok(number)) = (self.leaf(index), u64::try_from(index)) else {
                continue;
            };
            let Ok(start) = u64::try_from(leaf.top.start) else { continue };
            let mut cluster = number * CLUSTERS_PER_LEAF + start;
            let places = leaf.layers.get(leaf.top.clone()).unwrap_or_default();
            for group in places.chunk_by(|a, b| a == b) {
                let count = u64::try_from(group.len()).unwrap_or(CLUSTERS_PER_LEAF);
                if group.first() == Some(&top) {
                    match runs.last_mut().filter(|run| run.end() == cluster) {
                        Some(run) => run.count += count,
                        None => runs.push(Run { first: cluster, count }),
                    }
                }
                cluster += count;
            }
        }
        self.next_top()?;
        SealedMap::new(self.clusters, runs)
    }

    fn next_top(&mut self) -> Option<()> {
        self.top = self.top.checked_add(1)?;
        for index in std::mem::take(&mut self.with_top) {
            if let Some(leaf) = self.leaf_mut(index) {
                leaf.top = 0..0;
            }
        }
        Some(())
    }

    fn fill(&mut self, first: u64, end: u64) {
        let top = self.top;
        let mut next = first;
        while next < end {
            let leaf_end = ((next / CLUSTERS_PER_LEAF + 1) * CLUSTERS_PER_LEAF).min(end);
            let (Some(index), place) = position(next) else { return };
            let count = usize::try_from(leaf_end - next).unwrap_or(LEAF_CLUSTERS);
            let Some(leaf) = self.make_leaf(index) else { return };
            let places = place..place + count;
            if let Some(layers) = leaf.layers.get_mut(places.clone()) {
                layers.fill(top);
            }
            if leaf.top.is_empty() {
                leaf.top = places;
                self.with_top.push(index);
            } else {
                leaf.top = leaf.top.start.min(places.start)..leaf.top.end.max(places.end);
            }
            next = leaf_end;
        }
    }

    fn leaf(&self, index: usize) -> Option<&Leaf> {
        let place = usize::try_from(self.table.get(index)?.checked_sub(1)?).ok()?;
        self.leaves.get(place)
    }

    fn leaf_mut(&mut self, index: usize) -> Option<&mut Leaf> {
        let place = usize::try_from(self.table.get(index)?.checked_sub(1)?).ok()?;
        self.leaves.get_mut(place)
    }

    fn make_leaf(&mut self, index: usize) -> Option<&mut Leaf> {
        let entry = self.table.get_mut(index)?;
        if *entry == 0 {
            self.leaves.push(Leaf { layers: Box::new([BASE; LEAF_CLUSTERS]), top: 0..0 });
            *entry = u32::try_from(self.leaves.len()).ok()?;
        }
        self.leaf_mut(index)
    }
}

/// The leaf of a cluster and the place in it.
fn position(cluster: u64) -> (Option<usize>, usize) {
    let place = usize::try_from(cluster % CLUSTERS_PER_LEAF).unwrap_or(LEAF_CLUSTERS);
    (usize::try_from(cluster / CLUSTERS_PER_LEAF).ok(), place)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CLUSTERS: u64 = 3 * CLUSTERS_PER_LEAF - 5;

    fn check(map: &ClusterMap, model: &[LayerNumber]) {
        let mut cluster = 0;
        while cluster < CLUSTERS {
            let (layer, end) = map.run(cluster, CLUSTERS);
            assert!(end > cluster && end <= CLUSTERS);
            for inside in cluster..end {
                assert_eq!(model[usize::try_from(inside).unwrap()], layer, "{inside}");
                assert_eq!(map.layer(inside), layer);
            }
            if let Some(next) = model.get(usize::try_from(end).unwrap()) {
                assert_ne!(*next, layer, "the run ends too early");
            }
            cluster = end;
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_plain_vector(
            layers in prop::collection::vec(
                prop::collection::vec((0..CLUSTERS, 1u64..1500), 0..12),
                1..5,
            ),
        ) {
            let mut map = ClusterMap::new(CLUSTERS, []).unwrap();
            let mut model = vec![BASE; usize::try_from(CLUSTERS).unwrap()];
            let mut sealed = Vec::new();
            for (number, ranges) in (1..).zip(layers) {
                for (first, len) in ranges {
                    map.insert(first, first + len);
                    let end = (first + len).min(CLUSTERS);
                    model[usize::try_from(first).unwrap()..usize::try_from(end).unwrap()]
                        .fill(number);
                }
                check(&map, &model);
                let layer = map.seal().unwrap();
                let held: Vec<u64> = layer.runs().flat_map(|run| run.first..run.end()).collect();
                let wanted: Vec<u64> =
                    (0..).zip(&model).filter(|(_, l)| **l == number).map(|(c, _)| c).collect();
                prop_assert_eq!(held, wanted);
                sealed.push(layer);
            }
            check(&map, &model);
            check(&ClusterMap::new(CLUSTERS, &sealed).unwrap(), &model);
        }
    }

    #[test]
    fn a_sparse_map_has_few_leaves() {
        let mut map = ClusterMap::new(1 << 28, []).unwrap();
        map.insert(1 << 27, (1 << 27) + 2);
        assert_eq!(map.leaves.len(), 1);
    }
}
