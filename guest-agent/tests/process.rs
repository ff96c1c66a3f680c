//! Running processes: output, ends, users, environment, signals, deadlines.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::collections::BTreeMap;

use common::{Agent, Transcript, run, shell, shell_with_stdin};
use coppice_agent_protocol::Code;
use coppice_agent_protocol::process::{
    EndEvent, ProcessConfig, ProcessEvent, ProcessSelector, SendSignalRequest, Signal, StartRequest,
};
use http::StatusCode;
use nix::unistd::geteuid;
use serde_json::json;

fn exit(code: i32) -> EndEvent {
    let status = format!("exit status {code}");
    EndEvent { exit_code: code, exited: true, error: (code != 0).then(|| status.clone()), status }
}

fn killed(name: &str) -> EndEvent {
    let status = format!("signal: {name}");
    EndEvent { exit_code: -1, exited: false, error: Some(status.clone()), status }
}

fn signal(pid: u32, signal: Signal) -> SendSignalRequest {
    SendSignalRequest { process: ProcessSelector::Pid(pid), signal }
}

#[test]
fn output_and_exit_code_arrive() {
    run(async {
        let agent = Agent::start().await;
        let transcript = agent.shell("echo out; echo err >&2; exit 3").await.all().await;
        let expected = Transcript {
            stdout: b"out\n".to_vec(),
            stderr: b"err\n".to_vec(),
            end: Some(exit(3)),
            ..Transcript::default()
        };
        assert_eq!(transcript, expected);
    });
}

#[test]
fn a_signal_that_ends_a_process_is_named() {
    run(async {
        let agent = Agent::start().await;
        let transcript = agent.shell("kill -SEGV $$").await.all().await;
        let end = transcript.end.unwrap();
        assert!(end.status.starts_with("signal: segmentation fault"), "{}", end.status);
        assert_eq!((end.exit_code, end.exited), (-1, false));
    });
}

#[test]
fn much_output_arrives_whole_and_in_order() {
    run(async {
        let agent = Agent::start().await;
        let transcript = agent.shell("seq 1 300000").await.all().await;
        let expected: String = (1..=300_000).map(|number| format!("{number}\n")).collect();
        assert!(transcript.text() == expected);
        assert_eq!(transcript.end, Some(exit(0)));
    });
}

#[test]
fn a_program_that_does_not_exist_is_named() {
    run(async {
        let agent = Agent::start().await;
        let process = ProcessConfig { cmd: "/no/such".into(), ..ProcessConfig::default() };
        let request = StartRequest { process, ..StartRequest::default() };
        let error = agent.start_with(&request, &[]).await.rest().await.error.unwrap();
        assert_eq!(error.code, Code::InvalidArgument);
        assert_eq!(error.message, "error starting process '/no/such': no such file or directory");
    });
}

#[test]
fn a_directory_that_does_not_exist_is_named() {
    run(async {
        let agent = Agent::start().await;
        let mut request = shell("true");
        request.process.cwd = Some("/no/such".into());
        let error = agent.start_with(&request, &[]).await.rest().await.error.unwrap();
        assert_eq!(error.code, Code::InvalidArgument);
        assert_eq!(error.message, "cwd '/no/such' does not exist");
    });
}

#[test]
fn the_environment_is_the_users_plus_the_requests() {
    run(async {
        let agent = Agent::start().await;
        let mut request = shell("env");
        request.process.cmd = "/usr/bin/env".into();
        request.process.args = Vec::new();
        request.process.envs =
            BTreeMap::from([("ANSWER".into(), "4 2".into()), ("SHELL".into(), "/bin/mine".into())]);
        // "root:"
        let headers = [("authorization", "Basic cm9vdDo=")];
        let transcript = agent.start_with(&request, &headers).await.all().await;
        let found: BTreeMap<&str, &str> =
            transcript.text().lines().filter_map(|line| line.split_once('=')).collect();
        let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let expected = BTreeMap::from([
            ("ANSWER", "4 2"),
            ("HOME", "/root"),
            ("LANG", "C.UTF-8"),
            ("LOGNAME", "root"),
            ("PATH", path),
            ("SHELL", "/bin/mine"),
            ("USER", "root"),
        ]);
        assert_eq!(found, expected);
    });
}

#[test]
fn programs_are_found_in_the_path_of_the_request() {
    run(async {
        let agent = Agent::start().await;
        let tool = agent.path("my-tool");
        std::fs::write(&tool, "#!/bin/sh\necho found\n").unwrap();
        std::fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let path = agent.dir.path().to_str().unwrap().to_owned();
        let process = ProcessConfig {
            cmd: "my-tool".into(),
            envs: BTreeMap::from([("PATH".into(), path)]),
            ..ProcessConfig::default()
        };
        let request = StartRequest { process, ..StartRequest::default() };
        assert_eq!(agent.start_with(&request, &[]).await.all().await.text(), "found\n");
    });
}

#[test]
fn a_process_runs_as_the_named_user_with_its_groups() {
    if !geteuid().is_root() {
        println!("not root: users cannot be changed, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        // "nobody:"
        let headers = [("authorization", "Basic bm9ib2R5Og==")];
        let request = shell("id -un; id -Gn; echo $HOME");
        let transcript = agent.start_with(&request, &headers).await.all().await;
        assert_eq!(transcript.text(), "nobody\nnogroup\n/nonexistent\n");
    });
}

#[test]
fn a_user_without_a_home_starts_at_the_root() {
    if !geteuid().is_root() {
        println!("not root: users cannot be changed, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        // "nobody:"
        let headers = [("authorization", "Basic bm9ib2R5Og==")];
        let mut request = shell("pwd");
        request.process.cwd = None;
        let transcript = agent.start_with(&request, &headers).await.all().await;
        assert_eq!(transcript.text(), "/\n");
    });
}

#[test]
fn a_directory_closed_to_the_user_stays_closed() {
    if !geteuid().is_root() {
        println!("not root: users cannot be changed, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        let mut request = shell("true");
        let own = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(agent.dir.path(), own).unwrap();
        request.process.cwd = Some(agent.dir.path().to_str().unwrap().to_owned());
        let headers = [("authorization", "Basic bm9ib2R5Og==")];
        let error = agent.start_with(&request, &headers).await.rest().await.error.unwrap();
        assert_eq!(error.message, "error starting process '/bin/sh': permission denied");
    });
}

#[test]
fn an_unknown_user_is_refused() {
    run(async {
        let agent = Agent::start().await;
        // "no-such-user:"
        let headers = [("authorization", "Basic bm8tc3VjaC11c2VyOg==")];
        let error = agent.start_with(&shell("true"), &headers).await.rest().await.error.unwrap();
        assert_eq!(error.code, Code::Unauthenticated);
        let (status, body) = agent.call_raw("List", &headers, "{}").await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
        assert_eq!(body["code"], "unauthenticated");
    });
}

#[test]
fn a_relative_directory_starts_at_home() {
    if !geteuid().is_root() {
        println!("not root: root's home is closed, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        // "root:"
        let headers = [("authorization", "Basic cm9vdDo=")];
        let mut request = shell("pwd");
        for cwd in [Some("."), Some("~"), None] {
            request.process.cwd = cwd.map(str::to_owned);
            let transcript = agent.start_with(&request, &headers).await.all().await;
            assert_eq!(transcript.text(), "/root\n");
        }
    });
}

#[test]
fn running_processes_are_listed() {
    run(async {
        let agent = Agent::start().await;
        let mut request = shell_with_stdin("read line");
        request.tag = Some("reader".into());
        let mut events = agent.start_with(&request, &[]).await;
        let pid = events.pid().await;
        let (status, list) = agent.call("List", &json!({})).await;
        assert_eq!(status, StatusCode::OK);
        let config = json!({
            "cmd": "/bin/sh", "args": ["-c", "read line"], "envs": {}, "cwd": "/"
        });
        let expected = json!({ "processes": [{ "config": config, "pid": pid, "tag": "reader" }] });
        assert_eq!(list, expected);
        agent.call("CloseStdin", &json!({ "process": { "tag": "reader" } })).await;
        assert_eq!(events.rest().await.end, Some(exit(1)));
        assert_eq!(agent.call("List", &json!({})).await.1, json!({ "processes": [] }));
    });
}

#[test]
fn sigterm_reaches_the_process() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent
            .shell("trap 'echo bye; exit 7' TERM; while :; do (echo up; exec sleep 1000); done")
            .await;
        let pid = events.pid().await;
        events.until("up").await;
        assert_eq!(agent.call("SendSignal", &signal(pid, Signal::Term)).await.0, StatusCode::OK);
        let transcript = events.rest().await;
        assert_eq!((transcript.text(), &transcript.end), ("bye\n", &Some(exit(7))));
    });
}

#[test]
fn sigkill_takes_what_the_process_started_along() {
    run(async {
        let agent = Agent::start().await;
        // The fifo's writer vanishes with the child, which ends the reader below.
        let fifo = agent.path("alive");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let script = format!("(exec 9>{}; echo up; sleep 1000) & wait", fifo.display());
        let mut events = agent.shell(&script).await;
        let pid = events.pid().await;
        let reader = tokio::task::spawn_blocking(move || std::fs::read(fifo).unwrap());
        events.until("up").await;
        assert_eq!(agent.call("SendSignal", &signal(pid, Signal::Kill)).await.0, StatusCode::OK);
        assert_eq!(events.rest().await.end, Some(killed("killed")));
        assert_eq!(reader.await.unwrap(), b"");
    });
}

#[test]
fn signals_for_ended_and_unknown_processes_are_refused() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.shell("true").await;
        let pid = events.pid().await;
        events.rest().await;
        for pid in [pid, 1, u32::MAX] {
            let (status, body) = agent.call("SendSignal", &signal(pid, Signal::Term)).await;
            assert_eq!((status, &body["code"]), (StatusCode::NOT_FOUND, &json!("not_found")));
        }
    });
}

#[test]
fn a_deadline_kills_the_process_and_says_so() {
    run(async {
        let agent = Agent::start().await;
        let headers = [("connect-timeout-ms", "300")];
        let mut events = agent.start_with(&shell("echo up; sleep 1000 & wait"), &headers).await;
        let pid = events.pid().await;
        let transcript = events.rest().await;
        assert_eq!(transcript.text(), "up\n");
        assert_eq!(transcript.error.unwrap().code, Code::DeadlineExceeded);
        assert_eq!(transcript.end, None);
        assert_eq!(agent.connect(pid).await.all().await.end, Some(killed("killed")));
    });
}

#[test]
fn a_deadline_in_time_changes_nothing() {
    run(async {
        let agent = Agent::start().await;
        let headers = [("connect-timeout-ms", "30000")];
        let transcript = agent.start_with(&shell("echo x"), &headers).await.all().await;
        assert_eq!((transcript.end, transcript.error), (Some(exit(0)), None));
    });
}

#[test]
fn a_deadline_that_is_no_number_is_refused() {
    run(async {
        let agent = Agent::start().await;
        let headers = [("connect-timeout-ms", "soon")];
        let error = agent.start_with(&shell("true"), &headers).await.rest().await.error.unwrap();
        assert_eq!(error.code, Code::InvalidArgument);
    });
}

#[test]
fn a_hundred_processes_at_once_all_report() {
    run(async {
        let agent = std::rc::Rc::new(Agent::start().await);
        let tasks = tokio::task::LocalSet::new();
        let jobs: Vec<_> = (0..100)
            .map(|number| {
                let agent = std::rc::Rc::clone(&agent);
                tasks.spawn_local(async move {
                    let script = format!("seq 1 2000; exit {number}");
                    agent.shell(&script).await.all().await
                })
            })
            .collect();
        let expected: String = (1..=2000).map(|number| format!("{number}\n")).collect();
        tasks
            .run_until(async {
                for (number, job) in jobs.into_iter().enumerate() {
                    let transcript = job.await.unwrap();
                    assert!(transcript.text() == expected);
                    assert_eq!(transcript.end, Some(exit(number.try_into().unwrap())));
                }
            })
            .await;
    });
}

#[test]
fn the_end_comes_though_others_hold_the_output() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.shell("sleep 1000 & echo left; exit 5").await;
        let pid = events.pid().await;
        let transcript = events.rest().await;
        assert_eq!((transcript.text(), &transcript.end), ("left\n", &Some(exit(5))));
        let _ = nix::sys::signal::killpg(
            nix::unistd::Pid::from_raw(pid.cast_signed()),
            nix::sys::signal::Signal::SIGKILL,
        );
    });
}

#[test]
fn the_end_comes_though_others_write_for_ever() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.shell("yes & exit 5").await;
        let pid = events.pid().await;
        assert_eq!(events.rest().await.end, Some(exit(5)));
        let _ = nix::sys::signal::killpg(
            nix::unistd::Pid::from_raw(pid.cast_signed()),
            nix::sys::signal::Signal::SIGKILL,
        );
    });
}

#[test]
fn what_a_process_left_running_can_go_on_writing() {
    run(async {
        let agent = Agent::start().await;
        let (go, done) = (agent.path("go"), agent.path("done"));
        for fifo in [&go, &done] {
            nix::unistd::mkfifo(fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        }
        // More than a pipe holds: somebody has to read it.
        let script = format!(
            "(read line <{}; head -c 200000 /dev/zero && echo fine >{}) & exit 0",
            go.display(),
            done.display()
        );
        assert_eq!(agent.shell(&script).await.all().await.end, Some(exit(0)));
        let result = tokio::task::spawn_blocking(move || {
            std::fs::write(go, "now\n").unwrap();
            std::fs::read_to_string(done).unwrap()
        });
        assert_eq!(result.await.unwrap(), "fine\n");
    });
}

#[test]
fn a_process_that_closes_its_output_lives_on() {
    run(async {
        let agent = Agent::start().await;
        let request = shell_with_stdin("echo last; exec >&- 2>&-; read line; exit 4");
        let mut events = agent.start_with(&request, &[]).await;
        let pid = events.pid().await;
        events.until("last").await;
        let (_, list) = agent.call("List", &json!({})).await;
        assert_eq!(list["processes"][0]["pid"], pid);
        agent.call("CloseStdin", &json!({ "process": { "pid": pid } })).await;
        assert_eq!(events.rest().await.end, Some(exit(4)));
    });
}

#[test]
fn idle_streams_carry_keepalives() {
    run(async {
        let agent = Agent::start().await;
        let headers = [("keepalive-ping-interval", "1")];
        let mut events = agent.start_with(&shell("sleep 1000"), &headers).await;
        let pid = events.pid().await;
        assert_eq!(events.next().await, Ok(ProcessEvent::Keepalive));
        assert_eq!(events.next().await, Ok(ProcessEvent::Keepalive));
        agent.call("SendSignal", &signal(pid, Signal::Kill)).await;
    });
}

#[test]
fn data_puts_the_next_keepalive_off() {
    run(async {
        let agent = Agent::start().await;
        let headers = [("keepalive-ping-interval", "1")];
        let script = "for i in 1 2 3 4 5; do echo $i; sleep 0.4; done";
        let mut events = agent.start_with(&shell(script), &headers).await;
        events.pid().await;
        for _ in 0..5 {
            assert!(matches!(events.next().await, Ok(ProcessEvent::Data(_))));
        }
    });
}

#[test]
fn sigterm_ends_the_agent_and_its_processes() {
    run(async {
        let mut agent = Agent::start().await;
        let fifo = agent.path("done");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let trap = format!("trap 'echo bye >{}; exit' TERM", fifo.display());
        let mut events =
            agent.shell(&format!("{trap}; while :; do (echo up; exec sleep 1000); done")).await;
        events.pid().await;
        events.until("up").await;
        let pid = nix::unistd::Pid::from_raw(agent.child.id().cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        let last = tokio::task::spawn_blocking(move || std::fs::read_to_string(fifo).unwrap());
        assert_eq!(last.await.unwrap(), "bye\n");
        assert_eq!(agent.child.wait().unwrap().code(), Some(0));
    });
}

#[test]
fn commands_do_not_inherit_signals_that_the_agent_ignores() {
    run(async {
        let agent = Agent::launch(|dir| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", "trap '' HUP; exec \"$@\"", "sh", common::binary()]);
            for name in ["envd", "control", "ready"] {
                let option = if name == "envd" { "listen" } else { name };
                command.arg(format!("--{option}"));
                command.arg(format!("unix:{}", dir.join(name).display()));
            }
            command
        })
        .await;
        let mut events = agent.shell("kill -HUP $$; echo still here").await;
        events.pid().await;
        assert_eq!(events.rest().await.stdout, b"");
    });
}
