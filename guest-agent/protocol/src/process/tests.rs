//! The JSON of each message, against texts in the form the SDKs send and read.

use super::*;
use proptest::prelude::*;

fn blob(data: &[u8]) -> Option<Blob> {
    Some(Blob(data.to_vec()))
}

#[test]
fn start_request_of_an_sdk_is_read() {
    let text = r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","ls"],"envs":{"A":"b"},"cwd":"x"},
        "pty":{"size":{"cols":80,"rows":"24"}},"tag":"t","stdin":false,"newField":{"x":[1]}}"#;
    let request: StartRequest = serde_json::from_str(text).unwrap();
    let process = ProcessConfig {
        cmd: "/bin/bash".into(),
        args: vec!["-l".into(), "-c".into(), "ls".into()],
        envs: BTreeMap::from([("A".into(), "b".into())]),
        cwd: Some("x".into()),
    };
    let pty = Some(Pty { size: Some(PtySize { cols: 80, rows: 24 }) });
    let expected = StartRequest { process, pty, tag: Some("t".into()), stdin: Some(false) };
    assert_eq!(request, expected);
}

#[test]
fn null_means_not_set() {
    let text = r#"{"process":{"cmd":"ls","args":null,"envs":null,"cwd":null},"pty":null,
        "tag":null,"stdin":null}"#;
    let request: StartRequest = serde_json::from_str(text).unwrap();
    let process = ProcessConfig { cmd: "ls".into(), ..ProcessConfig::default() };
    assert_eq!(request, StartRequest { process, ..StartRequest::default() });
}

#[test]
fn selectors_are_pid_or_tag() {
    let read = |text: &str| serde_json::from_str::<ProcessSelector>(text).ok();
    assert_eq!(read(r#"{"pid":7}"#), Some(ProcessSelector::Pid(7)));
    assert_eq!(read(r#"{"pid":"7"}"#), Some(ProcessSelector::Pid(7)));
    assert_eq!(read(r#"{"tag":"t"}"#), Some(ProcessSelector::Tag("t".into())));
    assert_eq!(read("{}"), None);
    assert_eq!(read(r#"{"pid":7,"tag":"t"}"#), None);
}

#[test]
fn signals_are_read_by_name_or_number() {
    let read = |text: &str| serde_json::from_str::<Signal>(text).ok();
    assert_eq!(read(r#""SIGNAL_SIGTERM""#), Some(Signal::Term));
    assert_eq!(read("9"), Some(Signal::Kill));
    assert_eq!(read(r#""SIGNAL_UNSPECIFIED""#), None);
}

#[test]
fn stream_input_messages_are_told_apart() {
    let read = |text: &str| serde_json::from_str::<StreamInputRequest>(text).unwrap();
    let start = SelectRequest { process: ProcessSelector::Pid(3) };
    assert_eq!(read(r#"{"start":{"process":{"pid":3}}}"#), StreamInputRequest::Start(start));
    let data = InputData { input: ProcessInput::Stdin(Blob(b"hi".to_vec())) };
    assert_eq!(read(r#"{"data":{"input":{"stdin":"aGk="}}}"#), StreamInputRequest::Data(data));
    assert_eq!(read(r#"{"keepalive":{}}"#), StreamInputRequest::Keepalive(Empty {}));
}

#[test]
fn events_have_the_form_the_sdks_read() {
    let write = |event| serde_json::to_string(&StreamResponse { event }).unwrap();
    assert_eq!(
        write(ProcessEvent::Start(StartEvent { pid: 5 })),
        r#"{"event":{"start":{"pid":5}}}"#
    );
    assert_eq!(write(ProcessEvent::Keepalive), r#"{"event":{"keepalive":{}}}"#);
    let end = EndEvent {
        exit_code: -1,
        exited: false,
        status: "signal: killed".into(),
        error: Some("signal: killed".into()),
    };
    assert_eq!(
        write(ProcessEvent::End(end)),
        r#"{"event":{"end":{"exitCode":-1,"exited":false,"status":"signal: killed","error":"signal: killed"}}}"#
    );
}

#[test]
fn an_event_of_the_future_is_not_an_error() {
    let response: StreamResponse = serde_json::from_str(r#"{"event":{"trace":{}}}"#).unwrap();
    assert_eq!(response.event, ProcessEvent::Unknown);
}

#[test]
fn defaults_left_out_by_a_peer_are_filled_in() {
    let response: StreamResponse =
        serde_json::from_str(r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#)
            .unwrap();
    let end = EndEvent { exited: true, status: "exit status 0".into(), ..EndEvent::default() };
    assert_eq!(response.event, ProcessEvent::End(end));
}

fn event() -> impl Strategy<Value = ProcessEvent> {
    let data = proptest::collection::vec(any::<u8>(), 0..80);
    let end = (any::<i32>(), any::<bool>(), ".{0,20}", proptest::option::of(".{0,20}")).prop_map(
        |(exit_code, exited, status, error)| EndEvent { exit_code, exited, status, error },
    );
    prop_oneof![
        any::<u32>().prop_map(|pid| ProcessEvent::Start(StartEvent { pid })),
        data.prop_map(|data| ProcessEvent::Data(DataEvent {
            stdout: Some(Blob(data)),
            ..DataEvent::default()
        })),
        end.prop_map(ProcessEvent::End),
        Just(ProcessEvent::Keepalive),
    ]
}

proptest! {
    #[test]
    fn events_read_back(event in event()) {
        let response = StreamResponse { event };
        let text = serde_json::to_vec(&response).unwrap();
        prop_assert_eq!(serde_json::from_slice::<StreamResponse>(&text).unwrap(), response);
    }

    #[test]
    fn the_short_way_gives_the_same_bytes(data in proptest::collection::vec(any::<u8>(), 0..80)) {
        let cases = [
            (Output::Stdout, DataEvent { stdout: blob(&data), ..DataEvent::default() }),
            (Output::Stderr, DataEvent { stderr: blob(&data), ..DataEvent::default() }),
            (Output::Pty, DataEvent { pty: blob(&data), ..DataEvent::default() }),
        ];
        for (output, event) in cases {
            let response = StreamResponse { event: ProcessEvent::Data(event) };
            let long = envelope::encode_message(&response).unwrap();
            prop_assert_eq!(encode_data(output, &data), long);
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in r#"[{}\[\]:,"a-z0-9 .\\-]{0,60}"#) {
        let _ = serde_json::from_str::<StartRequest>(&text);
        let _ = serde_json::from_str::<StreamInputRequest>(&text);
        let _ = serde_json::from_str::<StreamResponse>(&text);
    }
}
