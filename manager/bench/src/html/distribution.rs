//! How samples are spread: each of them, quartiles and median, one row for each contender.

use std::fmt::{self, Write as _};

use super::plot::{self, BOTTOM, LEFT, RIGHT, ROW, Scale, TOP};
use super::{Shown, parameters};
use crate::measures::rank;
use crate::model::Series;
use crate::statistics::{self, Line};

/// Dots of a row, and crosses; of more samples every so many is drawn, of outliers the first ones.
const MOST_DOTS: usize = 400;

/// A plot for each thing that was measured.
pub(super) fn all(page: &mut String, shown: &Shown<'_>) -> fmt::Result {
    shown.groups.iter().try_for_each(|group| one(page, shown, group))
}

fn one(page: &mut String, shown: &Shown<'_>, group: &[(&Series, Line)]) -> fmt::Result {
    let rows: Vec<(&Series, Vec<f64>)> = group
        .iter()
        .map(|(series, _)| (*series, statistics::counted(series)))
        .filter(|(_, values)| values.iter().any(|value| value.is_finite()))
        .collect();
    let values = rows.iter().flat_map(|(_, values)| values.iter().copied());
    let scale = plot::bounds(values).and_then(|bounds| Scale::spread(bounds, (LEFT, RIGHT)));
    let (Some(scale), Some((first, _))) = (scale, rows.first()) else { return Ok(()) };
    let mut bottom = TOP;
    rows.iter().for_each(|_| bottom += ROW);
    let about = parameters(first) + &left_out(&rows);
    let words = words(&first.metric, group);
    plot::begin(page, bottom + BOTTOM, (&first.metric, &about), &words)?;
    let kind = if scale.is_logarithmic() { ", logarithmic" } else { "" };
    plot::axis(page, &scale, bottom, &format!("{}{kind}", plot::unit(first.unit)))?;
    let mut y = TOP + ROW / 2.0;
    for (series, values) in &rows {
        write!(page, "<g class=\"{}\">", shown.class(&series.contender))?;
        plot::row_name(page, y, &series.contender)?;
        row(page, &scale, y, values)?;
        page.push_str("</g>");
        y += ROW;
    }
    plot::end(page);
    Ok(())
}

/// What of the samples has no mark in the plot, if anything.
fn left_out(rows: &[(&Series, Vec<f64>)]) -> String {
    let mut told = String::new();
    if rows.iter().any(|(_, values)| values.len() > MOST_DOTS) {
        told += &format!(" (not every dot is drawn: about {MOST_DOTS} of a contender's)");
    }
    let strange = |(_, values): &(&Series, Vec<f64>)| {
        values.iter().filter(|value| !value.is_finite()).count()
    };
    match rows.iter().map(strange).sum::<usize>() {
        0 => {}
        count => told += &format!(" ({count} samples are no finite numbers and have no place)"),
    }
    told
}

fn words(metric: &str, group: &[(&Series, Line)]) -> String {
    let mut words = format!("Distribution of {metric}:");
    for (series, line) in group {
        if let Some(summary) = line.summary {
            words += &format!(
                " {} median {} {} of {} samples;",
                series.contender,
                plot::number(summary.p50.value),
                plot::unit(series.unit),
                summary.n
            );
        }
    }
    words
}

fn row(page: &mut String, scale: &Scale, y: f64, values: &[f64]) -> fmt::Result {
    let finite: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    if let [Some(low), Some(median), Some(high)] =
        [25, 50, 75].map(|percent| rank(&finite, percent))
    {
        let [low, median, high] = [low, median, high].map(|value| scale.at(value));
        write!(
            page,
            "<rect class=\"box\" x=\"{low:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"26\" rx=\"3\"/>\
             <line class=\"median\" x1=\"{median:.1}\" x2=\"{median:.1}\" y1=\"{:.1}\" \
             y2=\"{:.1}\"/>",
            y - 13.0,
            (high - low).max(1.0),
            y - 14.0,
            y + 14.0
        )?;
    }
    let every = values.len().div_ceil(MOST_DOTS).max(1);
    // Apart from each other, at the same places each time.
    let mut lot = fastrand::Rng::with_seed(1);
    let mut crosses = 0;
    for (at, (value, far)) in values.iter().zip(statistics::outliers(values)).enumerate() {
        let (x, y) = (scale.at(*value), y + (lot.f64() - 0.5) * 18.0);
        if !value.is_finite() {
        } else if far {
            crosses += 1;
            if crosses > MOST_DOTS {
                continue;
            }
            write!(
                page,
                "<path class=\"out\" d=\"M{:.1} {:.1}l7 7m0 -7l-7 7\"/>",
                x - 3.5,
                y - 3.5
            )?;
        } else if at % every == 0 {
            write!(page, "<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>")?;
        }
    }
    Ok(())
}
