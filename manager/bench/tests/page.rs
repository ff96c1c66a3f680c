//! The page of a report, opened in a browser as people open it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use coppice_bench::html;
use coppice_bench::model::{
    Contender, MachineInfo, Report, Sample, Series, Settings, Stage, Unit, Version,
};

const NAMES: [&str; 3] = ["coppice", "firecracker", "qemu"];

/// Samples around a value: most near it, some late, one far out.
fn samples(lot: &mut fastrand::Rng, middle: f64, stages: bool) -> Vec<Sample> {
    let sample = |round: u32, value: f64| {
        let parts = [("started", 0.18), ("running", 0.52), ("ready", 0.8), ("first_output", 1.0)];
        let stage = |(name, part): (&str, f64)| Stage { name: name.into(), ms: value * part };
        Sample {
            round,
            order: round.into(),
            at_ms: f64::from(round) * 100.0,
            value,
            stages: if stages { parts.map(stage).into() } else { Vec::new() },
            warm_up: round == 0,
        }
    };
    let value = |round: u32| {
        let late = if round == 17 { 2.4 } else { 1.0 };
        middle * late * (0.94 + 0.09 * lot.f64() + 0.1 * lot.f64().powi(6))
    };
    let values: Vec<f64> = (0..31).map(value).collect();
    (0..).zip(values).map(|(round, value)| sample(round, value)).collect()
}

/// A report as a run leaves one.
fn report() -> Report {
    let mut lot = fastrand::Rng::with_seed(5);
    let mut series = Vec::new();
    let kinds = [
        ("boot", "boot_ms", Unit::Ms, [32.0, 46.0, 164.0]),
        ("restore", "restore_first_output_ms", Unit::Ms, [15.2, 24.1, 155.0]),
        ("clone", "clone_fork_private_kib", Unit::KiB, [1180.0, 2900.0, 9100.0]),
        ("clone", "clone_fork_shared_kib", Unit::KiB, [5200.0, 4100.0, 6300.0]),
        ("clone", "clone_fork_pss_kib", Unit::KiB, [2100.0, 3700.0, 10400.0]),
        ("exec", "exec_per_s", Unit::PerS, [310.0, 305.0, 290.0]),
    ];
    for (scenario, metric, unit, middles) in kinds {
        let sizes: &[&str] = if unit == Unit::Ms { &["128", "512", "2048"] } else { &["128"] };
        for (place, memory) in sizes.iter().enumerate() {
            let larger = 1.0 + 0.3 * f64::from(u32::try_from(place).unwrap());
            let again = format!("{}{}", NAMES[0], coppice_bench::schedule::AGAIN);
            let names = NAMES.into_iter().chain([again.as_str()]);
            for (name, middle) in names.zip(middles.into_iter().chain([middles[0]])) {
                let parameters = [("memory_mib", *memory), ("vcpus", "1"), ("cache", "warm")];
                series.push(Series {
                    scenario: scenario.into(),
                    metric: metric.into(),
                    unit,
                    contender: name.into(),
                    parameters: parameters.map(|(n, v)| (n.to_owned(), v.to_owned())).into(),
                    samples: samples(&mut lot, middle * larger, scenario == "restore"),
                });
            }
        }
    }
    let contender = |name: &str| Contender {
        name: name.into(),
        version: "1.2.3".into(),
        program: format!("/usr/bin/{name}"),
        kind: name.into(),
    };
    let facts =
        [("cpu", "AMD EPYC 7B13, 8 threads"), ("kernel", "Linux 6.12.0"), ("memory", "32 GiB")];
    Report {
        format: 1,
        coppice: Version { version: "0.1.0".into(), revision: "0123456789ab".into() },
        command: ["coppice", "bench", "all", "-n", "30"].map(str::to_owned).into(),
        started: "2026-01-01T10:00:00Z".into(),
        finished: Some("2026-01-01T10:20:00Z".into()),
        complete: true,
        seed: 1,
        lane: "host".into(),
        machine: MachineInfo(facts.map(|(n, v)| (n.to_owned(), v.to_owned())).into()),
        settings: Settings(BTreeMap::from([("rounds".into(), "30".into())])),
        contenders: NAMES.map(contender).into(),
        series,
        failures: Vec::new(),
        left_out: Vec::new(),
        summary: Vec::new(),
    }
}

/// Opens a page, with more arguments, in a browser with nothing of anybody's in it.
fn open(page: &Path, arguments: &[&str]) -> Output {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new("chromium")
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"])
        .args(["--disable-dev-shm-usage", "--enable-logging=stderr", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .output()
        .expect("the package chromium is needed: `cargo xtask test unit` installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// What the page said on the browser's console, which has refused requests as well.
fn said(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().filter(|line| line.contains("CONSOLE")).map(str::to_owned).collect()
}

#[test]
fn a_browser_shows_all_plots_and_has_nothing_to_complain_of() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.html");
    std::fs::write(&path, html::page(&report())).unwrap();
    let opened = open(&path, &["--dump-dom"]);
    assert_eq!(said(&opened), Vec::<String>::new());
    let shown = String::from_utf8_lossy(&opened.stdout);
    // Ten distributions, three of stages, one of memory, two of how it scales.
    for part in ["<svg", "<figcaption>", "role=\"img\"", "<desc>"] {
        assert_eq!(shown.matches(part).count(), 16, "{part}");
    }
}

#[test]
fn a_page_that_asks_for_more_is_told_of() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.html");
    let page = html::page(&report()).replace("<main>", "<main><script src=\"x.js\"></script>");
    std::fs::write(&path, page).unwrap();
    let said = said(&open(&path, &["--dump-dom"]));
    assert!(said.iter().any(|line| line.contains("Content Security Policy")), "{said:?}");
}

/// For a look at it: `COPPICE_SCREENSHOTS=DIR` keeps pictures.
#[test]
fn it_is_drawn_for_screens_and_telephones_in_light_and_dark() {
    let dir = tempfile::tempdir().unwrap();
    let kept = std::env::var_os("COPPICE_SCREENSHOTS").map(std::path::PathBuf::from);
    let place = kept.as_deref().unwrap_or(dir.path());
    let path = place.join("report.html");
    std::fs::write(&path, html::page(&report())).unwrap();
    let mut sizes = Vec::new();
    for (name, window) in [("screen", "1280,2600"), ("phone", "390,2600")] {
        for (scheme, setting) in [("light", "1"), ("dark", "0")] {
            let picture = place.join(format!("{name}-{scheme}.png"));
            let arguments = [
                format!("--screenshot={}", picture.display()),
                format!("--window-size={window}"),
                format!("--blink-settings=preferredColorScheme={setting}"),
            ];
            open(&path, &arguments.each_ref().map(String::as_str));
            sizes.push(std::fs::read(picture).unwrap());
        }
    }
    let [light, dark, ..] = sizes.as_slice() else { panic!("four pictures") };
    assert!(light.starts_with(b"\x89PNG") && light != dark, "light and dark look the same");
}
