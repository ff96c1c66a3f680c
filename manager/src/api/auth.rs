//! Who asks: the tenant whose API key came with a request.

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;

use super::{Api, Failure};
use crate::registry::Tenant;

/// Header with the API key.
const KEY_HEADER: &str = "x-api-key";

/// The tenant that asks.
#[derive(Debug, Clone)]
pub(super) struct Caller(pub(super) Tenant);

impl FromRequestParts<Api> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        let refuse = |message: &str| Failure::new(StatusCode::UNAUTHORIZED, message);
        let key = parts.headers.get(KEY_HEADER).and_then(|key| key.to_str().ok());
        let key = key.ok_or_else(|| refuse("the header X-API-KEY is missing"))?;
        let tenant = api.fleet.registry().tenant_of(key).map_err(crate::fleet::Error::from)?;
        let unknown = "the API key is not known: `coppice key create` makes one";
        tenant.map(Caller).ok_or_else(|| refuse(unknown))
    }
}
