//! What is not a plot: what was measured on what, the figures, and what went wrong.

use std::fmt::{self, Write as _};

use super::plot::{number, unit};
use super::{Shown, Text, own_parameters, parameters};
use crate::model::Failure;
use crate::schedule::AGAIN;
use crate::statistics::{self, Estimate, Interval, Line};

/// Rows of the table of failures.
const MOST_FAILURES: usize = 200;

/// When, where, who; and whether it is all.
pub(super) fn head(page: &mut String, shown: &Shown<'_>) -> fmt::Result {
    let report = shown.report;
    if !report.complete {
        page.push_str(
            "<p class=\"warn\">The run was broken off: this is a part of what was to be measured.</p>",
        );
    }
    if !report.failures.is_empty() {
        let count = report.failures.len();
        write!(page, "<p class=\"warn\">{count} samples failed; they are listed below.</p>")?;
    }
    let finished = report.finished.as_deref().unwrap_or("not finished");
    write!(
        page,
        "<p>Coppice {} ({}), lane {}, {} to {}. The clock starts when the request is issued and stops \
         at the first byte of the first command's output, which carries a token of that very \
         sample.</p><ul class=\"keys\">",
        Text(&report.coppice.version),
        Text(&report.coppice.revision),
        Text(&report.lane),
        Text(&report.started),
        Text(finished),
    )?;
    for one in &report.contenders {
        write!(
            page,
            "<li class=\"{}\"><i></i><b>{}</b> {} <code>{}</code></li>",
            shown.class(&one.name),
            Text(&one.name),
            Text(&one.version),
            Text(&one.program)
        )?;
    }
    page.push_str("</ul>");
    Ok(())
}

/// All figures, contenders one below the other.
pub(super) fn figures(page: &mut String, shown: &Shown<'_>) -> fmt::Result {
    let first = shown.report.contenders.first().map_or("", |one| one.name.as_str());
    page.push_str("<div class=\"scroll\"><table><thead><tr>");
    let heads = ["P50", "95 %", "Ratio", "P95", "P99", "Samples", "Outliers"];
    page.push_str("<th>Metric</th><th>Guest</th><th>Contender</th>");
    heads.iter().try_for_each(|head| write!(page, "<th class=\"n\">{head}</th>"))?;
    page.push_str("</tr></thead><tbody>");
    for group in &shown.groups {
        for (at, (series, line)) in group.iter().enumerate() {
            let class = if at == 0 { " class=\"first\"" } else { "" };
            let (name, guest) = match at {
                0 => (line.metric.as_str(), parameters(series)),
                _ => ("", String::new()),
            };
            write!(
                page,
                "<tr{class}><td>{}</td><td>{}</td><td>{} <small>{}</small></td>",
                Text(name),
                Text(&guest),
                Text(&line.contender),
                Text(&own_parameters(series))
            )?;
            if line.summary.is_none() {
                let why = match statistics::counted(series).len() {
                    0 => "no sample that counts".to_owned(),
                    count => format!("not all of {count} samples are finite numbers"),
                };
                write!(page, "<td class=\"n\" colspan=\"7\">{why}</td></tr>")?;
                continue;
            }
            for cell in cells(line) {
                write!(page, "<td class=\"n\">{}</td>", Text(&cell))?;
            }
            page.push_str("</tr>");
        }
    }
    write!(
        page,
        "</tbody></table></div><p>Ratio: {} to the other, median over the rounds, with its 95 % \
         interval; a star says that it differs by more than {} does from itself ({}).</p>",
        Text(first),
        Text(first),
        Text(&format!("{first}{AGAIN}"))
    )
}

fn cells(line: &Line) -> [String; 7] {
    let Some(summary) = &line.summary else { return Default::default() };
    let figure = |value: f64| format!("{} {}", number(value), unit(line.unit));
    let ratio = line.ratio.map(|Estimate { value, interval }| {
        let star = if line.beyond_noise == Some(true) { " ★" } else { "" };
        format!("{value:.3} {}{star}", between(interval))
    });
    [
        figure(summary.p50.value),
        between(summary.p50.interval),
        ratio.unwrap_or_default(),
        figure(summary.p95.value),
        figure(summary.p99.value),
        summary.n.to_string(),
        summary.outliers.to_string(),
    ]
}

fn between(interval: Option<Interval>) -> String {
    let text = |Interval { low, high }| format!("{}–{}", number(low), number(high));
    interval.map(text).unwrap_or_default()
}

/// How it was measured, on what, and what went wrong.
pub(super) fn foot(page: &mut String, shown: &Shown<'_>) -> fmt::Result {
    let report = shown.report;
    failures(page, "Failed", &report.failures)?;
    failures(page, "Left out", &report.left_out)?;
    page.push_str("<h2>Machine</h2><dl>");
    for (name, value) in &report.machine.0 {
        write!(page, "<dt>{}</dt><dd>{}</dd>", Text(name), Text(value))?;
    }
    page.push_str("</dl><h2>Settings</h2><dl>");
    for (name, value) in &report.settings.0 {
        write!(page, "<dt>{}</dt><dd>{}</dd>", Text(name), Text(value))?;
    }
    write!(page, "<dt>seed</dt><dd>{}</dd></dl><h2>Command</h2><pre>", report.seed)?;
    let words: Vec<_> = report.command.iter().map(|word| shell_word(word)).collect();
    write!(page, "{}</pre>", Text(&words.join(" ")))
}

fn failures(page: &mut String, title: &str, failures: &[Failure]) -> fmt::Result {
    if failures.is_empty() {
        return Ok(());
    }
    write!(
        page,
        "<h2>{title}</h2><div class=\"scroll\"><table><thead><tr><th>Scenario</th><th>Contender</th>\
         <th class=\"n\">Round</th><th>Why</th></tr></thead><tbody>"
    )?;
    for one in failures.iter().take(MOST_FAILURES) {
        let round = one.round.map(|round| round.to_string()).unwrap_or_default();
        write!(
            page,
            "<tr><td>{}</td><td>{}</td><td class=\"n\">{round}</td><td>{}</td></tr>",
            Text(&one.scenario),
            Text(&one.contender),
            Text(&one.message)
        )?;
    }
    page.push_str("</tbody></table></div>");
    if let Some(more) = failures.len().checked_sub(MOST_FAILURES).filter(|more| *more > 0) {
        write!(page, "<p>And {more} more, in report.json.</p>")?;
    }
    Ok(())
}

/// A word of a command, so that the whole can be pasted into a shell.
fn shell_word(word: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_=./:,@%+".contains(letter);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}
