//! Templates: lists, and builds as E2B's clients ask for them.
//!
//! A build is asked for, files that its steps copy are uploaded, it is started, and then looked at
//! until it is over.

use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::header::{CONNECTION, HOST};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use http_body_util::BodyExt as _;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};

use super::auth::Caller;
use super::tags::build_id;
use super::types::{parse, rfc3339};
use super::{Api, ErrorBody, Failure};
use crate::build::{Entry, Level, Parent, RawStep, Spec, SpecError, Step, is_hash};
use crate::failure::chain;
use crate::fleet::{BuildRequest, Error, UPLOAD_TIME, Upload};
use crate::registry::{Build, BuildState, Template, TemplateKind};

/// Path below which files are uploaded.
pub(super) const UPLOADS: &str = "/uploads/{secret}";
/// How long an upload may be silent.
const STALLED: Duration = Duration::from_secs(60);
/// The most lines of a log in an answer.
const MAX_LINES: usize = 100;

/// A template that is to be built.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct NewTemplate {
    /// Its name, perhaps with a colon and a tag.
    name: Option<String>,
    /// The same, as older clients call it.
    alias: Option<String>,
    tags: Option<Vec<String>>,
    cpu_count: Option<u8>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u32>,
}

/// A build that was asked for.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct NewBuild {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    public: bool,
    names: Vec<String>,
    tags: Vec<String>,
    aliases: Vec<String>,
}

/// Ask for a template to be built; the build is started later
#[utoipa::path(post, path = "/v3/templates", request_body = NewTemplate,
    security(("ApiKey" = [])),
    responses((status = 202, body = NewBuild), (status = "default", body = ErrorBody)))]
pub(super) async fn create(
    Caller(tenant): Caller,
    State(api): State<Api>,
    body: Bytes,
) -> Result<(StatusCode, Json<NewBuild>), Failure> {
    let new: NewTemplate = parse(&body)?;
    let name = new.name.or(new.alias).ok_or_else(|| Failure::bad("a template has a name"))?;
    let request = BuildRequest {
        name,
        tags: new.tags.unwrap_or_default(),
        vcpus: new.cpu_count,
        memory_mib: new.memory_mb,
    };
    let Build { id, template, name, tags, .. } = api.fleet.request_build(&tenant, request)?;
    let new = NewBuild {
        template_id: template,
        build_id: id,
        public: false,
        names: vec![name.clone()],
        tags,
        aliases: vec![name],
    };
    Ok((StatusCode::ACCEPTED, Json(new)))
}

/// Whether files are there, and where they are uploaded to.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct Place {
    present: bool,
    /// Takes a `PUT` of the files' archive, without a key, for an hour.
    url: String,
}

/// Ask where files that a build copies are uploaded to
#[utoipa::path(get, path = "/templates/{id}/files/{hash}",
    params(("id" = String, Path), ("hash" = String, Path)), security(("ApiKey" = [])),
    responses((status = 201, body = Place), (status = "default", body = ErrorBody)))]
pub(super) async fn place(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path((id, hash)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<(StatusCode, Json<Place>), Failure> {
    if !is_hash(&hash) {
        return Err(Failure::bad("a hash of files is at most 128 hexadecimal digits"));
    }
    // Where the client got through to.
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let host = host.ok_or_else(|| Failure::bad("the header Host is missing"))?;
    let (present, secret) = api.fleet.upload_place(&tenant, &id, &hash)?;
    let url = format!("http://{host}{}", UPLOADS.replace("{secret}", &secret));
    Ok((StatusCode::CREATED, Json(Place { present, url })))
}

/// Takes an upload; who knows the address may. What is answered before all of it was read ends
/// the connection.
pub(super) async fn upload(
    State(api): State<Api>,
    Path(secret): Path<String>,
    body: Body,
) -> Response {
    let received = async {
        let upload = receive(api.fleet.begin_upload(&secret).await?, body).await?;
        Ok::<_, Failure>(upload.finish().await?)
    };
    let late = || Failure::new(StatusCode::REQUEST_TIMEOUT, "the upload takes too long");
    match timeout(UPLOAD_TIME, received).await.unwrap_or_else(|_| Err(late())) {
        Ok(()) => StatusCode::OK.into_response(),
        Err(failure) => ([(CONNECTION, "close")], failure).into_response(),
    }
}

async fn receive(mut upload: Upload, mut body: Body) -> Result<Upload, Failure> {
    let stalled = |_| Failure::new(StatusCode::REQUEST_TIMEOUT, "the upload has stalled");
    while let Some(frame) = timeout(STALLED, body.frame()).await.map_err(stalled)? {
        let frame = frame.map_err(|_| Failure::bad("the upload broke off"))?;
        if let Some(piece) = frame.data_ref() {
            upload.write(piece).await?;
        }
    }
    Ok(upload)
}

/// A step of a build.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct NewStep {
    /// RUN, COPY, ENV, WORKDIR or USER.
    #[serde(rename = "type")]
    kind: String,
    args: Option<Vec<String>>,
    files_hash: Option<String>,
}

/// What is to be built.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Start {
    /// The image that it begins with: `e2bdev/base`.
    from_image: Option<String>,
    /// The template or snapshot that it begins with.
    from_template: Option<String>,
    steps: Option<Vec<NewStep>>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
}

impl Start {
    fn spec(self) -> Result<Spec, SpecError> {
        let steps = self.steps.unwrap_or_default().into_iter().map(|step| RawStep {
            kind: step.kind,
            args: step.args.unwrap_or_default(),
            files_hash: step.files_hash,
        });
        let given = |command: Option<String>| command.filter(|command| !command.is_empty());
        Ok(Spec {
            from: Parent::new(self.from_template, self.from_image)?,
            steps: Step::all(steps.collect())?,
            start: given(self.start_cmd),
            ready: given(self.ready_cmd),
        })
    }
}

/// Start a build
#[utoipa::path(post, path = "/v2/templates/{id}/builds/{build}",
    params(("id" = String, Path), ("build" = String, Path)), request_body = Start,
    security(("ApiKey" = [])),
    responses((status = 202), (status = "default", body = ErrorBody)))]
pub(super) async fn start(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path((id, build)): Path<(String, String)>,
    body: Bytes,
) -> Result<StatusCode, Failure> {
    let start: Start = parse(&body)?;
    let spec = start.spec().map_err(|error| Failure::bad(chain(&error)))?;
    api.fleet.start_build(&tenant, &id, &build, spec).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Which lines of a log are wanted.
#[derive(Debug, Clone, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase")]
#[into_params(rename_all = "camelCase")]
pub(super) struct Lines {
    /// How many are skipped.
    #[serde(default)]
    logs_offset: usize,
    /// How many there are at most: up to 100.
    limit: Option<usize>,
}

/// A line of a log.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct Line {
    timestamp: String,
    level: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<String>,
}

impl From<Entry> for Line {
    fn from(entry: Entry) -> Self {
        let level = match entry.level {
            Level::Debug => "debug",
            Level::Info => "info",
            Level::Warn => "warn",
            Level::Error => "error",
        };
        let timestamp = rfc3339(entry.at_ms);
        Self { timestamp, level, message: entry.message, step: entry.step }
    }
}

/// Why a build failed.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Reason {
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<String>,
    log_entries: Vec<Line>,
}

/// How far a build is.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Status {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    /// `waiting`, `building`, `ready` or `error`.
    status: &'static str,
    /// Always empty: the lines are in `logEntries`.
    logs: Vec<String>,
    log_entries: Vec<Line>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Reason>,
}

fn state_word(state: BuildState) -> &'static str {
    match state {
        BuildState::Waiting => "waiting",
        BuildState::Building => "building",
        BuildState::Ready => "ready",
        BuildState::Error => "error",
    }
}

/// Show how far a build is
#[utoipa::path(get, path = "/templates/{id}/builds/{build}/status",
    params(("id" = String, Path), ("build" = String, Path), Lines), security(("ApiKey" = [])),
    responses((status = 200, body = Status), (status = "default", body = ErrorBody)))]
pub(super) async fn status(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path((id, build)): Path<(String, String)>,
    Query(lines): Query<Lines>,
) -> Result<Json<Status>, Failure> {
    let limit = lines.limit.unwrap_or(MAX_LINES).min(MAX_LINES);
    let built = api.fleet.built(&tenant, &id, &build, (lines.logs_offset, limit))?;
    let Build { id, template, state, step, reason, .. } = built.build;
    let reason = reason.map(|message| Reason { message, step, log_entries: Vec::new() });
    Ok(Json(Status {
        template_id: template,
        build_id: id,
        status: state_word(state),
        logs: Vec::new(),
        log_entries: built.entries.into_iter().map(Line::from).collect(),
        reason,
    }))
}

/// A template.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Listed {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    cpu_count: u8,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    public: bool,
    aliases: Vec<String>,
    names: Vec<String>,
    tags: Vec<String>,
    created_at: String,
    updated_at: String,
    created_by: Option<()>,
    last_spawned_at: Option<()>,
    spawn_count: u64,
    build_count: u64,
    envd_version: &'static str,
    build_status: &'static str,
}

/// List templates, oldest first
#[utoipa::path(get, path = "/templates", security(("ApiKey" = [])),
    responses((status = 200, body = Vec<Listed>), (status = "default", body = ErrorBody)))]
pub(super) async fn list(
    Caller(tenant): Caller,
    State(api): State<Api>,
) -> Result<Json<Vec<Listed>>, Failure> {
    let registry = api.fleet.registry();
    let mut found = registry.templates(&tenant).map_err(Error::from)?;
    found.retain(|template| template.kind == TemplateKind::Template);
    found.sort_by(|a, b| (a.created_ms, &a.id).cmp(&(b.created_ms, &b.id)));
    let builds = registry.builds(&tenant).map_err(Error::from)?;
    let mut listed = Vec::with_capacity(found.len());
    for template in found {
        // One whose checkpoint cannot be read is of no use, and not in the way of the others.
        let Ok((machine, disk_bytes)) = api.fleet.shape_of(&template).await else { continue };
        let build = builds.iter().find(|build| build.template == template.id);
        let build_id = build_id(&template, build);
        let names: Vec<String> = template.name.into_iter().collect();
        listed.push(Listed {
            build_id,
            template_id: template.id,
            cpu_count: machine.vcpus,
            memory_mb: machine.memory_mib,
            disk_size_mb: disk_bytes >> 20,
            public: template.tenant.is_none(),
            aliases: names.clone(),
            names,
            tags: template.tags,
            created_at: rfc3339(template.created_ms),
            updated_at: rfc3339(template.created_ms),
            created_by: None,
            last_spawned_at: None,
            spawn_count: 0,
            build_count: 1,
            envd_version: coppice_agent_protocol::ENVD_VERSION,
            build_status: "ready",
        });
    }
    Ok(Json(listed))
}

/// What a name means.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct Alias {
    #[serde(rename = "templateID")]
    template_id: String,
    public: bool,
}

/// Show which template a name means
#[utoipa::path(get, path = "/templates/aliases/{alias}", params(("alias" = String, Path)),
    security(("ApiKey" = [])),
    responses((status = 200, body = Alias), (status = "default", body = ErrorBody)))]
pub(super) async fn alias(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(alias): Path<String>,
) -> Result<Json<Alias>, Failure> {
    let found = api.fleet.registry().template(&tenant, &alias).map_err(Error::from)?;
    let Template { id, tenant, .. } = found.ok_or(Error::NoTemplate { reference: alias })?;
    Ok(Json(Alias { template_id: id, public: tenant.is_none() }))
}
