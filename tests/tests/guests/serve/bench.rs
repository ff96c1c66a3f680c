//! The daemon as a contender of `coppice bench`, as any service with E2B's API is one.

use serde_json::Value;

use super::client::Daemon;
use crate::common::{on_lane, stdout};

#[test]
fn the_daemon_is_measured_as_a_service() {
    on_lane!({
        let daemon = Daemon::start();
        let peer = format!("e2b={}", daemon.client.url);
        let mut bench = daemon.command(&["bench", "restore", "clone", "exec", "rollback"]);
        bench.args(["--peers-only", "--no-noise", "--peer", &peer, "--json"]);
        // The first sandbox waits until the template is made.
        bench.args(["-n", "1", "--warm-up", "0", "-c", "2", "--limit", "600"]);
        bench.env("E2B_API_KEY", &daemon.client.key);
        let report: Value = serde_json::from_str(&stdout(&mut bench)).unwrap();
        assert_eq!(report["failures"].as_array().unwrap().len(), 0, "{report:#}");
        let series = report["series"].as_array().unwrap();
        for (metric, samples) in
            [("restore_first_output_ms", 1), ("clone_first_output_ms", 2), ("exec_per_s", 1)]
        {
            let found = series.iter().find(|series| series["metric"] == metric);
            let found = found.unwrap_or_else(|| panic!("no {metric} in {report:#}"));
            assert_eq!(found["samples"].as_array().unwrap().len(), samples, "{found}");
        }
        // What it cannot do is told.
        let left_out = report["left_out"].as_array().unwrap();
        assert!(left_out.iter().any(|one| one["scenario"] == "rollback"), "{left_out:?}");
        assert_eq!(daemon.client.list().len(), 0, "sandboxes are left");
        daemon.end();
    });
}
