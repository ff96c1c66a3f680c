//! The process of a machine as the manager starts it, and what the manager can tell of it.

use std::fs;
use std::path::{Path, PathBuf};

use coppice_manager::vmm::{Vmm, WholeMemory};

use crate::common::program;
use crate::scene::block_on;

/// Names of what a process has open, but for events and the like that it made itself.
fn passed(pid: u32) -> Vec<String> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let names = links.map(|link| fs::read_link(link.unwrap().path()).unwrap());
    let kind = |name: PathBuf| name.to_str().unwrap().split('[').next().unwrap().to_owned();
    let mut kinds: Vec<_> =
        names.map(kind).filter(|kind| !kind.starts_with("anon_inode:")).collect();
    kinds.sort();
    kinds
}

#[test]
fn it_is_started_by_its_path_with_nothing_of_the_managers() {
    let program = program("coppice-vmm");
    // Something that a careless start would hand down.
    let leak = fs::File::open("/dev/zero").unwrap();
    rustix::io::fcntl_setfd(&leak, rustix::io::FdFlags::empty()).unwrap();
    block_on(async {
        let vmm = Vmm::start(&program).unwrap();
        // It answers, so it has closed what it did not want, and confined itself.
        vmm.status().await.unwrap();
        let pid = vmm.pid();
        let of = |what: &str| format!("/proc/{pid}/{what}");
        assert_eq!(fs::read_link(of("exe")).unwrap(), program);
        assert_eq!(fs::read_link(of("cwd")).unwrap(), Path::new("/"));
        assert_eq!(fs::read(of("environ")).unwrap(), b"");
        let arguments = fs::read_to_string(of("cmdline")).unwrap();
        assert!(arguments.starts_with(&format!("{}\0--control-fd\0", program.display())));
        let mut expected = vec!["/dev/null", "/dev/null", "pipe:", "socket:"];
        if Path::new("/dev/kvm").exists() {
            expected.insert(0, "/dev/kvm");
        }
        let maps = format!("/proc/{pid}/pagemap");
        expected.insert(expected.len() - 2, &maps);
        assert_eq!(passed(pid), expected);
        // Its memory can be told although it is closed to others.
        assert!(vmm.memory_use().unwrap().pss_kib > 0);
        assert!(WholeMemory::of(pid).unwrap().private > 0);
        vmm.stop().await;
    });
}
