//! Which clusters of a disk an overlay layer holds.
//!
//! One bit per cluster, in leaves that are made when first needed: a sparsely written disk costs
//! little memory whatever its size.

/// Bytes per cluster. Guests write whole pages almost always, so with clusters of a page hardly
/// any write has to copy from the base first.
pub(super) const CLUSTER: u64 = 4096;

const WORDS: usize = 64;
const CLUSTERS_PER_LEAF: u64 = 64 * 64;

type Leaf = [u64; WORDS];

/// A set of cluster numbers.
#[derive(Debug)]
pub(super) struct ClusterMap {
    leaves: Vec<Option<Box<Leaf>>>,
}

impl ClusterMap {
    /// An empty map for a disk of `clusters` clusters.
    pub(super) fn new(clusters: u64) -> Self {
        let mut leaves = Vec::new();
        let count = clusters.div_ceil(CLUSTERS_PER_LEAF);
        leaves.resize_with(usize::try_from(count).unwrap_or(usize::MAX), || None);
        Self { leaves }
    }

    /// Whether the layer holds `cluster`.
    pub(super) fn contains(&self, cluster: u64) -> bool {
        let Some((leaf, word, bit)) = position(cluster) else { return false };
        let leaf = self.leaves.get(leaf).and_then(Option::as_deref);
        leaf.and_then(|leaf| leaf.get(word)).is_some_and(|word| word & bit != 0)
    }

    /// Adds the clusters from `first` to `last`, both included. Those past the end of the disk
    /// are ignored.
    pub(super) fn insert(&mut self, first: u64, last: u64) {
        for cluster in first..=last {
            let Some((leaf, word, bit)) = position(cluster) else { return };
            let Some(leaf) = self.leaves.get_mut(leaf) else { return };
            let leaf = leaf.get_or_insert_with(|| Box::new([0; WORDS]));
            if let Some(word) = leaf.get_mut(word) {
                *word |= bit;
            }
        }
    }

    /// Whether the layer holds `cluster`, and up to which cluster (not included, at most `end`)
    /// that answer holds.
    pub(super) fn run(&self, cluster: u64, end: u64) -> (bool, u64) {
        let held = self.contains(cluster);
        let run_end = (cluster..end).find(|&next| self.contains(next) != held).unwrap_or(end);
        (held, run_end)
    }
}

/// Leaf, word in the leaf, and bit in the word.
fn position(cluster: u64) -> Option<(usize, usize, u64)> {
    let leaf = usize::try_from(cluster / CLUSTERS_PER_LEAF).ok()?;
    let word = usize::try_from(cluster % CLUSTERS_PER_LEAF / 64).ok()?;
    Some((leaf, word, 1 << (cluster % 64)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const CLUSTERS: u64 = 3 * CLUSTERS_PER_LEAF - 5;

    proptest! {
        #[test]
        fn agrees_with_a_plain_set(ranges in prop::collection::vec((0..CLUSTERS, 0u64..200), 0..20)) {
            let mut map = ClusterMap::new(CLUSTERS);
            let mut model = BTreeSet::new();
            for (first, len) in ranges {
                let last = (first + len).min(CLUSTERS - 1);
                map.insert(first, last);
                model.extend(first..=last);
            }
            let mut cluster = 0;
            while cluster < CLUSTERS {
                let (held, end) = map.run(cluster, CLUSTERS);
                prop_assert!(end > cluster);
                for inside in cluster..end {
                    prop_assert_eq!(model.contains(&inside), held);
                }
                cluster = end;
            }
        }
    }

    #[test]
    fn a_sparse_map_has_few_leaves() {
        let mut map = ClusterMap::new(1 << 28);
        map.insert(1 << 27, (1 << 27) + 1);
        assert_eq!(map.leaves.iter().flatten().count(), 1);
    }
}
