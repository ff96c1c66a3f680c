//! What follows from samples: percentiles with intervals, ratios of pairs, outliers and noise.
//!
//! Intervals are those of the percentile bootstrap, 95 %, drawn with a fixed seed: the same report
//! gives the same figures. Nothing is dropped: outliers are counted and marked.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::model::{Report, Series, Unit};
use crate::schedule::AGAIN;

/// How often the samples are drawn anew for an interval, where that is not too much work.
const RESAMPLES: usize = 2000;
/// The least of it, however many samples there are.
const FEWEST_RESAMPLES: usize = 200;
/// Draws that an interval may take.
const WORK: usize = 10_000_000;
/// Samples that there have to be, and beyond a percentile, for an interval.
const FEWEST: usize = 5;
/// An outlier is so many interquartile ranges away from the quartiles (Tukey's "far out").
const FAR_OUT: f64 = 3.0;

/// Where a figure lies with 95 % confidence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    /// Its lower end.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

/// A figure, and how sure it is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The figure.
    pub value: f64,
    /// Its interval; none when there are too few samples to say.
    pub interval: Option<Interval>,
}

/// What samples of one thing say.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// How many there are.
    pub n: usize,
    /// Their median.
    pub p50: Estimate,
    /// Their 95th percentile (nearest rank).
    pub p95: Estimate,
    /// Their 99th percentile (nearest rank).
    pub p99: Estimate,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
    /// How many are outliers; they count like all others.
    pub outliers: usize,
}

/// A series of a report, and what it says beside the first contender's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// The scenario.
    pub scenario: String,
    /// What was measured.
    pub metric: String,
    /// Its unit.
    pub unit: Unit,
    /// Whose it is.
    pub contender: String,
    /// The series' parameters.
    pub parameters: BTreeMap<String, String>,
    /// What its samples say; none when there are none.
    pub summary: Option<Summary>,
    /// Median of the ratios of the first contender's samples to these, in pairs of one round.
    pub ratio: Option<Estimate>,
    /// Whether that differs from 1 by more than the first contender does from itself; none when
    /// it is not known.
    pub beyond_noise: Option<bool>,
}

/// Summarises samples, with this seed for the intervals. None of none, and none when a value is
/// not a finite number.
#[must_use]
pub fn summarise(values: &[f64], seed: u64) -> Option<Summary> {
    let sorted = sorted(values)?;
    let [p50, p95, p99] = percentiles(&sorted, [50, 95, 99], seed);
    Some(Summary {
        n: sorted.len(),
        p50: p50?,
        p95: p95?,
        p99: p99?,
        min: *sorted.first()?,
        max: *sorted.last()?,
        outliers: outliers(values).into_iter().filter(|outlier| *outlier).count(),
    })
}

/// The median of the ratios of pairs, first to second. Pairs whose ratio is no positive finite
/// number are left out.
#[must_use]
pub fn ratio(pairs: &[(f64, f64)], seed: u64) -> Option<Estimate> {
    let ratios = pairs.iter().map(|(a, b)| a / b);
    let ratios: Vec<f64> = ratios.filter(|ratio| ratio.is_finite() && *ratio > 0.0).collect();
    let [median] = percentiles(&sorted(&ratios)?, [50], seed);
    median
}

/// The ratio of the medians of samples that are not pairs, first to second.
#[must_use]
pub fn ratio_of_medians(first: &[f64], second: &[f64], seed: u64) -> Option<Estimate> {
    let (a, b) = (sorted(first)?, sorted(second)?);
    let quotient = |a: f64, b: f64| Some(a / b).filter(|ratio| ratio.is_finite() && *ratio > 0.0);
    let value = quotient(at_rank(&a, 50)?, at_rank(&b, 50)?)?;
    if a.len().min(b.len()) < FEWEST {
        return Some(Estimate { value, interval: None });
    }
    let mut lot = fastrand::Rng::with_seed(seed);
    let mut draws = Vec::new();
    for _ in 0..resamples(a.len().saturating_add(b.len())) {
        let [a] = draw(&a, [50], &mut lot);
        let [b] = draw(&b, [50], &mut lot);
        draws.extend(a.zip(b).and_then(|(a, b)| quotient(a, b)));
    }
    Some(Estimate { value, interval: interval(draws) })
}

/// Which samples are outliers: further than three interquartile ranges from the quartiles.
#[must_use]
pub fn outliers(values: &[f64]) -> Vec<bool> {
    let quartiles = sorted(values)
        .filter(|sorted| sorted.len() >= FEWEST)
        .and_then(|sorted| Some((at_rank(&sorted, 25)?, at_rank(&sorted, 75)?)));
    let Some((low, high)) = quartiles else { return vec![false; values.len()] };
    let reach = FAR_OUT * (high - low);
    values.iter().map(|value| *value < low - reach || *value > high + reach).collect()
}

/// Every series of a report, beside the first contender's.
#[must_use]
pub fn compared(report: &Report) -> Vec<Line> {
    let first = report.contenders.first().map_or("", |contender| contender.name.as_str());
    let again = format!("{first}{AGAIN}");
    let mut all: BTreeMap<(&str, Thing<'_>), &Series> = BTreeMap::new();
    for series in &report.series {
        all.entry((&series.contender, thing(series))).or_insert(series);
    }
    let find = |whose: &str, like: &Series| all.get(&(whose, thing(like))).copied();
    let lines = report.series.iter().map(|series| {
        let own = find(first, series);
        let beside = |other: &Series| ratio(&pairs(own?, other), report.seed);
        let ratio = if series.contender == first { None } else { beside(series) };
        let noise = find(&again, series).and_then(beside);
        let told = ratio.filter(|_| series.contender != again);
        Line {
            scenario: series.scenario.clone(),
            metric: series.metric.clone(),
            unit: series.unit,
            contender: series.contender.clone(),
            parameters: series.parameters.clone(),
            summary: summarise(&counted(series), report.seed),
            ratio,
            beyond_noise: told.zip(noise).and_then(|(ratio, noise)| is_beyond(ratio, noise)),
        }
    });
    lines.collect()
}

/// The values of a series that count.
#[must_use]
pub fn counted(series: &Series) -> Vec<f64> {
    let counted = series.samples.iter().filter(|sample| !sample.warm_up);
    counted.map(|sample| sample.value).collect()
}

/// Parameters that have to agree for two series to be compared.
const SIZES: [&str; 4] = ["memory_mib", "vcpus", "cache", "concurrency"];

/// The parameters of a series that have to agree with another's to be compared with it.
#[must_use]
pub fn sizes(series: &Series) -> Vec<(&String, &String)> {
    let compared = |(name, _): &(&String, &String)| SIZES.contains(&name.as_str());
    series.parameters.iter().filter(compared).collect()
}

/// What is measured: the scenario, the metric, and the parameters that have to agree.
pub type Thing<'a> = (&'a str, &'a str, Vec<(&'a String, &'a String)>);

/// What a series is of, whoever's it is.
#[must_use]
pub fn thing(series: &Series) -> Thing<'_> {
    (&series.scenario, &series.metric, sizes(series))
}

/// Samples of the same round, each with the other's at the same place in it.
fn pairs(one: &Series, other: &Series) -> Vec<(f64, f64)> {
    let placed = |series: &Series| {
        let mut places: BTreeMap<u32, usize> = BTreeMap::new();
        let counted = series.samples.iter().filter(|sample| !sample.warm_up);
        let placed = counted.map(|sample| {
            let place = places.entry(sample.round).or_default();
            *place += 1;
            ((sample.round, *place), sample.value)
        });
        placed.collect::<BTreeMap<_, _>>()
    };
    let others = placed(other);
    let ours = placed(one).into_iter();
    ours.filter_map(|(place, value)| Some((value, *others.get(&place)?))).collect()
}

/// Whether a ratio is not 1, and further from it than noise is.
fn is_beyond(ratio: Estimate, noise: Estimate) -> Option<bool> {
    let (ratio, noise) = (ratio.interval?, noise.interval?);
    let away = |value: f64| value.ln().abs();
    let loudest = away(noise.low).max(away(noise.high));
    let apart = ratio.low > 1.0 || ratio.high < 1.0;
    Some(apart && away(ratio.low).min(away(ratio.high)) > loudest)
}

fn sorted(values: &[f64]) -> Option<Vec<f64>> {
    if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(sorted)
}

/// Position of a nearest-rank percentile, from 1 to 100, among so many.
fn rank(count: usize, percent: usize) -> usize {
    (count.saturating_mul(percent)).div_ceil(100).max(1) - 1
}

fn at_rank(sorted: &[f64], percent: usize) -> Option<f64> {
    sorted.get(rank(sorted.len(), percent)).copied()
}

/// Percentiles of sorted samples with their intervals, which those have beyond which some samples
/// are to be expected. They are too narrow still where that is few of them.
fn percentiles<const N: usize>(
    sorted: &[f64],
    percents: [usize; N],
    seed: u64,
) -> [Option<Estimate>; N] {
    let mut lot = fastrand::Rng::with_seed(seed);
    let mut draws: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    if sorted.len() >= FEWEST {
        for _ in 0..resamples(sorted.len()) {
            let drawn = draw(sorted, percents, &mut lot);
            draws.iter_mut().zip(drawn).for_each(|(draws, value)| draws.extend(value));
        }
    }
    let mut draws = draws.into_iter();
    percents.map(|percent| {
        let enough = sorted.len().saturating_mul(100 - percent) >= 100 * FEWEST;
        let interval = draws.next().filter(|_| enough).and_then(interval);
        Some(Estimate { value: at_rank(sorted, percent)?, interval })
    })
}

fn resamples(count: usize) -> usize {
    (WORK / count.max(1)).clamp(FEWEST_RESAMPLES, RESAMPLES)
}

/// Percentiles of as many samples as there are, drawn from them.
fn draw<const N: usize>(
    sorted: &[f64],
    percents: [usize; N],
    lot: &mut fastrand::Rng,
) -> [Option<f64>; N] {
    let mut places: Vec<usize> = sorted.iter().map(|_| lot.usize(..sorted.len())).collect();
    percents.map(|percent| {
        let (_, place, _) = places.select_nth_unstable(rank(sorted.len(), percent));
        sorted.get(*place).copied()
    })
}

/// The middle 95 % of what was drawn.
fn interval(mut draws: Vec<f64>) -> Option<Interval> {
    draws.sort_by(f64::total_cmp);
    let tail = draws.len() / 40;
    let low = *draws.get(tail)?;
    let high = *draws.get(draws.len().checked_sub(1 + tail)?)?;
    Some(Interval { low, high })
}

#[cfg(test)]
mod tests;
