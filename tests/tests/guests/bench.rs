//! The measuring program at its smallest size: a benchmark that does not run here does not exist.

use std::process::{Command, Stdio};

use crate::common::{home, on_lane, program, stdout};

#[test]
fn the_first_output_of_a_run_is_timed() {
    on_lane!({
        let mut bench = Command::new(program("coppice-bench"));
        bench.args(["first-output", "--memory", "128", "--coppice"]).arg(program("coppice"));
        bench.arg("--kernel").arg(home().kernel("micro").unwrap());
        bench.arg("--image").arg(home().image("tiny").unwrap()).stdin(Stdio::null());
        let sample: serde_json::Value = serde_json::from_str(&stdout(&mut bench)).unwrap();
        assert_eq!(sample["contender"], "coppice");
        assert!(sample["first_output_ms"].as_f64().unwrap() > 0.0);
    });
}
