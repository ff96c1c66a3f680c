//! What this host can do for sandboxes, check by check, each with what to do about a lack.
//!
//! Whether guest kernels run at full speed is measured by `coppice-vmm probe` with a tiny guest,
//! never concluded from a name.

mod host;
mod iaa;
mod kvm;

use std::path::Path;

use serde::Serialize;

use crate::failure::Class;
use crate::home::Home;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// All is well.
    Ok,
    /// Sandboxes run, but something is not as good as it could be.
    Note,
    /// Sandboxes cannot run.
    Missing,
}

/// One check.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What was looked at, in a word or two.
    pub name: &'static str,
    /// How it came out.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What to do, unless all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// The class of failure a sandbox would have, when it is missing.
    #[serde(skip)]
    pub class: Option<Class>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, found: found.into(), remedy: None, class: None }
    }

    fn note(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        let remedy = Some(remedy.into());
        Self { name, status: Status::Note, found: found.into(), remedy, class: None }
    }

    fn missing(
        name: &'static str,
        class: Class,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (remedy, class) = (Some(remedy.into()), Some(class));
        Self { name, status: Status::Missing, found: found.into(), remedy, class }
    }
}

/// Everything that was looked at.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Whether sandboxes can run here.
    pub ok: bool,
    /// Exit code of `coppice doctor`: 0, or that of the first thing missing.
    pub code: u8,
    /// The checks.
    pub checks: Vec<Check>,
    /// What `coppice-vmm probe` printed, as it is.
    pub probe: Option<serde_json::Value>,
}

/// Looks at the host. `vmm` is the `coppice-vmm` program.
pub async fn examine(vmm: &Path, home: &Home, runtime: &Path) -> Report {
    let probe = kvm::probe(vmm).await;
    let mut checks = kvm::checks(vmm, &probe);
    checks.push(host::home_kernels(home));
    checks.push(host::home_images(home));
    checks.push(host::scratch(home));
    checks.push(host::runtime(runtime));
    checks.push(host::memory());
    checks.push(host::huge_pages());
    checks.push(host::cgroups());
    checks.push(iaa::check(Path::new(coppice_iaa::discover::SYSFS)).await);
    let code = checks.iter().find_map(|check| check.class).map_or(0, Class::exit_code);
    Report { ok: code == 0, code, checks, probe: probe.ok() }
}
