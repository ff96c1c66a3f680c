//! What happens to members: pause and resume, checkpoint and the way back, removal.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;

use super::create::joined;
use super::queue::Start;
use super::quota::Reservation;
use super::{Error, Fleet, Member, blocking};
use crate::failure::chain;
use crate::registry::{DEFAULT_TAG, Row, State, Template, TemplateKind, Tenant, now_ms};
use crate::sandbox::{CheckpointRequest, Guest, Kept};
use crate::store::{self, GuestSettings, Id, Name};
use crate::trace;

/// Label of the checkpoint that a sandbox is suspended at.
const PAUSE_LABEL: &str = "coppice.pause";
/// Label of a snapshot.
const LABEL: &str = "coppice.snapshot";

/// Labels of a checkpoint that this daemon makes, of whatever it is.
pub(super) fn labels(of: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(LABEL.to_owned(), of.to_owned())])
}

/// Whether a checkpoint was made by a daemon.
pub(super) fn is_labelled(labels: &BTreeMap<String, String>) -> bool {
    labels.contains_key(LABEL)
}

impl Fleet {
    /// Suspends a running sandbox.
    ///
    /// # Errors
    /// [`Error::State`] unless it runs, or why it cannot be suspended; then it runs on.
    pub async fn pause(self: &Arc<Self>, member: &Arc<Member>) -> Result<(), Error> {
        self.pause_if(member, |_| true).await.map(drop)
    }

    /// Suspends a running sandbox if it still is as it was found to be; whether it was.
    pub(super) async fn pause_if(
        self: &Arc<Self>,
        member: &Arc<Member>,
        still: impl FnOnce(&Row) -> bool + Send + 'static,
    ) -> Result<bool, Error> {
        let (fleet, member) = (Arc::clone(self), Arc::clone(member));
        joined(tokio::spawn(trace::carried(async move {
            let _turn = member.turn.lock().await;
            if !still(&member.row()) {
                return Ok(false);
            }
            let _stage = fleet.meters.stage("pause");
            fleet.expect(&member, State::Running)?;
            fleet.promise(&member, Row { state: State::Pausing, ..member.row() })?;
            let (store, id) = (fleet.store.clone(), member.id().clone());
            let suspended = blocking(move || async move {
                let labels = BTreeMap::from([(PAUSE_LABEL.to_owned(), id.to_string())]);
                Kept::open(&store, &id).await?.suspend(labels).await
            });
            match suspended.await {
                Ok(made) => {
                    member.set_guest(None);
                    let pause = Some(made.meta.id);
                    fleet.note(&member, Row { state: State::Paused, pause, ..member.row() });
                    Ok(true)
                }
                Err(error) => {
                    fleet.note(&member, Row { state: State::Running, ..member.row() });
                    Err(error.into())
                }
            }
        })))
        .await
    }

    /// Has a paused sandbox go on.
    ///
    /// # Errors
    /// [`Error::State`] unless it is paused, or why it cannot go on; then it stays paused.
    pub async fn resume(
        self: &Arc<Self>,
        member: &Arc<Member>,
        timeout_ms: u64,
    ) -> Result<(), Error> {
        let turn = Arc::clone(&member.turn).lock_owned().await;
        self.wake_in_turn(member, timeout_ms, turn).await
    }

    /// Has a paused sandbox go on; whether it was paused. One that runs lives at least so much
    /// longer.
    ///
    /// # Errors
    /// Why it cannot go on; then it stays paused.
    pub async fn wake_or_extend(
        self: &Arc<Self>,
        member: &Arc<Member>,
        timeout_ms: u64,
    ) -> Result<bool, Error> {
        let turn = Arc::clone(&member.turn).lock_owned().await;
        let row = member.row();
        if row.state == State::Running {
            let end_ms = now_ms().saturating_add(timeout_ms).max(row.end_ms);
            return self.promise(member, Row { end_ms, ..row }).map(|()| false);
        }
        self.wake_in_turn(member, timeout_ms, turn).await.map(|()| true)
    }

    /// Until it may be started, this can be dropped and nothing has happened.
    async fn wake_in_turn(
        self: &Arc<Self>,
        member: &Arc<Member>,
        timeout_ms: u64,
        turn: OwnedMutexGuard<()>,
    ) -> Result<(), Error> {
        self.expect(member, State::Paused)?;
        self.expect_memory()?;
        let reservation = self.reserve(&member.tenant(), member.usage_when_woken())?;
        let tenant = member.tenant();
        let start = tokio::select! {
            start = self.wait_to_start(&tenant) => start?,
            () = member.unwanted() => return Err(Error::NotFound { id: member.id().to_string() }),
        };
        let (fleet, member) = (Arc::clone(self), Arc::clone(member));
        joined(tokio::spawn(trace::carried(async move {
            let _turn = turn;
            fleet.wake(&member, timeout_ms, (reservation, start)).await
        })))
        .await
    }

    async fn wake(
        self: &Arc<Self>,
        member: &Arc<Member>,
        timeout_ms: u64,
        (reservation, start): (Reservation, Start),
    ) -> Result<(), Error> {
        let _stage = self.meters.stage("resume");
        let row = member.row();
        let end_ms = now_ms().saturating_add(timeout_ms);
        self.promise(member, Row { state: State::Resuming, end_ms, ..row.clone() })?;
        // It counts as one that is not paused from now on.
        drop(reservation);
        let (store, program) = (self.store.clone(), self.settings.vmm.clone());
        let id = member.id().clone();
        let woken = blocking(move || async move { Kept::wake(&store, &program, &id).await }).await;
        drop(start);
        match woken {
            Ok(kept) => {
                self.connect(member, kept)?;
                // Its time begins now: waking took some that nobody could use.
                let started_ms = now_ms();
                let end_ms = started_ms.saturating_add(timeout_ms);
                let running =
                    Row { state: State::Running, pause: None, started_ms, end_ms, ..row.clone() };
                self.note(member, running);
                self.watch(member);
                if let Some(pause) = &row.pause {
                    self.hide(pause).await;
                }
                Ok(())
            }
            Err(error) => {
                self.note(member, Row { state: State::Paused, ..row });
                Err(error.into())
            }
        }
    }

    /// Sets when a sandbox's time is over.
    ///
    /// # Errors
    /// [`Error::State`] when it is being removed.
    pub async fn set_timeout(&self, member: &Arc<Member>, timeout_ms: u64) -> Result<(), Error> {
        let _turn = member.turn.lock().await;
        let row = member.row();
        match row.state {
            State::Running | State::Paused => {
                let end_ms = now_ms().saturating_add(timeout_ms);
                self.promise(member, Row { end_ms, ..row })
            }
            state => Err(Error::State { id: row.id.to_string(), state }),
        }
    }

    /// Removes a sandbox, in whatever state it is.
    ///
    /// # Errors
    /// Why its machine cannot be ended or its files not removed; it is tried again then when the
    /// daemon starts.
    pub async fn kill(self: &Arc<Self>, member: &Arc<Member>) -> Result<(), Error> {
        // Who waits to resume it has its turn, and shall not keep it.
        member.give_up();
        self.kill_if(member, |_| true, "asked for").await
    }

    /// Removes a sandbox if it still is as it was found to be.
    pub(super) async fn kill_if(
        self: &Arc<Self>,
        member: &Arc<Member>,
        still: impl FnOnce(&Row) -> bool + Send + 'static,
        why: &str,
    ) -> Result<(), Error> {
        let (fleet, member, why) = (Arc::clone(self), Arc::clone(member), why.to_owned());
        joined(tokio::spawn(trace::carried(async move {
            let _turn = member.turn.lock().await;
            let row = member.row();
            if !still(&row) || !fleet.members().contains_key(member.id()) {
                return Ok(());
            }
            let _stage = fleet.meters.stage("kill");
            // Nothing may keep a sandbox from being removed, a full disk least of all.
            fleet.note(&member, Row { state: State::Killing, ..row });
            fleet.remove(&member, &why).await
        })))
        .await
    }

    /// Removes what is left of a sandbox, here and in the store.
    pub(super) async fn remove(&self, member: &Member, why: &str) -> Result<(), Error> {
        member.set_guest(None);
        let (store, id) = (self.store.clone(), member.id().clone());
        let removed = blocking(move || async move { Kept::remove(&store, &id).await });
        match removed.await {
            Ok(()) | Err(crate::sandbox::Error::Store(store::Error::NotFound { .. })) => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(pause) = member.row().pause {
            self.hide(&pause).await;
        }
        self.members().remove(member.id());
        // It is gone; the next daemon finds no more of it than its row, and removes that.
        if let Err(error) = self.registry.remove_sandbox(&member.row(), why) {
            tracing::error!(sandbox = %member.id(), why, %error, "an end is not written down");
        }
        Ok(())
    }

    /// Keeps a sandbox's state as a snapshot of its tenant.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::State`], or why the checkpoint cannot be made.
    pub async fn snapshot(
        self: &Arc<Self>,
        member: &Arc<Member>,
        name: Option<String>,
    ) -> Result<Template, Error> {
        if let Some(name) = &name {
            let parsed: Result<Name, String> = name.parse();
            parsed.map_err(|reason| Error::Name { name: name.clone(), reason })?;
        }
        let (fleet, member) = (Arc::clone(self), Arc::clone(member));
        joined(tokio::spawn(trace::carried(async move {
            let _turn = member.turn.lock().await;
            let row = member.row();
            let checkpoint = match (row.state, row.pause) {
                (State::Running, _) => fleet.checkpoint_of(&member).await?,
                (State::Paused, Some(pause)) => pause,
                (state, _) => return Err(Error::State { id: row.id.to_string(), state }),
            };
            let guest = fleet.told(member.id()).await?;
            let template = Template {
                id: checkpoint.to_string(),
                tenant: Some(row.tenant),
                kind: TemplateKind::Snapshot,
                name,
                checkpoint,
                sandbox: Some(row.id),
                tags: vec![DEFAULT_TAG.into()],
                defaults: GuestSettings { access_token: None, ..guest },
                created_ms: now_ms(),
            };
            fleet.registry.put_template(&template)?;
            fleet.noted(&member.row(), "checkpoint", &template.checkpoint);
            Ok(template)
        })))
        .await
    }

    /// Brings a running sandbox back to a snapshot of its tree.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], [`Error::State`], or why it cannot go there.
    pub async fn roll_back(
        self: &Arc<Self>,
        member: &Arc<Member>,
        snapshot: &str,
    ) -> Result<(), Error> {
        let target = self.registry.template(&member.tenant(), snapshot)?;
        let target = target.filter(|found| found.tenant.is_some());
        let target = target.ok_or_else(|| Error::NoTemplate { reference: snapshot.into() })?;
        self.roll_back_to(member, target.checkpoint).await.map(drop)
    }

    /// Removes a template or snapshot; what was made from it stays.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], or [`Error::BuiltIn`].
    pub async fn remove_template(&self, tenant: &Tenant, reference: &str) -> Result<(), Error> {
        let none = || Error::NoTemplate { reference: reference.into() };
        let found = self.registry.template(tenant, reference)?.ok_or_else(none)?;
        if found.tenant.is_none() {
            return Err(Error::BuiltIn { reference: reference.into() });
        }
        let removed = self.registry.remove_template(tenant, &found.id)?.ok_or_else(none)?;
        self.hide(&removed.checkpoint).await;
        Ok(())
    }

    /// What the guest of a sandbox was told.
    pub(super) async fn told(&self, id: &Id) -> Result<GuestSettings, Error> {
        let (store, id) = (self.store.clone(), id.clone());
        let told =
            move || async move { store.look_at(&id).map(|view| view.record().guest.clone()) };
        Ok(blocking(told).await?)
    }

    /// A checkpoint of a running sandbox.
    pub(super) async fn checkpoint_of(&self, member: &Member) -> Result<Id, Error> {
        let _stage = self.meters.stage("snapshot");
        let (store, id) = (self.store.clone(), member.id().clone());
        let made = blocking(move || async move {
            let mut kept = Kept::open(&store, &id).await?;
            let labels = labels(id.as_str());
            let request = CheckpointRequest { labels, ..CheckpointRequest::default() };
            kept.checkpoint_running(request).await
        });
        Ok(made.await?.meta.id)
    }

    /// Removes a checkpoint from sight, unless a template or a paused sandbox needs it. What
    /// stands on it is not touched; a failure leaves a file more until it is removed by hand.
    pub(super) async fn hide(&self, checkpoint: &Id) {
        if self.registry.is_template(checkpoint).unwrap_or(true) {
            return;
        }
        let waits = self.members().values().any(|member| {
            member.about(|row| {
                row.pause.as_ref() == Some(checkpoint)
                    && matches!(row.state, State::Paused | State::Resuming)
            })
        });
        if waits {
            return;
        }
        let (store, id) = (self.store.clone(), checkpoint.clone());
        let hidden = blocking(move || async move { store.remove_checkpoint(&id) }).await;
        if let Err(error) = hidden {
            tracing::warn!(%checkpoint, %error, "a checkpoint could not be removed");
        }
    }

    /// Writes down what is promised about a sandbox, then shows it.
    pub(super) fn promise(&self, member: &Member, row: Row) -> Result<(), Error> {
        self.registry.put_sandbox(&row)?;
        member.set_row(row);
        self.expiry.notify_one();
        Ok(())
    }

    /// Shows what has become of a sandbox, and writes it down. Where that cannot be done now, what
    /// was written before has the next daemon find it out.
    pub(super) fn note(&self, member: &Member, row: Row) {
        if let Err(error) = self.registry.put_sandbox(&row) {
            let state = row.state.name();
            tracing::error!(sandbox = %member.id(), state, %error, "a state is not written down");
        }
        member.set_row(row);
        self.expiry.notify_one();
    }

    /// Makes the way to a sandbox's guest, and unlocks the sandbox.
    pub(super) fn connect(&self, member: &Member, kept: Kept) -> Result<(), Error> {
        member.set_machine(kept.record());
        drop(kept);
        let guest = Guest::open(&self.store, member.id())?;
        member.set_guest(Some(Arc::new(guest)));
        Ok(())
    }

    /// Removes a sandbox when its machine ends by itself.
    pub(super) fn watch(self: &Arc<Self>, member: &Arc<Member>) {
        let Some(guest) = member.guest() else { return };
        let (fleet, member) = (Arc::downgrade(self), Arc::downgrade(member));
        tokio::spawn(async move {
            let why = chain(&guest.ended().await);
            let (Some(fleet), Some(member)) = (fleet.upgrade(), member.upgrade()) else { return };
            let about = Arc::clone(&member);
            let still = move |row: &Row| row.state == State::Running && about.has(&guest);
            if still(&member.row()) {
                fleet.meters.ended();
                tracing::warn!(sandbox = %member.id(), why, "a sandbox ended by itself");
            }
            if let Err(error) = fleet.kill_if(&member, still, &why).await {
                tracing::error!(sandbox = %member.id(), %error, "its rest could not be removed");
            }
        });
    }

    pub(super) fn expect(&self, member: &Member, wanted: State) -> Result<(), Error> {
        match member.state() {
            state if state == wanted && self.members().contains_key(member.id()) => Ok(()),
            state => Err(Error::State { id: member.id().to_string(), state }),
        }
    }
}
