//! The daemon, used by E2B's own clients as their registries publish them. Every scenario is a
//! program in `tests/sdk`, and a test for each version of the client that runs it. The clients
//! must be installed, which `cargo xtask sdk` does, and the rest be built, which
//! `cargo xtask test guests` does.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;

use coppice_tests::source;

/// A module of tests for a version of a client: each scenario it runs is one.
macro_rules! tests {
    ($module:ident, $language:ident, $version:literal, [$($scenario:ident)*]) => {
        mod $module {
            $(#[test]
            fn $scenario() {
                crate::client::$language($version, stringify!($scenario));
            })*
        }
    };
}

/// Versions of the Python SDK, which have these scenarios in common and some of their own.
macro_rules! python {
    ($($module:ident $version:literal [$($own:ident)*])*) => {
        $(tests!(
            $module,
            python,
            $version,
            [
                asynchronous background commands expiry files gone lifecycle lists metrics output
                snapshots stdin suspend tenants terminal timeouts transfers watch web $($own)*
            ]
        );)*
    };
}

/// Versions of the JavaScript SDK, which have these scenarios in common and some of their own.
macro_rules! node {
    ($($module:ident $version:literal [$($own:ident)*])*) => {
        $(tests!(
            $module,
            node,
            $version,
            [
                background commands files gone lifecycle lists metrics snapshots suspend terminal
                watch web $($own)*
            ]
        );)*
    };
}

python! {
    python_2_29_5 "2.29.5" [builds]
    python_2_50_0 "2.50.0" [fork]
    python_2_51_0 "2.51.0" [fork]
    python_2_63_0 "2.63.0" [builds fork latency]
}

node! {
    node_2_29_1 "2.29.1" []
    node_2_51_0 "2.51.0" [builds fork]
}

/// A scenario that no test names would never run.
#[test]
fn every_scenario_has_tests() {
    let own = std::fs::read_to_string(source::top().join("tests/tests/sdk/main.rs")).unwrap();
    for (language, ending) in [("python", "py"), ("node", "mjs")] {
        let begins = [format!("macro_rules! {language} {{"), format!("\n{language}! {{")];
        let lists = begins.map(|begin| {
            let (_, rest) = own.split_once(&begin).unwrap();
            rest.split_once("\n}").unwrap().0
        });
        for script in std::fs::read_dir(client::scripts(language)).unwrap() {
            let script = script.unwrap().path();
            let name = script.file_stem().unwrap().to_string_lossy();
            let runs = script.extension().is_some_and(|e| e == ending) && name != "common";
            let mut words = lists.iter().flat_map(|list| list.split([' ', '[', ']', '\n']));
            assert!(!runs || words.any(|word| word == name), "{} has no test", script.display());
        }
    }
}
