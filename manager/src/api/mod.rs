//! The REST API: E2B's control plane, and the checkpoint trees on top of it.
//!
//! A handler checks who asks and what for, has the fleet do it, and says what came of it. Every
//! error has a body with `code` and `message`: clients of E2B fail on others. The OpenAPI document
//! at `/openapi.json` is made from the handlers themselves.

mod auth;
mod error;
mod list;
mod observe;
mod sandboxes;
mod snapshots;
mod tags;
mod templates;
mod tree;
mod types;

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, CONTENT_LENGTH};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, put};
use axum::{Json, Router, middleware};
use utoipa::OpenApi;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, SecurityScheme};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::fleet::Fleet;
pub use error::{ErrorBody, Failure};

/// The most bytes of a request's body.
const MAX_BODY: usize = 1 << 20;

/// What all handlers have.
#[derive(Debug, Clone)]
pub struct Api {
    /// The sandboxes.
    pub fleet: Arc<Fleet>,
    /// Domain under which sandboxes are reached, with the port if it is not the usual one.
    pub domain: Arc<str>,
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
    let fleet = Arc::clone(&api.fleet);
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
        .layer(middleware::from_fn(read_whole))
        // Not below the layer above: files are far longer than what may be in memory.
        .route(templates::UPLOADS, uploads)
        .layer(middleware::map_response(error::in_form))
}

/// Reads the whole body before anything is answered: an answer that comes earlier leaves a
/// connection that looks usable to the client and is not. A body that says it is too long is not
/// read.
async fn read_whole(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let length = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    let fits = length.is_none_or(|length| length.parse().is_ok_and(|n: usize| n <= MAX_BODY));
    let body = match fits {
        true => axum::body::to_bytes(body, MAX_BODY).await.ok(),
        false => None,
    };
    match body {
        Some(body) => next.run(Request::from_parts(parts, body.into())).await,
        None => {
            let text = format!("a body has at most {MAX_BODY} bytes");
            let failure = Failure::new(StatusCode::PAYLOAD_TOO_LARGE, text);
            ([(CONNECTION, "close")], failure).into_response()
        }
    }
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
