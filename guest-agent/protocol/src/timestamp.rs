//! `google.protobuf.Timestamp` in its JSON form: RFC 3339 in UTC.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const SECONDS_PER_DAY: i64 = 86_400;
/// Days from 0000-03-01, with which the arithmetic below begins, to 1970-01-01.
const DAYS_TO_EPOCH: i64 = 719_468;
/// Days in 400 years, after which the calendar repeats.
const DAYS_PER_ERA: i64 = 146_097;

/// A moment between the years 1 and 9999.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    seconds: i64,
    nanos: u32,
}

impl Timestamp {
    /// 0001-01-01T00:00:00Z.
    const MIN_SECONDS: i64 = -62_135_596_800;
    /// 9999-12-31T23:59:59Z.
    const MAX_SECONDS: i64 = 253_402_300_799;

    /// The moment `seconds` and `nanos` (0 to 999,999,999) after the Unix epoch. Moments that have
    /// no JSON form become the nearest that has one.
    #[must_use]
    pub fn from_unix(seconds: i64, nanos: u32) -> Self {
        if seconds < Self::MIN_SECONDS {
            return Self { seconds: Self::MIN_SECONDS, nanos: 0 };
        }
        if seconds > Self::MAX_SECONDS {
            return Self { seconds: Self::MAX_SECONDS, nanos: 999_999_999 };
        }
        Self { seconds, nanos: nanos.min(999_999_999) }
    }

    /// Whole seconds since the Unix epoch; negative before it.
    #[must_use]
    pub const fn seconds(self) -> i64 {
        self.seconds
    }

    /// Nanoseconds after [`Self::seconds`].
    #[must_use]
    pub const fn nanos(self) -> u32 {
        self.nanos
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = date_of(self.seconds.div_euclid(SECONDS_PER_DAY));
        let time = self.seconds.rem_euclid(SECONDS_PER_DAY);
        let (hour, minute, second) = (time / 3_600, time / 60 % 60, time % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")?;
        // The mapping writes no, three, six or nine digits.
        match self.nanos {
            0 => f.write_str("Z"),
            nanos if nanos % 1_000_000 == 0 => write!(f, ".{:03}Z", nanos / 1_000_000),
            nanos if nanos % 1_000 == 0 => write!(f, ".{:06}Z", nanos / 1_000),
            nanos => write!(f, ".{nanos:09}Z"),
        }
    }
}

/// Year, month and day of a number of days since the Unix epoch. Years begin in March here, so that
/// the leap day is the last of one and every month but the last has a fixed place.
const fn date_of(days: i64) -> (i64, i64, i64) {
    let days = days.saturating_add(DAYS_TO_EPOCH);
    let (era, day) = (days.div_euclid(DAYS_PER_ERA), days.rem_euclid(DAYS_PER_ERA));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let year = year + era * 400;
    if month < 10 { (year, month + 3, day) } else { (year + 1, month - 9, day) }
}

/// The inverse of [`date_of`].
const fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year) = (year.div_euclid(400), year.rem_euclid(400));
    let day = (153 * month + 2) / 5 + day - 1;
    era * DAYS_PER_ERA + 365 * year + year / 4 - year / 100 + day - DAYS_TO_EPOCH
}

/// Reads RFC 3339 with any zone.
fn parse(text: &str) -> Option<Timestamp> {
    let (date, time) = text.split_once(['T', 't'])?;
    let mut date = date.splitn(3, '-');
    let year = number(date.next()?, 4)?;
    let (month, day) = (number(date.next()?, 2)?, number(date.next()?, 2)?);
    let zone_at = time.find(['Z', 'z', '+', '-'])?;
    let (time, zone) = time.split_at_checked(zone_at)?;
    let (time, fraction) = time.split_once('.').map_or((time, None), |(t, f)| (t, Some(f)));
    let mut time = time.splitn(3, ':');
    let (hour, minute) = (number(time.next()?, 2)?, number(time.next()?, 2)?);
    let second = number(time.next()?, 2)?;
    let in_range = (1..=12).contains(&month) && hour < 24 && minute < 60 && second < 60;
    let days = days_of(year, month, day);
    if !in_range || date_of(days) != (year, month, day) {
        return None;
    }
    let nanos = match fraction {
        None => 0,
        Some(digits) if digits.len() <= 9 => {
            number(digits, digits.len())?
                * 10_i64.checked_pow(u32::try_from(9 - digits.len()).ok()?)?
        }
        Some(_) => return None,
    };
    let seconds = days * SECONDS_PER_DAY + hour * 3_600 + minute * 60 + second - offset(zone)?;
    let in_range = (Timestamp::MIN_SECONDS..=Timestamp::MAX_SECONDS).contains(&seconds);
    in_range.then_some(Timestamp { seconds, nanos: u32::try_from(nanos).ok()? })
}

/// Seconds a zone such as `Z` or `+01:30` is ahead of UTC.
fn offset(zone: &str) -> Option<i64> {
    let (sign, rest) = match zone.split_at_checked(1)? {
        ("Z" | "z", "") => return Some(0),
        ("+", rest) => (1, rest),
        ("-", rest) => (-1, rest),
        _ => return None,
    };
    let (hours, minutes) = rest.split_once(':')?;
    let (hours, minutes) = (number(hours, 2)?, number(minutes, 2)?);
    (hours < 24 && minutes < 60).then_some(sign * (hours * 3_600 + minutes * 60))
}

/// A number of exactly so many digits; at most nine, so that nothing overflows.
fn number(text: &str, digits: usize) -> Option<i64> {
    let plain = text.len() == digits && (1..=9).contains(&digits);
    (plain && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse(&text)
            .ok_or_else(|| D::Error::custom("a timestamp is a moment as RFC 3339 writes it"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_moments_have_their_text() {
        let text = |seconds, nanos| Timestamp::from_unix(seconds, nanos).to_string();
        assert_eq!(text(0, 0), "1970-01-01T00:00:00Z");
        assert_eq!(text(951_827_696, 120_000_000), "2000-02-29T12:34:56.120Z");
        assert_eq!(text(-1, 999_999_999), "1969-12-31T23:59:59.999999999Z");
        assert_eq!(text(4_107_542_400, 5_000), "2100-03-01T00:00:00.000005Z");
    }

    #[test]
    fn moments_past_the_calendar_are_its_ends() {
        assert_eq!(Timestamp::from_unix(i64::MIN, 7).to_string(), "0001-01-01T00:00:00Z");
        let last = "9999-12-31T23:59:59.999999999Z";
        assert_eq!(Timestamp::from_unix(i64::MAX, 7).to_string(), last);
    }

    #[test]
    fn zones_are_read() {
        let expected = Some(Timestamp::from_unix(1_000_000_000, 500_000_000));
        assert_eq!(parse("2001-09-09T03:16:40.5+01:30"), expected);
    }

    #[test]
    fn moments_that_never_were_are_refused() {
        for text in ["2001-02-29T00:00:00Z", "2001-01-01T24:00:00Z", "2001-1-01T00:00:00Z", "T"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_moment_reads_back(
            seconds in Timestamp::MIN_SECONDS..=Timestamp::MAX_SECONDS, nanos in 0_u32..1_000_000_000
        ) {
            let moment = Timestamp::from_unix(seconds, nanos);
            prop_assert_eq!(parse(&moment.to_string()), Some(moment));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-9TtZz:.+-]{0,40}") {
            let _ = parse(&text);
        }
    }
}
