//! `coppice run`: output, input, exit codes, users and limits of one command.

use std::io::{Read as _, Write as _};
use std::process::Stdio;

use crate::common::{coppice, finish, on_lane, stdout, tiny};

#[test]
fn output_and_exit_code_come_through() {
    on_lane!({
        let script = "echo to-stdout; echo to-stderr >&2; exit 3";
        let (code, out, err) = finish(&mut tiny(&[], &["sh", "-c", script]));
        assert_eq!((code, out.as_str()), (3, "to-stdout\n"), "{err}");
        assert_eq!(err, "to-stderr\n");
    });
}

#[test]
fn a_signal_is_128_and_its_number() {
    on_lane!({
        let (code, ..) = finish(&mut tiny(&[], &["sh", "-c", "kill -KILL $$"]));
        assert_eq!(code, 128 + 9);
    });
}

#[test]
fn a_command_over_its_time_ends_with_124() {
    on_lane!({
        let (code, ..) = finish(&mut tiny(&["--timeout", "1"], &["sleep", "1000"]));
        assert_eq!(code, 124);
    });
}

#[test]
fn a_command_that_is_not_there_is_127() {
    on_lane!({
        let (code, ..) = finish(&mut tiny(&[], &["no-such-command"]));
        assert_eq!(code, 127);
    });
}

#[test]
fn environment_directory_and_user_are_as_asked() {
    on_lane!({
        let options = ["--env", "COLOUR=blue", "--cwd", "/tmp", "--user", "user"];
        let script = "echo $COLOUR; pwd; id -un";
        assert_eq!(stdout(&mut tiny(&options, &["sh", "-c", script])), "blue\n/tmp\nuser\n");
    });
}

#[test]
fn standard_input_reaches_the_command_to_its_end() {
    on_lane!({
        let mut command = tiny(&["-i"], &["sha256sum"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let data: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251).to_le_bytes()[0]).collect();
        let mut input = child.stdin.take().unwrap();
        let writer = std::thread::spawn(move || {
            input.write_all(&data).unwrap();
            data
        });
        let mut out = String::new();
        child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(out, format!("{}  -\n", crate::streams::sha256_hex(&writer.join().unwrap())));
    });
}

#[test]
fn json_events_tell_the_whole_story() {
    on_lane!({
        let out = stdout(&mut tiny(&["--json"], &["echo", "hello"]));
        let events: Vec<serde_json::Value> =
            out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let names: Vec<&str> = events.iter().map(|e| e["event"].as_str().unwrap()).collect();
        assert_eq!(names, ["booting", "started", "stdout", "exit"]);
        assert_eq!(events[3]["code"], 0);
    });
}

#[test]
fn a_debian_userland_runs_python() {
    on_lane!({
        let script = "import platform, sys; print(sys.version_info.major, platform.system())";
        let out = stdout(&mut coppice(&["run", "--", "python3", "-c", script]));
        assert_eq!(out, "3 Linux\n");
    });
}

#[test]
fn text_beyond_ascii_is_text() {
    on_lane!({
        let script = "locale charmap; word=grün; echo ${#word}; python3 -c 'print(\"grün €\")'";
        let out = stdout(&mut coppice(&["run", "--", "bash", "-c", script]));
        assert_eq!(out, "UTF-8\n4\ngrün €\n");
    });
}

#[test]
fn what_a_guest_writes_is_gone_with_it() {
    on_lane!({
        let write = "echo mine > /home/user/note && sync && cat /home/user/note";
        assert_eq!(stdout(&mut coppice(&["run", "--", "sh", "-c", write])), "mine\n");
        let (code, ..) = finish(&mut coppice(&["run", "--", "test", "-e", "/home/user/note"]));
        assert_eq!(code, 1);
    });
}
