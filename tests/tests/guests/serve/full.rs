//! A disk without space: what cannot be kept is refused in so many words, and all
//! is well when there is space again.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use coppice_tests::tools::host_tools;
use serde_json::{Value, json};

use super::client::Daemon;
use crate::common::on_lane;

/// A small file system of its own, for as long as the value lives. One in memory would not do: a
/// page of a file that nobody wrote takes space there when it is read.
struct SmallDisk {
    at: PathBuf,
    _image: tempfile::NamedTempFile,
}

impl SmallDisk {
    fn mount(tools: &Path, at: &Path, mib: u64) -> Self {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(mib << 20).unwrap();
        let run = |command: &mut Command| {
            let status = command.status().unwrap();
            assert!(status.success(), "{command:?}: {status}; only root can make a file system");
        };
        run(Command::new(tools.join("mke2fs")).args(["-q", "-t", "ext4"]).arg(image.path()));
        run(Command::new("mount").args(["-t", "ext4", "-o", "loop"]).arg(image.path()).arg(at));
        Self { at: at.to_owned(), _image: image }
    }

    /// Takes all space.
    fn fill(&self) -> PathBuf {
        let path = self.at.join("ballast");
        let mut file = File::create(&path).unwrap();
        let block = vec![1; 1 << 16];
        while file.write_all(&block).is_ok() {}
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The daemon's end may still be under way; the name space ends with the test anyhow.
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
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
    let tools = host_tools(&["mke2fs"]).unwrap();
    on_lane!({
        let dir = tempfile::tempdir().unwrap();
        let disk = SmallDisk::mount(&tools, dir.path(), 700);
        let daemon = Daemon::start_in(dir, &[]);
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        let other = client.create(json!({}));
        let path = format!("/sandboxes/{}", sandbox.id);
        assert_eq!(client.write(&sandbox, "/root/state", "kept"), Some(200));

        // What a guest writes while the disk is full is lost to it, so this one has written all.
        client.run(&sandbox, "sync");
        let ballast = disk.fill();
        is_told(client.post("/v2/sandboxes", json!({"templateID": "base"})));
        is_told(client.post(&format!("{path}/pause"), json!({})));
        is_told(client.post(&format!("{path}/snapshots"), json!({})));
        // A guest whose writes fail runs on, whatever its commands make of it.
        client.try_run(&other, "head -c 8M /dev/urandom > /root/lost; sync");
        assert_eq!(client.get(&format!("/sandboxes/{}", other.id)).1["state"], "running");
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
