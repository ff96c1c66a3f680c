//! Holds the rules of the tree that no compiler checks: who may use whom, where `unsafe` lives,
//! how long a file may grow, and that every module says what it is for.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use coppice_tests::source::{SourceFile, rust_files, top};

/// Longest source file, in lines.
const MAX_LINES: usize = 500;

/// Crate -> crates of this workspace it may depend on. Lower never calls upper.
const CRATE_EDGES: &[(&str, &[&str])] = &[
    ("coppice-vmm-protocol", &[]),
    ("coppice-agent-protocol", &[]),
    ("coppice-iaa", &[]),
    ("coppice-image", &[]),
    ("coppice-micro", &["coppice-vmm-protocol"]),
    // The micro-guests serve its tests.
    ("coppice-vmm", &["coppice-vmm-protocol", "coppice-image", "coppice-micro"]),
    ("coppice-agent", &["coppice-agent-protocol"]),
    ("coppice-bench", &["coppice-vmm-protocol", "coppice-agent-protocol"]),
    // The micro-guests serve its tests.
    (
        "coppice",
        &[
            "coppice-vmm-protocol",
            "coppice-agent-protocol",
            "coppice-bench",
            "coppice-iaa",
            "coppice-image",
            "coppice-micro",
        ],
    ),
    ("coppice-lab", &[]),
    ("coppice-inject", &[]),
    ("xtask", &["coppice-bench", "coppice-lab"]),
    (
        "coppice-benches",
        &[
            "coppice-bench",
            "coppice-vmm-protocol",
            "coppice-agent-protocol",
            "coppice-image",
            "coppice-micro",
            "coppice-vmm",
            "coppice",
        ],
    ),
    (
        "coppice-tests",
        &[
            "coppice-lab",
            "coppice-vmm-protocol",
            "coppice-agent-protocol",
            "coppice-image",
            "coppice-vmm",
            "coppice",
        ],
    ),
];

/// Layer of `vmm/src` -> layers it may name through `crate::`.
const VMM_EDGES: &[(&str, &[&str])] = &[
    ("sys", &[]),
    ("memory", &["sys"]),
    ("boot", &["memory", "sys"]),
    ("devices", &["memory", "sys"]),
    ("vcpu", &["devices", "memory", "sys"]),
    ("checkpoint", &["memory", "sys"]),
    ("vm", &["checkpoint", "vcpu", "devices", "boot", "memory", "sys"]),
    ("control", &["vm", "sys"]),
];

/// Module of `manager/src` -> modules it may name through `crate::`.
const MANAGER_EDGES: &[(&str, &[&str])] = &[
    ("random", &[]),
    ("sys", &[]),
    ("home", &[]),
    ("failure", &[]),
    ("image", &[]),
    ("rootfs", &[]),
    ("listen", &[]),
    ("workdir", &[]),
    ("trace", &["random"]),
    ("agent", &["failure", "trace"]),
    ("vmm", &["sys"]),
    ("store", &["failure", "home", "random", "vmm"]),
    ("diff", &["failure", "store"]),
    ("doctor", &["failure", "home", "workdir"]),
    ("sandbox", &["agent", "failure", "home", "image", "random", "store", "sys", "vmm", "workdir"]),
    ("template", &["agent", "sandbox", "store"]),
    ("build", &["agent", "store", "template"]),
    ("registry", &["random", "store"]),
    (
        "fleet",
        &[
            "agent", "build", "diff", "failure", "home", "random", "registry", "sandbox", "store",
            "template", "trace", "vmm", "workdir",
        ],
    ),
    ("api", &["build", "failure", "fleet", "listen", "random", "registry", "sandbox", "store"]),
    ("gateway", &["agent", "api", "failure", "fleet", "listen", "registry", "store"]),
    ("serve", &["api", "fleet", "gateway", "listen", "sys", "trace"]),
    ("client", &["api", "failure", "fleet", "home", "registry", "serve", "store"]),
];

fn report(breaches: Vec<String>, rule: &str) {
    let mut text = String::new();
    for breach in &breaches {
        let _ = writeln!(text, "  {breach}");
    }
    assert!(breaches.is_empty(), "{rule}:\n{text}");
}

fn files() -> Vec<SourceFile> {
    rust_files().unwrap()
}

#[test]
fn every_module_says_what_it_is_for() {
    let breaches = files()
        .iter()
        .filter(|file| {
            !file.text.trim_start_matches("#![no_main]").trim_start().starts_with("//! ")
        })
        .map(|file| file.path.clone())
        .collect();
    report(breaches, "a source file starts with //! lines that place it in the picture");
}

#[test]
fn files_stay_readable() {
    let breaches = files()
        .iter()
        .map(|file| (file, file.text.lines().count()))
        .filter(|(_, lines)| *lines > MAX_LINES)
        .map(|(file, lines)| format!("{} has {lines} lines", file.path))
        .collect();
    report(breaches, "a source file has at most 500 lines; split it by meaning");
}

#[test]
fn unsafe_code_lives_in_sys_modules() {
    let breaches = files()
        .iter()
        .filter(|file| !(file.path.ends_with("/sys.rs") || file.path.contains("/sys/")))
        .flat_map(|file| {
            file.code_lines()
                .filter(|(_, line)| is_unsafe(line))
                .map(|(number, line)| format!("{}:{number}: {}", file.path, line.trim()))
                .collect::<Vec<_>>()
        })
        .collect();
    report(breaches, "`unsafe` is allowed in modules named sys only");
}

/// Whether a code line opens unsafe code: a block, a function, an implementation.
fn is_unsafe(line: &str) -> bool {
    ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"].iter().any(|form| line.contains(form))
        && !line.contains("\"unsafe")
}

#[test]
fn layers_of_the_vmm_call_downwards_only() {
    // Files beside the layers put them together.
    let layer = |rest: &str| Some(rest.split_once('/')?.0.to_owned());
    let breaches = upward_calls("vmm/src/", VMM_EDGES, layer);
    report(breaches, "layers of the VMM use those below them only");
}

#[test]
fn modules_of_the_manager_call_downwards_only() {
    let beside = ["lib.rs", "main.rs"];
    let module = |rest: &str| {
        let first = rest.split('/').next().unwrap_or(rest);
        let name = first.strip_suffix(".rs").unwrap_or(first);
        (!beside.contains(&rest) && name != "cli").then(|| name.to_owned())
    };
    let breaches = upward_calls("manager/src/", MANAGER_EDGES, module);
    report(breaches, "modules of the manager use those below them only");
}

/// Uses of one layer by another that are not in the edge table.
fn upward_calls(
    top: &str,
    edges: &[(&str, &[&str])],
    layer_of: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let allowed: BTreeMap<_, _> = edges.iter().copied().collect();
    let mut breaches = Vec::new();
    for file in files() {
        let Some(rest) = file.path.strip_prefix(top) else { continue };
        let Some(layer) = layer_of(rest) else { continue };
        let Some(below) = allowed.get(layer.as_str()) else {
            breaches.push(format!("{}: {layer} is not in the edge table", file.path));
            continue;
        };
        for (number, line) in file.code_lines() {
            for target in crate_paths(line) {
                if target != layer && allowed.contains_key(target) && !below.contains(&target) {
                    breaches.push(format!("{}:{number}: {layer} uses {target}", file.path));
                }
            }
        }
    }
    breaches
}

/// First path segment after each `crate::` in a line.
fn crate_paths(line: &str) -> Vec<&str> {
    line.split("crate::")
        .skip(1)
        .map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(""))
        .collect()
}

#[test]
fn devices_do_not_know_each_other() {
    let families = ["vmm/src/devices/virtio", "vmm/src/devices/legacy"];
    let shared = ["mod", "mmio", "io_thread", "queue"];
    let mut breaches = Vec::new();
    for family in families {
        let members: Vec<SourceFile> = files().into_iter().filter(|f| f.is_in(family)).collect();
        let name = |path: &str| {
            let rest = path.strip_prefix(family).unwrap_or(path).trim_start_matches('/');
            rest.split(['/', '.']).next().unwrap_or("").to_owned()
        };
        let devices: Vec<String> = members
            .iter()
            .map(|f| name(&f.path))
            .filter(|device| !shared.contains(&device.as_str()))
            .collect();
        let module = family.rsplit('/').next().unwrap_or("");
        for file in members.iter().filter(|f| devices.contains(&name(&f.path))) {
            for (number, line) in file.code_lines() {
                for other in devices.iter().filter(|other| **other != name(&file.path)) {
                    if line.contains(&format!("devices::{module}::{other}")) {
                        breaches.push(format!("{}:{number}: uses {other}", file.path));
                    }
                }
            }
        }
    }
    report(breaches, "a device never imports another device");
}

#[test]
fn only_the_machine_names_concrete_devices() {
    let concrete =
        ["virtio::blk::", "virtio::vsock::", "virtio::rng::", "virtio::balloon::", "legacy::"];
    let breaches = files()
        .iter()
        .filter(|file| {
            ["vmm/src/vcpu", "vmm/src/boot", "vmm/src/control"].iter().any(|d| file.is_in(d))
        })
        .flat_map(|file| {
            file.code_lines()
                .filter(|(_, line)| {
                    concrete.iter().any(|c| line.contains(&format!("devices::{c}")))
                })
                .map(|(number, line)| format!("{}:{number}: {}", file.path, line.trim()))
                .collect::<Vec<_>>()
        })
        .collect();
    report(breaches, "only vmm/src/vm names concrete devices");
}

#[test]
fn crates_depend_along_the_edge_table() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(top())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let names: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let allowed: BTreeMap<_, _> = CRATE_EDGES.iter().copied().collect();
    let mut breaches = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let Some(edges) = allowed.get(name) else {
            breaches.push(format!("{name} is not in the edge table"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            let target = dependency["name"].as_str().unwrap();
            if names.contains(&target) && !edges.contains(&target) {
                breaches.push(format!("{name} depends on {target}"));
            }
        }
    }
    report(breaches, "crates depend on each other along the edge table only");
}

#[test]
fn every_crate_holds_the_workspace_lints() {
    let mut breaches = Vec::new();
    for dir in [
        "vmm",
        "vmm/protocol",
        "vmm/iaa",
        "vmm/image",
        "vmm/micro",
        "guest-agent",
        "guest-agent/protocol",
        "manager",
        "manager/bench",
        "tests",
        "benches",
        "xtask",
        "xtask/lab",
    ] {
        let manifest = std::fs::read_to_string(top().join(dir).join("Cargo.toml")).unwrap();
        if !manifest.contains("[lints]\nworkspace = true") {
            breaches.push(dir.to_owned());
        }
    }
    report(breaches, "a crate takes its lints from the workspace");
}

#[test]
fn no_test_is_switched_off() {
    let breaches = files()
        .iter()
        .filter(|file| file.path != "tests/tests/tidy.rs")
        .flat_map(|file| {
            file.code_lines()
                .filter(|(_, line)| line.trim_start().starts_with("#[ignore"))
                .map(|(number, _)| format!("{}:{number}", file.path))
                .collect::<Vec<_>>()
        })
        .collect();
    report(breaches, "a test runs or does not exist");
}

#[test]
fn every_exception_for_dependencies_has_a_reason() {
    let deny = std::fs::read_to_string(top().join("deny.toml")).unwrap();
    let breaches = deny
        .lines()
        .filter(|line| {
            let entry = line.trim_start();
            entry.starts_with('{') && !entry.contains("reason = \"")
        })
        .map(str::to_owned)
        .collect();
    report(breaches, "every exception in deny.toml carries a reason");
}
