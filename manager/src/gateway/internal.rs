//! Paths of the agent that only the manager may ask for. The agent knows each in one spelling; here
//! every spelling of them is refused that anything on the way might take for it.

use percent_encoding::percent_decode_str;

const INTERNAL: [&str; 7] =
    ["init", "freeze", "unfreeze", "fsfreeze", "fsthaw", "collapse", "upgrade"];

/// Whether a request's path leads there.
pub(super) fn is_internal(path: &str) -> bool {
    let once = percent_decode_str(path).decode_utf8_lossy();
    let twice = percent_decode_str(&once).decode_utf8_lossy();
    [path, &once, &twice].into_iter().any(|path| INTERNAL.contains(&plain(path).as_str()))
}

/// A path in lower case, without what does not count in it.
fn plain(path: &str) -> String {
    let mut segments: Vec<String> = Vec::new();
    for segment in path.split(['/', '\\']) {
        let segment = segment.split([';', '?', '#', '\0']).next().unwrap_or(segment);
        match segment.trim() {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment.to_ascii_lowercase()),
        }
    }
    segments.join("/")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_spelling_is_known() {
        for path in [
            "/init",
            "//init",
            "/./init",
            "/init/",
            "/INIT",
            "/%69nit",
            "/%2569nit",
            "/init%2f",
            "/x/../init",
            "/x/%2e%2e/init",
            "/init;a=b",
            "/init%00",
            "/%5cinit",
            "/init%20",
            "/fsfreeze",
            "/collapse",
            "init",
        ] {
            assert!(is_internal(path), "{path}");
        }
    }

    #[test]
    fn what_only_begins_or_ends_so_is_the_guests() {
        for path in ["/", "/initial", "/files", "/init/x", "/x/init", "/process.Process/Start"] {
            assert!(!is_internal(path), "{path}");
        }
    }

    proptest! {
        #[test]
        fn any_path_is_judged_without_a_panic(path in "\\PC{0,60}") {
            is_internal(&path);
        }
    }
}
