//! Which lane a command takes, and why.

use std::fs::OpenOptions;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::Deserialize;
use thiserror::Error;

use crate::paths;

/// What the caller asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaneChoice {
    /// The host where its /dev/kvm runs kernels in hardware, else the nested machine.
    #[default]
    Best,
    /// The host, whatever its /dev/kvm can do.
    Direct,
    /// The nested machine.
    Nested,
}

/// Where commands run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// On this host, whose /dev/kvm runs guest kernels in hardware.
    Hardware,
    /// On this host, whose /dev/kvm is absent or emulates guest kernel code: no Linux guests.
    Host,
    /// In the nested machine.
    Nested,
    /// In the nested machine whose clock counts instructions.
    VirtualTime,
}

impl Lane {
    /// One word for reports and for `COPPICE_LAB_LANE`, which commands see.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Host => "host",
            Self::Nested => "nested",
            Self::VirtualTime => "virtual",
        }
    }

    /// Whether commands run in the nested machine.
    #[must_use]
    pub fn is_nested(self) -> bool {
        matches!(self, Self::Nested | Self::VirtualTime)
    }
}

impl std::fmt::Display for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Why the host could not be probed.
#[derive(Debug, Error)]
pub enum Error {
    /// The probe could not be built.
    #[error("cannot build coppice-vmm, which probes /dev/kvm: {0}")]
    Build(String),
    /// The probe could not be run.
    #[error("cannot run {program}")]
    Run {
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The probe's answer makes no sense.
    #[error("`coppice-vmm probe` answered {answer:?}")]
    Answer {
        /// What it printed.
        answer: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// The part of `coppice-vmm probe`'s answer that decides.
#[derive(Debug, Deserialize)]
struct Probe {
    kvm: bool,
    kernel_mode: Option<KernelMode>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum KernelMode {
    Hardware,
    Emulated,
}

/// Whether this host's /dev/kvm runs guest kernels in hardware, and the reason in words.
pub(crate) fn host_has_hardware_kvm() -> Result<(bool, String), Error> {
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        return Ok((false, format!("/dev/kvm does not open ({error})")));
    }
    let program = build_probe()?;
    let output = Command::new(&program)
        .arg("probe")
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::Run { program, source })?;
    verdict(&String::from_utf8_lossy(&output.stdout))
}

fn verdict(answer: &str) -> Result<(bool, String), Error> {
    let probe: Probe = serde_json::from_str(answer)
        .map_err(|source| Error::Answer { answer: answer.trim().to_owned(), source })?;
    Ok(match (probe.kvm, probe.kernel_mode) {
        (true, Some(KernelMode::Hardware)) => {
            (true, "/dev/kvm runs guest kernels in hardware".to_owned())
        }
        (true, Some(KernelMode::Emulated)) => {
            (false, "/dev/kvm emulates guest kernel code and cannot boot Linux".to_owned())
        }
        _ => (false, "/dev/kvm does not run guests".to_owned()),
    })
}

/// The program that probes: any build of it will do, since it is the host that is probed.
fn build_probe() -> Result<PathBuf, Error> {
    let program = paths::release_dir().join("coppice-vmm");
    if program.is_file() {
        return Ok(program);
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--quiet", "--release", "-p", "coppice-vmm", "--bin", "coppice-vmm"])
        .current_dir(paths::checkout())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Error::Build(format!("cannot run cargo: {error}")))?;
    if !output.status.success() {
        return Err(Error::Build(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hardware_kernel_mode_makes_the_host_a_lane_for_linux() {
        let hardware = |answer| verdict(answer).map(|(hardware, _)| hardware);
        assert!(hardware(r#"{"kvm":true,"kernel_mode":"hardware","api_version":12}"#).unwrap());
        assert!(!hardware(r#"{"kvm":true,"kernel_mode":"emulated"}"#).unwrap());
        assert!(!hardware(r#"{"kvm":false,"error":"no such file","kernel_mode":null}"#).unwrap());
        assert!(hardware("Segmentation fault").is_err());
    }
}
