//! For tests: fleets with sandboxes that have no machines. A stub in place of one answers requests
//! at its agent's socket.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::quota::Usage;
use super::{Error, Fleet, Member, Settings};
use crate::home::Home;
use crate::registry::{OnTimeout, Row, State, Tenant};
use crate::sandbox::Guest;
use crate::store::{Id, Machine, NewSandbox};

/// The socket that a guest's agent is reached by.
const VSOCK: &str = "vsock.sock";
/// What the stub answers.
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// A fleet in a home of its own.
pub(crate) fn fleet(max_per_tenant: usize) -> (tempfile::TempDir, Arc<Fleet>) {
    let dir = tempfile::tempdir().unwrap();
    let (home, vmm) = (Home::at(dir.path().to_owned()), dir.path().join("none"));
    let fleet = Fleet::open(Settings { home, vmm, max_per_tenant, reserve: 0 }).unwrap();
    (dir, fleet)
}

/// A tenant of this name.
pub(crate) fn tenant(name: &str) -> Tenant {
    Tenant::new(name).unwrap()
}

/// A sandbox that is being made.
pub(crate) fn row(tenant: &Tenant) -> Row {
    Row {
        id: Id::new().unwrap(),
        tenant: tenant.clone(),
        state: State::Creating,
        template: "base".into(),
        alias: Some("base".into()),
        started_ms: 0,
        end_ms: u64::MAX,
        on_timeout: OnTimeout::Kill,
        auto_resume: false,
        metadata: BTreeMap::from([("purpose".into(), "test".into())]),
        pause: None,
    }
}

pub(crate) fn machine() -> Machine {
    Machine {
        vcpus: 2,
        memory_mib: 512,
        kernel: PathBuf::new(),
        cmdline: String::new(),
        initrd: None,
        cid: 3,
        rng: true,
        balloon: None,
    }
}

impl Fleet {
    /// So many more paused sandboxes.
    pub(crate) fn add_paused(&self, tenant: &Tenant, count: usize) {
        for _ in 0..count {
            let reservation = self.reserve(tenant, Usage::of(&machine())).unwrap();
            let member = self.announce(&row(tenant), reservation).unwrap();
            self.promise(&member, Row { state: State::Paused, ..member.row() }).unwrap();
        }
    }

    /// What the daemon itself does to make a sandbox, without a machine.
    pub(crate) fn made(&self, tenant: &Tenant) -> Result<Arc<Member>, Error> {
        let reservation = self.reserve(tenant, Usage::of(&machine()))?;
        let member = self.announce(&row(tenant), reservation)?;
        self.promise(&member, Row { state: State::Running, ..member.row() })?;
        Ok(member)
    }

    /// A running sandbox with a stub in place of its machine; and the way to that.
    pub(crate) fn add_stub(&self, tenant: &Tenant) -> (Arc<Member>, PathBuf) {
        let member = self.made(tenant).unwrap();
        let id = Some(member.id().clone());
        let new = NewSandbox { id, name: None, machine: machine(), disks: Vec::new() };
        let (entry, _) = self.store.create_sandbox(new).unwrap();
        // Who connects is told nothing, as by a machine that runs.
        let control = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&control, &SocketAddrUnix::new(entry.control_socket()).unwrap()).unwrap();
        listen(&control, 8).unwrap();
        let vsock = UnixListener::bind(entry.socket(VSOCK)).unwrap();
        member.set_machine(entry.record());
        let path = entry.directory().join(VSOCK);
        drop(entry);
        tokio::spawn(async move {
            let _control = control;
            while let Ok((stream, _)) = vsock.accept().await {
                tokio::spawn(answer(stream));
            }
        });
        let guest = Guest::open(&self.store, member.id()).unwrap();
        member.set_guest(Some(Arc::new(guest)));
        (member, path)
    }
}

/// Accepts any port, then answers each request without a body.
async fn answer(stream: UnixStream) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    stream.write_all(b"OK 1\n").await?;
    loop {
        loop {
            line.clear();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            if line == "\r\n" {
                break;
            }
        }
        stream.write_all(ANSWER).await?;
    }
}
