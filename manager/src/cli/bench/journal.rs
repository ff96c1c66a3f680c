//! What is shown and written while it is measured: a line of progress, and the report, which is
//! written anew after every round and says whether it is complete.

use std::fs;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use coppice_bench::contender::Contender;
use coppice_bench::model::{Report, Settings, Version};
use coppice_bench::schedule::{Journal, Plan, Results, Step};
use coppice_bench::statistics;
use coppice_bench::{host, html};
use coppice_manager::failure::{Class, Failure};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::{Args, plain};

/// Version of the report's format.
pub(super) const FORMAT: u32 = 1;

/// A report without results.
pub(super) struct Paper(Report);

impl Paper {
    pub(super) fn new(
        args: &Args,
        plan: &Plan,
        contenders: &[Box<dyn Contender>],
        scratch: &Path,
    ) -> Self {
        let lane = std::env::var("COPPICE_LAB_LANE").unwrap_or_else(|_| "host".into());
        let scenarios: Vec<_> = plan.scenarios.iter().map(|kind| kind.name()).collect();
        let settings = [
            ("scenarios", scenarios.join(" ")),
            ("rounds", plan.rounds.to_string()),
            ("warm_up_rounds", plan.warm_up.to_string()),
            ("kernel", args.kernel.clone()),
            ("image", args.image.clone()),
            ("age_s", plan.workload.age.as_secs_f64().to_string()),
            ("limit_s", args.limit.as_secs_f64().to_string()),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value));
        Self(Report {
            format: FORMAT,
            coppice: Version {
                version: env!("CARGO_PKG_VERSION").into(),
                revision: std::env::var("COPPICE_REVISION").unwrap_or_else(|_| "unknown".into()),
            },
            command: std::env::args().collect(),
            started: now(),
            finished: None,
            complete: false,
            seed: args.seed,
            lane,
            machine: host::describe(scratch),
            settings: Settings(settings.into()),
            contenders: contenders.iter().map(|contender| contender.about()).collect(),
            series: Vec::new(),
            failures: Vec::new(),
            left_out: Vec::new(),
            summary: Vec::new(),
        })
    }
}

fn now() -> String {
    OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default()
}

/// Writes the report and the progress.
pub(super) struct Writer {
    paper: Paper,
    out: Option<PathBuf>,
    stop: Arc<AtomicBool>,
    terminal: bool,
    begun: Instant,
    failures: usize,
}

impl Writer {
    pub(super) fn new(
        paper: Paper,
        out: Option<PathBuf>,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, Failure> {
        if let Some(out) = &out {
            fs::create_dir_all(out).map_err(|error| unwritten(out, &error))?;
        }
        // The schedule changes the working directory.
        let out = out.map(fs::canonicalize).transpose();
        let out = out.map_err(|error| Failure::new(Class::Host, error, "name another --out"))?;
        let terminal = std::io::stderr().is_terminal();
        Ok(Self { paper, out, stop, terminal, begun: Instant::now(), failures: 0 })
    }

    /// Writes the report without results, so that a run that is broken off leaves one.
    pub(super) fn begin(&self) -> Result<(), Failure> {
        self.write(&self.paper.0)
    }

    /// Writes and shows the whole report; 0, or 1 if something failed.
    pub(super) fn conclude(mut self, results: &Results, json: bool) -> Result<u8, Failure> {
        self.fill(results);
        let report = &mut self.paper.0;
        report.complete = true;
        report.finished = Some(now());
        self.write(&self.paper.0)?;
        let text = match json {
            true => serde_json::to_string(&self.paper.0)
                .map(|text| text + "\n")
                .map_err(|error| Failure::new(Class::Internal, error, "report it"))?,
            false => plain::text(&self.paper.0),
        };
        if self.terminal {
            self.say("");
        }
        let code = super::super::print(&text);
        Ok(if code == 0 { u8::from(!results.failures.is_empty()) } else { code })
    }

    fn fill(&mut self, results: &Results) {
        let report = &mut self.paper.0;
        report.series.clone_from(&results.series);
        report.failures.clone_from(&results.failures);
        report.left_out.clone_from(&results.left_out);
        report.summary = statistics::compared(report);
    }

    fn write(&self, report: &Report) -> Result<(), Failure> {
        let Some(out) = &self.out else { return Ok(()) };
        let json = serde_json::to_string_pretty(report)
            .map_err(|error| Failure::new(Class::Internal, error, "report it"))?;
        let files = [
            ("report.json", json),
            ("samples.csv", plain::csv(report)),
            ("report.html", html::page(report)),
        ];
        for (name, text) in files {
            let path = out.join(name);
            // Whoever reads it meanwhile finds a whole one.
            let new = out.join(format!(".{name}.new"));
            fs::write(&new, text)
                .and_then(|()| fs::rename(&new, &path))
                .map_err(|error| unwritten(&path, &error))?;
        }
        Ok(())
    }

    fn say(&self, text: &str) {
        // There is nobody to tell when standard error is gone.
        let _ = match self.terminal {
            true => write!(std::io::stderr(), "\r\x1b[K{text}"),
            false => writeln!(std::io::stderr(), "{text}"),
        };
    }
}

fn unwritten(path: &Path, error: &std::io::Error) -> Failure {
    let message = format!("{} cannot be written: {error}", path.display());
    Failure::new(Class::Host, message, "name another directory with --out")
}

impl Journal for Writer {
    fn step(&mut self, step: &Step<'_>) {
        let Step { scenario, contender, memory_mib, vcpus, round, rounds } = *step;
        let what = match round {
            Some(round) if self.terminal => format!("round {} of {rounds}", round + 1),
            Some(_) => return,
            None => "prepares".into(),
        };
        let seconds = self.begun.elapsed().as_secs();
        let name = scenario.name();
        self.say(&format!(
            "{seconds:>5} s  {name}, {memory_mib} MiB, {vcpus} vCPU: {contender} {what}"
        ));
    }

    fn done(&mut self, results: &Results) {
        for failure in results.failures.iter().skip(self.failures) {
            let round =
                failure.round.map_or(String::new(), |round| format!(", round {}", round + 1));
            let text = format!(
                "{}, {}{round} FAILED: {}",
                failure.scenario, failure.contender, failure.message
            );
            self.say(&text);
            if self.terminal {
                let _ = writeln!(std::io::stderr());
            }
        }
        self.failures = results.failures.len();
        self.fill(results);
        // One that cannot be written now is tried again after the next round.
        let _ = self.write(&self.paper.0);
    }

    fn go_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }
}
