//! Coppice: machines over their control sockets, with the files that a manager's store would have
//! open.
//!
//! This is what `coppice clone` does to a machine, without what it writes down about it: processes
//! are told of files that are open already. The daemon as a whole is measured as an E2B service.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::Arc;

use super::coppice_vm::CoppiceVm;
use super::vsock::Ready;
use super::{
    Boot, Contender, Feature, Guest, Host, Place, Saved, Shell, Vm, agent_cmdline, console_cmdline,
    version_of,
};
use crate::clock::Clock;
use crate::error::Error;
use crate::model;

/// A checkpoint and what it stands on, open.
#[derive(Debug, Clone)]
pub struct Node {
    /// Memory, the root first.
    pub(super) layers: Vec<Arc<File>>,
    /// The disk's sealed layers, the lowest first.
    pub(super) disks: Vec<Arc<File>>,
    /// What a machine of it used at first.
    pub(super) working_set: Option<Arc<File>>,
}

impl Node {
    /// Its files, which have no names, by their descriptors.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let files = self.layers.iter().chain(&self.disks).chain(&self.working_set);
        files.map(|file| format!("/proc/self/fd/{}", file.as_raw_fd()).into()).collect()
    }
}

/// `coppice-vmm`.
#[derive(Debug)]
pub struct Coppice {
    name: String,
    program: PathBuf,
    host: Arc<Host>,
}

impl Coppice {
    /// The program at an absolute path.
    #[must_use]
    pub fn new(name: String, program: PathBuf, host: Arc<Host>) -> Self {
        Self { name, program, host }
    }
}

impl Contender for Coppice {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> model::Contender {
        model::Contender {
            name: self.name.clone(),
            version: version_of(&self.program),
            program: self.program.display().to_string(),
            kind: "coppice".into(),
        }
    }

    fn lacks(&self, _feature: Feature) -> Option<&'static str> {
        None
    }

    fn place(&self, _guest: &Guest, _from: Option<&Saved>) -> Result<Place, Error> {
        Place::new(&self.host, "coppice.")
    }

    fn boot_to_console(
        &self,
        guest: &Guest,
        token: &str,
        place: Place,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error> {
        let mut vm = CoppiceVm::start(&self.program, &self.host, place, guest)?;
        clock.mark("started");
        vm.boot_to_console(guest, &console_cmdline("root=/dev/vda ro", token))?;
        clock.mark("running");
        Ok(Box::new(vm))
    }

    fn boot(&self, guest: &Guest, how: Boot, clock: &mut Clock) -> Result<Box<dyn Vm>, Error> {
        let ready = Ready::listen(&CoppiceVm::socket(&how.place), guest.limit)?;
        let mut vm = CoppiceVm::start(&self.program, &self.host, how.place, guest)?;
        clock.mark("started");
        vm.boot(guest, &format!("{} root=/dev/vda rw", agent_cmdline()))?;
        clock.mark("running");
        ready.wait()?;
        clock.mark("ready");
        Ok(Box::new(vm))
    }

    fn prepare(&self, guest: &Guest) -> Result<Option<Box<dyn Shell>>, Error> {
        let mut vm = CoppiceVm::start(&self.program, &self.host, self.place(guest, None)?, guest)?;
        vm.prepare(guest)?;
        Ok(Some(Box::new(vm)))
    }

    fn restore(
        &self,
        guest: &Guest,
        from: &Saved,
        place: Place,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error> {
        let vm = CoppiceVm::start(&self.program, &self.host, place, guest)?;
        clock.mark("started");
        Box::new(vm).restore(guest, from, clock)
    }
}
