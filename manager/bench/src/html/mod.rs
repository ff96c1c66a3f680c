//! A report as one page for people: it needs no network and no script, and shows every sample.
//!
//! All text of a report is somebody else's, so it is escaped where it is put ([`Text`]); figures
//! that are no numbers have no place in a plot, and what a plot draws is bounded.

mod distribution;
mod memory;
mod plot;
mod scaling;
mod stages;
mod tables;

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use crate::model::{Report, Series};
use crate::schedule::AGAIN;
use crate::statistics::{self, Line};

const STYLE: &str = include_str!("page.css");

/// Text of a report, escaped for HTML and SVG, in attributes too.
struct Text<'a>(&'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                '\n' | '\t' => f.write_char(' ')?,
                letter if letter.is_control() => f.write_char('\u{FFFD}')?,
                letter => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}

/// What all parts of the page look at.
struct Shown<'a> {
    report: &'a Report,
    /// Series, each with what it says, those of one thing beside each other.
    groups: Vec<Vec<(&'a Series, Line)>>,
}

impl<'a> Shown<'a> {
    fn new(report: &'a Report) -> Self {
        let mut groups: Vec<Vec<(&Series, Line)>> = Vec::new();
        // It is costly, and a run has it at hand each time it writes the page.
        let lines = match report.summary.len() == report.series.len() {
            true => report.summary.clone(),
            false => statistics::compared(report),
        };
        let mut places = BTreeMap::new();
        for (series, line) in report.series.iter().zip(lines) {
            let place = *places.entry(statistics::thing(series)).or_insert(groups.len());
            match groups.get_mut(place) {
                Some(group) => group.push((series, line)),
                None => groups.push(vec![(series, line)]),
            }
        }
        Self { report, groups }
    }

    /// The class that gives a contender its colour: its place, and whether it is the first again.
    fn class(&self, contender: &str) -> String {
        let name = contender.strip_suffix(AGAIN);
        let wanted = name.unwrap_or(contender);
        let place = self.report.contenders.iter().position(|one| one.name == wanted);
        let again = if name.is_some() { " again" } else { "" };
        format!("c{}{again}", place.unwrap_or_default() % 6)
    }
}

/// The whole page.
#[must_use]
pub fn page(report: &Report) -> String {
    let shown = Shown::new(report);
    let mut page = String::with_capacity(1 << 16);
    // Writing to a string cannot fail.
    let _ = write_page(&mut page, &shown);
    page
}

fn write_page(page: &mut String, shown: &Shown<'_>) -> fmt::Result {
    let report = shown.report;
    let names: Vec<&str> = report.contenders.iter().map(|one| one.name.as_str()).collect();
    let title = format!("Benchmark of {}", names.join(", "));
    write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
         style-src 'unsafe-inline'; img-src data:\">\
         <link rel=\"icon\" href=\"data:,\"><title>{}</title><style>{STYLE}</style></head><body>\
         <main><h1>{}</h1>",
        Text(&title),
        Text(&title),
    )?;
    tables::head(page, shown)?;
    page.push_str("<h2>Figures</h2>");
    tables::figures(page, shown)?;
    section(page, "Distributions", DISTRIBUTIONS, |page| distribution::all(page, shown))?;
    section(page, "Stages", STAGES, |page| stages::all(page, shown))?;
    section(page, "Memory", MEMORY, |page| memory::all(page, shown))?;
    section(page, "Scaling", SCALING, |page| scaling::all(page, shown))?;
    tables::foot(page, shown)?;
    page.push_str("</main></body></html>\n");
    Ok(())
}

const DISTRIBUTIONS: &str = "Every sample that counts is a dot; a cross is an outlier, which counts \
                             as well. The box reaches from the first to the third quartile, the line \
                             is the median.";
const STAGES: &str = "From the request on: the median time at which each stage was reached.";
const MEMORY: &str = "Medians of what one machine takes: private and shared beside each other, and \
    Pss, in which every shared page counts in part, as a mark.";
const SCALING: &str = "Medians over the sizes that were measured.";

/// A part with plots, if it has any.
fn section(
    page: &mut String,
    title: &str,
    about: &str,
    plots: impl FnOnce(&mut String) -> fmt::Result,
) -> fmt::Result {
    let mut inner = String::new();
    plots(&mut inner)?;
    if inner.is_empty() {
        return Ok(());
    }
    write!(page, "<h2>{title}</h2><p>{about}</p><div class=\"plots\">{inner}</div>")
}

/// The parameters of a series in words; a warm page cache is what nobody has to be told.
fn parameters(series: &Series) -> String {
    let parts = statistics::sizes(series).into_iter().filter_map(|(name, value)| {
        Some(match (name.as_str(), value.as_str()) {
            ("cache", "warm") => return None,
            ("cache", cache) => format!("{cache} page cache"),
            ("memory_mib", mib) => format!("{mib} MiB"),
            ("vcpus", count) => format!("{count} vCPU"),
            ("concurrency", count) => format!("{count} at a time"),
            (name, value) => format!("{name}={value}"),
        })
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// The parameters that say how a contender did it, and need not agree with those of the others.
fn own_parameters(series: &Series) -> String {
    let sizes = statistics::sizes(series);
    let own = series.parameters.iter().filter(|one| !sizes.contains(one));
    own.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
