//! Where the time of a sample goes: stages one after the other, one bar for each contender.

use std::fmt::{self, Write as _};

use super::plot::{self, BOTTOM, LEFT, RIGHT, ROW, Scale, TOP};
use super::{Shown, Text, parameters};
use crate::measures::rank;
use crate::model::Series;
use crate::statistics::Line;

/// Stages of a bar.
const MOST: usize = 12;
/// Tones of a contender's colour, which stages take in turns.
const TONES: usize = 4;

/// A plot for each thing whose samples have stages.
pub(super) fn all(page: &mut String, shown: &Shown<'_>) -> fmt::Result {
    shown.groups.iter().try_for_each(|group| one(page, shown, group))
}

/// The stages of a series in the order they are reached, each with its median time.
fn reached(series: &Series) -> Vec<(&str, f64)> {
    let mut names: Vec<&str> = Vec::new();
    let counted = || series.samples.iter().filter(|sample| !sample.warm_up);
    for stage in counted().flat_map(|sample| &sample.stages) {
        if names.len() < MOST && !names.contains(&stage.name.as_str()) {
            names.push(&stage.name);
        }
    }
    let median = |name: &str| {
        let stages = counted().flat_map(|sample| &sample.stages);
        let times = stages.filter(|stage| stage.name == name && stage.ms.is_finite());
        rank(&times.map(|stage| stage.ms).collect::<Vec<_>>(), 50).filter(|ms| *ms >= 0.0)
    };
    let mut stages: Vec<_> =
        names.into_iter().filter_map(|name| Some((name, median(name)?))).collect();
    stages.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    stages
}

fn one(page: &mut String, shown: &Shown<'_>, group: &[(&Series, Line)]) -> fmt::Result {
    let rows: Vec<_> = group
        .iter()
        .map(|(series, _)| (*series, reached(series)))
        .filter(|(_, stages)| stages.len() > 1)
        .collect();
    // A stage has the same tone in all rows, those that lack another one too.
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flat_map(|(_, stages)| stages) {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let tone = |name: &str| names.iter().position(|one| *one == name).unwrap_or_default() % TONES;
    let ends = rows.iter().filter_map(|(_, stages)| stages.last()).map(|(_, ms)| *ms);
    let scale = plot::bounds(ends.chain([0.0])).and_then(|all| Scale::new(all, (LEFT, RIGHT)));
    let (Some(scale), Some((first, _))) = (scale, rows.first()) else { return Ok(()) };
    let mut bottom = TOP;
    rows.iter().for_each(|_| bottom += ROW);
    let words = words(&first.metric, &rows);
    plot::begin(page, bottom + BOTTOM, (&first.metric, &parameters(first)), &words)?;
    plot::axis(page, &scale, bottom, "ms since the request")?;
    let mut y = TOP + ROW / 2.0;
    for (series, stages) in &rows {
        write!(page, "<g class=\"{}\">", shown.class(&series.contender))?;
        plot::row_name(page, y, &series.contender)?;
        let mut before = 0.0;
        for (name, ms) in stages {
            let (from, to) = (scale.at(before), scale.at(*ms));
            write!(
                page,
                "<rect class=\"stage s{}\" x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" \
                 height=\"22\"><title>{}: {} ms</title></rect>",
                tone(name),
                y - 11.0,
                (to - from).max(0.0),
                Text(name),
                plot::number(*ms)
            )?;
            before = *ms;
        }
        page.push_str("</g>");
        y += ROW;
    }
    page.push_str("</svg><ul class=\"keys tones\">");
    for name in names.iter().take(MOST) {
        write!(page, "<li><i class=\"s{}\"></i>{}</li>", tone(name), Text(name))?;
    }
    page.push_str("</ul>");
    legend(page, &rows)?;
    page.push_str("</figure>");
    Ok(())
}

/// The bars in words, for those who do not see them, and who print them.
fn legend(page: &mut String, rows: &[(&Series, Vec<(&str, f64)>)]) -> fmt::Result {
    for (series, stages) in rows {
        let stages: Vec<_> =
            stages.iter().map(|(name, ms)| format!("{name} {}", plot::number(*ms))).collect();
        write!(
            page,
            "<small>{}: {} ms</small><br>",
            Text(&series.contender),
            Text(&stages.join(" → "))
        )?;
    }
    Ok(())
}

fn words(metric: &str, rows: &[(&Series, Vec<(&str, f64)>)]) -> String {
    let names: Vec<_> = rows.iter().map(|(series, _)| series.contender.as_str()).collect();
    format!("Stages of {metric} of {}; the figures are below", names.join(", "))
}
