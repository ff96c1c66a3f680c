//! Reading and writing files.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
use std::path::Path;

use bytes::Bytes;
use common::{Agent, run};
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use nix::unistd::geteuid;
use serde_json::{Value, json};

const OCTETS: (&str, &str) = ("content-type", "application/octet-stream");

fn target(path: &Path) -> String {
    format!("/files?path={}", path.display())
}

fn json_of(body: &Bytes) -> Value {
    serde_json::from_slice(body).unwrap()
}

/// The status of a request that fails, after a look at the form of its body.
async fn failure(agent: &Agent, method: Method, target: &str, headers: &[(&str, &str)]) -> u16 {
    let (status, _, body) = agent.http(method, target, headers, "data").await;
    let body = json_of(&body);
    assert_eq!(body["code"], status.as_u16());
    assert!(body["message"].is_string());
    status.as_u16()
}

fn multipart(parts: &[(&str, &str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, file_name, data) in parts {
        let head = format!(
            "--b0\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{file_name}\"\r\n\r\n"
        );
        body.extend_from_slice(head.as_bytes());
        body.extend_from_slice(data);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"--b0--\r\n");
    body
}

const FORM: (&str, &str) = ("content-type", "multipart/form-data; boundary=b0");

#[test]
fn health_is_answered() {
    run(async {
        let agent = Agent::start().await;
        let (status, _, body) = agent.http(Method::GET, "/health", &[], "").await;
        assert_eq!((status, body.len()), (StatusCode::NO_CONTENT, 0));
    });
}

#[test]
fn what_was_written_reads_back() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("new/deep/file");
        // Larger than any buffer on the way.
        let data: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
        let (status, _, body) =
            agent.http(Method::POST, &target(&path), &[OCTETS], data.clone()).await;
        assert_eq!(status, StatusCode::OK);
        let expected = json!([{ "path": path, "name": "file", "type": "file" }]);
        assert_eq!(json_of(&body), expected);
        let (status, headers, body) = agent.http(Method::GET, &target(&path), &[], "").await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(headers["content-length"], "3000000");
        assert!(body == data);
    });
}

#[test]
fn a_shorter_file_replaces_a_longer_one_in_place() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("script");
        std::fs::write(&path, "a longer text").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let inode = std::fs::metadata(&path).unwrap().ino();
        agent.http(Method::POST, &target(&path), &[OCTETS], "short").await;
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "short");
        assert_eq!((metadata.ino(), metadata.mode() & 0o777), (inode, 0o755));
    });
}

#[test]
fn a_link_is_written_through() {
    run(async {
        let agent = Agent::start().await;
        let (link, file) = (agent.path("link"), agent.path("file"));
        symlink(&file, &link).unwrap();
        let (status, ..) = agent.http(Method::POST, &target(&link), &[OCTETS], "x").await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "x");
    });
}

#[test]
fn a_form_writes_each_file_to_its_path() {
    run(async {
        let agent = Agent::start().await;
        let (one, two) = (agent.path("one"), agent.path("sub/two"));
        let names = [one.to_str().unwrap(), two.to_str().unwrap()];
        let parts: [(&str, &str, &[u8]); 3] =
            [("file", names[0], b"1"), ("note", "ignored", b"?"), ("file", names[1], b"\r\n2\r\n")];
        let (status, _, body) =
            agent.http(Method::POST, "/files", &[FORM], multipart(&parts)).await;
        assert_eq!(status, StatusCode::OK);
        let expected = json!([
            { "path": one, "name": "one", "type": "file" },
            { "path": two, "name": "two", "type": "file" },
        ]);
        assert_eq!(json_of(&body), expected);
        assert_eq!(std::fs::read(&one).unwrap(), b"1");
        assert_eq!(std::fs::read(&two).unwrap(), b"\r\n2\r\n");
    });
}

#[test]
fn the_path_parameter_names_the_one_file_of_a_form() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("named");
        let body = multipart(&[("file", "other", b"x")]);
        agent.http(Method::POST, &target(&path), &[FORM], body).await;
        assert_eq!(std::fs::read(&path).unwrap(), b"x");
    });
}

#[test]
fn two_files_for_one_path_are_refused() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("named");
        let body = multipart(&[("file", "a", b"1"), ("file", "b", b"2")]);
        let (status, ..) = agent.http(Method::POST, &target(&path), &[FORM], body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
    });
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

const GZIP: (&str, &str) = ("content-encoding", "gzip");

#[test]
fn compressed_uploads_are_unpacked() {
    run(async {
        let agent = Agent::start().await;
        let (raw, form) = (agent.path("raw"), agent.path("form"));
        // Expands a thousandfold: must not pass through memory as a whole.
        let data = vec![7; 50_000_000];
        agent.http(Method::POST, &target(&raw), &[OCTETS, GZIP], gzip(&data)).await;
        assert!(std::fs::read(&raw).unwrap() == data);
        let body = gzip(&multipart(&[("file", form.to_str().unwrap(), b"packed")]));
        agent.http(Method::POST, "/files", &[FORM, GZIP], body).await;
        assert_eq!(std::fs::read(&form).unwrap(), b"packed");
        assert!(agent.private_kib() < 8 * 1024);
    });
}

#[test]
fn damaged_compression_is_refused_and_leaves_no_file() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("file");
        let mut body = gzip(&[1; 1000]);
        body.truncate(body.len() - 4);
        let (status, ..) = agent.http(Method::POST, &target(&path), &[OCTETS, GZIP], body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(!path.exists());
    });
}

#[test]
fn a_form_cut_short_leaves_no_file() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("file");
        let mut body = multipart(&[("file", "a", b"data")]);
        body.truncate(body.len() - 6);
        let (status, ..) = agent.http(Method::POST, &target(&path), &[FORM], body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(!path.exists());
    });
}

#[test]
fn files_and_new_directories_belong_to_the_user() {
    if !geteuid().is_root() {
        println!("not root: owners cannot be changed, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("new/file");
        let target = format!("{}&username=nobody", target(&path));
        let (status, ..) = agent.http(Method::POST, &target, &[OCTETS], "x").await;
        assert_eq!(status, StatusCode::OK);
        let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap().uid.as_raw();
        for made in [&path, &agent.path("new")] {
            assert_eq!(std::fs::metadata(made).unwrap().uid(), nobody);
        }
        assert_eq!(std::fs::metadata(agent.dir.path()).unwrap().uid(), geteuid().as_raw());
    });
}

#[test]
fn what_is_not_a_file_is_refused() {
    run(async {
        let agent = Agent::start().await;
        let fifo = agent.path("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [agent.dir.path(), &fifo, Path::new("/dev/zero")] {
            assert_eq!(failure(&agent, Method::GET, &target(path), &[]).await, 400);
        }
        assert_eq!(failure(&agent, Method::POST, &target(agent.dir.path()), &[OCTETS]).await, 400);
        let below = target(&fifo.join("x"));
        assert_eq!(failure(&agent, Method::POST, &below, &[OCTETS]).await, 400);
    });
}

#[test]
fn what_does_not_exist_is_not_found() {
    run(async {
        let agent = Agent::start().await;
        assert_eq!(failure(&agent, Method::GET, "/files?path=/no/such", &[]).await, 404);
        assert_eq!(failure(&agent, Method::GET, "/nowhere", &[]).await, 404);
    });
}

#[test]
fn an_unknown_user_is_refused() {
    run(async {
        let agent = Agent::start().await;
        let target = "/files?path=/etc/passwd&username=no-such-user";
        assert_eq!(failure(&agent, Method::GET, target, &[]).await, 401);
        assert_eq!(failure(&agent, Method::POST, target, &[OCTETS]).await, 401);
    });
}

#[test]
fn uploads_without_path_or_type_are_refused() {
    run(async {
        let agent = Agent::start().await;
        assert_eq!(failure(&agent, Method::POST, "/files", &[OCTETS]).await, 400);
        let path = target(&agent.path("x"));
        assert_eq!(failure(&agent, Method::POST, &path, &[]).await, 400);
        let no_boundary = [("content-type", "multipart/form-data")];
        assert_eq!(failure(&agent, Method::POST, &path, &no_boundary).await, 400);
        let packed = [OCTETS, ("content-encoding", "br")];
        assert_eq!(failure(&agent, Method::POST, &path, &packed).await, 400);
    });
}

#[test]
fn a_full_disk_is_told_apart() {
    if !geteuid().is_root() {
        println!("not root: no small file system can be mounted, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::launch(|dir| {
            let small = dir.join("small");
            std::fs::create_dir(&small).unwrap();
            let mut command = std::process::Command::new("unshare");
            let script = "mount -t tmpfs -o size=64k small \"$1/small\" && exec \"$2\" \
                          --listen unix:\"$1/envd\" --control unix:\"$1/control\" \
                          --ready unix:\"$1/ready\"";
            command.args(["--mount", "sh", "-c", script, "sh"]).arg(dir).arg(common::binary());
            command
        })
        .await;
        let path = agent.path("small/file");
        let (status, _, body) =
            agent.http(Method::POST, &target(&path), &[OCTETS], vec![1; 500_000]).await;
        assert_eq!(
            (status, &json_of(&body)["code"]),
            (StatusCode::INSUFFICIENT_STORAGE, &json!(507))
        );
    });
}

#[test]
fn a_client_that_first_sends_everything_learns_why_it_is_refused() {
    run(async {
        let agent = Agent::start().await;
        // More than the sockets on the way hold.
        let body = vec![0; 20_000_000];
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\
             content-type: application/octet-stream\r\n\r\n",
            target(agent.dir.path()),
            body.len()
        );
        let mut stream = std::os::unix::net::UnixStream::connect(agent.path("envd")).unwrap();
        let answer = tokio::task::spawn_blocking(move || {
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&body).unwrap();
            let mut answer = Vec::new();
            std::io::Read::read_to_end(&mut stream, &mut answer).unwrap();
            answer
        });
        assert!(answer.await.unwrap().starts_with(b"HTTP/1.1 400"));
    });
}

#[test]
fn files_of_the_kernel_are_read_to_their_end() {
    run(async {
        let agent = Agent::start().await;
        let (status, _, body) = agent.http(Method::GET, "/files?path=/proc/version", &[], "").await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(body, std::fs::read("/proc/version").unwrap());
    });
}

#[test]
fn a_client_that_stops_reading_costs_no_memory() {
    run(async {
        let agent = Agent::start().await;
        let path = agent.path("big");
        std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
        let request =
            http::Request::get(target(&path)).body(http_body_util::Full::default()).unwrap();
        let mut body = agent.send("envd", request).await.into_body();
        body.frame().await.unwrap().unwrap();
        // Whatever another request may find, the first one has had its turn by then.
        for _ in 0..20 {
            agent.http(Method::GET, "/health", &[], "").await;
        }
        let held = agent.private_kib();
        assert!(held < 8 * 1024, "the agent holds {held} KiB");
    });
}
