//! What the host sets for requests: access token, environment, user and working directory.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{Agent, run, shell};
use coppice_agent_protocol::Code;
use http::{Method, StatusCode};
use nix::unistd::geteuid;
use serde_json::{Value, json};

async fn init(agent: &Agent, settings: Value) {
    let (status, body) = agent.control(Method::POST, "/init", settings.to_string()).await;
    assert_eq!((status, body), (StatusCode::NO_CONTENT, Value::Null));
}

#[test]
fn with_a_token_only_health_is_open() {
    run(async {
        let agent = Agent::start().await;
        init(&agent, json!({ "access_token": "secret" })).await;
        assert_eq!(agent.http(Method::GET, "/health", &[], "").await.0, StatusCode::NO_CONTENT);
        for (method, target) in [
            (Method::GET, "/files?path=/etc/hostname"),
            (Method::POST, "/files?path=/etc/hostname"),
            (Method::POST, "/files/compose"),
            (Method::GET, "/envs"),
            (Method::GET, "/metrics"),
            (Method::POST, "/process.Process/Start"),
            (Method::POST, "/filesystem.Filesystem/Stat"),
            (Method::GET, "/nowhere"),
        ] {
            let (status, ..) = agent.http(method, target, &[], "").await;
            assert_eq!(status, StatusCode::UNAUTHORIZED, "{target}");
        }
    });
}

#[test]
fn a_call_without_the_token_says_why_it_is_refused() {
    run(async {
        let agent = Agent::start().await;
        init(&agent, json!({ "access_token": "secret" })).await;
        let (_, body) = agent.call_raw("List", &[], "{}").await;
        assert_eq!(body["code"], "unauthenticated");
        let (_, _, body) = agent.http(Method::GET, "/files?path=/", &[], "").await;
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["code"], 401);
    });
}

#[test]
fn the_token_opens_all() {
    run(async {
        let agent = Agent::start().await;
        init(&agent, json!({ "access_token": "secret" })).await;
        let headers = [("x-access-token", "secret")];
        assert_eq!(agent.call_raw("List", &headers, "{}").await.0, StatusCode::OK);
        let wrong = [("x-access-token", "secreT")];
        assert_eq!(agent.call_raw("List", &wrong, "{}").await.0, StatusCode::UNAUTHORIZED);
    });
}

#[test]
fn a_signed_url_reads_its_file() {
    run(async {
        let agent = Agent::start().await;
        init(&agent, json!({ "access_token": "tok" })).await;
        // SHA-256 of "/proc/version:read::tok", by OpenSSL.
        let target =
            "/files?path=/proc/version&signature=v1_15TKou78m0TMVdPrt3Taej%2BghS0BQZ6MD7eRRVhd83w";
        let (status, _, body) = agent.http(Method::GET, target, &[], "").await;
        assert_eq!((status, &body[..5]), (StatusCode::OK, &b"Linux"[..]));
        let (status, ..) = agent.http(Method::POST, target, &[], "").await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
    });
}

#[test]
fn a_wrong_token_is_not_made_good_by_a_signature() {
    run(async {
        let agent = Agent::start().await;
        init(&agent, json!({ "access_token": "tok" })).await;
        let target =
            "/files?path=/proc/version&signature=v1_15TKou78m0TMVdPrt3Taej%2BghS0BQZ6MD7eRRVhd83w";
        let headers = [("x-access-token", "other")];
        let (status, ..) = agent.http(Method::GET, target, &headers, "").await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
    });
}

#[test]
fn the_environment_lies_under_the_requests_own() {
    run(async {
        let agent = Agent::start().await;
        init(&agent, json!({ "envs": { "A": "set", "B": "set", "LANG": "set" } })).await;
        let mut request = shell("echo $A $B $LANG");
        request.process.envs.insert("B".into(), "own".into());
        assert_eq!(agent.start_with(&request, &[]).await.all().await.text(), "set own set\n");
    });
}

#[test]
fn a_new_environment_replaces_the_old_one() {
    run(async {
        let agent = Agent::start().await;
        init(&agent, json!({ "envs": { "A": "1" } })).await;
        init(&agent, json!({ "envs": { "B": "2" } })).await;
        assert_eq!(agent.shell("echo $A$B").await.all().await.text(), "2\n");
    });
}

#[test]
fn processes_start_in_the_default_directory() {
    run(async {
        let agent = Agent::start().await;
        init(&agent, json!({ "default_workdir": "/usr" })).await;
        for (cwd, expected) in [(None, "/usr\n"), (Some("bin/.."), "/usr\n"), (Some("/"), "/\n")] {
            let mut request = shell("pwd -P");
            request.process.cwd = cwd.map(str::to_owned);
            assert_eq!(agent.start_with(&request, &[]).await.all().await.text(), expected);
        }
    });
}

#[test]
fn requests_without_a_user_act_as_the_default_one() {
    if !geteuid().is_root() {
        println!("not root: users cannot be changed, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        init(&agent, json!({ "default_user": "nobody" })).await;
        assert_eq!(agent.shell("id -un").await.all().await.text(), "nobody\n");
    });
}

#[test]
fn what_cannot_be_set_is_refused() {
    run(async {
        let agent = Agent::start().await;
        for settings in [
            json!({ "access_token": "two words" }),
            json!({ "access_token": "x".repeat(513) }),
            json!({ "envs": { "A=B": "" } }),
            json!({ "default_user": "no-such-user" }),
            json!({ "default_workdir": "relative" }),
            json!({ "unknown": 1 }),
        ] {
            let (status, body) = agent.control(Method::POST, "/init", settings.to_string()).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{settings}");
            assert_eq!(body["code"], Code::InvalidArgument.as_str());
        }
    });
}

#[test]
fn clients_cannot_set_anything() {
    run(async {
        let agent = Agent::start().await;
        for path in
            ["/init", "/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse", "/upgrade"]
        {
            let (status, ..) = agent.http(Method::POST, path, &[], "{}").await;
            assert_eq!(status, StatusCode::NOT_FOUND, "{path}");
        }
    });
}
