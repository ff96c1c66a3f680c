//! Who asks: the tenant whose API key came with a request, found before anything else is read of
//! it; and whether it asks too fast.

use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::{Api, Failure, body};
use crate::listen::Peer;
use crate::registry::Tenant;

/// Header with the API key.
pub(crate) const KEY_HEADER: &str = "x-api-key";

/// The tenant that asks.
#[derive(Debug, Clone)]
pub(super) struct Caller(pub(super) Tenant);

/// What was found out about who asks.
#[derive(Debug, Clone)]
struct Identity(Result<Caller, Failure>);

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let unknown = || Err(refused("nobody asked who this is from"));
        parts.extensions.get().map_or_else(unknown, |Identity(found)| found.clone())
    }
}

/// Finds out who asks. The body of a known tenant's request is read whole before anything is done;
/// anybody else's is not kept.
pub(super) async fn admit(State(api): State<Api>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let found = identify(&api, &parts);
    let is_known = found.is_ok();
    let slower = found.as_ref().ok().and_then(|caller| too_fast(&api, caller));
    if let Some(failure) = slower {
        return body::after(body, failure.into_response()).await;
    }
    parts.extensions.insert(Identity(found));
    if !is_known {
        let response = next.run(Request::from_parts(parts, Body::empty())).await;
        return body::after(body, response).await;
    }
    match body::whole(&parts.headers, body).await {
        Ok(body) => next.run(Request::from_parts(parts, body.into())).await,
        Err(failure) => body::closing(failure.into_response()),
    }
}

fn refused(message: &str) -> Failure {
    Failure::new(StatusCode::UNAUTHORIZED, message)
}

fn identify(api: &Api, parts: &Parts) -> Result<Caller, Failure> {
    let mut keys = parts.headers.get_all(KEY_HEADER).iter();
    let key = keys.next().ok_or_else(|| refused("the header X-API-KEY is missing"))?;
    if keys.next().is_some() {
        return Err(refused("the header X-API-KEY is there twice"));
    }
    let tenant = match key.to_str() {
        Ok(key) => api.fleet.registry().tenant_of(key).map_err(crate::fleet::Error::from)?,
        Err(_) => None,
    };
    tenant.map(Caller).ok_or_else(|| {
        // Who has a key is not hindered by who has none.
        let network = parts.extensions.get::<Peer>().and_then(|peer| peer.network());
        match api.rates.wrong_keys.take(&network, 1) {
            Ok(()) => refused("the API key is not known: `coppice key create` makes one"),
            Err(wait) => {
                api.fleet.refused("keys").inc();
                Failure::too_fast("too many unknown API keys came from this address", wait)
            }
        }
    })
}

fn too_fast(api: &Api, Caller(tenant): &Caller) -> Option<Failure> {
    let wait = api.rates.requests.take(tenant, 1).err()?;
    api.fleet.refused("requests").inc();
    Some(Failure::too_fast("too many requests in a short time", wait))
}

/// Counts sandboxes that a tenant wants to make.
///
/// # Errors
/// That it makes too many in a short time.
pub(super) fn may_create(api: &Api, tenant: &Tenant, count: usize) -> Result<(), Failure> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    api.rates.creates.take(tenant, count).map_err(|wait| {
        api.fleet.refused("creates").inc();
        Failure::too_fast("too many sandboxes are made in a short time", wait)
    })
}
