//! Tags of templates, as E2B's clients give and take them.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use utoipa::ToSchema;

use super::auth::Caller;
use super::types::{parse, rfc3339};
use super::{Api, ErrorBody, Failure};
use crate::fleet::Tagged;
use crate::random::uuid_of;
use crate::registry::{Build, Template};

/// Tags that a template is to have.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(super) struct Assign {
    /// The template: its name, perhaps with a colon and a tag, or its ID.
    target: String,
    tags: Vec<String>,
}

/// Tags that the templates of a name are to lose.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(super) struct Unassign {
    name: String,
    tags: Vec<String>,
}

/// All tags that a template has now.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct Assigned {
    #[serde(rename = "buildID")]
    build_id: String,
    tags: Vec<String>,
}

/// A tag.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Tag {
    tag: String,
    #[serde(rename = "buildID")]
    build_id: String,
    /// When the template was made.
    created_at: String,
}

/// The ID of a template's build. One that was not built through the API, or long ago, has one that
/// is made of its own ID: clients want to see a UUID.
pub(super) fn build_id(template: &Template, build: Option<&Build>) -> String {
    let derived = || {
        let digest: [u8; 32] = Sha256::digest(&template.id).into();
        uuid_of(*digest.first_chunk().unwrap_or(&[0; 16]))
    };
    build.map_or_else(derived, |build| build.id.clone())
}

/// Give a template more tags; other templates of its name lose them
#[utoipa::path(post, path = "/templates/tags", request_body = Assign, security(("ApiKey" = [])),
    responses((status = 201, body = Assigned), (status = "default", body = ErrorBody)))]
pub(super) async fn assign(
    Caller(tenant): Caller,
    State(api): State<Api>,
    body: Bytes,
) -> Result<(StatusCode, Json<Assigned>), Failure> {
    let Assign { target, tags } = parse(&body)?;
    let Tagged { template, build } = api.fleet.tag(&tenant, &target, tags)?;
    let build_id = build_id(&template, build.as_ref());
    Ok((StatusCode::CREATED, Json(Assigned { build_id, tags: template.tags })))
}

/// Take tags from the templates of a name
#[utoipa::path(delete, path = "/templates/tags", request_body = Unassign,
    security(("ApiKey" = [])),
    responses((status = 204), (status = "default", body = ErrorBody)))]
pub(super) async fn unassign(
    Caller(tenant): Caller,
    State(api): State<Api>,
    body: Bytes,
) -> Result<StatusCode, Failure> {
    let Unassign { name, tags } = parse(&body)?;
    api.fleet.untag(&tenant, &name, &tags)?;
    Ok(StatusCode::NO_CONTENT)
}

/// List the tags of all templates of a name
#[utoipa::path(get, path = "/templates/{id}/tags", params(("id" = String, Path)),
    security(("ApiKey" = [])),
    responses((status = 200, body = Vec<Tag>), (status = "default", body = ErrorBody)))]
pub(super) async fn list(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
) -> Result<Json<Vec<Tag>>, Failure> {
    let mut listed = Vec::new();
    for Tagged { template, build } in api.fleet.tagged(&tenant, &id)? {
        let build_id = build_id(&template, build.as_ref());
        listed.extend(template.tags.into_iter().map(|tag| Tag {
            tag,
            build_id: build_id.clone(),
            created_at: rfc3339(template.created_ms),
        }));
    }
    Ok(Json(listed))
}
