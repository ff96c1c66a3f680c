//! Percentiles of small samples.

use serde::Serialize;

/// Summary of a duration in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Micros {
    /// Median.
    pub p50: f64,
    /// 99th percentile (nearest rank).
    pub p99: f64,
    /// Number of samples.
    pub n: usize,
}

/// Summarises durations in microseconds; `None` without any.
pub fn micros(samples: &[f64]) -> Option<Micros> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(Micros { p50: rank(&sorted, 50)?, p99: rank(&sorted, 99)?, n: sorted.len() })
}

/// Nearest-rank percentile of sorted samples; `percent` from 1 to 100.
fn rank(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_rank_takes_real_samples() {
        let samples: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(micros(&samples), Some(Micros { p50: 100.0, p99: 198.0, n: 200 }));
    }

    #[test]
    fn one_sample_is_every_percentile() {
        assert_eq!(micros(&[3.5]), Some(Micros { p50: 3.5, p99: 3.5, n: 1 }));
    }

    #[test]
    fn no_samples_have_no_summary() {
        assert_eq!(micros(&[]), None);
    }
}
