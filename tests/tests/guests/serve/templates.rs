//! Templates: built once, then where every sandbox begins.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use coppice_tests::tools::host_tools;
use serde_json::{Value, json};

use super::client::{Daemon, Sandbox};
use crate::common::{finish, home, on_lane, stdout};

/// Where a sandbox of a template is asked for a page.
fn page(daemon: &Daemon, sandbox: &Sandbox) -> (u16, String) {
    let headers = [("e2b-sandbox-id", sandbox.id.as_str()), ("e2b-sandbox-port", "8000")];
    let (status, body) = daemon.client.try_ask("GET", "/mark", &headers, b"").unwrap();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[test]
fn sandboxes_of_a_template_begin_with_its_server_running() {
    on_lane!({
        let daemon = Daemon::start();
        let start = "mkdir -p /tmp/www && echo first > /tmp/www/mark && \
                     exec python3 -m http.server --directory /tmp/www 8000";
        let ready = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))'";
        let build = |start: &str| {
            let args = ["template", "build", "web", "--json", "--start", start, "--ready", ready];
            let made: Value = serde_json::from_str(&stdout(&mut daemon.command(&args))).unwrap();
            made["templateID"].as_str().unwrap().to_owned()
        };
        let id = build(start);
        let old = daemon.client.create(json!({"templateID": "web"}));
        assert_eq!(page(&daemon, &old), (200, "first\n".into()));
        assert_eq!(page(&daemon, &daemon.client.create(json!({"templateID": id}))).0, 200);

        // Built again, the name means the new one; what was made from the old one runs on.
        build(&start.replace("first", "second"));
        let new = daemon.client.create(json!({"templateID": "web"}));
        assert_eq!(page(&daemon, &new), (200, "second\n".into()));
        assert_eq!(page(&daemon, &old), (200, "first\n".into()));
        let gone = json!({"templateID": id});
        assert_eq!(daemon.client.post("/v2/sandboxes", gone).0, 404);

        stdout(&mut daemon.command(&["template", "rm", "web"]));
        assert_eq!(page(&daemon, &new), (200, "second\n".into()));
        daemon.end();
    });
}

#[test]
fn a_template_whose_commands_fail_is_told_of_and_nothing_stays() {
    on_lane!({
        let daemon = Daemon::start();
        let cases = [
            (["--start", "echo no such luck; exit 3"].as_slice(), "no such luck"),
            (&["--ready", "echo not yet; false", "--ready-timeout", "15"], "not yet"),
        ];
        for (options, said) in cases {
            let mut args = vec!["template", "build", "web"];
            args.extend(options);
            // Without a ready command the end of the start command would not be waited for.
            if options[0] == "--start" {
                args.extend(["--ready", "sleep 600"]);
            }
            let (code, _, stderr) = finish(&mut daemon.command(&args));
            assert_ne!(code, 0);
            assert!(stderr.contains(said), "{stderr}");
        }
        assert_eq!(stdout(&mut daemon.command(&["template", "ls", "--json"])).trim(), "[]");
        daemon.end();
    });
}

/// A directory with what is in the smallest image, but without its agent and its init.
fn directory(at: &Path, path: &str) {
    let image = home().image("tiny").unwrap();
    std::fs::create_dir(at).unwrap();
    let mut rdump = Command::new("debugfs");
    rdump.args(["-R", &format!("rdump / {}", at.display())]).arg(image).env("PATH", path);
    assert!(rdump.status().unwrap().success());
    for file in ["usr/bin/coppice-agent", "sbin/init"] {
        std::fs::remove_file(at.join(file)).unwrap();
    }
    let bash = at.join("bin/bash");
    std::fs::write(&bash, "#!/bin/sh\nexec /bin/busybox ash \"$@\"\n").unwrap();
    std::fs::set_permissions(&bash, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(at.join("etc/mark"), "of the directory\n").unwrap();
}

#[test]
fn a_directory_becomes_a_template_and_its_image_goes_with_the_last_that_needs_it() {
    let tools = host_tools(&["mke2fs", "debugfs"]).unwrap();
    on_lane!({
        let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
        let daemon = Daemon::start();
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        directory(&tree, &path);
        let image = tree.to_str().unwrap();
        let build = ["template", "build", "mine:v1", "--json", "--image", image];
        let options = ["--cpus", "1", "--memory", "128", "--ready", "test -s /etc/mark"];
        let options = [options.as_slice(), &["--ready-timeout", "30"]].concat();
        let mut command = daemon.command(&[build.as_slice(), options.as_slice()].concat());
        stdout(command.env("PATH", &path));
        std::fs::remove_dir_all(&tree).unwrap();

        let made = daemon.client.create(json!({"templateID": "mine:v1"}));
        assert_eq!(daemon.client.read(&made, "/etc/mark"), "of the directory\n");
        stdout(&mut daemon.command(&["template", "rm", "mine:v1"]));
        assert_eq!(daemon.images(), 1, "a sandbox stands on it");
        assert_eq!(daemon.client.delete(&made.id).0, 204);
        assert_eq!(daemon.images(), 0);
        daemon.end();
    });
}
