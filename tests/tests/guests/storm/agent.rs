//! What agents do in the Debian image: programs with state in memory, and TLS, across rollbacks
//! and clones.

use crate::common::on_lane;
use crate::sessions::Session;

fn python(session: &Session, sandbox: &str, program: &str, argument: &str) -> String {
    let args = ["exec", "--user", "root", sandbox, "--", "python3", "-c", program, argument];
    session.ok(&args)
}

#[test]
fn a_python_process_goes_back_to_exactly_its_state() {
    on_lane!({
        let session = Session::with(&["--memory", "256", "--cpus", "2"]);
        let state = include_str!("../scripts/state.py");
        let served = format!("cat > /tmp/state.py << 'END'\n{state}\nEND\n");
        session.sh("web", &format!("{served} python3 /tmp/state.py serve > /dev/null 2>&1 &"));
        let ask = |question: &str| python(&session, "web", state, question);
        ask("grow 5000");
        let at_first = ask("digest");
        session.ok(&["checkpoint", "web", "--name", "first"]);
        ask("grow 3000");
        let later = ask("digest");
        session.ok(&["checkpoint", "web", "--name", "later", "--async"]);
        ask("grow 100");

        session.ok(&["rollback", "web", "first"]);
        assert_eq!(ask("digest"), at_first);
        ask("grow 7");
        assert_ne!(ask("digest"), at_first, "it runs on");
        session.ok(&["rollback", "web", "later"]);
        assert_eq!(ask("digest"), later);
        session.ok(&["clone", "first", "--name", "copy"]);
        assert_eq!(python(&session, "copy", state, "digest"), at_first);

        // The whole disk as the file system's own checker sees it.
        session
            .sh("web", "pkill -f '[s]tate.py'; sync; mount -o remount,ro / && e2fsck -fn /dev/vda");
        session.end();
    });
}

#[test]
fn tls_works_right_after_a_clone_of_an_hour_ago() {
    on_lane!({
        let session = Session::with(&["--memory", "256"]);
        let tls = include_str!("../scripts/tls.py");
        // Its certificate is valid since ten minutes ago: to a guest an hour behind, not yet.
        session.sh("web", "date -s @$(($(date +%s) - 3600))");
        let handshake = |sandbox: &str| python(&session, sandbox, tls, &unix_seconds().to_string());
        assert_eq!(handshake("web"), "certificate is not yet valid\n");
        session.ok(&["checkpoint", "web", "--name", "hour"]);

        session.ok(&["clone", "hour", "--name", "copy"]);
        let before = unix_seconds();
        let seen: u64 = crate::sessions::number(&session.sh("copy", "date +%s"));
        assert!((before..=unix_seconds()).contains(&seen), "{seen} is not now: {before}");
        assert_eq!(handshake("copy"), "hello over TLS\n");
        session.ok(&["rollback", "web", "hour"]);
        assert_eq!(handshake("web"), "hello over TLS\n");
        session.end();
    });
}

fn unix_seconds() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap().as_secs()
}
