//! Statistics of samples whose distribution is known.

use proptest::prelude::*;

use super::*;

const SEED: u64 = 1;

/// How many of so many intervals hold the true value.
fn hits(
    (trials, n): (u64, usize),
    truth: f64,
    mut sample: impl FnMut(&mut fastrand::Rng) -> f64,
    pick: impl Fn(&Summary) -> Estimate,
) -> usize {
    let mut lot = fastrand::Rng::with_seed(7);
    let held = (0..trials).filter(|seed| {
        let values: Vec<f64> = (0..n).map(|_| sample(&mut lot)).collect();
        let interval = pick(&summarise(&values, *seed).unwrap()).interval.unwrap();
        (interval.low..=interval.high).contains(&truth)
    });
    held.count()
}

/// By Box and Muller.
fn normal(lot: &mut fastrand::Rng) -> f64 {
    let (a, b) = (1.0 - lot.f64(), lot.f64());
    (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

fn exponential(lot: &mut fastrand::Rng) -> f64 {
    -(1.0 - lot.f64()).ln()
}

#[test]
fn nineteen_of_twenty_intervals_hold_the_median_of_a_normal_distribution() {
    let held = hits((400, 41), 100.0, |lot| 100.0 + 5.0 * normal(lot), |summary| summary.p50);
    assert!((364..=396).contains(&held), "{held} of 400");
}

#[test]
fn nineteen_of_twenty_intervals_hold_the_median_of_a_skewed_distribution() {
    let held = hits((400, 41), std::f64::consts::LN_2, exponential, |summary| summary.p50);
    assert!((364..=396).contains(&held), "{held} of 400");
}

#[test]
fn most_intervals_hold_the_95th_percentile() {
    let held = hits((100, 200), 20f64.ln(), exponential, |summary| summary.p95);
    assert!((82..=100).contains(&held), "{held} of 100");
}

#[test]
fn nineteen_of_twenty_intervals_hold_the_ratio_of_pairs_that_share_their_noise() {
    let mut lot = fastrand::Rng::with_seed(3);
    let held = (0..400).filter(|seed| {
        let pair = |lot: &mut fastrand::Rng| {
            // What the host does to both of a round is ten times what is to be seen.
            let host = (0.5 * normal(lot)).exp();
            let own = |lot: &mut fastrand::Rng| (0.05 * normal(lot)).exp();
            (0.8 * host * own(lot), host * own(lot))
        };
        let pairs: Vec<_> = (0..30).map(|_| pair(&mut lot)).collect();
        let interval = ratio(&pairs, *seed).unwrap().interval.unwrap();
        assert!(interval.high - interval.low < 0.15, "{interval:?}");
        (interval.low..=interval.high).contains(&0.8)
    });
    let held = held.count();
    assert!((364..=398).contains(&held), "{held} of 400");
}

#[test]
fn a_difference_as_small_as_the_noise_is_not_told_as_one() {
    let estimate = |value: f64, reach: f64| Estimate {
        value,
        interval: Some(Interval { low: value - reach, high: value + reach }),
    };
    let noise = estimate(1.0, 0.05);
    assert_eq!(is_beyond(estimate(0.5, 0.1), noise), Some(true));
    assert_eq!(is_beyond(estimate(0.97, 0.01), noise), Some(false));
    assert_eq!(is_beyond(estimate(0.9, 0.2), noise), Some(false));
    assert_eq!(is_beyond(estimate(2.0, 0.1), noise), Some(true));
    assert_eq!(is_beyond(Estimate { value: 0.5, interval: None }, noise), None);
}

#[test]
fn outliers_are_marked_and_count() {
    let mut values: Vec<f64> = (0..20).map(f64::from).collect();
    values.push(1000.0);
    let marked = outliers(&values);
    assert_eq!(marked.iter().filter(|outlier| **outlier).count(), 1);
    assert_eq!(marked.last(), Some(&true));
    let summary = summarise(&values, SEED).unwrap();
    assert_eq!((summary.n, summary.outliers, summary.max), (21, 1, 1000.0));
}

#[test]
fn few_samples_have_figures_without_intervals() {
    assert_eq!(summarise(&[], SEED), None);
    let one = summarise(&[3.5], SEED).unwrap();
    assert_eq!((one.p50.value, one.p99.value, one.p50.interval), (3.5, 3.5, None));
    let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
    let summary = summarise(&hundred, SEED).unwrap();
    assert_eq!((summary.p50.value, summary.p95.value, summary.p99.value), (50.0, 95.0, 99.0));
    assert!(summary.p50.interval.is_some() && summary.p95.interval.is_some());
    assert_eq!(summary.p99.interval, None);
}

#[test]
fn what_is_no_number_is_refused() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(summarise(&[1.0, bad], SEED), None);
        assert_eq!(ratio(&[(bad, 1.0), (1.0, 0.0), (0.0, 0.0)], SEED), None);
        assert_eq!(outliers(&[1.0, bad]), [false, false]);
        assert_eq!(ratio_of_medians(&[bad], &[1.0], SEED), None);
    }
}

proptest! {
    #[test]
    fn an_interval_lies_among_the_samples_and_is_the_same_for_the_same_seed(
        values in prop::collection::vec(-1e12..1e12f64, 10..60), seed: u64,
    ) {
        let summary = summarise(&values, seed).unwrap();
        prop_assert_eq!(summarise(&values, seed).unwrap(), summary);
        let interval = summary.p50.interval.unwrap();
        prop_assert!(summary.min <= interval.low && interval.low <= interval.high);
        prop_assert!(interval.high <= summary.max);
        prop_assert!(summary.p50.value <= summary.p95.value);
        prop_assert!(summary.p95.value <= summary.p99.value);
    }

    #[test]
    fn any_values_are_bounded_work_and_no_panic(
        values in prop::collection::vec(any::<f64>(), 0..40),
    ) {
        let _ = (summarise(&values, SEED), outliers(&values));
        let pairs: Vec<_> = values.iter().map(|value| (*value, value * 0.5)).collect();
        let _ = (ratio(&pairs, SEED), ratio_of_medians(&values, &values, SEED));
    }
}
