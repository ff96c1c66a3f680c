//! Runs the scenarios, which are programs that use an SDK as anybody would, against the daemon.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use coppice_lab::{Lab, LaneChoice, Options, paths};
use coppice_manager::failure::chain;
use coppice_tests::daemon::Daemon;
use coppice_tests::source::top;

/// One daemon serves all tests of this process.
static DAEMON: LazyLock<Daemon> = LazyLock::new(|| {
    let lab = Lab::open(LaneChoice::Best, &Options::default());
    let lab = lab.unwrap_or_else(|error| panic!("no lane for guests: {}", chain(&error)));
    eprintln!("lane: {} ({})", lab.lane().name(), lab.reason());
    Daemon::start(Box::leak(Box::new(lab)), &["first", "second"])
        .unwrap_or_else(|error| panic!("{}", chain(&error)))
});

/// Runs `tests/sdk/python/SCENARIO.py` with this version of the SDK.
pub(crate) fn python(version: &str, scenario: &str) {
    let mut command = Command::new("python3");
    command
        .arg(scripts("python").join(format!("{scenario}.py")))
        .env("PYTHONPATH", sdk("python", version))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    run(&mut command);
}

/// Runs `tests/sdk/node/SCENARIO.mjs` with this version of the SDK.
pub(crate) fn node(version: &str, scenario: &str) {
    let mut command = Command::new("node");
    command
        .arg(scripts("node").join(format!("{scenario}.mjs")))
        .env("E2B_SDK", sdk("node", version).join("node_modules/e2b"));
    run(&mut command);
}

/// Where the scenarios of a language are.
pub(crate) fn scripts(language: &str) -> PathBuf {
    top().join("tests/sdk").join(language)
}

/// Where `cargo xtask sdk` put this version.
fn sdk(language: &str, version: &str) -> PathBuf {
    let path = paths::target_dir().join("coppice/sdk").join(language).join(version);
    assert!(path.is_dir(), "{} is not there: run `cargo xtask sdk`", path.display());
    path
}

#[allow(clippy::print_stdout, reason = "what a scenario measured is its output")]
fn run(command: &mut Command) {
    let daemon = &*DAEMON;
    let before = daemon.log().len();
    for (name, _) in std::env::vars_os() {
        if Path::new(&name).to_string_lossy().starts_with("E2B_") {
            command.env_remove(name);
        }
    }
    let [key, other] = daemon.keys() else { panic!("two keys were asked for") };
    let output = command
        .env("E2B_API_KEY", key)
        .env("OTHER_API_KEY", other)
        .env("E2B_API_URL", daemon.url())
        .env("E2B_SANDBOX_URL", daemon.url())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}\nthe daemon's log meanwhile:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
        &daemon.log()[before..]
    );
    // What a scenario measured, for `--nocapture`.
    print!("{}", String::from_utf8_lossy(&output.stdout));
}
