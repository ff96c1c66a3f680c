//! How medians change with the number at a time and with the guest's size.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use super::plot::{self, BOTTOM, LEFT, RIGHT, Scale, TOP};
use super::{Shown, Text};
use crate::model::Series;
use crate::statistics;

/// Height of the area of the values.
const HEIGHT: f64 = 190.0;

/// Parameters that are numbers, and what they are called.
const AXES: [(&str, &str); 3] = [
    ("concurrency", "at a time"),
    ("memory_mib", "memory of the guest, MiB"),
    ("vcpus", "vCPUs of the guest"),
];

/// Lines of one plot: by contender, the medians by the parameter's value.
type Lines<'a> = BTreeMap<&'a str, Vec<(f64, f64)>>;

/// A plot for each metric and each parameter of which it has several values.
pub(super) fn all(page: &mut String, shown: &Shown<'_>) -> fmt::Result {
    for (parameter, name) in AXES {
        let mut plots: BTreeMap<(&str, String), (Lines<'_>, &Series)> = BTreeMap::new();
        for (series, line) in shown.groups.iter().flatten() {
            let value = series.parameters.get(parameter).and_then(|text| text.parse::<f64>().ok());
            let (Some(value), Some(summary)) = (value.filter(|at| at.is_finite()), &line.summary)
            else {
                continue;
            };
            let others = statistics::sizes(series).into_iter().filter(|(key, _)| *key != parameter);
            let others: Vec<_> = others.map(|(key, value)| format!("{key}={value}")).collect();
            let key = (series.metric.as_str(), others.join(" "));
            let (lines, _) = plots.entry(key).or_insert_with(|| (BTreeMap::new(), series));
            lines.entry(&series.contender).or_default().push((value, summary.p50.value));
        }
        for ((metric, others), (mut lines, series)) in plots {
            lines.values_mut().for_each(|points| points.sort_by(|a, b| a.0.total_cmp(&b.0)));
            one(page, shown, (metric, &others), (name, plot::unit(series.unit)), &lines)?;
        }
    }
    Ok(())
}

fn one(
    page: &mut String,
    shown: &Shown<'_>,
    (metric, others): (&str, &str),
    (name, unit): (&str, &str),
    lines: &Lines<'_>,
) -> fmt::Result {
    let points = || lines.values().flatten();
    let Some((least, most)) = plot::bounds(points().map(|point| point.0)) else { return Ok(()) };
    let across = Scale::new((least, most), (LEFT, RIGHT));
    let bottom = TOP + HEIGHT;
    let up = plot::bounds(points().map(|point| point.1).chain([0.0]))
        .and_then(|bounds| Scale::new(bounds, (bottom, TOP)));
    let (Some(across), Some(up), true) = (across, up, most > least) else { return Ok(()) };
    let names: Vec<_> = lines.keys().copied().collect();
    let words = format!("{metric} of {}, over {name}", names.join(", "));
    plot::begin(page, bottom + BOTTOM, (metric, others), &words)?;
    plot::axis(page, &across, bottom, name)?;
    for value in up.ticks() {
        let y = up.at(value);
        write!(
            page,
            "<line class=\"grid\" x1=\"{LEFT:.0}\" x2=\"{RIGHT:.0}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"tick\" x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{} {unit}</text>",
            LEFT - 8.0,
            y + 4.0,
            plot::label(&up, value)
        )?;
    }
    for (contender, points) in lines {
        let places = points.iter().map(|(at, value)| (across.at(*at), up.at(*value)));
        let places: Vec<_> = places.collect();
        let line: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        write!(
            page,
            "<g class=\"{}\"><title>{}</title><polyline class=\"curve\" points=\"{}\"/>",
            shown.class(contender),
            Text(contender),
            line.join(" ")
        )?;
        for (x, y) in places {
            write!(page, "<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>")?;
        }
        page.push_str("</g>");
    }
    page.push_str("</svg><ul class=\"keys\">");
    for contender in lines.keys() {
        let class = shown.class(contender);
        write!(page, "<li class=\"{class}\"><i></i>{}</li>", Text(contender))?;
    }
    page.push_str("</ul></figure>");
    Ok(())
}
