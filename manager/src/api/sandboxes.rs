//! Sandboxes: made, shown, paused, resumed, removed.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};

use super::auth::{Caller, may_create};
use super::types::{
    Listed, NewSandbox, Pause, Refresh, Resume, Sandbox, Timeout, parse, timeout_ms, with_memory,
};
use super::{Api, ErrorBody, Failure};
use crate::fleet::Order;
use crate::registry::OnTimeout;

/// Header by which a request that is sent again is known.
const IDEMPOTENCY: &str = "idempotency-key";
/// The most bytes of such a key.
const MAX_KEY: usize = 255;
/// Seconds that a sandbox has when its maker does not say: by the first version of the route, and
/// by the second.
const TIMEOUT_V1: u64 = 15;
const TIMEOUT_V2: u64 = 300;

/// Make a sandbox from a template or snapshot
#[utoipa::path(post, path = "/sandboxes", request_body = NewSandbox, security(("ApiKey" = [])),
    responses((status = 201, body = Sandbox), (status = "default", body = ErrorBody)))]
pub(super) async fn create_v1(
    Caller(tenant): Caller,
    State(api): State<Api>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<(StatusCode, Json<Sandbox>), Failure> {
    let new: NewSandbox = parse(&body)?;
    let secure = new.secure.unwrap_or(true);
    let order = order(tenant, new, TIMEOUT_V1, secure, idempotency(&headers, &body)?)?;
    create(&api, order).await
}

/// Make a sandbox from a template or snapshot
#[utoipa::path(post, path = "/v2/sandboxes", request_body = NewSandbox, security(("ApiKey" = [])),
    responses((status = 201, body = Sandbox), (status = "default", body = ErrorBody)))]
pub(super) async fn create_v2(
    Caller(tenant): Caller,
    State(api): State<Api>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<(StatusCode, Json<Sandbox>), Failure> {
    let new: NewSandbox = parse(&body)?;
    let order = order(tenant, new, TIMEOUT_V2, true, idempotency(&headers, &body)?)?;
    create(&api, order).await
}

async fn create(api: &Api, order: Order) -> Result<(StatusCode, Json<Sandbox>), Failure> {
    may_create(api, &order.tenant, 1)?;
    let member = api.fleet.create(order).await?;
    Ok((StatusCode::CREATED, Json(Sandbox::of(member.shown(), api))))
}

fn order(
    tenant: crate::registry::Tenant,
    new: NewSandbox,
    default: u64,
    secure: bool,
    idempotency: Option<(String, Vec<u8>)>,
) -> Result<Order, Failure> {
    let absent = |value: &serde_json::Value| match value {
        serde_json::Value::Null => true,
        serde_json::Value::Array(values) => values.is_empty(),
        serde_json::Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    let given = [
        ("network", &new.network),
        ("volumeMounts", &new.volume_mounts),
        ("mcp", &new.mcp),
        ("iam", &new.iam),
    ];
    if let Some((name, _)) = given.into_iter().find(|(_, value)| !absent(value)) {
        return Err(Failure::bad(format!("{name} is not supported: leave it out")));
    }
    with_memory(new.auto_pause_memory.filter(|_| new.auto_pause))?;
    Ok(Order {
        tenant,
        template: new.template_id,
        timeout_ms: timeout_ms(new.timeout.unwrap_or(default))?,
        on_timeout: if new.auto_pause { OnTimeout::Pause } else { OnTimeout::Kill },
        auto_resume: new.auto_resume.unwrap_or_default().enabled,
        metadata: new.metadata.unwrap_or_default(),
        envs: new.env_vars.unwrap_or_default(),
        secure,
        idempotency,
    })
}

fn idempotency(headers: &HeaderMap, body: &Bytes) -> Result<Option<(String, Vec<u8>)>, Failure> {
    let Some(key) = headers.get(IDEMPOTENCY) else { return Ok(None) };
    let key = key.to_str().ok().filter(|key| !key.is_empty() && key.len() <= MAX_KEY);
    let wrong = || Failure::bad(format!("an idempotency key has 1 to {MAX_KEY} ASCII characters"));
    Ok(Some((key.ok_or_else(wrong)?.to_owned(), body.to_vec())))
}

/// Show a sandbox
#[utoipa::path(get, path = "/sandboxes/{id}", params(("id" = String, Path)),
    security(("ApiKey" = [])),
    responses((status = 200, body = Listed), (status = "default", body = ErrorBody)))]
pub(super) async fn show(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
) -> Result<Json<Listed>, Failure> {
    Ok(Json(Listed::whole(api.fleet.find(&tenant, &id)?.shown(), &api)))
}

/// Remove a sandbox, in whatever state it is
#[utoipa::path(delete, path = "/sandboxes/{id}", params(("id" = String, Path)),
    security(("ApiKey" = [])),
    responses((status = 204), (status = "default", body = ErrorBody)))]
pub(super) async fn kill(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
) -> Result<StatusCode, Failure> {
    api.fleet.kill(&api.fleet.find(&tenant, &id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Set how long a sandbox lives from now on
#[utoipa::path(post, path = "/sandboxes/{id}/timeout", params(("id" = String, Path)),
    request_body = Timeout, security(("ApiKey" = [])),
    responses((status = 204), (status = "default", body = ErrorBody)))]
pub(super) async fn set_timeout(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<StatusCode, Failure> {
    let Timeout { timeout } = parse(&body)?;
    let member = api.fleet.find(&tenant, &id)?;
    api.fleet.set_timeout(&member, timeout_ms(timeout)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Have a sandbox live at least so much longer
#[utoipa::path(post, path = "/sandboxes/{id}/refreshes", params(("id" = String, Path)),
    request_body = Refresh, security(("ApiKey" = [])),
    responses((status = 204), (status = "default", body = ErrorBody)))]
pub(super) async fn refresh(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<StatusCode, Failure> {
    let Refresh { duration } = parse(&body)?;
    let member = api.fleet.find(&tenant, &id)?;
    let wanted = timeout_ms(duration.unwrap_or(TIMEOUT_V1))?;
    let left = member.shown().row.end_ms.saturating_sub(crate::registry::now_ms());
    api.fleet.set_timeout(&member, wanted.max(left)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Suspend a sandbox: its memory and disk are kept, and it takes no memory
#[utoipa::path(post, path = "/sandboxes/{id}/pause", params(("id" = String, Path)),
    request_body = Pause, security(("ApiKey" = [])),
    responses((status = 204), (status = 409, body = ErrorBody),
              (status = "default", body = ErrorBody)))]
pub(super) async fn pause(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<StatusCode, Failure> {
    let Pause { memory } = parse(&body)?;
    with_memory(memory)?;
    api.fleet.pause(&api.fleet.find(&tenant, &id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Have a paused sandbox go on
#[utoipa::path(post, path = "/sandboxes/{id}/resume", params(("id" = String, Path)),
    request_body = Resume, security(("ApiKey" = [])),
    responses((status = 201, body = Sandbox), (status = 409, body = ErrorBody),
              (status = "default", body = ErrorBody)))]
pub(super) async fn resume(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<(StatusCode, Json<Sandbox>), Failure> {
    let Resume { timeout, memory } = parse(&body)?;
    with_memory(memory)?;
    let member = api.fleet.find(&tenant, &id)?;
    let timeout = timeout_ms(timeout.unwrap_or(TIMEOUT_V1))?;
    api.fleet.resume(&member, timeout).await?;
    Ok((StatusCode::CREATED, Json(Sandbox::of(member.shown(), &api))))
}

/// Connect to a sandbox, which goes on if it was paused
#[utoipa::path(post, path = "/sandboxes/{id}/connect", params(("id" = String, Path)),
    request_body = Resume, security(("ApiKey" = [])),
    responses((status = 200, body = Sandbox), (status = 201, body = Sandbox),
              (status = "default", body = ErrorBody)))]
pub(super) async fn connect_v1(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<(StatusCode, Json<Sandbox>), Failure> {
    connect(&api, &tenant, &id, &body).await
}

/// Connect to a sandbox, which goes on if it was paused
#[utoipa::path(post, path = "/v2/sandboxes/{id}/connect", params(("id" = String, Path)),
    request_body = Resume, security(("ApiKey" = [])),
    responses((status = 200, body = Sandbox), (status = 201, body = Sandbox),
              (status = "default", body = ErrorBody)))]
pub(super) async fn connect_v2(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<(StatusCode, Json<Sandbox>), Failure> {
    connect(&api, &tenant, &id, &body).await
}

async fn connect(
    api: &Api,
    tenant: &crate::registry::Tenant,
    id: &str,
    body: &Bytes,
) -> Result<(StatusCode, Json<Sandbox>), Failure> {
    let Resume { timeout, memory } = parse(body)?;
    with_memory(memory)?;
    let member = api.fleet.find(tenant, id)?;
    let timeout = timeout_ms(timeout.unwrap_or(TIMEOUT_V2))?;
    let resumed = api.fleet.wake_or_extend(&member, timeout).await?;
    let status = if resumed { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(Sandbox::of(member.shown(), api))))
}
