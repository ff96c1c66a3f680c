//! Watching directories, by streams and by watchers that are asked.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::fs;
use std::path::Path;

use common::{Agent, Events, run};
use coppice_agent_protocol::filesystem::{
    EventType, FilesystemEvent, GetWatcherEventsResponse, WatchDirResponse,
};
use coppice_agent_protocol::{Code, ConnectError, envelope};
use http::StatusCode;
use serde_json::{Value, json};

use EventType::{Chmod, Create, Remove, Rename, Write};

/// A stream of a directory's events, its start message read.
async fn watch(agent: &Agent, message: Value, headers: &[(&str, &str)]) -> Events {
    let mut events = open(agent, message, headers).await;
    assert_eq!(events.message().await, Ok(WatchDirResponse::Start));
    events
}

async fn open(agent: &Agent, message: Value, headers: &[(&str, &str)]) -> Events {
    let body = envelope::encode_message(&message).unwrap();
    agent.stream_at("/filesystem.Filesystem/WatchDir", headers, body).await
}

async fn next(events: &mut Events) -> FilesystemEvent {
    match events.message().await {
        Ok(WatchDirResponse::Filesystem(event)) => event,
        other => panic!("not an event: {other:?}"),
    }
}

/// Names and kinds of events until, and without, the creation of `last`.
async fn until(events: &mut Events, last: &str) -> Vec<(String, EventType)> {
    let mut found = Vec::new();
    loop {
        let FilesystemEvent { name, kind, .. } = next(events).await;
        if name == last {
            return found;
        }
        found.push((name, kind));
    }
}

fn named(events: &[(&str, EventType)]) -> Vec<(String, EventType)> {
    events.iter().map(|(name, kind)| ((*name).to_owned(), *kind)).collect()
}

fn top(agent: &Agent) -> std::path::PathBuf {
    let top = agent.path("top");
    fs::create_dir(&top).unwrap();
    top
}

#[test]
fn each_kind_of_change_is_told() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        let mut events = watch(&agent, json!({ "path": top }), &[]).await;
        fs::write(top.join("a"), "x").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(top.join("a"), mode).unwrap();
        fs::rename(top.join("a"), top.join("b")).unwrap();
        fs::remove_file(top.join("b")).unwrap();
        fs::create_dir(top.join("last")).unwrap();
        let expected = named(&[
            ("a", Create),
            ("a", Write),
            ("a", Chmod),
            ("a", Rename),
            ("b", Create),
            ("b", Remove),
        ]);
        assert_eq!(until(&mut events, "last").await, expected);
    });
}

#[test]
fn an_upload_is_told_in_three_events() {
    if !nix::unistd::geteuid().is_root() {
        println!("not root: owners are not changed, so there is no third event");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        let watcher = create(&agent, json!({ "path": top })).await;
        let target = format!("/files?path={}", top.join("file").display());
        let headers = [("content-type", "application/octet-stream")];
        agent.http(http::Method::POST, &target, &headers, "content").await;
        let expected = named(&[("file", Create), ("file", Chmod), ("file", Write)]);
        assert_eq!(fetch(&agent, &watcher).await, expected);
    });
}

#[test]
fn without_recursion_directories_within_are_not_watched() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        fs::create_dir(top.join("sub")).unwrap();
        let mut events = watch(&agent, json!({ "path": top }), &[]).await;
        fs::write(top.join("sub/file"), "x").unwrap();
        fs::create_dir(top.join("last")).unwrap();
        assert_eq!(until(&mut events, "last").await, []);
    });
}

#[test]
fn with_recursion_the_whole_tree_is_watched() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        fs::create_dir_all(top.join("sub/deep")).unwrap();
        fs::write(top.join("sub/old"), "").unwrap();
        let mut events = watch(&agent, json!({ "path": top, "recursive": true }), &[]).await;
        fs::write(top.join("sub/deep/file"), "x").unwrap();
        fs::create_dir(top.join("last")).unwrap();
        let expected = named(&[("sub/deep/file", Create), ("sub/deep/file", Write)]);
        assert_eq!(until(&mut events, "last").await, expected);
    });
}

#[test]
fn files_in_new_directories_are_told_once_and_none_is_lost() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        let mut events = watch(&agent, json!({ "path": top, "recursive": true }), &[]).await;
        let mut expected = Vec::new();
        // Some are there before their directory is watched, some come while it is looked through,
        // some after.
        for number in 0..200 {
            fs::create_dir_all(top.join(format!("{number}/a/b"))).unwrap();
            for path in ["a/b/one", "a/two", "three"] {
                fs::File::create(top.join(format!("{number}/{path}"))).unwrap();
                expected.push((format!("{number}/{path}"), Create));
            }
            for path in ["", "/a", "/a/b"] {
                expected.push((format!("{number}{path}"), Create));
            }
        }
        fs::create_dir(top.join("last")).unwrap();
        let mut found = until(&mut events, "last").await;
        // What comes after the last directory began before it.
        while found.len() < expected.len() {
            let FilesystemEvent { name, kind, .. } = next(&mut events).await;
            found.push((name, kind));
        }
        found.sort_by(|left, right| left.0.cmp(&right.0));
        expected.sort_by(|left, right| left.0.cmp(&right.0));
        assert_eq!(found, expected);
    });
}

#[test]
fn the_content_of_files_in_new_directories_is_told() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        let outside = agent.path("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "content").unwrap();
        let mut events = watch(&agent, json!({ "path": top, "recursive": true }), &[]).await;
        fs::rename(&outside, top.join("sub")).unwrap();
        fs::create_dir(top.join("last")).unwrap();
        let expected = named(&[("sub", Create), ("sub/file", Create), ("sub/file", Write)]);
        assert_eq!(until(&mut events, "last").await, expected);
    });
}

#[test]
fn a_directory_moved_within_the_tree_is_watched_under_its_new_name() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        fs::create_dir_all(top.join("old/sub")).unwrap();
        fs::write(top.join("old/sub/file"), "").unwrap();
        let mut events = watch(&agent, json!({ "path": top, "recursive": true }), &[]).await;
        fs::rename(top.join("old"), top.join("new")).unwrap();
        let expected = named(&[("old", Rename), ("new", Create), ("new/sub", Create)]);
        assert_eq!(until(&mut events, "new/sub/file").await, expected);
        fs::remove_file(top.join("new/sub/file")).unwrap();
        fs::create_dir(top.join("last")).unwrap();
        assert_eq!(until(&mut events, "last").await, named(&[("new/sub/file", Remove)]));
    });
}

#[test]
fn a_directory_moved_out_of_the_tree_is_not_watched_any_more() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        fs::create_dir_all(top.join("sub")).unwrap();
        let mut events = watch(&agent, json!({ "path": top, "recursive": true }), &[]).await;
        fs::rename(top.join("sub"), agent.path("outside")).unwrap();
        assert_eq!(next(&mut events).await.kind, Rename);
        fs::write(agent.path("outside/file"), "").unwrap();
        fs::create_dir(top.join("last")).unwrap();
        assert_eq!(until(&mut events, "last").await, []);
    });
}

#[test]
fn events_describe_what_is_still_there() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        let message = json!({ "path": top, "includeEntry": true });
        let mut events = watch(&agent, message, &[]).await;
        fs::create_dir(top.join("sub")).unwrap();
        let entry = next(&mut events).await.entry.unwrap();
        assert_eq!((entry.name.as_str(), Path::new(&entry.path)), ("sub", &*top.join("sub")));
        fs::remove_dir(top.join("sub")).unwrap();
        assert_eq!(next(&mut events).await.entry, None);
    });
}

#[test]
fn the_end_of_the_directory_itself_is_told() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        let mut events = watch(&agent, json!({ "path": top, "recursive": true }), &[]).await;
        fs::remove_dir(&top).unwrap();
        let event = next(&mut events).await;
        assert_eq!((event.name.as_str(), event.kind), (".", Remove));
    });
}

#[test]
fn what_is_no_directory_is_not_watched() {
    run(async {
        let agent = Agent::start().await;
        let cases = [("/no/such", Code::NotFound), ("/etc/passwd", Code::InvalidArgument)];
        for (path, code) in cases {
            let error = open(&agent, json!({ "path": path }), &[]).await;
            assert_eq!(code_of(error).await, code, "{path}");
        }
    });
}

/// The code with which a stream ends at once.
async fn code_of(mut events: Events) -> Code {
    let end: Result<WatchDirResponse, Option<ConnectError>> = events.message().await;
    end.unwrap_err().unwrap().code
}

#[test]
fn idle_streams_carry_keepalives_and_end_with_their_time() {
    run(async {
        let agent = Agent::start().await;
        let headers = [("keepalive-ping-interval", "1"), ("connect-timeout-ms", "1500")];
        let mut events = watch(&agent, json!({ "path": "/usr" }), &headers).await;
        assert_eq!(events.message().await, Ok(WatchDirResponse::Keepalive));
        assert_eq!(code_of(events).await, Code::DeadlineExceeded);
    });
}

#[test]
fn a_stream_that_is_left_makes_room_for_others() {
    run(async {
        let agent = Agent::start().await;
        for _ in 0..200 {
            watch(&agent, json!({ "path": "/usr" }), &[]).await;
        }
    });
}

async fn call(agent: &Agent, procedure: &str, message: Value) -> (StatusCode, Value) {
    agent.call_service("filesystem.Filesystem", procedure, &message).await
}

async fn create(agent: &Agent, message: Value) -> Value {
    let (status, reply) = call(agent, "CreateWatcher", message).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    json!({ "watcherId": reply["watcherId"].as_str().unwrap() })
}

async fn fetch(agent: &Agent, watcher: &Value) -> Vec<(String, EventType)> {
    let (status, reply) = call(agent, "GetWatcherEvents", watcher.clone()).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let reply: GetWatcherEventsResponse = serde_json::from_value(reply).unwrap();
    reply.events.into_iter().map(|event| (event.name, event.kind)).collect()
}

#[test]
fn a_watcher_has_what_happened_until_it_is_asked() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        let watcher = create(&agent, json!({ "path": top, "recursive": true })).await;
        for number in 0..50 {
            fs::create_dir_all(top.join(format!("{number}/sub"))).unwrap();
            let expected = [(format!("{number}"), Create), (format!("{number}/sub"), Create)];
            assert_eq!(fetch(&agent, &watcher).await, expected);
        }
        assert_eq!(fetch(&agent, &watcher).await, []);
    });
}

#[test]
fn a_watcher_is_removed_once() {
    run(async {
        let agent = Agent::start().await;
        let watcher = create(&agent, json!({ "path": "/usr" })).await;
        let (status, reply) = call(&agent, "RemoveWatcher", watcher.clone()).await;
        assert_eq!((status, reply), (StatusCode::OK, json!({})));
        for procedure in ["RemoveWatcher", "GetWatcherEvents"] {
            let (status, reply) = call(&agent, procedure, watcher.clone()).await;
            assert_eq!((status, &reply["code"]), (StatusCode::NOT_FOUND, &json!("not_found")));
        }
    });
}

#[test]
fn watchers_are_limited_and_removing_makes_room() {
    run(async {
        let agent = Agent::start().await;
        let first = create(&agent, json!({ "path": "/usr" })).await;
        let refused = loop {
            let (status, reply) = call(&agent, "CreateWatcher", json!({ "path": "/usr" })).await;
            if status != StatusCode::OK {
                break reply;
            }
        };
        assert_eq!(refused["code"], "resource_exhausted");
        call(&agent, "RemoveWatcher", first).await;
        create(&agent, json!({ "path": "/usr" })).await;
    });
}

#[test]
fn more_events_than_are_fetched_end_a_watcher_in_bounded_memory() {
    run(async {
        let agent = Agent::start().await;
        let top = top(&agent);
        let watcher = create(&agent, json!({ "path": top })).await;
        let long = "x".repeat(200);
        for number in 0..60_000 {
            let path = top.join(format!("{long}{number}"));
            fs::File::create(&path).unwrap();
            fs::remove_file(&path).unwrap();
        }
        assert!(agent.private_kib() < 16 * 1024, "{} KiB", agent.private_kib());
        // What came before the loss is told first.
        assert!(fetch(&agent, &watcher).await.len() > 1000);
        let failed = loop {
            let (status, reply) = call(&agent, "GetWatcherEvents", watcher.clone()).await;
            if status != StatusCode::OK {
                break reply;
            }
        };
        assert_eq!(failed["code"], "resource_exhausted");
    });
}
