//! Builds of templates: a sandbox that nobody is told of, made from what the build begins with,
//! brought on by its steps, checkpointed, and removed again.
//!
//! The sandbox is entered as one that is being made, so a daemon that starts after this one died
//! removes it, and calls the build failed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::timeout;

use super::create::{Birth, proven};
use super::lifecycle::labels;
use super::queue::Start;
use super::quota::Usage;
use super::tags::checked_tags;
use super::template::{BASE, MEMORY_MIB, VCPUS};
use super::{Error, Fleet, Member, blocking};
use crate::build::{Entry, Level, Log, Parent, Runner, Spec, Step};
use crate::failure::chain;
use crate::random::{random_bytes, uuid_of};
use crate::registry::{
    Build, BuildState, DEFAULT_TAG, OnTimeout, Row, State, Template, TemplateKind, Tenant, now_ms,
};
use crate::sandbox::{CheckpointRequest, Config, Kept};
use crate::store::{GuestSettings, Id, Machine, Name};
use crate::template::{self, Commands};
use crate::trace;

/// How long all steps of a build may take.
const BUILD_TIME: Duration = Duration::from_secs(60 * 60);
/// How long a ready command may fail.
const READY_TIME: Duration = Duration::from_secs(5 * 60);
/// How many builds that are over keep what they said.
const KEPT_LOGS: usize = 16;
/// Shapes that can be asked for.
const VCPU_RANGE: std::ops::RangeInclusive<u8> = 1..=8;
const MEMORY_RANGE: std::ops::RangeInclusive<u32> = 128..=16_384;
/// What clients call what comes before the first step, and after the last one.
const FIRST: &str = "base";
const LAST: &str = "finalize";

/// A build that is asked for.
#[derive(Debug, Clone, Default)]
pub struct BuildRequest {
    /// The template's name, perhaps with a colon and a tag.
    pub name: String,
    /// More tags.
    pub tags: Vec<String>,
    /// Number of vCPUs, if it matters.
    pub vcpus: Option<u8>,
    /// Memory in MiB, if it matters.
    pub memory_mib: Option<u32>,
}

/// How far a build is, and a part of what it said.
#[derive(Debug, Clone)]
pub struct Built {
    /// The build.
    pub build: Build,
    /// Lines of its log.
    pub entries: Vec<Entry>,
}

/// Builds of this daemon.
#[derive(Debug, Default)]
pub(super) struct Builds(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Names that are being built.
    names: BTreeSet<(String, String)>,
    logs: BTreeMap<String, Arc<Log>>,
    /// Those that are over, oldest first.
    over: VecDeque<String>,
}

impl Builds {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, build: &Build) -> Result<Arc<Log>, Error> {
        let mut known = self.known();
        if !known.names.insert(key(build)) {
            return Err(Error::BuildBusy { name: build.name.clone() });
        }
        let log = Arc::new(Log::default());
        known.logs.insert(build.id.clone(), Arc::clone(&log));
        Ok(log)
    }

    fn end(&self, build: &Build) {
        let mut known = self.known();
        known.names.remove(&key(build));
        known.over.push_back(build.id.clone());
        while known.over.len() > KEPT_LOGS {
            let oldest = known.over.pop_front();
            oldest.and_then(|oldest| known.logs.remove(&oldest));
        }
    }
}

fn key(build: &Build) -> (String, String) {
    (build.tenant.as_str().to_owned(), build.name.clone())
}

/// What a build begins with.
#[derive(Debug, Clone)]
enum Origin {
    /// A template that is there.
    Template(Box<Template>),
    /// The built-in template, which may have to be made first.
    Base,
    /// The built-in template's image, booted as a machine of another shape.
    Fresh(Box<Config>),
}

/// Why a build failed, and where.
struct Failed {
    step: String,
    error: Error,
}

fn at(step: &str) -> impl FnOnce(Error) -> Failed {
    let step = step.to_owned();
    move |error| Failed { step, error }
}

impl Fleet {
    /// Enters a build, for which files can be uploaded then.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Unbuildable`], or the registry's.
    pub fn request_build(&self, tenant: &Tenant, request: BuildRequest) -> Result<Build, Error> {
        let (name, tag) = match request.name.split_once(':') {
            Some((name, tag)) => (name, Some(tag.to_owned())),
            None => (request.name.as_str(), None),
        };
        let wrong = |name: &str, reason: String| Error::Name { name: name.into(), reason };
        let _: Name = name.parse().map_err(|reason| wrong(name, reason))?;
        let mut tags = checked_tags(tag.into_iter().chain(request.tags))?;
        if tags.is_empty() {
            tags.push(DEFAULT_TAG.into());
        }
        let fits = request.vcpus.is_none_or(|vcpus| VCPU_RANGE.contains(&vcpus))
            && request.memory_mib.is_none_or(|memory| MEMORY_RANGE.contains(&memory));
        if !fits {
            let text = format!("cpuCount is {VCPU_RANGE:?} and memoryMB is {MEMORY_RANGE:?}");
            return Err(Error::Unbuildable(text));
        }
        let build = Build {
            id: uuid_of(random_bytes().map_err(Error::Random)?),
            template: Id::new().map_err(Error::Random)?.into(),
            tenant: tenant.clone(),
            name: name.into(),
            tags,
            vcpus: request.vcpus,
            memory_mib: request.memory_mib,
            state: BuildState::Waiting,
            step: None,
            reason: None,
            created_ms: now_ms(),
        };
        self.registry.put_build(&build)?;
        Ok(build)
    }

    /// Starts a build, which goes on by itself.
    ///
    /// # Errors
    /// Why it cannot be: [`Error::NoBuild`], [`Error::BuildStarted`], [`Error::BuildBusy`],
    /// [`Error::NoTemplate`] or [`Error::Unbuildable`].
    pub async fn start_build(
        self: &Arc<Self>,
        tenant: &Tenant,
        template: &str,
        id: &str,
        spec: Spec,
    ) -> Result<(), Error> {
        let build = self.build(tenant, template, id)?;
        if build.state != BuildState::Waiting {
            return Err(Error::BuildStarted { id: id.into() });
        }
        for step in &spec.steps {
            if let Step::Copy(copy) = step
                && self.uploads.find(tenant, &copy.hash).is_none()
            {
                let text = format!("the files of '{}' were not uploaded", copy.source);
                return Err(Error::Unbuildable(text));
            }
        }
        let origin = self.origin(&build, &spec.from).await?;
        let log = self.builds.begin(&build)?;
        // Another request may have been here meanwhile.
        let started = self.build(tenant, template, id).and_then(|build| match build.state {
            BuildState::Waiting => {
                Ok(self.registry.put_build(&Build { state: BuildState::Building, ..build })?)
            }
            _ => Err(Error::BuildStarted { id: id.into() }),
        });
        if let Err(error) = started {
            self.builds.end(&build);
            return Err(error);
        }
        let fleet = Arc::clone(self);
        tokio::spawn(trace::carried(
            async move { fleet.carry_out(build, spec, origin, &log).await },
        ));
        Ok(())
    }

    /// How far a build is, and at most `limit` lines of its log from a place on.
    ///
    /// # Errors
    /// [`Error::NoBuild`], or the registry's.
    pub fn built(
        &self,
        tenant: &Tenant,
        template: &str,
        id: &str,
        (offset, limit): (usize, usize),
    ) -> Result<Built, Error> {
        let build = self.build(tenant, template, id)?;
        let log = self.builds.known().logs.get(id).cloned();
        Ok(Built { build, entries: log.map_or_else(Vec::new, |log| log.from(offset, limit)) })
    }

    /// A template's machine, and the size of its disks in bytes as its guest sees them.
    ///
    /// # Errors
    /// The store's, when its checkpoint cannot be read.
    pub async fn shape_of(&self, template: &Template) -> Result<(Machine, u64), Error> {
        let (store, id) = (self.store.clone(), template.checkpoint.clone());
        let meta = blocking(move || async move { store.checkpoint(&id) }).await?;
        let sizes = meta.standing.disks.iter().map(|disk| disk.base.size);
        Ok((meta.machine, sizes.fold(0, u64::saturating_add)))
    }

    fn build(&self, tenant: &Tenant, template: &str, id: &str) -> Result<Build, Error> {
        let found = self.registry.build(tenant, id)?.filter(|build| build.template == template);
        found.ok_or_else(|| Error::NoBuild { id: id.into() })
    }

    /// What a build begins with, if it can be had in the shape that is asked for.
    async fn origin(&self, build: &Build, from: &Parent) -> Result<Origin, Error> {
        let template = match from {
            Parent::Base => None,
            Parent::Template(reference) => {
                let found = self.registry.template(&build.tenant, reference)?;
                match found.filter(|template| template.id != BASE) {
                    Some(template) => Some(template),
                    None if reference == BASE => None,
                    None => return Err(Error::NoTemplate { reference: reference.clone() }),
                }
            }
        };
        let (vcpus, memory_mib) = match &template {
            None => (VCPUS, MEMORY_MIB),
            Some(template) => {
                let machine = self.machine_of(&template.checkpoint).await?;
                (machine.vcpus, machine.memory_mib)
            }
        };
        let wanted = (build.vcpus.unwrap_or(vcpus), build.memory_mib.unwrap_or(memory_mib));
        match template {
            None if wanted == (vcpus, memory_mib) => Ok(Origin::Base),
            None => {
                let (vcpus, memory_mib) = wanted;
                let config = Config { vcpus, memory_mib, ..self.base_config()? };
                Ok(Origin::Fresh(Box::new(config)))
            }
            Some(template) if wanted == (vcpus, memory_mib) => {
                Ok(Origin::Template(Box::new(template)))
            }
            Some(_) => Err(Error::Unbuildable(format!(
                "a template that is built from another has its shape, which is {vcpus} vCPUs and \
                 {memory_mib} MiB: leave cpuCount and memoryMB out or begin from '{BASE}'"
            ))),
        }
    }

    async fn carry_out(self: Arc<Self>, build: Build, spec: Spec, origin: Origin, log: &Log) {
        let (template, name) = (&build.template, &build.name);
        tracing::info!(%template, name, "a template is being built");
        let (state, step, reason) = match self.make(&build, &spec, origin, log).await {
            Ok(()) => {
                log.add(Level::Info, Some(LAST), "the template is ready");
                (BuildState::Ready, None, None)
            }
            Err(Failed { step, error }) => {
                let reason = chain(&error);
                tracing::warn!(%template, name, step, reason, "a template was not built");
                log.add(Level::Error, Some(&step), &reason);
                (BuildState::Error, Some(step), Some(reason))
            }
        };
        if let Err(error) = self.registry.put_build(&Build { state, step, reason, ..build.clone() })
        {
            tracing::error!(%error, "the end of a build could not be written down");
        }
        self.builds.end(&build);
    }

    /// Makes the template; of the sandbox it is made in nothing is left.
    async fn make(
        self: &Arc<Self>,
        build: &Build,
        spec: &Spec,
        origin: Origin,
        log: &Log,
    ) -> Result<(), Failed> {
        log.add(Level::Info, Some(FIRST), "the machine is being started");
        let (member, kept, defaults) =
            self.start_machine(build, origin).await.map_err(at(FIRST))?;
        let _turn = member.turn.lock().await;
        let steps = self.bring_on(build, spec, kept.agent(), defaults, log);
        let outcome = match timeout(BUILD_TIME, steps).await {
            Ok(Ok(defaults)) => {
                log.add(Level::Info, Some(LAST), "the machine's state is being kept");
                self.keep(build, kept, defaults).await.map_err(at(LAST))
            }
            Ok(Err(failed)) => {
                // Its lock is taken again when it is removed.
                drop(kept);
                Err(failed)
            }
            Err(_) => {
                drop(kept);
                Err(Failed { step: LAST.into(), error: Error::BuildTime(BUILD_TIME) })
            }
        };
        let why = if outcome.is_ok() { "the template is built" } else { "its build failed" };
        if let Err(error) = self.remove(&member, why).await {
            tracing::error!(sandbox = %member.id(), %error, "the rest of a build stays");
        }
        outcome
    }

    /// Starts the machine of a build; with what its guest was told.
    async fn start_machine(
        self: &Arc<Self>,
        build: &Build,
        origin: Origin,
    ) -> Result<(Arc<Member>, Kept, GuestSettings), Error> {
        let row = Row {
            id: Id::new().map_err(Error::Random)?,
            tenant: build.tenant.clone(),
            state: State::Creating,
            template: build.template.clone(),
            alias: Some(build.name.clone()),
            started_ms: now_ms(),
            end_ms: u64::MAX,
            on_timeout: OnTimeout::Kill,
            auto_resume: false,
            metadata: BTreeMap::new(),
            pause: None,
        };
        let template = match origin {
            Origin::Fresh(config) => {
                let usage = Usage::running(config.vcpus, config.memory_mib);
                let reservation = self.reserve(&build.tenant, usage)?;
                let start = self.wait_to_start(&build.tenant).await?;
                let member = self.announce(&row, reservation)?;
                let booted = self.boot(&member, *config, start).await;
                let kept = self.or_forget(&member, booted).await?;
                return Ok((member, kept, GuestSettings::default()));
            }
            Origin::Base => self.base().await?,
            Origin::Template(template) => *template,
        };
        let (from, guest) = (template.checkpoint, template.defaults);
        let machine = self.machine_of(&from).await?;
        let reservation = self.reserve(&build.tenant, Usage::of(&machine))?;
        let start = self.wait_to_start(&build.tenant).await?;
        let member = self.announce(&row, reservation)?;
        let birth = Birth { row, from, machine, guest: guest.clone(), shell: None, start };
        let started = self.start(&member, birth).await;
        let kept = self.or_forget(&member, started).await?;
        Ok((member, kept, guest))
    }

    async fn boot(&self, member: &Member, config: Config, _start: Start) -> Result<Kept, Error> {
        let (store, id) = (self.store.clone(), member.id().clone());
        blocking(move || async move {
            let (kept, _time) = Kept::boot(&store, &config, Some(id), None, pending()).await?;
            proven(kept, &store).await
        })
        .await
    }

    /// What was started, or nothing of it.
    async fn or_forget(
        &self,
        member: &Member,
        started: Result<Kept, Error>,
    ) -> Result<Kept, Error> {
        if let Err(error) = &started {
            self.forget(member, &chain(error)).await;
        }
        started
    }

    /// Does the steps and runs the commands; what guests are told from then on.
    async fn bring_on(
        &self,
        build: &Build,
        spec: &Spec,
        agent: &crate::agent::Agent,
        settings: GuestSettings,
        log: &Log,
    ) -> Result<GuestSettings, Failed> {
        let mut runner = Runner { agent, settings, log };
        for (place, step) in spec.steps.iter().enumerate() {
            // Clients count from where the build begins.
            let name = place.saturating_add(1).to_string();
            let archive = match step {
                Step::Copy(copy) => self.uploads.find(&build.tenant, &copy.hash),
                _ => None,
            };
            let done = runner.run(&name, step, archive.as_deref()).await;
            done.map_err(|error| Failed { step: name, error: error.into() })?;
        }
        let (start, ready) = (spec.start.clone(), spec.ready.clone());
        for (what, command) in [("start", &start), ("ready", &ready)] {
            if let Some(command) = command {
                log.add(Level::Info, Some(LAST), &format!("{what} command: {command}"));
            }
        }
        let commands = Commands { start, ready, ready_timeout: READY_TIME };
        let up = template::bring_up(agent, &commands).await;
        up.map_err(|error| Failed { step: LAST.into(), error: Error::BringUp(error.into()) })?;
        Ok(runner.settings)
    }

    /// Keeps the machine's state as the template.
    async fn keep(
        &self,
        build: &Build,
        mut kept: Kept,
        defaults: GuestSettings,
    ) -> Result<(), Error> {
        let request = CheckpointRequest { labels: labels(&build.id), ..Default::default() };
        let made = blocking(move || async move { kept.checkpoint(request).await });
        let template = Template {
            id: build.template.clone(),
            tenant: Some(build.tenant.clone()),
            kind: TemplateKind::Template,
            name: Some(build.name.clone()),
            checkpoint: made.await?.meta.id,
            sandbox: None,
            tags: build.tags.clone(),
            defaults,
            created_ms: now_ms(),
        };
        let replaced = {
            let _one_at_a_time = self.tagging();
            self.registry.replace_template(&template)?
        };
        for replaced in replaced {
            self.hide(&replaced.checkpoint).await;
        }
        Ok(())
    }
}
