//! The benchmark of micro-guests at its smallest size: that it runs and has all its figures.

#[test]
fn one_sample_of_everything_is_measured() {
    if !coppice_micro::kvm() {
        return;
    }
    let summary = coppice_benches::micro::measure(1).unwrap().summary();
    let names: Vec<_> = summary.keys().copied().collect();
    assert_eq!(
        names,
        [
            "checkpoint_pause_256mib_async",
            "checkpoint_pause_7mib",
            "clone_cold_first_exit",
            "clone_from_running_pause",
            "clone_warm_first_exit",
            "floor_assign",
            "floor_copy_7mib",
            "floor_create",
            "rollback_7mib",
            "rollback_7mib_5_levels_up",
        ]
    );
}
