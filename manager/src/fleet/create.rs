//! New members: from a template or snapshot, and by forking.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::memory::HostMemory;
use super::queue::Start;
use super::quota::{Reservation, Usage};
use super::template::BASE;
use super::{Error, Fleet, Member, blocking};
use crate::agent::{self, Agent};
use crate::random::random_bytes;
use crate::registry::{Earlier, OnTimeout, Row, State, Template, Tenant, now_ms};
use crate::sandbox::{Kept, Shell};
use crate::store::{GuestSettings, Id, Machine, Store};
use crate::trace;

/// Random bytes of an access token.
const TOKEN: usize = 24;

/// What a new sandbox is to be.
#[derive(Debug, Clone)]
pub struct Order {
    /// Whose it will be.
    pub tenant: Tenant,
    /// A template's or snapshot's ID or name.
    pub template: String,
    /// How long it may live, in milliseconds.
    pub timeout_ms: u64,
    /// What happens then.
    pub on_timeout: OnTimeout,
    /// Whether a request to it resumes it.
    pub auto_resume: bool,
    /// What its maker writes on it.
    pub metadata: BTreeMap<String, String>,
    /// Variables that every process in it has.
    pub envs: BTreeMap<String, String>,
    /// Whether its agent wants to see a token.
    pub secure: bool,
    /// The client's key for this request and the request, if it sent a key.
    pub idempotency: Option<(String, Vec<u8>)>,
}

/// A new sandbox on its way.
pub(super) struct Birth {
    pub(super) row: Row,
    pub(super) from: Id,
    pub(super) machine: Machine,
    pub(super) guest: GuestSettings,
    /// What it is put into, if that was prepared.
    pub(super) shell: Option<Shell>,
    /// That it may be started now.
    pub(super) start: Start,
}

impl Fleet {
    /// Makes a sandbox; it has run a command when this returns. On failure nothing is left of it.
    /// Until it is its turn to be started, this can be dropped and nothing has happened; from then
    /// on it is made, whoever waits for it.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], [`Error::Quota`], [`Error::Queue`], [`Error::Busy`],
    /// [`Error::Memory`], [`Error::KeyReused`], or why it does not start.
    pub async fn create(self: &Arc<Self>, order: Order) -> Result<Arc<Member>, Error> {
        let _stage = self.meters.stage("create");
        if let Some(earlier) = self.earlier(&order).await? {
            return Ok(earlier);
        }
        let template = self.template(&order.tenant, &order.template).await?;
        let machine = self.machine_of(&template.checkpoint).await?;
        let (reservation, start) = self.turn_for(&order.tenant, &machine).await?;
        // The same request may have come again, and its turn before.
        if let Some(earlier) = self.earlier(&order).await? {
            return Ok(earlier);
        }
        let (id, shell) = self.place_for(&machine)?;
        let row = Row {
            id,
            tenant: order.tenant.clone(),
            state: State::Creating,
            template: template.id.clone(),
            alias: template.name.clone(),
            started_ms: now_ms(),
            end_ms: u64::MAX,
            on_timeout: order.on_timeout,
            auto_resume: order.auto_resume,
            metadata: order.metadata,
            pause: None,
        };
        if let Some((key, request)) = &order.idempotency
            && let Err(error) = self.registry.remember(&order.tenant, key, request, &row.id)
        {
            self.discard(shell).await;
            return Err(error.into());
        }
        let access_token = order.secure.then(token).transpose()?;
        let guest = template.defaults.overlaid(access_token, order.envs);
        let birth = Birth { row, from: template.checkpoint, machine, guest, shell, start };
        self.bear(birth, reservation, order.timeout_ms).await
    }

    /// Waits until a tenant may start one more such machine.
    async fn turn_for(
        &self,
        tenant: &Tenant,
        machine: &Machine,
    ) -> Result<(Reservation, Start), Error> {
        self.expect_memory()?;
        let reservation = self.reserve(tenant, Usage::of(machine))?;
        let start = self.wait_to_start(tenant).await?;
        Ok((reservation, start))
    }

    /// Waits until a tenant may start a machine.
    pub(super) async fn wait_to_start(&self, tenant: &Tenant) -> Result<Start, Error> {
        let _stage = self.meters.stage("queue");
        let start = self.queue.start(tenant).await;
        start.inspect_err(|_| self.refused("queue").inc())
    }

    /// Looks whether the host has memory for one more machine.
    pub(super) fn expect_memory(&self) -> Result<(), Error> {
        let admits = HostMemory::now().admits(self.settings.reserve);
        if admits { Ok(()) } else { Err(Error::Memory) }
    }

    /// Makes so many sandboxes that go on from one as it is now, each like it. When this is dropped,
    /// those whose turn to be started has not come are not made.
    ///
    /// # Errors
    /// Why it cannot be forked; that one of the new ones failed is part of the answer.
    pub async fn fork(
        self: &Arc<Self>,
        member: &Arc<Member>,
        count: usize,
        timeout_ms: u64,
    ) -> Result<Vec<Result<Arc<Member>, Error>>, Error> {
        let (fleet, parent) = (Arc::clone(self), Arc::clone(member));
        // Its end, with this, is seen by those who wait.
        let (_asking, asked) = watch::channel(());
        let forked = async move {
            let _turn = parent.turn.lock().await;
            let row = parent.row();
            let (from, hide) = match (row.state, &row.pause) {
                (State::Running, _) => (fleet.checkpoint_of(&parent).await?, true),
                (State::Paused, Some(pause)) => (pause.clone(), false),
                (state, _) => return Err(Error::State { id: row.id.to_string(), state }),
            };
            let born = fleet.bear_all(&parent, &from, (count, timeout_ms), &asked).await;
            if hide {
                fleet.hide(&from).await;
            }
            born
        };
        joined(tokio::spawn(trace::carried(forked))).await
    }

    async fn bear_all(
        self: &Arc<Self>,
        parent: &Member,
        from: &Id,
        (count, timeout_ms): (usize, u64),
        asked: &watch::Receiver<()>,
    ) -> Result<Vec<Result<Arc<Member>, Error>>, Error> {
        let guest = self.told(parent.id()).await?;
        let machine = self.machine_of(from).await?;
        let mut births = JoinSet::new();
        for _ in 0..count {
            let access_token = guest.access_token.is_some().then(token).transpose()?;
            let guest = GuestSettings { access_token, ..guest.clone() };
            let (from, machine, parent) = (from.clone(), machine.clone(), parent.row());
            let (fleet, mut asked) = (Arc::clone(self), asked.clone());
            births.spawn(trace::carried(async move {
                let (reservation, start) = tokio::select! {
                    turn = fleet.turn_for(&parent.tenant, &machine) => turn?,
                    // Nobody hears this.
                    _gone = asked.changed() => return Err(Error::Busy),
                };
                let (id, shell) = fleet.place_for(&machine)?;
                let row = Row {
                    id,
                    state: State::Creating,
                    started_ms: now_ms(),
                    end_ms: u64::MAX,
                    pause: None,
                    ..parent
                };
                let birth = Birth { row, from, machine, guest, shell, start };
                fleet.bear(birth, reservation, timeout_ms).await
            }));
        }
        Ok(births.join_all().await)
    }

    pub(super) async fn machine_of(&self, checkpoint: &Id) -> Result<Machine, Error> {
        let (store, id) = (self.store.clone(), checkpoint.clone());
        Ok(blocking(move || async move { store.checkpoint(&id) }).await?.machine)
    }

    /// A prepared shell for a machine and its ID, or a new ID.
    fn place_for(&self, machine: &Machine) -> Result<(Id, Option<Shell>), Error> {
        match self.pool.take(machine) {
            Some(shell) => Ok((shell.id().clone(), Some(shell))),
            None => Ok((Id::new().map_err(Error::Random)?, None)),
        }
    }

    /// What the same request made before, once it is there.
    async fn earlier(&self, order: &Order) -> Result<Option<Arc<Member>>, Error> {
        let Some((key, request)) = &order.idempotency else { return Ok(None) };
        let id = match self.registry.earlier(&order.tenant, key, request)? {
            Earlier::Nothing => return Ok(None),
            Earlier::Other => return Err(Error::KeyReused),
            Earlier::Made(id) => id,
        };
        let Some(member) = self.member(id.as_str()) else { return Ok(None) };
        drop(member.turn.lock().await);
        Ok(Some(member).filter(|member| member.is_told()))
    }

    async fn bear(
        self: &Arc<Self>,
        birth: Birth,
        reservation: Reservation,
        timeout_ms: u64,
    ) -> Result<Arc<Member>, Error> {
        let member = match self.announce(&birth.row, reservation) {
            Ok(member) => member,
            Err(error) => {
                self.discard(birth.shell).await;
                return Err(error);
            }
        };
        let (fleet, child) = (Arc::clone(self), Arc::clone(&member));
        let born = async move {
            let _turn = child.turn.lock().await;
            let started = match fleet.start(&child, birth).await {
                Ok(kept) => fleet.tell_of(&child, kept, timeout_ms),
                Err(error) => Err(error),
            };
            if let Err(error) = &started {
                tracing::warn!(sandbox = %child.id(), %error, "a sandbox did not start");
                fleet.forget(&child, &crate::failure::chain(error)).await;
            }
            started
        };
        joined(tokio::spawn(trace::carried(born))).await.map(|()| member)
    }

    /// Promises a new sandbox that runs.
    fn tell_of(
        self: &Arc<Self>,
        member: &Arc<Member>,
        kept: Kept,
        timeout_ms: u64,
    ) -> Result<(), Error> {
        let end_ms = now_ms().saturating_add(timeout_ms);
        let row = Row { state: State::Running, end_ms, ..member.row() };
        self.connect(member, kept)?;
        self.promise(member, row)?;
        self.watch(member);
        Ok(())
    }

    /// Removes a new sandbox that nobody was told of. What cannot be removed now is removed when
    /// the daemon starts again, which finds that it was being made.
    pub(super) async fn forget(&self, member: &Member, why: &str) {
        if let Err(error) = self.remove(member, why).await {
            tracing::error!(sandbox = %member.id(), %error, "the rest of a sandbox stays");
            self.members().remove(member.id());
        }
    }

    /// Enters a new sandbox, for which there was a reservation.
    pub(super) fn announce(
        &self,
        row: &Row,
        reservation: Reservation,
    ) -> Result<Arc<Member>, Error> {
        self.expect_memory()?;
        let member = Arc::new(Member::new(row.clone(), reservation.usage));
        let mut members = self.members();
        self.registry.put_sandbox(row)?;
        members.insert(row.id.clone(), Arc::clone(&member));
        // It counts as a member from now on, and not twice.
        drop(reservation);
        Ok(member)
    }

    pub(super) async fn start(&self, member: &Member, birth: Birth) -> Result<Kept, Error> {
        let (store, program) = (self.store.clone(), self.settings.vmm.clone());
        let id = member.id().clone();
        let _start = birth.start;
        let _starting = self.meters.starting();
        let [shell_stage, restore_stage, prove_stage] =
            ["shell", "restore", "prove"].map(|name| self.meters.prepared(name));
        blocking(move || async move {
            let stage = shell_stage.begin();
            let mut shell = match birth.shell {
                Some(shell) => shell,
                None => Shell::new(&store, &program, birth.machine, Some(id.clone()), None).await?,
            };
            drop(stage);
            if let Err(error) = shell.set_guest(birth.guest) {
                shell.discard().await?;
                return Err(error.into());
            }
            let stage = restore_stage.begin();
            let kept = shell.restore(&birth.from).await?;
            drop(stage);
            let _stage = prove_stage.begin();
            proven(kept, &store).await
        })
        .await
    }

    /// The template or snapshot that a reference means for a tenant.
    pub(super) async fn template(
        self: &Arc<Self>,
        tenant: &Tenant,
        reference: &str,
    ) -> Result<Template, Error> {
        match self.registry.template(tenant, reference)? {
            // Whether it is still usable is looked at.
            Some(template) if template.id != BASE => Ok(template),
            _ if reference == BASE => self.base().await,
            _ => Err(Error::NoTemplate { reference: reference.into() }),
        }
    }
}

/// A new sandbox whose guest runs commands, or nothing of it.
pub(super) async fn proven(kept: Kept, store: &Store) -> Result<Kept, Error> {
    match prove(kept.agent()).await {
        Ok(()) => Ok(kept),
        Err(error) => {
            let id = kept.record().id.clone();
            drop(kept);
            Kept::remove(store, &id).await?;
            Err(error)
        }
    }
}

/// Runs a command in a guest and waits for its end.
pub(super) async fn prove(agent: &Agent) -> Result<(), Error> {
    run(agent, "true").await
}

/// Runs a program in a guest that is to succeed and takes no arguments.
pub(super) async fn run(agent: &Agent, program: &str) -> Result<(), Error> {
    let mut start = agent::Start::default();
    start.process.cmd = program.into();
    let mut stream = agent.start(start).await?;
    while let Some(event) = stream.next().await? {
        if let coppice_agent_protocol::process::ProcessEvent::End(end) = event {
            let good = end.exited && end.exit_code == 0;
            return if good { Ok(()) } else { Err(Error::Useless(end.status)) };
        }
    }
    Err(Error::Useless("its end was not told".into()))
}

/// An unguessable text.
pub(super) fn token() -> Result<String, Error> {
    use base64::Engine as _;
    let bytes = random_bytes::<TOKEN>().map_err(Error::Random)?;
    Ok(base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes))
}

/// The value of a task that is never cancelled.
pub(super) async fn joined<T>(task: tokio::task::JoinHandle<T>) -> T {
    match task.await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}
