//! What a machine takes of the host's memory: private and shared as a bar, Pss as a mark across it.

use std::fmt::{self, Write as _};

use super::plot::{self, BOTTOM, LEFT, RIGHT, ROW, Scale, TOP};
use super::{Shown, Text, parameters};
use crate::model::{Series, Unit};
use crate::statistics::Line;

/// What names of metrics say of the kind of memory, in the order of [`Row::kinds`].
const KINDS: [(&str, &str); 3] = [("_private", "private"), ("_shared", "shared"), ("_pss", "Pss")];

/// One contender's machine: medians in KiB.
struct Row<'a> {
    contender: &'a str,
    kinds: [Option<f64>; 3],
}

/// One plot: the metrics that differ in the kind of memory alone.
struct Plot<'a> {
    stem: String,
    like: &'a Series,
    rows: Vec<Row<'a>>,
}

/// A plot for each moment at which memory was looked at.
pub(super) fn all(page: &mut String, shown: &Shown<'_>) -> fmt::Result {
    let mut plots: Vec<Plot<'_>> = Vec::new();
    for (series, line) in shown.groups.iter().flatten() {
        add(&mut plots, series, line);
    }
    plots.iter().try_for_each(|plot| one(page, shown, plot))
}

fn add<'a>(plots: &mut Vec<Plot<'a>>, series: &'a Series, line: &Line) {
    let kind = KINDS.iter().position(|(word, _)| series.metric.contains(word));
    let median = line.summary.map(|summary| summary.p50.value).filter(|value| *value >= 0.0);
    let (Some(kind), Some(median), Unit::KiB) = (kind, median, series.unit) else { return };
    let word = KINDS.get(kind).map_or("", |(word, _)| word);
    let stem = series.metric.replacen(word, "", 1);
    let alike = |plot: &Plot<'_>| {
        plot.stem == stem
            && plot.like.scenario == series.scenario
            && parameters(plot.like) == parameters(series)
    };
    let at = plots.iter().position(alike).unwrap_or_else(|| {
        plots.push(Plot { stem, like: series, rows: Vec::new() });
        plots.len() - 1
    });
    let Some(Plot { rows, .. }) = plots.get_mut(at) else { return };
    let row = rows.iter().position(|row| row.contender == series.contender);
    let row = row.unwrap_or_else(|| {
        rows.push(Row { contender: &series.contender, kinds: [None; 3] });
        rows.len() - 1
    });
    if let Some(place) = rows.get_mut(row).and_then(|row| row.kinds.get_mut(kind)) {
        place.get_or_insert(median);
    }
}

fn one(page: &mut String, shown: &Shown<'_>, plot: &Plot<'_>) -> fmt::Result {
    let reach = |row: &Row<'_>| {
        let [private, shared, pss] = row.kinds.map(Option::unwrap_or_default);
        [private + shared, pss]
    };
    let ends = plot.rows.iter().flat_map(reach).chain([0.0]);
    let scale = plot::bounds(ends).and_then(|bounds| Scale::new(bounds, (LEFT, RIGHT)));
    let Some(scale) = scale else { return Ok(()) };
    let mut bottom = TOP;
    plot.rows.iter().for_each(|_| bottom += ROW);
    let said: Vec<String> = plot.rows.iter().map(words).collect();
    let about = parameters(plot.like);
    plot::begin(page, bottom + BOTTOM, (&plot.stem, &about), &said.join("; "))?;
    plot::axis(page, &scale, bottom, "KiB, medians")?;
    let mut y = TOP + ROW / 2.0;
    for row in &plot.rows {
        write!(page, "<g class=\"{}\">", shown.class(row.contender))?;
        plot::row_name(page, y, row.contender)?;
        bar(page, &scale, y, row)?;
        page.push_str("</g>");
        y += ROW;
    }
    page.push_str("</svg><ul class=\"keys tones\">");
    for (kind, (_, name)) in KINDS.iter().enumerate() {
        let is_there = |row: &Row<'_>| row.kinds.get(kind).is_some_and(Option::is_some);
        if plot.rows.iter().any(is_there) {
            write!(page, "<li><i class=\"m{kind}\"></i>{name}</li>")?;
        }
    }
    page.push_str("</ul>");
    said.iter().try_for_each(|said| write!(page, "<small>{}</small><br>", Text(said)))?;
    page.push_str("</figure>");
    Ok(())
}

fn bar(page: &mut String, scale: &Scale, y: f64, row: &Row<'_>) -> fmt::Result {
    let [private, shared, pss] = row.kinds;
    let mut before = 0.0;
    for (class, part) in [("m0", private), ("m1", shared)] {
        let Some(part) = part else { continue };
        let (from, to) = (scale.at(before), scale.at(before + part));
        write!(
            page,
            "<rect class=\"stage {class}\" x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" \
             height=\"22\"/>",
            y - 11.0,
            (to - from).max(0.0)
        )?;
        before += part;
    }
    let Some(pss) = pss else { return Ok(()) };
    let x = scale.at(pss);
    write!(
        page,
        "<line class=\"pss\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
        y - 15.0,
        y + 15.0
    )
}

fn words(row: &Row<'_>) -> String {
    let told = KINDS
        .iter()
        .zip(row.kinds)
        .filter_map(|((_, name), value)| Some(format!("{name} {}", plot::number(value?))));
    format!("{}: {} KiB", row.contender, told.collect::<Vec<_>>().join(", "))
}
