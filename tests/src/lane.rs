//! Runs a test where Linux guests can boot.
//!
//! A test of a Linux guest calls [`on_best_lane`] with its own name. On a host whose `/dev/kvm`
//! boots Linux the body runs at once. Elsewhere this very test binary (it is static) is run again
//! inside the nested lab, for this one test, and its outcome is the test's outcome.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use coppice_lab::{Lab, LaneChoice, Options};
use coppice_manager::failure::chain;

use crate::kvm_trace::KvmTrace;

/// Set inside a lane, so that the body runs instead of being sent on.
const INSIDE: &str = "COPPICE_TEST_INSIDE_LANE";

/// Longest time one test may take in the nested lab; the longest takes a few minutes on a quiet
/// host.
const LIMIT: Duration = Duration::from_secs(1800);

/// Tests on the host itself take turns: they look at the processes there.
static ON_HOST: Mutex<()> = Mutex::new(());

/// Whether this runs inside the nested lab, where a test was sent.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs `body` on the best lane of this machine; `name` is the test's full name as the harness
/// prints it.
///
/// # Panics
/// When the body does, or when no lane can be had: that is a failure, not a reason to pass.
#[allow(clippy::panic, clippy::print_stderr)]
pub fn on_best_lane(name: &str, body: impl FnOnce()) {
    if is_inside() {
        let _shown_on_failure = match KvmTrace::record() {
            Ok(trace) => trace,
            Err(error) => panic!("the lab's kernel does not trace KVM: {error}"),
        };
        return body();
    }
    let lab = match Lab::open(LaneChoice::Best, &Options::default()) {
        Ok(lab) => lab,
        Err(error) => panic!("no lane that boots Linux guests: {}", chain(&error)),
    };
    eprintln!("lane: {} ({})", lab.lane().name(), lab.reason());
    if !lab.lane().is_nested() {
        let _one_at_a_time = ON_HOST.lock().unwrap_or_else(PoisonError::into_inner);
        return body();
    }
    let own = match std::env::current_exe() {
        Ok(own) => own.to_string_lossy().into_owned(),
        Err(error) => panic!("the test's own path is unknown: {error}"),
    };
    in_lab(&lab, &own, name);
}

/// Runs a test in the nested lab.
#[allow(clippy::panic, clippy::print_stderr)]
fn in_lab(lab: &Lab, own: &str, name: &str) {
    let argv = [own, "--exact", name, "--nocapture", "--test-threads=1"];
    match lab.command(argv).env(INSIDE, "1").timeout(LIMIT).output() {
        Ok(output) => {
            let stdout = String::from_utf8_lossy(&output.stdout);
            eprintln!("{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
            // A misspelt name would select no test and exit with success.
            assert!(stdout.contains("running 1 test"), "{name} is not the name of this test");
            assert!(output.status.success(), "{name} failed in the nested lab: {}", output.status);
        }
        Err(error) => panic!("{name} did not run to its end in the nested lab: {}", chain(&error)),
    }
}
