//! Which clusters a sealed layer of a disk holds, as runs, in memory and in a checkpoint.
//!
//! Encoded, all numbers are 64 bits, little-endian: the disk's size in clusters, then for each run
//! its first cluster and how many there are. Runs are in order and do not touch, so that a map has
//! one encoding.

use thiserror::Error;

const NUMBER: usize = 8;
const RUN: usize = 2 * NUMBER;

/// Clusters in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterRun {
    /// The first cluster.
    pub first: u64,
    /// How many, at least 1.
    pub count: u64,
}

impl ClusterRun {
    /// The first cluster after the run.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.count)
    }
}

/// The clusters that a sealed layer holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedMap {
    clusters: u64,
    /// In order, without touching each other, inside the disk.
    runs: Vec<ClusterRun>,
}

/// Most maps in one section: a checkpoint adds one layer to a disk, and more after failures.
const MAPS_MAX: usize = 1024;

/// Why bytes are not a map.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MapError {
    /// The length is none that a map has.
    #[error("the map of a disk layer has a length of {0} bytes, which no map has")]
    Length(usize),
    /// More maps than there are layers that one checkpoint adds.
    #[error("a checkpoint adds more than {MAPS_MAX} layers to a disk")]
    TooMany,
    /// A run is empty, outside the disk, or not after the one before it.
    #[error("the map of a disk layer is damaged at its run {0}")]
    Run(usize),
}

impl SealedMap {
    /// The map of a layer that holds `runs`, which are in order, do not touch, and lie inside a
    /// disk of `clusters`; nothing if they are not like that.
    #[must_use]
    pub fn new(clusters: u64, runs: Vec<ClusterRun>) -> Option<Self> {
        let mut end = None;
        for run in &runs {
            let follows = end.is_none_or(|end| run.first > end);
            let inside = run.first.checked_add(run.count).is_some_and(|end| end <= clusters);
            if run.count == 0 || !follows || !inside {
                return None;
            }
            end = Some(run.end());
        }
        Some(Self { clusters, runs })
    }

    /// The disk's size in clusters of 4096 bytes; the last may be cut off by the disk's end.
    #[must_use]
    pub fn disk_clusters(&self) -> u64 {
        self.clusters
    }

    /// How many clusters the layer holds.
    #[must_use]
    pub fn held_clusters(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    /// The runs in order.
    pub fn runs(&self) -> impl Iterator<Item = ClusterRun> {
        self.runs.iter().copied()
    }

    /// The map as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(NUMBER + self.runs.len() * RUN);
        bytes.extend(self.clusters.to_le_bytes());
        for run in &self.runs {
            bytes.extend(run.first.to_le_bytes());
            bytes.extend(run.count.to_le_bytes());
        }
        bytes
    }

    /// Reads what [`SealedMap::encode`] wrote. The bytes may be anything; the map takes about as
    /// much memory as they do.
    ///
    /// # Errors
    /// [`MapError`] for anything but the one encoding of a map.
    pub fn decode(bytes: &[u8]) -> Result<Self, MapError> {
        let length = MapError::Length(bytes.len());
        let Some((clusters, rest)) = bytes.split_first_chunk::<NUMBER>() else {
            return Err(length);
        };
        let clusters = u64::from_le_bytes(*clusters);
        let (numbers, tail) = rest.as_chunks::<NUMBER>();
        let (pairs, odd) = numbers.as_chunks::<2>();
        if !tail.is_empty() || !odd.is_empty() {
            return Err(length);
        }
        let mut runs: Vec<ClusterRun> = Vec::with_capacity(pairs.len());
        for (number, pair) in pairs.iter().enumerate() {
            let [first, count] = pair.map(u64::from_le_bytes);
            let follows = runs.last().is_none_or(|before| first > before.end());
            let inside = first.checked_add(count).is_some_and(|end| end <= clusters);
            if count == 0 || !follows || !inside {
                return Err(MapError::Run(number));
            }
            runs.push(ClusterRun { first, count });
        }
        Ok(Self { clusters, runs })
    }
}

/// The maps of the layers that one checkpoint adds to a disk, each with its length before it: the
/// content of a section [`crate::Kind::DiskMap`].
#[must_use]
pub fn encode_maps(maps: &[SealedMap]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for map in maps {
        let map = map.encode();
        bytes.extend(u64::try_from(map.len()).unwrap_or(u64::MAX).to_le_bytes());
        bytes.extend(map);
    }
    bytes
}

/// Reads what [`encode_maps`] wrote.
///
/// # Errors
/// [`MapError`] for anything else.
pub fn decode_maps(mut bytes: &[u8]) -> Result<Vec<SealedMap>, MapError> {
    let mut maps = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<NUMBER>() {
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let (map, rest) = rest.split_at_checked(length).ok_or(MapError::Length(length))?;
        if maps.len() == MAPS_MAX {
            return Err(MapError::TooMany);
        }
        maps.push(SealedMap::decode(map)?);
        bytes = rest;
    }
    if bytes.is_empty() { Ok(maps) } else { Err(MapError::Length(bytes.len())) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(numbers: &[u64]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn runs_must_be_in_order_apart_and_inside_the_disk() {
        for (numbers, run) in [
            (&[10, 3, 0][..], 0),
            (&[10, 3, 2, 5, 1], 1),
            (&[10, 3, 2, 4, 1], 1),
            (&[10, 3, 2, 1, 1], 1),
            (&[10, 9, 2], 0),
            (&[10, u64::MAX, 2], 0),
            (&[u64::MAX, u64::MAX, 1], 0),
        ] {
            assert_eq!(SealedMap::decode(&bytes(numbers)), Err(MapError::Run(run)), "{numbers:?}");
        }
    }

    #[test]
    fn a_cut_map_is_refused() {
        let whole = bytes(&[10, 3, 2, 6, 4]);
        for len in (0..whole.len()).filter(|len| ![8, 24].contains(len)) {
            assert_eq!(SealedMap::decode(&whole[..len]), Err(MapError::Length(len)));
        }
    }

    #[test]
    fn a_list_of_maps_is_read_as_it_was_written_and_not_cut_short() {
        let maps = [&[10, 3, 2][..], &[10], &[10, 0, 1, 9, 1]]
            .map(|numbers| SealedMap::decode(&bytes(numbers)).unwrap());
        let whole = encode_maps(&maps);
        assert_eq!(decode_maps(&whole).unwrap(), maps);
        let ends = [0, 32, 48];
        for len in (0..whole.len()).filter(|len| !ends.contains(len)) {
            decode_maps(&whole[..len]).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_to_the_same(
            clusters in 0u64..40,
            pairs in prop::collection::vec((0u64..40, 0u64..5), 0..4),
        ) {
            let mut numbers = vec![clusters];
            numbers.extend(pairs.iter().flat_map(|(first, count)| [*first, *count]));
            let bytes = bytes(&numbers);
            if let Ok(map) = SealedMap::decode(&bytes) {
                prop_assert_eq!(map.encode(), bytes);
                prop_assert!(map.held_clusters() <= clusters);
            }
        }
    }
}
