//! Devices and work queues, as sysfs tells of them.
//!
//! The tree belongs to the kernel, yet it changes while it is read, and older kernels lack some
//! files: whatever is missing or odd makes a queue unusable with a reason, never an error.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

/// Where the kernel shows the devices of the idxd driver.
pub const SYSFS: &str = "/sys/bus/dsa/devices";

/// Longest attribute that is read, in bytes: one page, as sysfs has it.
const MAX_ATTRIBUTE: u64 = 4096;
/// Most devices, and most queues of a device, that are looked at.
const MAX_ENTRIES: usize = 256;

/// How a work queue takes descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By many processes, with ENQCMD, which says when the queue is full.
    Shared,
    /// By one process, with MOVDIR64B, which does not.
    Dedicated,
}

/// Why a work queue cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// An attribute is missing or cannot be read.
    #[error("its attribute {0} cannot be read")]
    Unreadable(&'static str),
    /// An attribute says something unknown.
    #[error("its attribute {name} is {value:?}")]
    Odd {
        /// The attribute.
        name: &'static str,
        /// The first characters of what it says.
        value: String,
    },
    /// The device is not enabled.
    #[error("its device is not enabled")]
    DeviceDisabled,
    /// The queue is not enabled.
    #[error("it is not enabled")]
    Disabled,
    /// The queue is not of type `user`.
    #[error("it is of type {0:?}, not \"user\"")]
    NotForUsers(String),
    /// The device does not share the address space of processes.
    #[error("its device has no PASID: shared virtual memory is off")]
    NoPasid,
}

/// What a usable work queue is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traits {
    /// How it takes descriptors.
    pub mode: Mode,
    /// Entries, at least one.
    pub size: u32,
    /// Entries that ENQCMD of unprivileged code may fill; no more than `size`.
    pub threshold: u32,
    /// Whether descriptors may ask to block on a page fault.
    pub block_on_fault: bool,
    /// Most bytes of one transfer, at least one.
    pub max_transfer: u32,
}

impl Traits {
    /// Descriptors that may be under way at once.
    pub fn depth(&self) -> u32 {
        match self.mode {
            Mode::Shared => self.threshold,
            Mode::Dedicated => self.size,
        }
    }
}

/// A work queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkQueue {
    /// Its name, such as `wq1.0`; its device file has the same under `/dev/iax`.
    pub name: String,
    /// What it is like, or why it cannot be used.
    pub traits: Result<Traits, Unusable>,
}

/// An accelerator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its name, such as `iax1`.
    pub name: String,
    /// Whether it is enabled.
    pub enabled: bool,
    /// Whether it works in the address space of processes (PASID, shared virtual memory).
    pub pasid: bool,
    /// Its work queues, by name.
    pub queues: Vec<WorkQueue>,
}

/// The accelerators below `root` (on a real machine [`SYSFS`]), by name. None when the driver is
/// not there.
pub fn devices(root: &Path) -> Vec<Device> {
    names(root, "iax", "").into_iter().map(|name| device(&root.join(&name), name)).collect()
}

fn device(dir: &Path, name: String) -> Device {
    let enabled = attribute(dir, "state").is_ok_and(|state| state == "enabled");
    let pasid = attribute(dir, "pasid_enabled").is_ok_and(|value| value == "1");
    let read = |queue: String| WorkQueue {
        traits: traits(&dir.join(&queue), enabled, pasid),
        name: queue,
    };
    let queues = names(dir, "wq", ".").into_iter().map(read).collect();
    Device { name, enabled, pasid, queues }
}

fn traits(dir: &Path, device_enabled: bool, pasid: bool) -> Result<Traits, Unusable> {
    if !device_enabled {
        return Err(Unusable::DeviceDisabled);
    }
    if attribute(dir, "state")? != "enabled" {
        return Err(Unusable::Disabled);
    }
    let kind = attribute(dir, "type")?;
    if kind != "user" {
        return Err(Unusable::NotForUsers(shorten(&kind)));
    }
    if !pasid {
        return Err(Unusable::NoPasid);
    }
    let mode = match attribute(dir, "mode")?.as_str() {
        "shared" => Mode::Shared,
        "dedicated" => Mode::Dedicated,
        value => return Err(Unusable::Odd { name: "mode", value: shorten(value) }),
    };
    let size = positive(dir, "size")?;
    let threshold = match mode {
        Mode::Shared => positive(dir, "threshold")?.min(size),
        Mode::Dedicated => size,
    };
    // Kernels without the file cannot block on faults for users.
    let block_on_fault = attribute(dir, "block_on_fault").is_ok_and(|value| value == "1");
    let max_transfer = positive(dir, "max_transfer_size")?;
    Ok(Traits { mode, size, threshold, block_on_fault, max_transfer })
}

/// A number of at least one; larger than 32 bits counts as the most.
fn positive(dir: &Path, name: &'static str) -> Result<u32, Unusable> {
    let value = attribute(dir, name)?;
    match value.parse::<u64>() {
        Ok(number) if number > 0 => Ok(u32::try_from(number).unwrap_or(u32::MAX)),
        _ => Err(Unusable::Odd { name, value: shorten(&value) }),
    }
}

fn attribute(dir: &Path, name: &'static str) -> Result<String, Unusable> {
    let mut text = String::new();
    let path = dir.join(name);
    // Only regular files: opening another kind could wait for ever.
    let regular = fs::metadata(&path).is_ok_and(|meta| meta.is_file());
    let read = regular
        .then(|| File::open(path).ok()?.take(MAX_ATTRIBUTE).read_to_string(&mut text).ok())
        .flatten();
    match read {
        Some(_) => Ok(text.trim().to_owned()),
        None => Err(Unusable::Unreadable(name)),
    }
}

fn shorten(value: &str) -> String {
    value.chars().take(32).collect()
}

/// Entries named `prefix`, a number, and, with a separator, that and another number.
fn names(dir: &Path, prefix: &str, separator: &str) -> Vec<String> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let fits = |name: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| match separator {
            "" => digits(rest),
            _ => rest.split_once(separator).is_some_and(|(a, b)| digits(a) && digits(b)),
        })
    };
    let mut found: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| fits(name))
        .take(MAX_ENTRIES)
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &[(&str, &str)] = &[
        ("state", "enabled"),
        ("type", "user"),
        ("mode", "shared"),
        ("size", "16"),
        ("threshold", "12"),
        ("block_on_fault", "1"),
        ("max_transfer_size", "2097152"),
    ];

    /// A tree with one device and one queue, changed in one attribute of the queue.
    fn tree(pasid: &str, change: Option<(&str, Option<&str>)>) -> Vec<Device> {
        let dir = tempfile::tempdir().unwrap();
        let queue = dir.path().join("iax1/wq1.0");
        fs::create_dir_all(&queue).unwrap();
        fs::create_dir_all(dir.path().join("dsa0/wq0.0")).unwrap();
        fs::create_dir_all(dir.path().join("iax1/engine1.0")).unwrap();
        fs::write(dir.path().join("iax1/state"), "enabled\n").unwrap();
        fs::write(dir.path().join("iax1/pasid_enabled"), pasid).unwrap();
        for (name, value) in GOOD {
            fs::write(queue.join(name), format!("{value}\n")).unwrap();
        }
        match change {
            Some((name, Some(value))) => fs::write(queue.join(name), value).unwrap(),
            Some((name, None)) => fs::remove_file(queue.join(name)).unwrap(),
            None => {}
        }
        devices(dir.path())
    }

    fn only(devices: Vec<Device>) -> Result<Traits, Unusable> {
        assert_eq!(devices.len(), 1, "{devices:?}");
        assert_eq!(devices[0].queues.len(), 1, "{devices:?}");
        devices[0].queues[0].traits.clone()
    }

    #[test]
    fn a_usable_queue_is_read_as_it_is() {
        let traits = only(tree("1\n", None)).unwrap();
        let expected = Traits {
            mode: Mode::Shared,
            size: 16,
            threshold: 12,
            block_on_fault: true,
            max_transfer: 2 << 20,
        };
        assert_eq!(traits, expected);
        assert_eq!(traits.depth(), 12);
    }

    #[test]
    fn an_unusable_queue_says_why() {
        let with = |name, value| only(tree("1", Some((name, value)))).unwrap_err();
        assert_eq!(with("state", Some("disabled")), Unusable::Disabled);
        assert_eq!(with("type", Some("kernel")), Unusable::NotForUsers("kernel".into()));
        assert_eq!(with("mode", None), Unusable::Unreadable("mode"));
        let odd = Unusable::Odd { name: "size", value: "0".into() };
        assert_eq!(with("size", Some("0")), odd);
        assert_eq!(only(tree("0", None)).unwrap_err(), Unusable::NoPasid);
    }

    #[test]
    fn a_queue_without_block_on_fault_is_usable() {
        assert!(!only(tree("1", Some(("block_on_fault", None)))).unwrap().block_on_fault);
    }

    #[test]
    fn without_the_driver_there_is_no_device() {
        assert_eq!(devices(Path::new("/nowhere")), []);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_bytes_in_any_attribute_are_taken(
            which in 0..GOOD.len(),
            value in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let queue = dir.path().join("iax1/wq1.0");
            fs::create_dir_all(&queue).unwrap();
            fs::write(dir.path().join("iax1/state"), "enabled").unwrap();
            fs::write(dir.path().join("iax1/pasid_enabled"), "1").unwrap();
            for (name, good) in GOOD {
                fs::write(queue.join(name), good).unwrap();
            }
            fs::write(queue.join(GOOD[which].0), &value).unwrap();
            if let Ok(traits) = only(devices(dir.path())) {
                prop_assert!(traits.size > 0 && traits.max_transfer > 0);
                prop_assert!((1..=traits.size).contains(&traits.depth()));
            }
        }
    }
}
