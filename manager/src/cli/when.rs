//! Times as people write and read them.

use std::time::Duration;

use coppice_manager::registry::now_ms;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A moment, in milliseconds since 1970: `10m` (so long ago; s, m, h or d), or as RFC 3339 has it.
pub(super) fn moment(text: &str) -> Result<u64, String> {
    if let Some(ago) = span(text) {
        let ago = u64::try_from(ago.as_millis()).unwrap_or(u64::MAX);
        return Ok(now_ms().saturating_sub(ago));
    }
    let wrong = || "neither a time such as 2026-01-31T12:00:00Z nor a span such as 10m".to_owned();
    let moment = OffsetDateTime::parse(text, &Rfc3339).map_err(|_| wrong())?;
    u64::try_from(moment.unix_timestamp_nanos() / 1_000_000).map_err(|_| wrong())
}

fn span(text: &str) -> Option<Duration> {
    let seconds = match text.chars().last()? {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return None,
    };
    let count: u64 = text.get(..text.len() - 1)?.parse().ok()?;
    count.checked_mul(seconds).map(Duration::from_secs)
}

/// A moment as RFC 3339 has it, with milliseconds, in UTC.
pub(super) fn clock(ms: u64) -> String {
    let moment = OffsetDateTime::from_unix_timestamp_nanos(i128::from(ms) * 1_000_000);
    let moment = moment.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let (date, time) = (moment.date(), moment.time());
    let (hour, minute, second, milli) = time.as_hms_milli();
    format!("{date}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

/// A length of time in its two largest units, as `1h 5m`.
pub(super) fn length(ms: u64) -> String {
    let seconds = ms / 1000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{minutes}m {}s", seconds % 60),
        3_600..86_400 => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_times_or_spans_before_now() {
        assert_eq!(moment("1970-01-01T00:00:01.5Z"), Ok(1500));
        let ago = now_ms() - moment("2h").unwrap();
        assert!((7_200_000..7_260_000).contains(&ago), "{ago}");
        for text in ["", "m", "10", "-1s", "1.5h", "1w", "99999999999999999999s", "\u{e9}"] {
            moment(text).unwrap_err();
        }
    }

    #[test]
    fn a_clock_reads_as_it_was_written() {
        assert_eq!(clock(1500), "1970-01-01T00:00:01.500Z");
        assert_eq!(moment(&clock(1_800_000_000_123)), Ok(1_800_000_000_123));
        assert_eq!(clock(u64::MAX), "1970-01-01T00:00:00.000Z");
    }

    #[test]
    fn lengths_have_two_units() {
        let cases = [(999, "0s"), (61_000, "1m 1s"), (3_900_000, "1h 5m"), (90_000_000, "1d 1h")];
        for (ms, text) in cases {
            assert_eq!(length(ms), text);
        }
    }
}
