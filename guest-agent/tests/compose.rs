//! Making one file of several, and what the guest tells of itself.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};

use common::{Agent, run};
use coppice_agent_protocol::metrics::Metrics;
use http::{Method, StatusCode};
use nix::unistd::geteuid;
use serde_json::{Value, json};

async fn compose(agent: &Agent, request: Value) -> (StatusCode, Value) {
    let (status, _, body) =
        agent.http(Method::POST, "/files/compose", &[], request.to_string()).await;
    (status, serde_json::from_slice(&body).unwrap())
}

fn parts(agent: &Agent, contents: &[&str]) -> Vec<String> {
    let write = |(number, content): (usize, &&str)| {
        let path = agent.path(&format!("part{number}"));
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    contents.iter().enumerate().map(write).collect()
}

#[test]
fn parts_become_one_file_and_vanish() {
    run(async {
        let agent = Agent::start().await;
        let parts = parts(&agent, &["one ", "two ", "three"]);
        let whole = agent.path("new/whole");
        let request = json!({ "source_paths": parts, "destination": whole });
        let (status, body) = compose(&agent, request).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(body, json!({ "path": whole, "name": "whole", "type": "file" }));
        assert_eq!(fs::read_to_string(&whole).unwrap(), "one two three");
        assert!(parts.iter().all(|part| !std::path::Path::new(part).exists()));
    });
}

#[test]
fn what_fails_leaves_all_as_it_was() {
    run(async {
        let agent = Agent::start().await;
        let mut parts = parts(&agent, &["one"]);
        let whole = agent.path("whole");
        fs::write(&whole, "before").unwrap();
        parts.push("/no/such".into());
        let request = json!({ "source_paths": parts, "destination": whole });
        assert_eq!(compose(&agent, request).await.0, StatusCode::NOT_FOUND);
        let directory = json!({ "source_paths": [parts[0]], "destination": agent.dir.path() });
        assert_eq!(compose(&agent, directory).await.0, StatusCode::BAD_REQUEST);
        assert_eq!(fs::read_to_string(&whole).unwrap(), "before");
        assert_eq!(fs::read_to_string(&parts[0]).unwrap(), "one");
        let left = fs::read_dir(agent.dir.path()).unwrap();
        assert!(left.flatten().all(|entry| !entry.file_name().to_str().unwrap().starts_with('.')));
    });
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    run(async {
        let agent = Agent::start().await;
        let part = parts(&agent, &["one"]).remove(0);
        for request in [
            json!({}),
            json!({ "source_paths": [], "destination": "/tmp/x" }),
            json!({ "source_paths": [part], "destination": "" }),
            json!({ "source_paths": [part], "destination": part }),
            json!({ "source_paths": [agent.dir.path()], "destination": agent.path("x") }),
        ] {
            let (status, body) = compose(&agent, request.clone()).await;
            assert_eq!(
                (status, &body["code"]),
                (StatusCode::BAD_REQUEST, &json!(400)),
                "{request}"
            );
        }
    });
}

#[test]
fn a_part_that_is_the_whole_by_way_of_a_link_does_not_take_it_away() {
    run(async {
        let agent = Agent::start().await;
        let whole = parts(&agent, &["content"]).remove(0);
        symlink(agent.dir.path(), agent.path("link")).unwrap();
        let request = json!({ "source_paths": [agent.path("link/part0")], "destination": whole });
        assert_eq!(compose(&agent, request).await.0, StatusCode::OK);
        assert_eq!(fs::read_to_string(&whole).unwrap(), "content");
    });
}

#[test]
fn the_whole_belongs_to_the_user() {
    if !geteuid().is_root() {
        println!("not root: owners cannot be changed, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        let parts = parts(&agent, &["one"]);
        let whole = agent.path("whole");
        let request = json!({ "source_paths": parts, "destination": whole, "username": "nobody" });
        assert_eq!(compose(&agent, request).await.0, StatusCode::OK);
        let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap().uid.as_raw();
        assert_eq!(fs::metadata(&whole).unwrap().uid(), nobody);
    });
}

#[test]
fn the_environment_is_told() {
    run(async {
        let agent = Agent::start().await;
        let settings = json!({ "envs": { "A": "b" } }).to_string();
        agent.control(Method::POST, "/init", settings).await;
        let (status, _, body) = agent.http(Method::GET, "/envs", &[], "").await;
        assert_eq!((status, &body[..]), (StatusCode::OK, &br#"{"A":"b"}"#[..]));
    });
}

#[test]
fn metrics_are_those_of_the_machine() {
    run(async {
        let agent = Agent::start().await;
        let (status, _, body) = agent.http(Method::GET, "/metrics", &[], "").await;
        assert_eq!(status, StatusCode::OK);
        let metrics: Metrics = serde_json::from_slice(&body).unwrap();
        let disk = nix::sys::statvfs::statvfs("/").unwrap();
        assert_eq!(metrics.disk_total, disk.blocks() * disk.fragment_size());
        let pages = nix::unistd::sysconf(nix::unistd::SysconfVar::_PHYS_PAGES).unwrap().unwrap();
        assert_eq!(metrics.mem_total, u64::try_from(pages).unwrap() * 4096);
        assert!((1..metrics.mem_total).contains(&metrics.mem_used));
        let cpus = nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_ONLN).unwrap();
        assert_eq!(i64::from(metrics.cpu_count), cpus.unwrap());
        assert!((0.0..=100.0).contains(&metrics.cpu_used_pct));
    });
}

#[test]
fn the_host_gets_metrics_without_the_guests_token() {
    run(async {
        let agent = Agent::start().await;
        agent.control(Method::POST, "/init", r#"{"access_token":"secret"}"#).await;
        let (status, body) = agent.control(Method::GET, "/metrics", "").await;
        assert_eq!(status, StatusCode::OK);
        assert!(body["mem_total"].as_u64().unwrap() > 0);
    });
}
