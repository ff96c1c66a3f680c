//! Tests of the artefact cache, on real directories.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|child| child.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn a_key_depends_on_names_values_and_their_borders() {
    let key = |parts: &[(&str, &str)]| {
        parts.iter().fold(Key::default(), |key, (name, value)| key.add(name, value)).finish()
    };
    let base = key(&[("a", "bc")]);
    assert_eq!(base, key(&[("a", "bc")]));
    assert_eq!(base.len(), 32);
    for other in [&[("ab", "c")][..], &[("a", "bd")], &[("a", "b"), ("c", "")], &[]] {
        assert_ne!(base, key(other));
    }
}

#[test]
fn the_digest_of_a_file_is_sha256() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, "abc").unwrap();
    assert_eq!(
        sha256_file(&path).unwrap(),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    );
}

#[test]
fn an_entry_is_built_once_even_by_concurrent_callers() {
    let dir = tempfile::tempdir().unwrap();
    let builds = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let entry = entry_in(dir.path(), "k", "thing", |place| {
                    builds.fetch_add(1, Ordering::SeqCst);
                    fs::write(place.join("file"), "made")?;
                    Ok(())
                });
                assert_eq!(fs::read_to_string(entry.unwrap().join("file")).unwrap(), "made");
            });
        }
    });
    assert_eq!(builds.load(Ordering::SeqCst), 1);
    assert_eq!(names(dir.path()), ["k", "k.lock"]);
}

#[test]
fn a_failed_build_leaves_nothing_and_can_be_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let failed = entry_in(dir.path(), "k", "thing", |place| {
        fs::write(place.join("half"), "x")?;
        bail!("broken")
    });
    assert_eq!(failed.unwrap_err().to_string(), "broken");
    assert_eq!(names(dir.path()), ["k.lock"]);
    entry_in(dir.path(), "k", "thing", |_| Ok(())).unwrap();
    assert_eq!(names(dir.path()), ["k", "k.lock"]);
}

#[test]
fn what_a_killed_build_left_is_removed_for_that_key_only() {
    let dir = tempfile::tempdir().unwrap();
    for stale in [".k.abc", ".other.abc"] {
        fs::create_dir(dir.path().join(stale)).unwrap();
    }
    entry_in(dir.path(), "k", "thing", |_| Ok(())).unwrap();
    assert_eq!(names(dir.path()), [".other.abc", "k", "k.lock"]);
}

#[test]
fn a_full_disk_is_explained() {
    let full = std::io::Error::from_raw_os_error(nix::libc::ENOSPC);
    let error = explain_space(anyhow::Error::new(full).context("cannot write"), Path::new("/c"));
    assert!(error.to_string().starts_with("the disk of /c is full"), "{error}");
    let other = explain_space(anyhow::anyhow!("broken"), Path::new("/c"));
    assert_eq!(other.to_string(), "broken");
}

#[test]
fn too_little_space_is_told_before_the_build() {
    let dir = tempfile::tempdir().unwrap();
    check_space(dir.path(), 1, "thing").unwrap();
    let error = check_space(dir.path(), u64::MAX, "thing").unwrap_err().to_string();
    assert!(error.starts_with("thing needs ") && error.contains("XDG_CACHE_HOME"), "{error}");
}

#[test]
fn a_link_replaces_the_one_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sub/link");
    for target in ["one", "two"] {
        link(Path::new(target), &path).unwrap();
        assert_eq!(fs::read_link(&path).unwrap(), Path::new(target));
    }
    assert_eq!(names(&dir.path().join("sub")), ["link"]);
}

#[test]
fn a_keyed_file_is_made_anew_only_for_another_key() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sub/image");
    let make = |key: &str, text: &str| {
        keyed_file(&path, key, "image", |new| Ok(fs::write(new, text)?)).unwrap();
        fs::read_to_string(&path).unwrap()
    };
    assert_eq!(make("k1", "one"), "one");
    assert_eq!(make("k1", "two"), "one");
    assert_eq!(make("k2", "three"), "three");
    assert_eq!(names(&dir.path().join("sub")), [".image.key", ".image.lock", "image"]);
}

#[test]
fn a_keyed_file_survives_a_failed_build_of_its_successor() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    keyed_file(&path, "k1", "image", |new| Ok(fs::write(new, "one")?)).unwrap();
    let failed = keyed_file(&path, "k2", "image", |new| {
        fs::write(new, "half")?;
        bail!("broken")
    });
    assert_eq!(failed.unwrap_err().to_string(), "broken");
    assert_eq!(fs::read_to_string(&path).unwrap(), "one");
    assert_eq!(names(dir.path()), [".image.key", ".image.lock", "image"]);
}
