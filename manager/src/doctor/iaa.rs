//! The IAA accelerators: which work queues can be used, and whether each does a known block.

use std::path::Path;

use coppice_iaa::discover::{self, Device, WorkQueue};
use coppice_iaa::{probe, queue};

use super::Check;
use crate::failure::chain;

const NAME: &str = "iaa";
const ENABLE: &str = "boot with intel_iommu=on,sm_on, load the idxd module, then configure a queue \
                      of type user with accel-config (config-wq, enable-device, enable-wq)";

/// Looks at the accelerators below `root`. None is no lack: software compresses then.
pub(super) async fn check(root: &Path) -> Check {
    let root = root.to_owned();
    // A device may take its time to answer.
    let made = tokio::task::spawn_blocking(move || judge(&discover::devices(&root), test)).await;
    made.unwrap_or_else(|_| Check::note(NAME, "the test of IAA ended early", ENABLE))
}

/// What became of a work queue: whether it works, and in words.
fn test(queue: &WorkQueue) -> (bool, String) {
    let name = &queue.name;
    let tested = match &queue.traits {
        Err(reason) => return (false, format!("{name} not usable ({reason})")),
        Ok(traits) => probe::device(&Path::new(queue::DEVICES).join(name), traits),
    };
    match tested {
        Ok(way) => (true, format!("{name} works (by {way})")),
        Err(error) => (false, format!("{name} FAILED its test ({})", chain(&error))),
    }
}

fn judge(devices: &[Device], test: impl Fn(&WorkQueue) -> (bool, String)) -> Check {
    if devices.is_empty() {
        let remedy = format!("nothing to do unless this is a Xeon with IAA: then {ENABLE}");
        return Check::note(NAME, "no IAA accelerators; software compression is used", remedy);
    }
    let (mut works, mut text) = (false, Vec::new());
    for device in devices {
        let results: Vec<_> = device.queues.iter().map(&test).collect();
        works |= results.iter().any(|(works, _)| *works);
        let queues: Vec<_> = results.into_iter().map(|(_, text)| text).collect();
        let queues = if queues.is_empty() { "no work queues".into() } else { queues.join(", ") };
        text.push(format!("{}: {queues}", device.name));
    }
    let text = text.join("; ");
    match works {
        true => Check::ok(NAME, text),
        false => Check::note(NAME, format!("{text}; software compression is used"), ENABLE),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::doctor::Status;

    /// Devices of a made-up tree, in which one queue lacks everything but its name.
    fn devices() -> Vec<Device> {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("iax1/wq1.0")).unwrap();
        discover::devices(dir.path())
    }

    #[tokio::test]
    async fn without_a_device_software_is_used() {
        let check = check(Path::new("/nowhere")).await;
        assert_eq!(check.status, Status::Note);
        assert!(check.found.contains("software compression is used"), "{}", check.found);
    }

    #[test]
    fn a_queue_that_cannot_be_used_says_why() {
        let check = judge(&devices(), test);
        assert_eq!(check.status, Status::Note);
        let expected = "iax1: wq1.0 not usable (its device is not enabled)";
        assert!(check.found.starts_with(expected), "{}", check.found);
    }

    #[test]
    fn a_queue_that_works_makes_it_well() {
        let check = judge(&devices(), |queue| (true, format!("{} works", queue.name)));
        assert_eq!((check.status, check.found.as_str()), (Status::Ok, "iax1: wq1.0 works"));
    }
}
