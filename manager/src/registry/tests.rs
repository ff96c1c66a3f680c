//! The registry on a real file.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;

use super::*;
use crate::store::{GuestSettings, Id};

fn registry() -> (tempfile::TempDir, Registry) {
    let dir = tempfile::tempdir().unwrap();
    let registry = Registry::open(dir.path()).unwrap();
    (dir, registry)
}

fn tenant(name: &str) -> Tenant {
    Tenant::new(name).unwrap()
}

fn row(tenant: Tenant) -> Row {
    Row {
        id: Id::new().unwrap(),
        tenant,
        state: State::Running,
        template: "base".into(),
        alias: None,
        started_ms: 1,
        end_ms: 2,
        on_timeout: OnTimeout::Kill,
        auto_resume: false,
        metadata: BTreeMap::from([("a".into(), "b".into())]),
        pause: None,
    }
}

fn after(number: i64) -> Wanted {
    Wanted { after: number, ..Wanted::default() }
}

fn template(tenant: Option<Tenant>, name: &str) -> Template {
    let checkpoint = Id::new().unwrap();
    Template {
        id: checkpoint.to_string(),
        tenant,
        kind: TemplateKind::Template,
        name: Some(name.into()),
        checkpoint,
        sandbox: None,
        tags: vec![DEFAULT_TAG.into()],
        defaults: GuestSettings::default(),
        created_ms: 0,
    }
}

#[test]
fn only_its_owner_can_read_the_file() {
    let (dir, _registry) = registry();
    let meta = std::fs::metadata(dir.path().join("manager.db")).unwrap();
    assert_eq!(meta.mode() & 0o777, 0o600);
}

#[test]
fn a_key_belongs_to_its_tenant_until_it_is_removed() {
    let (_dir, registry) = registry();
    let new = registry.create_key(tenant("team")).unwrap();
    assert_eq!(registry.tenant_of(&new.key).unwrap(), Some(tenant("team")));
    assert_eq!(registry.keys().unwrap(), vec![new.listed.clone()]);
    assert!(registry.remove_key(&new.listed.id).unwrap());
    assert_eq!(registry.tenant_of(&new.key).unwrap(), None);
}

#[test]
fn a_key_has_the_form_that_clients_check() {
    let (_dir, registry) = registry();
    let key = registry.create_key(tenant("team")).unwrap().key;
    let digits = key.strip_prefix("e2b_").unwrap();
    assert_eq!(digits.len(), 40);
    assert!(digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
}

#[test]
fn the_file_does_not_hold_the_key() {
    let (dir, registry) = registry();
    let key = registry.create_key(tenant("team")).unwrap().key;
    drop(registry);
    let secret = &key.as_bytes()[4..];
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        assert!(!bytes.windows(secret.len()).any(|part| part == secret));
    }
}

#[test]
fn sandboxes_read_back_from_a_file_that_is_opened_again() {
    let (dir, registry) = registry();
    let mut row = row(tenant("team"));
    registry.put_sandbox(&row).unwrap();
    row.state = State::Paused;
    registry.put_sandbox(&row).unwrap();
    drop(registry);
    let registry = Registry::open(dir.path()).unwrap();
    assert_eq!(registry.sandboxes().unwrap(), [row.clone()]);
    registry.remove_sandbox(&row, "asked for").unwrap();
    registry.remove_sandbox(&row, "again").unwrap();
    assert_eq!(registry.sandboxes().unwrap(), []);
    let events = registry.events_of(&row.id, 10).unwrap();
    let told: Vec<_> = events.iter().map(|event| (&*event.kind, &*event.text)).collect();
    assert_eq!(told, [("running", ""), ("paused", ""), ("gone", "asked for")]);
    let page = registry.events(&after(events[0].number), 1).unwrap();
    assert_eq!((&page.events[..], page.read_to), (&events[1..2], events[1].number));
}

#[test]
fn a_shell_is_one_until_it_is_a_sandbox() {
    let (_dir, registry) = registry();
    let (row, other) = (row(tenant("team")), Id::new().unwrap());
    registry.put_shell(&row.id).unwrap();
    registry.put_shell(&other).unwrap();
    registry.put_sandbox(&row).unwrap();
    assert_eq!(registry.shells().unwrap(), vec![other.clone()]);
    registry.remove_shell(&other).unwrap();
    assert_eq!(registry.shells().unwrap(), vec![]);
}

#[test]
fn a_tenants_own_template_goes_before_everybodys() {
    let (_dir, registry) = registry();
    let (public, own) = (template(None, "base"), template(Some(tenant("a")), "base"));
    registry.put_template(&public).unwrap();
    registry.put_template(&own).unwrap();
    assert_eq!(registry.template(&tenant("a"), "base").unwrap(), Some(own.clone()));
    assert_eq!(registry.template(&tenant("b"), "base").unwrap(), Some(public));
    assert_eq!(registry.template(&tenant("b"), &own.id).unwrap(), None);
}

#[test]
fn a_template_replaces_the_one_of_its_owner_with_its_name() {
    let (_dir, registry) = registry();
    let old = template(Some(tenant("a")), "web");
    let others = [template(Some(tenant("b")), "web"), template(None, "web")];
    for template in others.iter().chain([&old]) {
        registry.put_template(template).unwrap();
    }
    let new = Template { created_ms: 1, ..template(Some(tenant("a")), "web") };
    assert_eq!(registry.replace_template(&new).unwrap(), vec![old]);
    assert_eq!(registry.template(&tenant("a"), "web").unwrap(), Some(new));
    assert_eq!(registry.template(&tenant("b"), "web").unwrap(), Some(others[0].clone()));
}

#[test]
fn nobody_removes_another_tenants_template() {
    let (_dir, registry) = registry();
    let own = template(Some(tenant("a")), "mine");
    registry.put_template(&own).unwrap();
    assert_eq!(registry.remove_template(&tenant("b"), &own.id).unwrap(), None);
    assert!(registry.is_template(&own.checkpoint).unwrap());
    assert_eq!(registry.remove_template(&tenant("a"), &own.id).unwrap(), Some(own.clone()));
    assert!(!registry.is_template(&own.checkpoint).unwrap());
}

#[test]
fn the_same_request_is_known_again_and_another_is_told_apart() {
    let (_dir, registry) = registry();
    let (team, id) = (tenant("team"), Id::new().unwrap());
    assert_eq!(registry.earlier(&team, "k", b"x").unwrap(), Earlier::Nothing);
    registry.remember(&team, "k", b"x", &id).unwrap();
    assert_eq!(registry.earlier(&team, "k", b"x").unwrap(), Earlier::Made(id));
    assert_eq!(registry.earlier(&team, "k", b"y").unwrap(), Earlier::Other);
    assert_eq!(registry.earlier(&tenant("other"), "k", b"x").unwrap(), Earlier::Nothing);
}

#[test]
fn a_later_version_is_refused() {
    let (dir, registry) = registry();
    registry.connection().pragma_update(None, "user_version", 99).unwrap();
    drop(registry);
    assert!(matches!(Registry::open(dir.path()), Err(Error::Version { found: 99 })));
}

#[test]
fn a_tag_means_the_template_that_was_built_with_it_last() {
    let (_dir, registry) = registry();
    let owner = tenant("a");
    let tagged = |tags: &[&str], created_ms| Template {
        tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        created_ms,
        ..template(Some(owner.clone()), "web")
    };
    let meant =
        |reference: &str| registry.template(&owner, reference).unwrap().map(|template| template.id);
    let (first, second) = (tagged(&["default", "v1"], 1), tagged(&["v2", "v1"], 2));
    registry.replace_template(&first).unwrap();
    assert_eq!(registry.replace_template(&second).unwrap(), []);
    for (reference, template) in [("web", &first), ("web:default", &first), ("web:v1", &second)] {
        assert_eq!(meant(reference).as_ref(), Some(&template.id), "{reference}");
    }
    assert_eq!(meant("web:v3"), None);
    let third = tagged(&["default"], 3);
    let replaced = registry.replace_template(&third).unwrap();
    assert_eq!(replaced.into_iter().map(|old| old.id).collect::<Vec<_>>(), [first.id]);
    assert_eq!(meant("web"), Some(third.id));
}

fn build(owner: &str, created_ms: u64) -> Build {
    Build {
        id: format!("{created_ms}"),
        template: Id::new().unwrap().into(),
        tenant: tenant(owner),
        name: "web".into(),
        tags: vec![DEFAULT_TAG.into()],
        vcpus: None,
        memory_mib: None,
        state: BuildState::Building,
        step: None,
        reason: None,
        created_ms,
    }
}

#[test]
fn a_build_is_its_tenants_alone() {
    let (_dir, registry) = registry();
    let own = build("a", 1);
    registry.put_build(&own).unwrap();
    assert_eq!(registry.build(&tenant("b"), &own.id).unwrap(), None);
    assert_eq!(registry.builds(&tenant("b")).unwrap(), []);
    assert_eq!(registry.build(&tenant("a"), &own.id).unwrap(), Some(own));
}

#[test]
fn builds_under_way_are_failed_once_nobody_works_on_them() {
    let (_dir, registry) = registry();
    let waiting = Build { state: BuildState::Waiting, ..build("a", 1) };
    registry.put_build(&waiting).unwrap();
    registry.put_build(&build("a", 2)).unwrap();
    registry.interrupt_builds("no daemon").unwrap();
    let found = registry.build(&tenant("a"), "2").unwrap().unwrap();
    assert_eq!((found.state, found.reason.as_deref()), (BuildState::Error, Some("no daemon")));
    assert_eq!(registry.build(&tenant("a"), "1").unwrap(), Some(waiting));
}

#[test]
fn old_builds_are_forgotten_and_those_of_others_are_not() {
    let (_dir, registry) = registry();
    registry.put_build(&build("b", 0)).unwrap();
    for number in 1..=501 {
        registry.put_build(&build("a", number)).unwrap();
    }
    assert_eq!(registry.build(&tenant("a"), "1").unwrap(), None);
    assert_eq!(registry.builds(&tenant("a")).unwrap().len(), 500);
    assert_eq!(registry.builds(&tenant("b")).unwrap().len(), 1);
}

#[test]
fn a_registry_of_the_first_version_is_brought_up_to_date() {
    let dir = tempfile::tempdir().unwrap();
    let old = Connection::open(dir.path().join("manager.db")).unwrap();
    old.execute_batch(TABLES).unwrap();
    old.pragma_update(None, "user_version", 1).unwrap();
    drop(old);
    for _ in 0..2 {
        let registry = Registry::open(dir.path()).unwrap();
        registry.put_build(&build("a", 1)).unwrap();
    }
}

#[test]
fn a_quota_is_its_tenants_and_changes_where_something_is_said() {
    let (_dir, registry) = registry();
    assert_eq!(registry.quota_of(&tenant("a")).unwrap(), None);
    let first = Quota { sandboxes: Some(2), memory_mib: Some(3), vcpus: None };
    registry.set_quota(&tenant("a"), first).unwrap();
    registry.set_quota(&tenant("a"), Quota { memory_mib: Some(4), ..Quota::default() }).unwrap();
    let wanted = Quota { memory_mib: Some(4), ..first };
    assert_eq!(registry.quota_of(&tenant("a")).unwrap(), Some(wanted));
    assert_eq!(registry.quota_of(&tenant("b")).unwrap(), None);
}

#[test]
fn a_template_is_found_by_indices_however_many_there_are() {
    let (_dir, registry) = registry();
    let connection = registry.connection();
    let mut explained =
        connection.prepare(&format!("EXPLAIN QUERY PLAN {}", templates::ALIKE)).unwrap();
    let steps = explained.query_map(["a", "web:one", "web"], |row| row.get(3)).unwrap();
    let steps: Vec<String> = steps.map(Result::unwrap).collect();
    assert!(steps.iter().any(|step| step.contains("templates_by_name")), "{steps:?}");
    assert!(!steps.iter().any(|step| step.starts_with("SCAN")), "{steps:?}");
}
