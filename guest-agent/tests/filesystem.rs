//! Looking at, making, moving and removing files and directories.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use common::{Agent, run};
use http::{Method, StatusCode};
use nix::unistd::geteuid;
use serde_json::{Value, json};

async fn call(agent: &Agent, procedure: &str, message: Value) -> (StatusCode, Value) {
    agent.call_service("filesystem.Filesystem", procedure, &message).await
}

async fn stat(agent: &Agent, path: &Path) -> Value {
    let (status, mut reply) = call(agent, "Stat", json!({ "path": path })).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    reply["entry"].take()
}

/// The code with which a call fails.
async fn failure(agent: &Agent, procedure: &str, message: Value) -> String {
    let (status, reply) = call(agent, procedure, message).await;
    assert_ne!(status, StatusCode::OK, "{reply}");
    assert!(reply["message"].is_string());
    reply["code"].as_str().unwrap().to_owned()
}

#[test]
fn a_file_is_described_completely() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("file");
        fs::write(&path, "12345").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_millis(1_500);
        fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        let me = nix::unistd::User::from_uid(geteuid()).unwrap().unwrap().name;
        let group = nix::unistd::Group::from_gid(nix::unistd::getegid()).unwrap().unwrap().name;
        let expected = json!({
            "name": "file", "type": "FILE_TYPE_FILE", "path": path, "size": "5", "mode": 0o640,
            "permissions": "-rw-r-----", "owner": me, "group": group,
            "modifiedTime": "1970-01-01T00:00:01.500Z",
        });
        assert_eq!(stat(&agent, &path).await, expected);
    });
}

#[test]
fn a_link_is_described_with_what_it_leads_to() {
    run(async {
        let agent = Agent::start().await;
        let (file, link) = (agent.path("file"), agent.path("link"));
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        symlink("file", &link).unwrap();
        let entry = stat(&agent, &link).await;
        assert_eq!((&entry["type"], &entry["isSymlink"]), (&json!("FILE_TYPE_FILE"), &json!(true)));
        assert_eq!((&entry["mode"], &entry["permissions"]), (&json!(0o600), &json!("Lrwxrwxrwx")));
        assert_eq!(entry["symlinkTarget"], json!(fs::canonicalize(&file).unwrap()));
    });
}

#[test]
fn a_device_has_no_type() {
    run(async {
        let agent = Agent::start().await;
        let entry = stat(&agent, Path::new("/dev/null")).await;
        assert_eq!(entry["type"], "FILE_TYPE_UNSPECIFIED");
    });
}

#[test]
fn what_does_not_exist_is_not_found() {
    run(async {
        let agent = Agent::start().await;
        for path in ["/no/such", "/etc/passwd/below"] {
            let code = failure(&agent, "Stat", json!({ "path": path })).await;
            assert_eq!(code, "not_found", "{path}");
        }
        assert_eq!(failure(&agent, "ListDir", json!({ "path": "/no/such" })).await, "not_found");
        let message = json!({ "source": "/no/such", "destination": agent.path("new/x") });
        assert_eq!(failure(&agent, "Move", message).await, "not_found");
        assert!(!agent.path("new").exists());
    });
}

#[test]
fn directories_are_made_with_their_parents() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("a/b/c");
        let (status, reply) = call(&agent, "MakeDir", json!({ "path": path })).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(reply["entry"]["type"], "FILE_TYPE_DIRECTORY");
        assert_eq!(reply["entry"]["permissions"], "drwxr-xr-x");
        assert!(path.is_dir());
    });
}

#[test]
fn a_directory_that_exists_is_not_made_again() {
    run(async {
        let agent = Agent::start().await;
        let file = agent.path("file");
        fs::write(&file, "").unwrap();
        let (status, reply) = call(&agent, "MakeDir", json!({ "path": agent.dir.path() })).await;
        assert_eq!((status, &reply["code"]), (StatusCode::CONFLICT, &json!("already_exists")));
        assert_eq!(failure(&agent, "MakeDir", json!({ "path": file })).await, "invalid_argument");
        let below = json!({ "path": file.join("x") });
        assert_eq!(failure(&agent, "MakeDir", below).await, "invalid_argument");
    });
}

#[test]
fn what_is_made_belongs_to_the_user() {
    if !geteuid().is_root() {
        println!("not root: owners cannot be changed, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        // "nobody:"
        let headers = [("authorization", "Basic bm9ib2R5Og==")];
        let message = json!({ "path": agent.path("a/b") }).to_string();
        let target = "/filesystem.Filesystem/MakeDir";
        let headers = [headers[0], ("content-type", "application/json")];
        let (status, ..) = agent.http(Method::POST, target, &headers, message).await;
        assert_eq!(status, StatusCode::OK);
        let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap().uid.as_raw();
        for made in ["a", "a/b"] {
            assert_eq!(fs::metadata(agent.path(made)).unwrap().uid(), nobody);
        }
    });
}

#[test]
fn a_move_replaces_and_makes_parents() {
    run(async {
        let agent = Agent::start().await;
        let (from, to) = (agent.path("from"), agent.path("new/to"));
        for content in ["1", "2"] {
            fs::write(&from, content).unwrap();
            let message = json!({ "source": from, "destination": to });
            let (status, reply) = call(&agent, "Move", message).await;
            assert_eq!((status, &reply["entry"]["path"]), (StatusCode::OK, &json!(to)));
            assert_eq!(fs::read_to_string(&to).unwrap(), content);
            assert!(!from.exists());
        }
    });
}

#[test]
fn removing_takes_trees_and_spares_what_links_lead_to() {
    run(async {
        let agent = Agent::start().await;
        let (tree, kept) = (agent.path("tree"), agent.path("kept"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        symlink(&kept, tree.join("a/link")).unwrap();
        let (status, reply) = call(&agent, "Remove", json!({ "path": tree })).await;
        assert_eq!((status, reply), (StatusCode::OK, json!({})));
        assert!(!tree.exists() && kept.join("file").exists());
    });
}

#[test]
fn removing_nothing_is_no_error_but_the_root_is() {
    run(async {
        let agent = Agent::start().await;
        assert_eq!(call(&agent, "Remove", json!({ "path": "/no/such" })).await.0, StatusCode::OK);
        for path in ["/", "", "/tmp/.."] {
            let code = failure(&agent, "Remove", json!({ "path": path })).await;
            assert_eq!(code, "invalid_argument", "{path}");
        }
    });
}

/// Paths of a listing, relative to `top`.
async fn listed(agent: &Agent, top: &Path, depth: u32) -> Vec<String> {
    let message = json!({ "path": top, "depth": depth });
    let (status, reply) = call(agent, "ListDir", message).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let relative = |entry: &Value| {
        let path = Path::new(entry["path"].as_str().unwrap());
        path.strip_prefix(top).unwrap().to_str().unwrap().to_owned()
    };
    reply["entries"].as_array().unwrap().iter().map(relative).collect()
}

#[test]
fn a_listing_is_as_deep_as_asked_for() {
    run(async {
        let agent = Agent::start().await;
        let top = agent.path("top");
        fs::create_dir_all(top.join("b/c/d")).unwrap();
        fs::write(top.join("a"), "").unwrap();
        symlink("b", top.join("link")).unwrap();
        assert_eq!(listed(&agent, &top, 0).await, ["a", "b", "link"]);
        assert_eq!(listed(&agent, &top, 1).await, ["a", "b", "link"]);
        assert_eq!(listed(&agent, &top, 2).await, ["a", "b", "b/c", "link"]);
        assert_eq!(listed(&agent, &top, 99).await, ["a", "b", "b/c", "b/c/d", "link"]);
    });
}

#[test]
fn a_link_to_a_directory_is_listed_under_its_own_name() {
    run(async {
        let agent = Agent::start().await;
        fs::create_dir_all(agent.path("real/x")).unwrap();
        symlink("real", agent.path("link")).unwrap();
        assert_eq!(listed(&agent, &agent.path("link"), 1).await, ["x"]);
    });
}

#[test]
fn only_directories_are_listed() {
    run(async {
        let agent = Agent::start().await;
        let code = failure(&agent, "ListDir", json!({ "path": "/etc/passwd" })).await;
        assert_eq!(code, "invalid_argument");
    });
}

#[test]
fn a_listing_too_large_is_refused_and_costs_no_memory() {
    run(async {
        let agent = Agent::start().await;
        let top = agent.path("top");
        fs::create_dir(&top).unwrap();
        // 70,000 entries of more than 240 bytes.
        for number in 0..70_000 {
            nix::unistd::mkfifo(&top.join(format!("{number:0>60}")), nix::sys::stat::Mode::S_IRWXU)
                .unwrap();
        }
        let code = failure(&agent, "ListDir", json!({ "path": top })).await;
        assert_eq!(code, "resource_exhausted");
        assert!(agent.private_kib() < 48 * 1024, "{} KiB", agent.private_kib());
    });
}

#[test]
fn relative_paths_start_at_the_default_directory() {
    run(async {
        let agent = Agent::start().await;
        let settings = json!({ "default_workdir": agent.dir.path() }).to_string();
        agent.control(Method::POST, "/init", settings).await;
        fs::write(agent.path("file"), "").unwrap();
        let (_, reply) = call(&agent, "Stat", json!({ "path": "x/../file" })).await;
        assert_eq!(reply["entry"]["path"], json!(agent.path("file")));
    });
}

#[test]
fn unknown_procedures_and_users_are_refused() {
    run(async {
        let agent = Agent::start().await;
        let (status, reply) = call(&agent, "Chmod", json!({})).await;
        assert_eq!((status, &reply["code"]), (StatusCode::NOT_FOUND, &json!("unimplemented")));
        // "no-such-user:"
        let headers =
            [("authorization", "Basic bm8tc3VjaC11c2VyOg=="), ("content-type", "application/json")];
        let target = "/filesystem.Filesystem/Stat";
        let (status, ..) = agent.http(Method::POST, target, &headers, "{}").await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
    });
}

#[test]
fn the_metadata_of_an_upload_is_part_of_its_entry() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("file");
        let target = format!("/files?path={}", path.display());
        let octets = ("content-type", "application/octet-stream");
        let headers = [octets, ("X-Metadata-Author", "me"), ("x-metadata-kind", "a b")];
        let (status, _, body) = agent.http(Method::POST, &target, &headers, "x").await;
        assert_eq!(status, StatusCode::OK);
        let written: Value = serde_json::from_slice(&body).unwrap();
        if written[0].get("metadata").is_none() {
            println!("this file system keeps no extended attributes, so this is not tested");
            return;
        }
        let expected = json!({ "author": "me", "kind": "a b" });
        assert_eq!(written[0]["metadata"], expected);
        assert_eq!(stat(&agent, &path).await["metadata"], expected);
        // The next upload replaces it.
        agent.http(Method::POST, &target, &[octets], "y").await;
        assert_eq!(stat(&agent, &path).await.get("metadata"), None);
    });
}

#[test]
fn metadata_out_of_form_is_refused_before_anything_is_written() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("file");
        let target = format!("/files?path={}", path.display());
        let long = "x".repeat(5000);
        let headers = [("content-type", "application/octet-stream"), ("x-metadata-k", &*long)];
        let (status, ..) = agent.http(Method::POST, &target, &headers, "x").await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(!path.exists());
    });
}
