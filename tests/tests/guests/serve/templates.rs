//! Templates: built once, then where every sandbox begins.

use serde_json::{Value, json};

use super::client::{Daemon, Sandbox};
use crate::common::{finish, on_lane, stdout};

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
