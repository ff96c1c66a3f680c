//! Counts of tests, read off what the test harness prints.

/// What ran so far.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    passed: u64,
    failed: u64,
    failed_steps: Vec<&'static str>,
}

impl Tally {
    /// Reads one line of a step's output; lines that are no test result are passed over.
    pub(crate) fn read_line(&mut self, line: &str) {
        if let Some((passed, failed)) = counts(line) {
            self.passed += passed;
            self.failed += failed;
        }
    }

    /// Counts a whole step as one check.
    pub(crate) fn step(&mut self, passed: bool) {
        if passed {
            self.passed += 1;
        }
    }

    /// Remembers the name of a failed step.
    pub(crate) fn failed_step(&mut self, name: &'static str) {
        self.failed_steps.push(name);
        self.failed += 1;
    }

    /// Whether all went well.
    pub(crate) fn is_clean(&self) -> bool {
        self.failed == 0
    }

    /// The last line of the run.
    pub(crate) fn summary(&self) -> String {
        let counts = format!("{} passed, {} failed", self.passed, self.failed);
        if self.failed_steps.is_empty() {
            counts
        } else {
            format!("failed steps: {}\n{counts}", self.failed_steps.join(", "))
        }
    }
}

/// Numbers of a `test result: ok. 3 passed; 0 failed; ...` line.
fn counts(line: &str) -> Option<(u64, u64)> {
    let rest = line.trim_start().strip_prefix("test result: ")?;
    let (_, rest) = rest.split_once(". ")?;
    let (passed, rest) = rest.split_once(" passed; ")?;
    let (failed, _) = rest.split_once(" failed")?;
    Some((passed.parse().ok()?, failed.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_counted() {
        let line = "test result: ok. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(counts(line), Some((12, 3)));
    }

    #[test]
    fn other_lines_are_not() {
        assert_eq!(counts("test tidy ... ok"), None);
        assert_eq!(counts("test result: ok. many passed; 0 failed"), None);
    }

    #[test]
    fn one_failed_test_makes_the_run_fail() {
        let mut tally = Tally::default();
        tally.read_line("test result: FAILED. 5 passed; 1 failed; 0 ignored");
        assert!(!tally.is_clean());
        assert_eq!(tally.summary(), "5 passed, 1 failed");
    }

    #[test]
    fn a_failed_step_without_tests_makes_the_run_fail() {
        let mut tally = Tally::default();
        tally.failed_step("format");
        assert!(!tally.is_clean());
    }
}
