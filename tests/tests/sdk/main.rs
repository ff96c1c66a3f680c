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
                asynchronous background commands expiry files lifecycle lists output snapshots
                stdin suspend tenants terminal timeouts transfers watch web $($own)*
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
                lifecycle $($own)*
            ]
        );)*
    };
}

python! {
    python_2_29_5 "2.29.5" []
    python_2_50_0 "2.50.0" [fork]
    python_2_51_0 "2.51.0" [fork]
    python_2_63_0 "2.63.0" [fork]
}

node! {
    node_2_29_1 "2.29.1" []
    node_2_51_0 "2.51.0" []
}

/// A scenario that no test names would never run.
#[test]
fn every_scenario_has_tests() {
    let own = std::fs::read_to_string(source::top().join("tests/tests/sdk/main.rs")).unwrap();
    for (language, ending) in [("python", "py"), ("node", "mjs")] {
        let (_, list) = own.split_once(&format!("macro_rules! {language} {{")).unwrap();
        for script in std::fs::read_dir(client::scripts(language)).unwrap() {
            let script = script.unwrap().path();
            let name = script.file_stem().unwrap().to_string_lossy().into_owned();
            if script.extension().is_some_and(|e| e == ending) && name != "common" {
                assert!(list.split([' ', '[', ']']).any(|word| word == name), "{script:?}");
            }
        }
    }
}
