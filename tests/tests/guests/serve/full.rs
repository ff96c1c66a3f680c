//! A disk without space: what cannot be kept is refused in so many words, and all
//! is well when there is space again.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::client::Daemon;
use crate::common::on_lane;

/// A small file system of its own, for as long as the value lives.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, mib: u32) -> Self {
        let size = format!("size={mib}m");
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(at).status().unwrap();
        assert!(mounted.success(), "only root can mount a small file system");
        Self(at.to_owned())
    }

    /// Takes all space.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("ballast");
        let mut file = File::create(&path).unwrap();
        let block = vec![1; 1 << 16];
        while file.write_all(&block).is_ok() {}
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The daemon's end may still be under way; the name space ends with the test anyhow.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn is_told((status, answer): (u16, Value)) {
    assert_eq!(status, 507, "{answer}");
    assert_eq!(answer["code"], 507);
    let message = answer["message"].as_str().unwrap();
    assert!(message.contains("space") || message.contains("full"), "{message}");
}

#[test]
fn a_full_disk_is_told_of_and_all_is_well_when_it_has_space_again() {
    on_lane!({
        let dir = tempfile::tempdir().unwrap();
        let disk = SmallDisk::mount(dir.path(), 700);
        let daemon = Daemon::start_in(dir, &[]);
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        let other = client.create(json!({}));
        let path = format!("/sandboxes/{}", sandbox.id);
        assert_eq!(client.write(&sandbox, "/root/state", "kept"), Some(200));

        // What a guest writes while the disk is full is lost to it: that is not tried here.
        client.run(&sandbox, "sync");
        let ballast = disk.fill();
        is_told(client.post("/v2/sandboxes", json!({"templateID": "base"})));
        is_told(client.post(&format!("{path}/pause"), json!({})));
        is_told(client.post(&format!("{path}/snapshots"), json!({})));
        assert_eq!(client.get(&path).1["state"], "running");
        assert_eq!(client.read(&sandbox, "/root/state"), "kept");
        assert_eq!(client.list().len(), 2);
        // What is removed makes space, so it must not need any.
        assert_eq!(client.delete(&other.id).0, 204);
        assert_eq!(client.list(), std::slice::from_ref(&sandbox.id));

        std::fs::remove_file(ballast).unwrap();
        assert_eq!(client.post(&format!("{path}/pause"), json!({})).0, 204);
        assert_eq!(client.post(&format!("/v2{path}/connect"), json!({})).0, 201);
        assert_eq!(client.read(&sandbox, "/root/state"), "kept");
        client.create(json!({}));
        daemon.end();
        drop(disk);
    });
}
