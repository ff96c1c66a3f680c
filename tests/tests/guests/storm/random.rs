//! Random numbers drawn without a pause while the machine is cloned.

use std::collections::BTreeMap;

use super::load;
use crate::common::on_lane;
use crate::sessions::Session;

/// Draws of a machine: value, and the nanosecond at which it began to be drawn.
type Draws = BTreeMap<u64, i64>;

/// The draws of a machine that has stopped drawing.
fn draws(session: &Session, name: &str) -> Draws {
    let found = load::draws(session, name);
    let count = found.len();
    let found: Draws = found.into_iter().collect();
    assert_eq!(found.len(), count, "{name} drew a number twice");
    found
}

/// Two machines have a value in common only if it was on its way when they parted: then both
/// began it in the same nanosecond. After that their clocks go apart at once. Gives how many
/// they have in common. A clone stops drawing soon after it was given its name, so that it has the
/// first ones of its own, which are the ones that count.
fn common(one: &(&str, Draws), other: &(&str, Draws)) -> usize {
    let mut common = 0;
    for (value, began) in &one.1 {
        if let Some(other_began) = other.1.get(value) {
            assert_eq!(began, other_began, "{} and {} drew {value} when apart", one.0, other.0);
            common += 1;
        }
    }
    let own = one.1.len() - common;
    assert!(own > 0, "{} drew no numbers of its own", one.0);
    common
}

fn never_equal(cpus: &str) {
    let options = ["--kernel", "micro", "--image", "tiny", "--memory", "128"];
    let session = Session::with(&[options.as_slice(), &["--cpus", cpus]].concat());
    load::start(&session, "web", "getrandom urandom getrandom urandom");
    session.ok(&["checkpoint", "web", "--name", "base"]);
    // The parent stands still until its clones are there, so that it keeps what it drew first, too,
    // and takes no processor from them.
    session.ok(&["pause", "web"]);
    session.ok(&["clone", "base", "-n", "2", "--name", "c"]);
    session.ok(&["clone", "web", "--name", "live"]);
    session.ok(&["resume", "web"]);
    load::stop_drawing(&session, "web");
    let mut all: Vec<(&str, Draws)> =
        ["c-1", "c-2", "live", "web"].map(|name| (name, draws(&session, name))).into();
    assert!(common(&all[0], &all[1]) > 0, "the clones were asked too late");
    assert!(common(&all[2], &all[3]) > 0, "clone and parent were asked too late");
    // And the parent once more, brought back to where the first two clones began.
    session.ok(&["rollback", "web", "base"]);
    load::stop_drawing(&session, "web");
    all.push(("web, rolled back,", draws(&session, "web")));
    for (at, one) in all.iter().enumerate() {
        for other in &all[..at] {
            common(one, other);
        }
    }
    session.end();
}

#[test]
fn machines_of_one_checkpoint_never_draw_the_same_on_one_vcpu() {
    on_lane!({ never_equal("1") });
}

#[test]
fn machines_of_one_checkpoint_never_draw_the_same_on_four_vcpus() {
    on_lane!({ never_equal("4") });
}
