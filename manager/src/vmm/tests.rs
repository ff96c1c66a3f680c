//! The process side against real programs that are not a VMM.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;

/// A directory with an executable script in it.
fn script(body: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vmm");
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    (dir, path)
}

#[tokio::test]
async fn a_program_that_is_not_there_cannot_be_started() {
    let error = Vmm::start(std::path::Path::new("/nonexistent/coppice-vmm")).unwrap_err();
    assert!(matches!(error, Error::Spawn { .. }), "{error}");
}

#[tokio::test]
async fn the_last_words_of_a_program_that_ends_are_told() {
    let (_dir, path) = script("echo no such luck >&2; exit 3");
    let vmm = Vmm::start(&path).unwrap();
    let Err(Error::Ended(end)) = vmm.status().await else { panic!("an answer from nobody") };
    assert_eq!(end.status.and_then(|status| status.code()), Some(3));
    assert_eq!(end.stderr, "no such luck");
    assert_eq!(end.reason, None);
}

#[tokio::test]
async fn the_end_by_a_filter_is_told_plainly() {
    let (_dir, path) = script("echo last words >&2; kill -SYS $$");
    let vmm = Vmm::start(&path).unwrap();
    let error = vmm.status().await.unwrap_err();
    let Error::Ended(end) = &error else { panic!("{error}") };
    assert!(end.is_by_filter());
    let text = error.to_string();
    assert!(text.contains("system call that it may not make") && !text.contains('\n'), "{text}");
}

#[tokio::test]
async fn nothing_is_passed_but_the_control_socket_and_standard_error() {
    let (_dir, path) = script("env >&2; exec 1>&2; cd /proc/self/fd; exec readlink $(seq 0 99)");
    // Deliberately inheritable.
    let leak = fs::File::open("/dev/zero").unwrap();
    rustix::io::fcntl_setfd(&leak, rustix::io::FdFlags::empty()).unwrap();
    let end = Vmm::start(&path).unwrap().ended().await;
    let (links, variables): (Vec<&str>, Vec<&str>) =
        end.stderr.lines().partition(|line| !line.contains('='));
    let kinds: Vec<&str> = links.iter().map(|link| link.split(':').next().unwrap()).collect();
    // Standard output went to standard error for the listing, and the shell is a process like
    // any other: nothing of this process's is among its descriptors.
    assert_eq!(kinds, ["/dev/null", "pipe", "pipe", "socket"]);
    // The shell's own.
    assert_eq!(variables, ["PWD=/"]);
}

#[tokio::test]
async fn it_leads_a_process_group_of_its_own() {
    let (_dir, path) = script("cut -d' ' -f5 /proc/$$/stat >&2");
    let vmm = Vmm::start(&path).unwrap();
    let pid = vmm.pid();
    assert_eq!(vmm.ended().await.stderr, pid.to_string());
}

#[tokio::test(start_paused = true)]
async fn a_program_that_ignores_the_end_of_its_socket_is_killed() {
    let (_dir, path) = script("exec sleep 1000");
    let vmm = Vmm::start(&path).unwrap();
    let end = vmm.stop().await;
    let signal = end.status.and_then(|s| std::os::unix::process::ExitStatusExt::signal(&s));
    assert_eq!(signal, Some(9));
}

#[tokio::test(start_paused = true)]
async fn dropping_the_handle_ends_and_reaps_the_process() {
    let (_dir, path) = script("exec sleep 1000");
    let vmm = Vmm::start(&path).unwrap();
    let mut end = vmm.end.clone();
    let pid = vmm.pid();
    drop(vmm);
    end.wait_for(Option::is_some).await.unwrap();
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
