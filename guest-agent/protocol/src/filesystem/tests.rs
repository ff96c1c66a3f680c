//! The JSON of each message, against texts in the form the SDKs send and read.

use super::*;
use proptest::prelude::*;

#[test]
fn watch_requests_of_an_sdk_are_read() {
    let text = r#"{"path":"/a","recursive":true,"includeEntry":true,"allowNetworkMounts":null}"#;
    let request: WatchRequest = serde_json::from_str(text).unwrap();
    let expected = WatchRequest {
        path: "/a".into(),
        recursive: true,
        include_entry: true,
        allow_network_mounts: false,
    };
    assert_eq!(request, expected);
}

#[test]
fn what_is_not_set_has_its_default() {
    assert_eq!(
        serde_json::from_str::<ListDirRequest>("{}").unwrap(),
        ListDirRequest { path: String::new(), depth: 0 }
    );
}

#[test]
fn entries_have_the_form_the_sdks_read() {
    let entry = EntryInfo {
        name: "f".into(),
        kind: FileType::File,
        path: "/f".into(),
        size: 5_000_000_000,
        mode: 0o644,
        permissions: "-rw-r--r--".into(),
        owner: "user".into(),
        group: "user".into(),
        modified_time: Some(Timestamp::from_unix(1, 0)),
        metadata: BTreeMap::from([("k".into(), "v".into())]),
        ..EntryInfo::default()
    };
    let expected = serde_json::json!({ "entry": {
        "name": "f", "type": "FILE_TYPE_FILE", "path": "/f", "size": "5000000000", "mode": 420,
        "permissions": "-rw-r--r--", "owner": "user", "group": "user",
        "modifiedTime": "1970-01-01T00:00:01Z", "metadata": { "k": "v" },
    }});
    let response = EntryResponse { entry: Some(entry) };
    assert_eq!(serde_json::to_value(&response).unwrap(), expected);
}

#[test]
fn messages_of_a_watch_have_the_form_the_sdks_read() {
    let write = |message| serde_json::to_string(&message).unwrap();
    assert_eq!(write(WatchDirResponse::Start), r#"{"start":{}}"#);
    assert_eq!(write(WatchDirResponse::Keepalive), r#"{"keepalive":{}}"#);
    let event = FilesystemEvent { name: "a/b".into(), kind: EventType::Write, entry: None };
    assert_eq!(
        write(WatchDirResponse::Filesystem(event)),
        r#"{"filesystem":{"name":"a/b","type":"EVENT_TYPE_WRITE"}}"#
    );
}

#[test]
fn enums_are_read_by_name_or_number_and_the_future_is_no_error() {
    let read = |text: &str| serde_json::from_str::<FileType>(text).ok();
    assert_eq!(read(r#""FILE_TYPE_DIRECTORY""#), Some(FileType::Directory));
    assert_eq!(read("3"), Some(FileType::Symlink));
    assert_eq!(read("77"), Some(FileType::Unspecified));
    assert_eq!(read(r#""FILE_TYPE_PORTAL""#), Some(FileType::Unspecified));
    assert_eq!(read("[]"), None);
}

fn entry() -> impl Strategy<Value = EntryInfo> {
    let kind = prop_oneof![
        Just(FileType::Unspecified),
        Just(FileType::File),
        Just(FileType::Directory),
        Just(FileType::Symlink)
    ];
    let texts = proptest::collection::vec(".{0,12}", 4);
    let metadata = proptest::collection::btree_map(".{0,6}", ".{0,6}", 0..3);
    let times = proptest::option::of((any::<i64>(), 0_u32..1_000_000_000));
    let link = proptest::option::of(".{0,12}");
    (texts, kind, any::<i64>(), any::<u32>(), times, link, metadata).prop_map(
        |(texts, kind, size, mode, times, symlink_target, metadata)| EntryInfo {
            name: texts[0].clone(),
            kind,
            path: texts[1].clone(),
            size,
            mode,
            permissions: texts[2].clone(),
            owner: texts[3].clone(),
            group: texts[0].clone(),
            modified_time: times.map(|(seconds, nanos)| Timestamp::from_unix(seconds, nanos)),
            is_symlink: symlink_target.is_some(),
            symlink_target,
            metadata,
        },
    )
}

fn event() -> impl Strategy<Value = FilesystemEvent> {
    let kind =
        prop_oneof![Just(EventType::Create), Just(EventType::Chmod), Just(EventType::Rename)];
    (".{0,20}", kind, proptest::option::of(entry().prop_map(Box::new)))
        .prop_map(|(name, kind, entry)| FilesystemEvent { name, kind, entry })
}

proptest! {
    #[test]
    fn entries_read_back(entries in proptest::collection::vec(entry(), 0..4)) {
        let response = ListDirResponse { entries };
        let text = serde_json::to_vec(&response).unwrap();
        prop_assert_eq!(serde_json::from_slice::<ListDirResponse>(&text).unwrap(), response);
    }

    #[test]
    fn events_read_back(event in event()) {
        let response = WatchDirResponse::Filesystem(event);
        let text = serde_json::to_vec(&response).unwrap();
        prop_assert_eq!(serde_json::from_slice::<WatchDirResponse>(&text).unwrap(), response);
    }

    #[test]
    fn any_text_is_read_or_refused(text in r#"[{}\[\]:,"a-zE0-9 .\\-]{0,60}"#) {
        let _ = serde_json::from_str::<WatchRequest>(&text);
        let _ = serde_json::from_str::<ListDirRequest>(&text);
        let _ = serde_json::from_str::<WatchDirResponse>(&text);
    }
}
