//! Lists of sandboxes, in pages.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use utoipa::IntoParams;

use super::auth::Caller;
use super::types::{Listed, state_word};
use super::{Api, ErrorBody, Failure};
use crate::fleet::Member;
use crate::registry::{Row, Tenant};
use crate::store::Id;

/// Header with where the next page begins.
const NEXT: &str = "x-next-token";
/// Sandboxes of a page when nobody says, and at most.
const PAGE: usize = 100;

/// What sandboxes are listed.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase")]
pub(super) struct Wanted {
    /// Keys and values that they have, URL-encoded as in a query: `a=b&c=d`.
    metadata: Option<String>,
    /// Their states: `running`, `paused`, or both with a comma between.
    state: Option<String>,
    /// The template they were made from.
    template: Option<String>,
    /// Oldest (`asc`) or newest (`desc`, as without it) first.
    order: Option<String>,
    /// Started later than this, RFC 3339.
    started_after: Option<String>,
    /// How many, 1 to 100.
    limit: Option<usize>,
    /// Where the page begins, as the last one said.
    next_token: Option<String>,
}

/// List sandboxes
#[utoipa::path(get, path = "/sandboxes", params(Wanted), security(("ApiKey" = [])),
    responses((status = 200, body = Vec<Listed>), (status = "default", body = ErrorBody)))]
pub(super) async fn list_v1(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Query(wanted): Query<Wanted>,
) -> Result<Json<Vec<Listed>>, Failure> {
    // The first version knows running ones only, and no pages.
    let wanted = Wanted { state: Some("running".into()), limit: None, next_token: None, ..wanted };
    let found = filtered(&api, &tenant, &wanted)?;
    Ok(Json(listed(&found)))
}

/// List sandboxes, page by page
#[utoipa::path(get, path = "/v2/sandboxes", params(Wanted), security(("ApiKey" = [])),
    responses((status = 200, body = Vec<Listed>), (status = "default", body = ErrorBody)))]
pub(super) async fn list_v2(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Query(wanted): Query<Wanted>,
) -> Result<(HeaderMap, Json<Vec<Listed>>), Failure> {
    let limit = wanted.limit.unwrap_or(PAGE);
    if !(1..=PAGE).contains(&limit) {
        return Err(Failure::bad(format!("limit is 1 to {PAGE}")));
    }
    let mut found = filtered(&api, &tenant, &wanted)?;
    if let Some(token) = &wanted.next_token {
        let last = Place::parse(token).ok_or_else(|| Failure::bad("nextToken is not one"))?;
        found.retain(|(place, _)| comes_after(place, &last, &wanted));
    }
    let more = found.len() > limit;
    found.truncate(limit);
    let mut headers = HeaderMap::new();
    if let Some((last, _)) = found.last().filter(|_| more)
        && let Ok(token) = last.token().parse()
    {
        headers.insert(NEXT, token);
    }
    Ok((headers, Json(listed(&found))))
}

fn listed(found: &[(Place, Arc<Member>)]) -> Vec<Listed> {
    found.iter().map(|(_, member)| Listed::of(member.shown())).collect()
}

/// Where a sandbox is in a list: by start, then by ID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place(u64, Id);

impl Place {
    fn of(row: &Row) -> Self {
        Self(row.started_ms, row.id.clone())
    }

    fn token(&self) -> String {
        format!("{}-{}", self.0, self.1)
    }

    fn parse(token: &str) -> Option<Self> {
        let (started, id) = token.split_once('-')?;
        Some(Self(started.parse().ok()?, Id::parse(id)?))
    }
}

fn ascending(wanted: &Wanted) -> bool {
    wanted.order.as_deref() == Some("asc")
}

fn comes_after(place: &Place, last: &Place, wanted: &Wanted) -> bool {
    if ascending(wanted) { place > last } else { place < last }
}

/// A tenant's sandboxes that are wanted, in order.
fn filtered(
    api: &Api,
    tenant: &Tenant,
    wanted: &Wanted,
) -> Result<Vec<(Place, Arc<Member>)>, Failure> {
    let order = wanted.order.as_deref().unwrap_or("desc");
    if !["asc", "desc"].contains(&order) {
        return Err(Failure::bad("order is asc or desc"));
    }
    let metadata = match &wanted.metadata {
        Some(text) => pairs(text)?,
        None => BTreeMap::new(),
    };
    let after = match &wanted.started_after {
        Some(text) => Some(
            super::types::from_rfc3339(text)
                .ok_or_else(|| Failure::bad("startedAfter is not an RFC 3339 time"))?,
        ),
        None => None,
    };
    let states: Option<Vec<&str>> = wanted.state.as_ref().map(|text| text.split(',').collect());
    let is_wanted = |row: &Row| {
        let has = |(key, value): (&String, &String)| row.metadata.get(key) == Some(value);
        let template =
            |wanted: &String| *wanted == row.template || row.alias.as_ref() == Some(wanted);
        states.as_ref().is_none_or(|states| states.contains(&state_word(row.state)))
            && wanted.template.as_ref().is_none_or(template)
            && after.is_none_or(|after| row.started_ms > after)
            && metadata.iter().all(has)
    };
    // Only those of the page are copied, of which there may be far more.
    let place = |member: Arc<Member>| {
        let place = member.about(|row| is_wanted(row).then(|| Place::of(row)))?;
        Some((place, member))
    };
    let mut found: Vec<_> = api.fleet.of_tenant(tenant).into_iter().filter_map(place).collect();
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    if !ascending(wanted) {
        found.reverse();
    }
    Ok(found)
}

/// The pairs of a query string. Clients encode keys and values by themselves before they make a
/// query of them, so those are encoded twice.
fn pairs(text: &str) -> Result<BTreeMap<String, String>, Failure> {
    let wrong = || Failure::bad("metadata is not URL-encoded");
    let uri = format!("/?{text}").parse::<axum::http::Uri>().map_err(|_| wrong())?;
    let Query(pairs) =
        Query::<BTreeMap<String, String>>::try_from_uri(&uri).map_err(|_| wrong())?;
    let plain = |text: &str| {
        let decoded = percent_decode_str(text).decode_utf8();
        decoded.map(|text| text.into_owned()).map_err(|_| wrong())
    };
    pairs.iter().map(|(key, value)| Ok((plain(key)?, plain(value)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_read_as_the_clients_write_it() {
        // Of {"the role": "a & b=c"}, after the query of the request was read.
        let read = pairs("the%2520role=a%2520%2526%2520b%253Dc&x=1").unwrap();
        let wanted = [("the role", "a & b=c"), ("x", "1")].map(|(k, v)| (k.into(), v.into()));
        assert_eq!(read, BTreeMap::from(wanted));
        pairs("a=%25ff").unwrap_err();
    }
}
