//! Pages of reports, hostile ones too.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::model::{
    Contender, Failure, MachineInfo, Report, Sample, Series, Settings, Stage, Unit, Version,
};

fn series(metric: &str, contender: &str, values: &[f64]) -> Series {
    let sample = |(round, value): (u32, &f64)| {
        let stage = |name: &str, part: f64| Stage { name: name.into(), ms: value * part };
        Sample {
            round,
            order: round.into(),
            at_ms: 0.0,
            value: *value,
            stages: vec![stage("started", 0.2), stage("running", 0.5), stage("first_output", 1.0)],
            warm_up: false,
        }
    };
    Series {
        scenario: "restore".into(),
        metric: metric.into(),
        unit: Unit::Ms,
        contender: contender.into(),
        parameters: BTreeMap::from([("memory_mib".into(), "128".into())]),
        samples: (0..).zip(values).map(sample).collect(),
    }
}

fn report(names: &[&str], series: Vec<Series>) -> Report {
    let contender = |name: &&str| Contender {
        name: (*name).into(),
        version: "1".into(),
        program: "/usr/bin/vmm".into(),
        kind: "coppice".into(),
    };
    Report {
        format: 1,
        coppice: Version { version: "0.1".into(), revision: "a".into() },
        command: vec!["coppice".into(), "bench".into(), "it's".into()],
        started: "2026-01-01T00:00:00Z".into(),
        finished: None,
        complete: true,
        seed: 1,
        lane: "host".into(),
        machine: MachineInfo(BTreeMap::new()),
        settings: Settings(BTreeMap::new()),
        contenders: names.iter().map(contender).collect(),
        series,
        failures: Vec::new(),
        left_out: Vec::new(),
        summary: Vec::new(),
    }
}

fn count(page: &str, what: &str) -> usize {
    page.matches(what).count()
}

#[test]
fn every_sample_is_a_dot_and_every_metric_has_its_plots() {
    let (ours, theirs) = (series("restore_ms", "a", &[1.0, 2.0, 3.0]), [4.0, 5.0, 6.0]);
    let page = page(&report(&["a", "b"], vec![ours, series("restore_ms", "b", &theirs)]));
    // The distribution and the stages.
    assert_eq!(count(&page, "<svg"), 2);
    assert_eq!(count(&page, "class=\"dot\""), 6);
    assert_eq!(count(&page, "class=\"stage"), 6);
    assert!(page.contains("&#39;it&#39;\\&#39;&#39;s&#39;"), "the command can be pasted");
}

#[test]
fn outliers_are_drawn_as_crosses() {
    let mut values: Vec<f64> = (0..20).map(|value| 10.0 + f64::from(value) / 10.0).collect();
    values.push(99.0);
    let page = page(&report(&["a"], vec![series("restore_ms", "a", &values)]));
    assert_eq!((count(&page, "class=\"out\""), count(&page, "class=\"dot\"")), (1, 20));
}

#[test]
fn of_many_outliers_none_is_drawn_as_if_it_were_none() {
    let mut values = vec![10.0; 4_000];
    values.extend((0..1_000).map(|value| 1_000.0 + f64::from(value)));
    let page = page(&report(&["a"], vec![series("restore_ms", "a", &values)]));
    let crosses = count(&page, "class=\"out\"");
    assert!((1..=400).contains(&crosses), "{crosses}");
    // All dots are at the place of the ten; every thirteenth of them.
    assert!(count(&page, "class=\"dot\"") <= 4_000 / 13 + 1);
    assert!(page.contains("not every dot is drawn"));
}

#[test]
fn memory_is_a_bar_of_private_and_shared_with_a_mark_for_pss() {
    let kib = |metric: &str, name: &str, value: f64| Series {
        unit: Unit::KiB,
        ..series(metric, name, &[value])
    };
    let all = vec![
        kib("clone_fork_private_kib", "a", 10.0),
        kib("clone_fork_shared_kib", "a", 20.0),
        kib("clone_fork_pss_kib", "a", 15.0),
        kib("clone_fork_pss_kib", "b", 25.0),
        kib("clone_exec_pss_kib", "a", 35.0),
    ];
    let page = page(&report(&["a", "b"], all));
    let parts = ["stage m0", "stage m1", "\"pss\""].map(|part| count(&page, part));
    assert_eq!(parts, [1, 1, 3]);
    assert!(page.contains("a: private 10, shared 20, Pss 15 KiB"), "{page}");
}

#[test]
fn a_stage_has_one_tone_whoever_lacks_another() {
    let mut lacking = series("restore_ms", "b", &[4.0]);
    lacking.samples.iter_mut().for_each(|sample| {
        sample.stages.remove(0);
    });
    let page = page(&report(&["a", "b"], vec![series("restore_ms", "a", &[1.0]), lacking]));
    let tones = ["s0", "s1", "s2"].map(|tone| count(&page, &format!("class=\"stage {tone}")));
    assert_eq!(tones, [1, 2, 2]);
}

#[test]
fn samples_without_a_place_are_told_of() {
    let strange = series("restore_ms", "a", &[1.0, f64::NAN, f64::INFINITY]);
    let page = page(&report(&["a"], vec![strange]));
    assert!(page.contains("2 samples are no finite numbers"), "{page}");
    assert!(page.contains("not all of 3 samples are finite numbers"), "{page}");
}

#[test]
fn a_series_without_samples_is_in_the_table() {
    let page = page(&report(&["a"], vec![series("restore_ms", "a", &[])]));
    assert!(page.contains("no sample that counts") && !page.contains("<svg"), "{page}");
}

#[test]
fn how_a_contender_did_it_stands_beside_its_name() {
    let mut back = series("rollback_first_output_ms", "a", &[1.0]);
    back.parameters.insert("method".into(), "in place".into());
    assert!(page(&report(&["a"], vec![back])).contains("<small>method=in place</small>"));
}

#[test]
fn sizes_have_a_plot_of_how_it_scales() {
    let sized = |memory: &str, value: f64| Series {
        parameters: BTreeMap::from([("memory_mib".into(), memory.into())]),
        ..series("restore_ms", "a", &[value])
    };
    let page = page(&report(&["a"], vec![sized("128", 5.0), sized("512", 7.0)]));
    assert_eq!(count(&page, "<polyline"), 1);
}

#[test]
fn what_a_report_says_is_text_and_nothing_else() {
    let evil = "\"><script>alert(1)</script><img src=x onerror=y>&'";
    let mut hostile = report(&[evil], vec![series(evil, evil, &[1.0, 2.0])]);
    hostile.lane = evil.into();
    hostile.machine.0.insert(evil.into(), evil.into());
    hostile.failures.push(Failure {
        contender: evil.into(),
        scenario: evil.into(),
        round: None,
        message: evil.into(),
    });
    let page = page(&hostile);
    assert!(!page.contains("<script") && !page.contains("<img"), "{page}");
    assert!(!page.contains(evil), "{page}");
}

#[test]
fn a_part_of_a_run_says_that_it_is_one() {
    let part = Report { complete: false, ..report(&["a"], Vec::new()) };
    assert!(page(&part).contains("broken off"));
}

#[test]
fn a_great_many_samples_make_no_great_page() {
    let values: Vec<f64> = (0..100_000).map(f64::from).collect();
    let mut many = series("restore_ms", "a", &values);
    many.samples.iter_mut().for_each(|sample| sample.stages.clear());
    let page = page(&report(&["a"], vec![many]));
    assert!(page.len() < 200_000, "{}", page.len());
    assert!(page.contains("not every dot is drawn"));
}

#[test]
fn nothing_outside_of_the_page_is_needed() {
    let page = page(&report(&["a"], vec![series("restore_ms", "a", &[1.0])]));
    for outside in ["http:", "https:", "src=", "url(", "@import", "<script"] {
        assert!(!page.contains(outside), "{outside}");
    }
}

proptest! {
    #[test]
    fn any_figures_have_a_page(
        values in prop::collection::vec(prop::num::f64::ANY, 0..12),
        other in prop::num::f64::ANY,
        text: String,
    ) {
        let series = vec![series(&text, "a", &values), series(&text, &text, &[other])];
        let page = page(&report(&["a", &text], series));
        prop_assert!(!page.contains("NaN") && !page.contains("\"inf"), "{page}");
    }
}
