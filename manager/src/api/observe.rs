//! What a sandbox uses, and what happened to it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Json;
use axum::extract::{ConnectInfo, Path, Query, State};
use axum::http::HeaderName;
use axum::http::header::CONTENT_TYPE;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::auth::Caller;
use super::types::rfc3339;
use super::{Api, ErrorBody, Failure};
use crate::fleet::{Fleet, Sample};
use crate::registry::Event;

/// The most log entries of one answer.
const MAX_LOGS: usize = 1000;

/// What a guest used at a time.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metric {
    timestamp: String,
    timestamp_unix: u64,
    cpu_count: u32,
    /// Of all processors together, in percent.
    cpu_used_pct: f64,
    /// Bytes.
    mem_used: u64,
    mem_total: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

impl From<Sample> for Metric {
    fn from(sample: Sample) -> Self {
        let Sample { at_ms, metrics } = sample;
        Self {
            timestamp: rfc3339(at_ms),
            timestamp_unix: at_ms / 1000,
            cpu_count: metrics.cpu_count,
            cpu_used_pct: metrics.cpu_used_pct,
            mem_used: metrics.mem_used,
            mem_total: metrics.mem_total,
            mem_cache: metrics.mem_cache,
            disk_used: metrics.disk_used,
            disk_total: metrics.disk_total,
        }
    }
}

/// Between which times.
#[derive(Debug, Clone, Deserialize, IntoParams)]
pub(super) struct Span {
    /// Seconds since 1970.
    start: Option<u64>,
    /// Seconds since 1970.
    end: Option<u64>,
}

/// Show what a sandbox used lately
#[utoipa::path(get, path = "/sandboxes/{id}/metrics", params(("id" = String, Path), Span),
    security(("ApiKey" = [])),
    responses((status = 200, body = Vec<Metric>), (status = "default", body = ErrorBody)))]
pub(super) async fn metrics(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    Query(span): Query<Span>,
) -> Result<Json<Vec<Metric>>, Failure> {
    let member = api.fleet.find(&tenant, &id)?;
    let samples = api.fleet.metrics(&member).await?.into_iter().map(Metric::from);
    let within = |metric: &Metric| {
        let at = metric.timestamp_unix;
        span.start.is_none_or(|start| at >= start) && span.end.is_none_or(|end| at <= end)
    };
    Ok(Json(samples.filter(within).collect()))
}

/// All meters, for Prometheus. They are about no tenant, and only who is on the host may read
/// them.
pub(super) async fn measured(
    State(fleet): State<Arc<Fleet>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
) -> Result<([(HeaderName, &'static str); 1], String), Failure> {
    if !peer.ip().is_loopback() {
        return Err(Failure::not_found("there is no such route"));
    }
    let kind = [(CONTENT_TYPE, "text/plain; version=0.0.4")];
    Ok((kind, fleet.measured().await))
}

/// Something that happened to a sandbox.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct LogEntry {
    timestamp: String,
    message: String,
    level: &'static str,
    fields: BTreeMap<String, String>,
}

impl From<Event> for LogEntry {
    fn from(event: Event) -> Self {
        let message = match event.text.as_str() {
            "" => event.kind.clone(),
            text => format!("{}: {text}", event.kind),
        };
        Self {
            timestamp: rfc3339(event.at_ms),
            message,
            level: "info",
            fields: BTreeMap::from([("event".to_owned(), event.kind)]),
        }
    }
}

/// Log entries as the second version has them.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct Logs {
    logs: Vec<LogEntry>,
}

/// A log entry in one line.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct LogLine {
    timestamp: String,
    line: String,
}

/// Log entries as the first version has them.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct LogLines {
    logs: Vec<LogLine>,
    log_entries: Vec<LogEntry>,
}

/// Show what happened to a sandbox
#[utoipa::path(get, path = "/sandboxes/{id}/logs", params(("id" = String, Path)),
    security(("ApiKey" = [])),
    responses((status = 200, body = LogLines), (status = "default", body = ErrorBody)))]
pub(super) async fn logs_v1(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
) -> Result<Json<LogLines>, Failure> {
    let log_entries = entries(&api, &tenant, &id)?;
    let line = |entry: &LogEntry| LogLine {
        timestamp: entry.timestamp.clone(),
        line: entry.message.clone(),
    };
    Ok(Json(LogLines { logs: log_entries.iter().map(line).collect(), log_entries }))
}

/// Show what happened to a sandbox
#[utoipa::path(get, path = "/v2/sandboxes/{id}/logs", params(("id" = String, Path)),
    security(("ApiKey" = [])),
    responses((status = 200, body = Logs), (status = "default", body = ErrorBody)))]
pub(super) async fn logs_v2(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
) -> Result<Json<Logs>, Failure> {
    Ok(Json(Logs { logs: entries(&api, &tenant, &id)? }))
}

fn entries(
    api: &Api,
    tenant: &crate::registry::Tenant,
    id: &str,
) -> Result<Vec<LogEntry>, Failure> {
    let member = api.fleet.find(tenant, id)?;
    let events = api.fleet.registry().events_of(member.id(), MAX_LOGS);
    let events = events.map_err(crate::fleet::Error::from)?;
    Ok(events.into_iter().map(LogEntry::from).collect())
}
