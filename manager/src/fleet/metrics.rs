//! What guests use, sampled at intervals and kept for a while.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use coppice_agent_protocol::metrics::Metrics;
use tokio::time::{MissedTickBehavior, interval};

use super::{Error, Fleet, Member};
use crate::registry::now_ms;

/// Time between samples. Each wakes the guest.
const INTERVAL: Duration = Duration::from_secs(15);
/// Samples kept of each sandbox: those of an hour.
const KEPT: usize = 240;

/// What a guest used at a time.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// What it used.
    pub metrics: Metrics,
}

/// The last samples of a sandbox.
#[derive(Debug, Default)]
pub(super) struct Samples(VecDeque<Sample>);

impl Samples {
    fn add(&mut self, sample: Sample) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }

    fn all(&self) -> Vec<Sample> {
        self.0.iter().cloned().collect()
    }

    fn last_ms(&self) -> u64 {
        self.0.back().map_or(0, |sample| sample.at_ms)
    }
}

impl Fleet {
    /// Samples all running guests for ever.
    pub async fn sample(self: Arc<Self>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let members: Vec<_> = self.members().values().cloned().collect();
            for member in members {
                // A guest that does not answer is waited for by nobody but itself.
                tokio::spawn(async move { drop(sample(&member).await) });
            }
        }
    }

    /// What a sandbox used lately, oldest first, with a sample of now if it runs.
    ///
    /// # Errors
    /// The agent's, when it does not answer.
    pub async fn metrics(&self, member: &Member) -> Result<Vec<Sample>, Error> {
        let age = now_ms().saturating_sub(member.samples().last_ms());
        if age > 1000 {
            sample(member).await?;
        }
        Ok(member.samples().all())
    }
}

async fn sample(member: &Member) -> Result<(), Error> {
    let Some(guest) = member.guest() else { return Ok(()) };
    let metrics = guest.agent().metrics().await?;
    member.samples().add(Sample { at_ms: now_ms(), metrics });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_samples_go_first() {
        let mut samples = Samples::default();
        for at_ms in 0..300 {
            samples.add(Sample { at_ms, metrics: Metrics::default() });
        }
        let kept: Vec<u64> = samples.all().iter().map(|sample| sample.at_ms).collect();
        assert_eq!(kept, (60..300).collect::<Vec<_>>());
    }
}
