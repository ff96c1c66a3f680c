//! The pure parts that hot paths go through: sets of pages, maps of disks, requests, statistics.
//! `cargo bench -p coppice-benches`; `cargo xtask test` runs each once.

#![allow(missing_docs, reason = "the function that the macro makes has none")]

use std::hint::black_box;

use coppice_bench::statistics;
use coppice_image::{ClusterRun, PageSet, SealedMap, decode_maps, encode_maps};
use coppice_vmm_protocol::{Op, Request};
use criterion::{Criterion, criterion_group, criterion_main};

/// Pages of a machine with 256 MiB.
const PAGES: u64 = 65_536;

/// A set with every tenth run of 7 pages, as guests dirty them.
fn dirty() -> PageSet {
    let mut set = PageSet::new(PAGES);
    (0..PAGES / 70).for_each(|run| set.insert_run(run * 70, 7));
    set
}

fn page_sets(criterion: &mut Criterion) {
    let set = dirty();
    criterion.bench_function("page_set/runs", |bencher| {
        bencher.iter(|| black_box(&set).runs().count());
    });
    criterion.bench_function("page_set/runs_with_gaps", |bencher| {
        bencher.iter(|| black_box(&set).runs_with_gaps(8).count());
    });
    // As the dirty log of a memory slot is taken in.
    criterion.bench_function("page_set/union_words", |bencher| {
        let mut all = PageSet::new(PAGES);
        bencher.iter(|| all.union_words(0, black_box(set.words())));
    });
    criterion.bench_function("page_set/len", |bencher| bencher.iter(|| black_box(&set).len()));
}

fn disk_maps(criterion: &mut Criterion) {
    let run = |number: u64| ClusterRun { first: number * 5, count: 3 };
    let Some(map) = SealedMap::new(1 << 20, (0..2000).map(run).collect()) else { return };
    let maps = [map];
    criterion.bench_function("sealed_map/encode", |bencher| {
        bencher.iter(|| encode_maps(black_box(&maps)));
    });
    let bytes = encode_maps(&maps);
    criterion.bench_function("sealed_map/decode", |bencher| {
        bencher.iter(|| decode_maps(black_box(&bytes)));
    });
}

fn requests(criterion: &mut Criterion) {
    let Ok(text) = serde_json::to_vec(&Request { id: 7, op: Op::Status {} }) else { return };
    criterion.bench_function("request/parse", |bencher| {
        bencher.iter(|| serde_json::from_slice::<Request>(black_box(&text)));
    });
}

fn figures(criterion: &mut Criterion) {
    let values: Vec<f64> = (0..50u32).map(|at| f64::from(at * 7919 % 101)).collect();
    criterion.bench_function("statistics/summarise", |bencher| {
        bencher.iter(|| statistics::summarise(black_box(&values), 1));
    });
}

criterion_group!(pure, page_sets, disk_maps, requests, figures);
criterion_main!(pure);
