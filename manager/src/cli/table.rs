//! Words for people: sizes, ages and columns.

use std::fmt::Write as _;
use std::time::SystemTime;

/// A size in at most five letters and a unit, as `48.2 MiB`.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    // Tenths of the unit, rounded; a whole number, so that nothing is lost in between.
    let mut tenths = bytes.saturating_mul(10).saturating_add(512) / 1024;
    let mut units = UNITS.iter();
    let mut unit = units.next();
    while tenths >= 10_235 {
        let Some(larger) = units.next() else { break };
        unit = Some(larger);
        tenths = (tenths + 512) / 1024;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, unit.unwrap_or(&""))
}

/// How long ago something was, in its largest unit.
pub(super) fn age(then: SystemTime, now: SystemTime) -> String {
    let seconds = now.duration_since(then).unwrap_or_default().as_secs();
    let (count, unit) = match seconds {
        0..60 => (seconds, "s"),
        60..3_600 => (seconds / 60, "min"),
        3_600..86_400 => (seconds / 3_600, "h"),
        _ => (seconds / 86_400, "d"),
    };
    format!("{count} {unit} ago")
}

/// Lines of columns, each as wide as its widest entry. Columns of numbers stand to the right.
/// Control characters, which could do something to a terminal, are shown as a replacement.
pub(super) fn columns(rows: &[Vec<String>], right: &[usize]) -> String {
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (number, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if number == 0 { "" } else { "  " };
            let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
            let cell: String = cell.chars().map(shown).collect();
            // Writing to a string cannot fail.
            let _ = match right.contains(&number) {
                true => write!(line, "{gap}{cell:>width$}"),
                false => write!(line, "{gap}{cell:width$}"),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_stands_in_a_table_does_nothing_to_a_terminal() {
        let rows = [vec!["\u{1b}]0;title\u{7}".to_owned(), "two\nlines".to_owned()]];
        assert_eq!(columns(&rows, &[]), "\u{fffd}]0;title\u{fffd}  two\u{fffd}lines\n");
    }

    #[test]
    fn sizes_have_one_digit_after_the_point() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1024 * 1024 - 1, "1.0 MiB"),
            (50_541_363, "48.2 MiB"),
            (3 << 40, "3.0 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(size(bytes), text);
        }
        // No size is too large to be told.
        assert!(size(u64::MAX).ends_with("TiB"));
    }

    #[test]
    fn ages_are_told_in_their_largest_unit() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 30);
        let ago = |seconds| age(now - Duration::from_secs(seconds), now);
        let texts = [59, 60, 7_300, 200_000].map(ago);
        assert_eq!(texts, ["59 s ago", "1 min ago", "2 h ago", "2 d ago"]);
        assert_eq!(age(now + Duration::from_secs(5), now), "0 s ago");
    }

    #[test]
    fn numbers_stand_to_the_right() {
        let rows = [["a", "1"], ["bcd", "100"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows, &[1]), "a      1\nbcd  100\n");
    }
}
