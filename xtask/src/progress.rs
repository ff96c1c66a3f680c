//! What long commands show while they work: steps, spinners and bars.
//!
//! On a terminal a bar moves; elsewhere (a log, continuous integration) the same facts come as a
//! few plain lines. Everything goes to standard error, so that standard output stays a result.

use std::fmt::Display;
use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Says what happens next, in one line.
pub(crate) fn step(text: impl Display) {
    eprintln!("  {text}");
}

/// Says something the user should act on or know of, in one line.
pub(crate) fn note(text: impl Display) {
    eprintln!("note: {text}");
}

/// One task with a known or unknown end.
pub(crate) struct Task {
    bar: Option<ProgressBar>,
    title: String,
    length: u64,
    position: AtomicU64,
    started: Instant,
}

impl Task {
    /// Starts a task whose length is not known.
    pub(crate) fn spinner(title: impl Into<String>) -> Self {
        Self::start(title.into(), 0, "{spinner} {msg} {elapsed}")
    }

    /// Starts a task of `length` units; it may turn out shorter or longer.
    pub(crate) fn bar(title: impl Into<String>, length: u64) -> Self {
        Self::start(title.into(), length, "{spinner} {msg} [{bar:32}] {pos}/{len} {elapsed}")
    }

    fn start(title: String, length: u64, template: &str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar =
                if length == 0 { ProgressBar::new_spinner() } else { ProgressBar::new(length) };
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_message(title.clone());
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        if bar.is_none() {
            step(format_args!("{title} ..."));
        }
        Self { bar, title, length, position: AtomicU64::new(0), started: Instant::now() }
    }

    /// Moves the task on by one unit.
    pub(crate) fn advance(&self) {
        let before = self.position.fetch_add(1, Ordering::Relaxed);
        let after = before.saturating_add(1);
        if let Some(bar) = &self.bar {
            // An estimate that was too low grows instead of overflowing.
            if after > self.length {
                bar.set_length(after);
            }
            bar.set_position(after);
        } else if let Some(tenth) = passed_tenth(before, after, self.length) {
            step(format_args!("{} {tenth}0 %", self.title));
        }
    }

    /// Ends the task and says how long it took.
    pub(crate) fn done(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = self.started.elapsed().as_secs_f64();
        step(format_args!("{}: done in {seconds:.1} s", self.title));
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The tenth of `length` that lies in `before..after`, if one does.
fn passed_tenth(before: u64, after: u64, length: u64) -> Option<u64> {
    let tenth = |position: u64| position.saturating_mul(10).checked_div(length);
    let (old, new) = (tenth(before)?, tenth(after)?);
    (new > old && new < 10).then_some(new)
}

/// A byte count as a person reads it.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    // Tenths of the unit, so that no float is needed.
    let mut tenths = u128::from(bytes).saturating_mul(10) / 1024;
    let mut unit = 0;
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_use_the_largest_fitting_unit() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (8 << 30, "8.0 GiB"),
            (u64::MAX, "16777215.9 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn each_tenth_is_told_once_and_an_unknown_length_never() {
        let told: Vec<u64> = (0..200).filter_map(|i| passed_tenth(i, i + 1, 100)).collect();
        assert_eq!(told, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(passed_tenth(0, 1, 0), None);
    }
}
