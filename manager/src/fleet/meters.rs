//! What Prometheus reads of the fleet: how long things take, how many sandboxes there are, what
//! memory they take. Each fleet has its own, so tests of two do not mix.

use std::time::Instant;

use prometheus::{
    Encoder as _, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

use super::{Fleet, blocking};
use crate::registry::State;
use crate::trace;
use crate::vmm::WholeMemory;

/// Bounds of the buckets of times, in seconds: from a warm clone to a cold boot.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// The meters of a fleet.
#[derive(Debug)]
pub(super) struct Meters {
    all: Registry,
    stages: HistogramVec,
    states: IntGaugeVec,
    memory: IntGaugeVec,
    ended: IntCounter,
    refused: IntCounterVec,
    connections: IntGauge,
    starting: IntGauge,
    pool: IntGauge,
}

impl Meters {
    /// Meters that nothing was measured with.
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let all = Registry::new();
        let stages = HistogramVec::new(
            HistogramOpts::new(
                "coppice_stage_seconds",
                "Time that the stages of requests take. create: all of it; queue: until it may \
                 start; shell: a process with a machine without content; restore: until the guest \
                 knows who it is; prove: a command in it; pause, resume, snapshot, rollback, kill.",
            )
            .buckets(BOUNDS.to_vec()),
            &["stage"],
        )?;
        let states = IntGaugeVec::new(Opts::new("coppice_sandboxes", "Sandboxes."), &["state"])?;
        let memory = IntGaugeVec::new(
            Opts::new(
                "coppice_memory_bytes",
                "Memory of all machines: what only one of them has, and each page that several \
                 share once for each of them.",
            ),
            &["kind"],
        )?;
        let ended = IntCounter::new(
            "coppice_sandboxes_ended_total",
            "Sandboxes whose machines ended by themselves.",
        )?;
        let refused = IntCounterVec::new(
            Opts::new(
                "coppice_refused_total",
                "What a limit did not let in. connections: there were too many; requests, creates: \
                 a tenant asked too fast; keys: an address tried too many wrong ones; queue: too \
                 many waited to be started; quota: the tenant had as many as it may.",
            ),
            &["limit"],
        )?;
        let connections = IntGauge::new("coppice_connections", "Connections of clients.")?;
        let starting = IntGauge::new("coppice_starting", "Machines that are being started.")?;
        let pool = IntGauge::new("coppice_pool", "Machines that are prepared and not used.")?;
        all.register(Box::new(pool.clone()))?;
        all.register(Box::new(stages.clone()))?;
        all.register(Box::new(states.clone()))?;
        all.register(Box::new(memory.clone()))?;
        all.register(Box::new(ended.clone()))?;
        all.register(Box::new(starting.clone()))?;
        all.register(Box::new(refused.clone()))?;
        all.register(Box::new(connections.clone()))?;
        Ok(Self { all, stages, states, memory, ended, refused, connections, starting, pool })
    }

    /// Begins to measure a stage, which ends when the value is dropped.
    pub(super) fn stage(&self, name: &'static str) -> Stage {
        self.prepared(name).begin()
    }

    /// A stage that begins later, elsewhere.
    pub(super) fn prepared(&self, name: &'static str) -> Prepared {
        Prepared { name, histogram: self.stages.with_label_values(&[name]) }
    }

    /// Counts a machine that is being started until the value is dropped.
    pub(super) fn starting(&self) -> Starting {
        self.starting.inc();
        Starting(self.starting.clone())
    }

    /// Counts a machine that ended by itself.
    pub(super) fn ended(&self) {
        self.ended.inc();
    }
}

/// A stage that has not begun.
#[derive(Debug)]
pub(super) struct Prepared {
    name: &'static str,
    histogram: Histogram,
}

impl Prepared {
    /// Begins to measure it.
    pub(super) fn begin(self) -> Stage {
        Stage { name: self.name, histogram: self.histogram, began: Instant::now() }
    }
}

/// A stage that is being measured.
#[derive(Debug)]
pub(super) struct Stage {
    name: &'static str,
    histogram: Histogram,
    began: Instant,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.histogram.observe(self.began.elapsed().as_secs_f64());
        // In the log lines of the request, for the stages that those have.
        tracing::Span::current().record(self.name, trace::milliseconds(self.began));
    }
}

/// A machine that is being started.
#[derive(Debug)]
pub(super) struct Starting(IntGauge);

impl Drop for Starting {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Fleet {
    /// Counts what a limit of this name did not let in.
    pub fn refused(&self, limit: &str) -> IntCounter {
        self.meters.refused.with_label_values(&[limit])
    }

    /// How many connections clients have.
    pub fn connections(&self) -> IntGauge {
        self.meters.connections.clone()
    }

    /// All meters, in the text form that Prometheus reads.
    pub async fn measured(&self) -> String {
        let meters = &self.meters;
        meters.pool.set(i64::try_from(self.pool.depth()).unwrap_or(i64::MAX));
        let members: Vec<_> = self.members().values().cloned().collect();
        for state in State::ALL {
            let count = members.iter().filter(|member| member.state() == state).count();
            let gauge = meters.states.with_label_values(&[state.name()]);
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let pids: Vec<u32> =
            members.iter().filter_map(|m| m.guest()).map(|g| g.vmm().pid()).collect();
        // The kernel walks the page tables of each; one that is gone meanwhile takes nothing.
        let uses = blocking(move || async move {
            pids.into_iter().filter_map(|pid| WholeMemory::of(pid).ok()).collect::<Vec<_>>()
        });
        let uses = uses.await;
        let sum = |part: fn(&WholeMemory) -> u64| uses.iter().map(part).sum::<u64>();
        for (kind, bytes) in [("private", sum(|m| m.private)), ("shared", sum(|m| m.shared))] {
            let gauge = meters.memory.with_label_values(&[kind]);
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        let mut text = Vec::new();
        // Writing to memory cannot fail, and our meters are well formed.
        let _ = TextEncoder::new().encode(&meters.all.gather(), &mut text);
        String::from_utf8_lossy(&text).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_is_counted_when_it_is_over() {
        let meters = Meters::new().unwrap();
        let stage = meters.stage("create");
        assert_eq!(meters.stages.with_label_values(&["create"]).get_sample_count(), 0);
        drop(stage);
        assert_eq!(meters.stages.with_label_values(&["create"]).get_sample_count(), 1);
    }
}
