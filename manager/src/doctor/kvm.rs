//! KVM as the VMM's own probe sees it.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::fs::{Access, access};
use rustix::io::Errno;
use serde_json::Value;
use tokio::time::timeout;

use super::Check;
use crate::failure::{Class, chain};

/// How long the probe may take; emulation that is slow needs seconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);
const DEVICE: &str = "/dev/kvm";
/// The way out on a host without KVM that is fit.
const LAB: &str = "or use the nested lab (cargo xtask lab)";

/// Runs `coppice-vmm probe`.
pub(super) async fn probe(vmm: &Path) -> io::Result<Value> {
    let mut command = tokio::process::Command::new(vmm);
    command.arg("probe").env_clear().stdin(Stdio::null()).stderr(Stdio::null());
    command.kill_on_drop(true);
    let output = timeout(PROBE_TIMEOUT, command.output())
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    Ok(serde_json::from_slice(&output.stdout)?)
}

pub(super) fn checks(vmm: &Path, probe: &io::Result<Value>) -> Vec<Check> {
    match probe {
        Err(error) => vec![Check::missing(
            "vmm",
            Class::ProgramMissing,
            format!("{} does not run: {}", vmm.display(), chain(error)),
            "put coppice-vmm next to coppice, or name it with --vmm or COPPICE_VMM",
        )],
        Ok(report) => {
            let vmm = Check::ok("vmm", vmm.display().to_string());
            vec![vmm, kvm(report), userfaultfd(report)]
        }
    }
}

fn kvm(report: &Value) -> Check {
    if report.get("kvm").and_then(Value::as_bool) != Some(true) {
        let error = report.get("error").and_then(Value::as_str).unwrap_or("no reason given");
        return unusable(error);
    }
    let ratio = report.get("loop_ns_ratio").and_then(Value::as_f64).unwrap_or_default();
    let vcpus = report.pointer("/capabilities/max_vcpus").and_then(Value::as_i64);
    let vcpus = vcpus.map_or_else(String::new, |count| format!(", up to {count} vCPUs"));
    match report.get("kernel_mode").and_then(Value::as_str) {
        Some("hardware") => Check::ok(
            "kvm",
            format!(
                "{DEVICE} runs guest kernels on the processor ({ratio} x the host's time{vcpus})"
            ),
        ),
        _ => Check::missing(
            "kvm",
            Class::KvmUnfit,
            format!("{DEVICE} emulates guest kernel code, {ratio} times slower than the host"),
            format!("use a host with VT-x or AMD-V open to KVM, {LAB}"),
        ),
    }
}

/// Which of the reasons for an unusable KVM it is.
fn unusable(error: &str) -> Check {
    match access(DEVICE, Access::READ_OK | Access::WRITE_OK) {
        Err(Errno::NOENT) => Check::missing(
            "kvm",
            Class::KvmAbsent,
            format!("there is no {DEVICE}"),
            format!(
                "turn virtualization on in the firmware and load kvm_intel or kvm_amd (modprobe), \
                 {LAB}"
            ),
        ),
        Err(_) => Check::missing(
            "kvm",
            Class::KvmDenied,
            format!("{DEVICE} may not be opened by this user"),
            "join its group (usermod -aG kvm USER) and log in again",
        ),
        Ok(()) => Check::missing(
            "kvm",
            Class::KvmUnfit,
            format!("{DEVICE} cannot be used: {error}"),
            format!("use a newer kernel or another host, {LAB}"),
        ),
    }
}

fn userfaultfd(report: &Value) -> Check {
    if report.get("userfaultfd").and_then(Value::as_bool) == Some(true) {
        return Check::ok("userfaultfd", "guest memory can be loaded on demand");
    }
    Check::note(
        "userfaultfd",
        "this user may not handle the page faults of guests",
        "run as root, set sysctl vm.unprivileged_userfaultfd=1, or open /dev/userfaultfd to this \
         user; without it memory is loaded up front",
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::doctor::Status;

    #[test]
    fn hardware_is_well_and_emulation_is_not() {
        let report = |mode| json!({"kvm": true, "kernel_mode": mode, "loop_ns_ratio": 1.5});
        assert_eq!(kvm(&report("hardware")).status, Status::Ok);
        assert_eq!(kvm(&report("emulated")).class, Some(Class::KvmUnfit));
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_missing() {
        let path = Path::new("/nonexistent/coppice-vmm");
        let checks = checks(path, &probe(path).await);
        assert_eq!(checks[0].class, Some(Class::ProgramMissing));
    }

    #[test]
    fn a_probe_that_says_nothing_is_not_taken_for_success() {
        assert_eq!(kvm(&json!({})).status, Status::Missing);
    }
}
