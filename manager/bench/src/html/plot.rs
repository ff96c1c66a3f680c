//! What all plots are made of: a frame with a scale, ticks, labels.

use std::fmt::{self, Write as _};

use super::Text;
use crate::model::Unit;

/// Width of a plot; the page scales it.
pub(super) const WIDTH: f64 = 440.0;
/// Where the area of the values begins and ends.
pub(super) const LEFT: f64 = 128.0;
pub(super) const RIGHT: f64 = WIDTH - 24.0;
/// Height of a contender's row.
pub(super) const ROW: f64 = 38.0;
/// What is above the first row, and below the last one.
pub(super) const TOP: f64 = 8.0;
pub(super) const BOTTOM: f64 = 40.0;
/// Letters of a label that fit beside a plot.
const LABEL: usize = 15;

/// Greatest to least value from which on a scale may be logarithmic, and up to which.
const DECADES: std::ops::RangeInclusive<f64> = 5.0..=1e6;

/// A scale from values to places.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    step: f64,
    /// Whether equal ways are equal ratios; all values are positive then.
    logarithmic: bool,
}

impl Scale {
    /// For values between two, with round ticks, on the places between two others. Values near
    /// zero, compared with how far they reach, have the zero on the scale.
    pub(super) fn new((low, high): (f64, f64), (from, to): (f64, f64)) -> Option<Self> {
        let reach = high - low;
        if !(low.is_finite() && high.is_finite() && reach.is_finite() && reach >= 0.0) {
            return None;
        }
        let low = if low > 0.0 && low < 0.6 * high { 0.0 } else { low };
        let reach = if high > low { high - low } else { (low.abs() * 0.1).max(1.0) };
        let step = round_step(reach / 5.0)?;
        let (low, high) = ((low / step).floor() * step, ((low + reach) / step).ceil() * step);
        let scale = Self { low, high, from, to, step, logarithmic: false };
        (low.is_finite() && high.is_finite() && high > low).then_some(scale)
    }

    /// The same, and logarithmic where the values lie so far apart that the small ones would
    /// otherwise be in one place.
    pub(super) fn spread((low, high): (f64, f64), places: (f64, f64)) -> Option<Self> {
        if !(low.is_normal() && low > 0.0 && DECADES.contains(&(high / low))) {
            return Self::new((low, high), places);
        }
        let round = |value: f64, up: bool| {
            let power = 10f64.powf(value.log10().floor());
            let mut marks = [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter();
            match up {
                true => marks.find(|mark| *mark >= value * 0.999),
                false => marks.rev().find(|mark| *mark <= value * 1.001),
            }
        };
        let (low, high) = (round(low, false)?, round(high, true)?);
        let (from, to) = places;
        let usable = low.is_normal() && high.is_normal() && high > low;
        usable.then_some(Self { low, high, from, to, step: 0.0, logarithmic: true })
    }

    /// Whether it is logarithmic.
    pub(super) fn is_logarithmic(&self) -> bool {
        self.logarithmic
    }

    /// Where a value is.
    pub(super) fn at(&self, value: f64) -> f64 {
        let part = match self.logarithmic {
            true => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        let part = part.clamp(0.0, 1.0);
        self.from + part * (self.to - self.from)
    }

    /// The values with a tick.
    pub(super) fn ticks(&self) -> Vec<f64> {
        let Self { low, high, step, .. } = *self;
        if !self.logarithmic {
            let ticks = (0..12).map(|tick| low + f64::from(tick) * step);
            return ticks.take_while(|value| *value <= high + step * 0.01).collect();
        }
        let marks: &[f64] = match high / low {
            few if few < 60.0 => &[1.0, 2.0, 5.0],
            some if some < 2_000.0 => &[1.0, 3.0],
            _ => &[1.0],
        };
        let power = 10f64.powf(low.log10().floor());
        let powers = (0..9).map(|exponent| power * 10f64.powi(exponent));
        let ticks = powers.flat_map(|power| marks.iter().map(move |mark| mark * power));
        ticks.filter(|value| (low * 0.999..=high * 1.001).contains(value)).collect()
    }
}

/// The label of a tick: as many digits as tell it from the next one.
pub(super) fn label(scale: &Scale, value: f64) -> String {
    if scale.logarithmic {
        return match value {
            large if (1e9..1e12).contains(&large) => number(value / 1e9) + "G",
            large if (1e6..1e9).contains(&large) => number(value / 1e6) + "M",
            large if (1e4..1e6).contains(&large) => number(value / 1e3) + "k",
            _ => number(value),
        };
    }
    let (reach, step) = (scale.low.abs().max(scale.high.abs()), scale.step);
    let (part, suffix) = match reach {
        large if large >= 1e12 => return number(value),
        large if large >= 1e9 => (1e9, "G"),
        large if large >= 1e6 => (1e6, "M"),
        large if large >= 1e5 => (1e3, "k"),
        small if small < 1e-3 => return number(value),
        _ => (1.0, ""),
    };
    let (value, mut step, mut digits) = (value / part, step / part, 0_usize);
    while step < 0.999 && digits < 6 {
        step *= 10.0;
        digits += 1;
    }
    let text = format!("{value:.digits$}");
    match text.trim_matches(['-', '0', '.']).is_empty() {
        true => "0".into(),
        false => text + suffix,
    }
}

/// The next of 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> Option<f64> {
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= least * 0.999 && step.is_normal())
}

/// The least and the greatest of finite values.
pub(super) fn bounds(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.into_iter().filter(|value| value.is_finite());
    finite.fold(None, |bounds, value| match bounds {
        None => Some((value, value)),
        Some((low, high)) => Some((f64::min(low, value), f64::max(high, value))),
    })
}

/// Begins a figure: its caption, and what it shows in words.
pub(super) fn begin(
    page: &mut String,
    height: f64,
    (title, about): (&str, &str),
    words: &str,
) -> fmt::Result {
    write!(
        page,
        "<figure><figcaption>{}<small>{}</small></figcaption>\
         <svg viewBox=\"0 0 {WIDTH:.0} {height:.0}\" role=\"img\">\
         <title>{} {}</title><desc>{}</desc>",
        Text(title),
        Text(about),
        Text(title),
        Text(about),
        Text(words)
    )
}

/// Ends a figure.
pub(super) fn end(page: &mut String) {
    page.push_str("</svg></figure>");
}

/// The scale below rows, with a line at each tick, and its name.
pub(super) fn axis(page: &mut String, scale: &Scale, bottom: f64, name: &str) -> fmt::Result {
    for value in scale.ticks() {
        let x = scale.at(value);
        write!(
            page,
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP:.0}\" y2=\"{bottom:.0}\"/>\
             <text class=\"tick\" x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>",
            bottom + 15.0,
            label(scale, value)
        )?;
    }
    let middle = f64::midpoint(LEFT, RIGHT);
    write!(
        page,
        "<text class=\"tick\" x=\"{middle:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>",
        bottom + 32.0,
        Text(name)
    )
}

/// The name of a row, shortened where there is no place for it.
pub(super) fn row_name(page: &mut String, y: f64, name: &str) -> fmt::Result {
    let long = name.chars().count() > LABEL;
    let short: String = name.chars().take(if long { LABEL - 1 } else { LABEL }).collect();
    write!(
        page,
        "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}{}<title>{}</title></text>",
        LEFT - 10.0,
        y + 4.5,
        Text(&short),
        if long { "…" } else { "" },
        Text(name)
    )
}

/// A figure with as many digits as it needs.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        tiny if !(1e-3..1e9).contains(&tiny) => format!("{value:.1e}"),
        large if large >= 100.0 => format!("{value:.0}"),
        large if large >= 10.0 => trimmed(format!("{value:.1}")),
        _ => trimmed(format!("{value:.3}")),
    }
}

fn trimmed(text: String) -> String {
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A unit as it is written.
pub(super) fn unit(unit: Unit) -> &'static str {
    match unit {
        Unit::Ms => "ms",
        Unit::KiB => "KiB",
        Unit::Count => "count",
        Unit::MiBPerS => "MiB/s",
        Unit::PerS => "/s",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(low: f64, high: f64) -> Vec<String> {
        let scale = Scale::new((low, high), (LEFT, RIGHT)).unwrap();
        scale.ticks().into_iter().map(|value| label(&scale, value)).collect()
    }

    #[test]
    fn labels_of_ticks_differ_and_are_short() {
        assert_eq!(labels(0.0, 100.0), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(labels(0.0, 1_000_000.0), ["0", "0.2M", "0.4M", "0.6M", "0.8M", "1.0M"]);
        let far = Scale::spread((31.0, 380.0), (LEFT, RIGHT)).unwrap();
        let labels_far: Vec<_> = far.ticks().into_iter().map(|at| label(&far, at)).collect();
        assert_eq!(labels_far, ["20", "50", "100", "200", "500"]);
        for (low, high) in [(1000.1, 1000.9), (-3.0, 5.0), (0.002, 0.01), (9e6, 9.1e6), (0.0, 3e8)]
        {
            let mut labels = labels(low, high);
            assert!(labels.len() > 2 && labels.iter().all(|text| text.len() < 9), "{labels:?}");
            let all = labels.len();
            labels.dedup();
            assert_eq!(labels.len(), all, "{labels:?}");
        }
    }
    #[test]
    fn far_apart_values_have_a_logarithmic_scale_and_others_none() {
        let scale = |low, high| Scale::spread((low, high), (0.0, 100.0)).unwrap();
        let far = scale(1.0, 100.0);
        assert!((far.at(10.0) - 50.0).abs() < 1e-9 && far.is_logarithmic());
        for (low, high) in [(10.0, 12.0), (0.0, 9.0), (-1.0, 50.0), (1e-9, 1e9)] {
            assert!(!scale(low, high).is_logarithmic(), "{low} {high}");
        }
        assert!((2..9).contains(&scale(1.0, 1e6).ticks().len()));
    }
}
