//! The daemon, used by E2B's own clients as their registries publish them. Every scenario is a
//! program in `tests/sdk`, and a test for each version of the client that runs it. The clients
//! must be installed, which `cargo xtask sdk` does, and the rest be built, which
//! `cargo xtask test guests` does.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;

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

/// Versions of the Python SDK, all with the same scenarios.
macro_rules! python {
    ($($module:ident $version:literal)*) => {
        $(tests!(
            $module,
            python,
            $version,
            [
                lifecycle
            ]
        );)*
    };
}

/// Versions of the JavaScript SDK, all with the same scenarios.
macro_rules! node {
    ($($module:ident $version:literal)*) => {
        $(tests!(
            $module,
            node,
            $version,
            [
                lifecycle
            ]
        );)*
    };
}

python! {
    python_2_29_5 "2.29.5"
    python_2_50_0 "2.50.0"
    python_2_51_0 "2.51.0"
    python_2_63_0 "2.63.0"
}

node! {
    node_2_29_1 "2.29.1"
    node_2_51_0 "2.51.0"
}
