//! What a guest uses, as `GET /metrics` of both services tells it.

use serde::{Deserialize, Serialize};

/// A guest's use of its processors, memory and root file system.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Metrics {
    /// Seconds since the Unix epoch by the guest's clock.
    pub ts: u64,
    /// Processors.
    pub cpu_count: u32,
    /// How busy they were since the last time somebody asked (at first: since boot), all together,
    /// in percent from 0 to 100 with two decimals.
    pub cpu_used_pct: f64,
    /// Bytes of memory.
    pub mem_total: u64,
    /// Bytes that cannot be had without swapping; caches do not count.
    pub mem_used: u64,
    /// Bytes of cached files.
    pub mem_cache: u64,
    /// Bytes of the root file system that users cannot have.
    pub disk_used: u64,
    /// Bytes of the root file system.
    pub disk_total: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_the_names_that_envd_gives_them() {
        let text = serde_json::to_string(&Metrics { cpu_used_pct: 12.5, ..Metrics::default() });
        assert_eq!(
            text.unwrap(),
            r#"{"ts":0,"cpu_count":0,"cpu_used_pct":12.5,"mem_total":0,"mem_used":0,"mem_cache":0,"disk_used":0,"disk_total":0}"#
        );
    }
}
