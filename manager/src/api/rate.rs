//! How fast a tenant may ask, and how many wrong keys may be tried from one network.
//!
//! Each has a bucket that holds a burst and fills at a steady rate. What is kept of it is one
//! number: when it will be full again.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::registry::Tenant;

/// The most buckets that are not full; beyond these, strangers wait.
const MAX_BUCKETS: usize = 16 * 1024;
/// Wrong keys per second, and at once, from one network.
const WRONG_KEYS: Rate = Rate { per_second: 10, burst: 100 };

/// How fast tenants may ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Requests of a tenant per second; twice as many at once.
    pub requests: u32,
    /// Sandboxes that a tenant may make per second; ten times as many at once.
    pub creates: u32,
}

/// The buckets of everybody.
#[derive(Debug)]
pub(super) struct Rates {
    pub(super) requests: Buckets<Tenant>,
    pub(super) creates: Buckets<Tenant>,
    pub(super) wrong_keys: Buckets<Option<IpAddr>>,
}

impl Rates {
    pub(super) fn new(limits: Limits) -> Self {
        let Limits { requests, creates } = limits;
        let rate = |per_second: u32, burst: u32| {
            Buckets::new(Rate { per_second, burst: per_second.saturating_mul(burst) })
        };
        Self {
            requests: rate(requests, 2),
            creates: rate(creates, 10),
            wrong_keys: Buckets::new(WRONG_KEYS),
        }
    }
}

/// So many per second, and so many at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rate {
    per_second: u32,
    burst: u32,
}

impl Rate {
    fn time_for(self, amount: u32) -> Duration {
        // A rate of none lets none through, as good as.
        Duration::from_secs(1).saturating_mul(amount) / self.per_second.max(1)
    }

    /// When a bucket is full again from which so much is taken, or how long to wait until that
    /// can be done. `full_at` and `now` are times since the same beginning.
    fn take(self, full_at: Duration, now: Duration, amount: u32) -> Result<Duration, Duration> {
        // More than fits into it is had for all that fits into it.
        let cost = self.time_for(amount.min(self.burst));
        let full_then = full_at.max(now).saturating_add(cost);
        let latest = now.saturating_add(self.time_for(self.burst));
        if full_then <= latest { Ok(full_then) } else { Err(full_then.saturating_sub(latest)) }
    }
}

/// A bucket for each of many.
#[derive(Debug)]
pub(super) struct Buckets<K> {
    rate: Rate,
    began: Instant,
    full_at: Mutex<HashMap<K, Duration>>,
}

impl<K: Clone + Eq + Hash> Buckets<K> {
    fn new(rate: Rate) -> Self {
        Self { rate, began: Instant::now(), full_at: Mutex::default() }
    }

    /// Takes so much out of a bucket.
    ///
    /// # Errors
    /// How long to wait until it has so much.
    pub(super) fn take(&self, key: &K, amount: u32) -> Result<(), Duration> {
        let now = self.began.elapsed();
        let mut all = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let full_at = all.get(key).copied();
        if full_at.is_none() && all.len() >= MAX_BUCKETS {
            all.retain(|_, full_at| *full_at > now);
            if all.len() >= MAX_BUCKETS {
                return Err(self.rate.time_for(1));
            }
        }
        let full_at = self.rate.take(full_at.unwrap_or_default(), now, amount)?;
        all.insert(key.clone(), full_at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_burst_goes_through_and_then_the_rate_does() {
        let buckets = Buckets::new(Rate { per_second: 1, burst: 5 });
        for _ in 0..5 {
            buckets.take(&"a", 1).unwrap();
        }
        let wait = buckets.take(&"a", 1).unwrap_err();
        assert!(wait <= Duration::from_secs(1), "{wait:?}");
        buckets.take(&"b", 1).unwrap();
    }

    #[test]
    fn the_number_of_buckets_has_a_limit_and_full_ones_do_not_count() {
        let buckets = Buckets::new(Rate { per_second: 1, burst: 1 });
        for key in 0..MAX_BUCKETS {
            buckets.take(&key, 1).unwrap();
        }
        buckets.take(&MAX_BUCKETS, 1).unwrap_err();
        for full_at in buckets.full_at.lock().unwrap().values_mut() {
            *full_at = Duration::ZERO;
        }
        buckets.take(&MAX_BUCKETS, 1).unwrap();
        assert_eq!(buckets.full_at.lock().unwrap().len(), 1);
    }

    proptest! {
        /// In any span of time no more goes through than the burst and what the rate gives; and
        /// who waits as long as it was told gets through.
        #[test]
        fn no_more_goes_through_than_burst_and_rate(
            per_second in 1..1000u32,
            burst in 1..100u32,
            asks in prop::collection::vec((0..200_000u64, 1..120u32), 1..100),
        ) {
            let rate = Rate { per_second, burst };
            let (mut now, mut full_at) = (Duration::ZERO, Duration::ZERO);
            let mut passed = Vec::new();
            for (later_us, amount) in asks {
                now += Duration::from_micros(later_us);
                match rate.take(full_at, now, amount) {
                    Ok(then) => {
                        full_at = then;
                        passed.push((now, amount.min(burst)));
                    }
                    Err(wait) => prop_assert!(rate.take(full_at, now + wait, amount).is_ok()),
                }
            }
            for (first, (begin, _)) in passed.iter().enumerate() {
                let mut sum = 0u64;
                for (at, amount) in &passed[first..] {
                    sum += u64::from(*amount);
                    let given = (*at - *begin).as_secs_f64() * f64::from(per_second);
                    let most = f64::from(burst) + given + 0.01;
                    prop_assert!(f64::from(u32::try_from(sum).unwrap()) <= most);
                }
            }
        }
    }
}
