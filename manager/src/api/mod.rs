//! The REST API: E2B's control plane, and the checkpoint trees on top of it.
//!
//! Who asks is known before a request's body is read. A handler checks what for, has the fleet do
//! it, and says what came of it. Every
//! error has a body with `code` and `message`: clients of E2B fail on others. The OpenAPI document
//! at `/openapi.json` is made from the handlers themselves.

pub mod admin;
mod auth;
mod body;
mod error;
pub mod events;
mod list;
mod observe;
mod rate;
mod sandboxes;
mod snapshots;
mod tags;
mod templates;
mod tree;
mod types;

use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::routing::{get, put};
use axum::{Json, Router, middleware};
use utoipa::OpenApi;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, SecurityScheme};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::fleet::Fleet;
pub(crate) use auth::KEY_HEADER;
pub(crate) use body::{after as after_body, closing};
pub use error::{ErrorBody, Failure};
pub use rate::Limits;
use rate::Rates;

/// What all handlers have.
#[derive(Debug, Clone)]
pub struct Api {
    /// The sandboxes.
    pub fleet: Arc<Fleet>,
    /// Domain under which sandboxes are reached, with the port if it is not the usual one.
    pub domain: Arc<str>,
    rates: Arc<Rates>,
}

impl Api {
    /// The API of a fleet whose sandboxes are told to be in a domain.
    pub fn new(fleet: Arc<Fleet>, domain: Arc<str>, limits: Limits) -> Self {
        Self { fleet, domain, rates: Arc::new(Rates::new(limits)) }
    }
}

#[derive(OpenApi)]
#[openapi(info(
    title = "Coppice",
    description = "Sandboxes that are microVMs: E2B's control plane, and checkpoint trees.",
    license(name = "Apache-2.0")
))]
struct Document;

/// The API as a router, with its OpenAPI document.
pub fn router(api: Api) -> Router {
    let (fleet, admitted) = (Arc::clone(&api.fleet), api.clone());
    let uploads = put(templates::upload).with_state(api.clone());
    let (router, document) = described().with_state(api).split_for_parts();
    let document = Arc::new(document);
    router
        .route("/openapi.json", get(move || std::future::ready(Json((*document).clone()))))
        .route("/metrics", get(observe::measured).with_state(fleet))
        .route("/health", get(|| std::future::ready(StatusCode::NO_CONTENT)))
        .fallback(|| std::future::ready(Failure::not_found("there is no such route")))
        .method_not_allowed_fallback(|| {
            std::future::ready(Failure::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "the route does not have this method",
            ))
        })
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(admitted, auth::admit))
        // Not below the layer above: files are far longer than what may be in memory.
        .route(templates::UPLOADS, uploads)
        .layer(middleware::map_response(error::in_form))
}

fn described() -> OpenApiRouter<Api> {
    let mut document = Document::openapi();
    let key = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-KEY")));
    document.components.get_or_insert_default().add_security_scheme("ApiKey", key);
    OpenApiRouter::with_openapi(document)
        .routes(routes!(sandboxes::create_v1, list::list_v1))
        .routes(routes!(sandboxes::create_v2, list::list_v2))
        .routes(routes!(sandboxes::show, sandboxes::kill))
        .routes(routes!(sandboxes::set_timeout))
        .routes(routes!(sandboxes::refresh))
        .routes(routes!(sandboxes::pause))
        .routes(routes!(sandboxes::resume))
        .routes(routes!(sandboxes::connect_v1))
        .routes(routes!(sandboxes::connect_v2))
        .routes(routes!(snapshots::take))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::remove))
        .routes(routes!(snapshots::fork))
        .routes(routes!(templates::create))
        .routes(routes!(templates::list))
        .routes(routes!(templates::alias))
        .routes(routes!(tags::assign, tags::unassign))
        .routes(routes!(tags::list))
        .routes(routes!(templates::place))
        .routes(routes!(templates::start))
        .routes(routes!(templates::status))
        .routes(routes!(tree::roll_back))
        .routes(routes!(tree::show))
        .routes(routes!(tree::diff))
        .routes(routes!(observe::metrics))
        .routes(routes!(observe::logs_v1))
        .routes(routes!(observe::logs_v2))
}
