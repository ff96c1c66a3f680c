//! Request headers with a meaning to the agent.

use std::time::Duration;

use coppice_agent_protocol::{
    Code, ConnectError, DEFAULT_KEEPALIVE_SECS, KEEPALIVE_HEADER, TIMEOUT_HEADER, json,
};
use http::{HeaderMap, header};

use crate::settings::Settings;
use crate::users::User;

/// The time a call may take. Absent and 0 mean without end.
pub(super) fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, ConnectError> {
    let Some(value) = headers.get(TIMEOUT_HEADER) else { return Ok(None) };
    let millis = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok());
    match millis {
        Some(0) => Ok(None),
        Some(millis) => Ok(Some(Duration::from_millis(millis))),
        None => Err(ConnectError::new(
            Code::InvalidArgument,
            "connect-timeout-ms is not a number of milliseconds",
        )),
    }
}

/// Time between keepalives. Values that make no sense are as good as none.
pub(super) fn keepalive(headers: &HeaderMap) -> Duration {
    let seconds = headers
        .get(KEEPALIVE_HEADER)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.trim().parse::<u32>().ok())
        .filter(|seconds| *seconds > 0);
    Duration::from_secs(seconds.map_or(DEFAULT_KEEPALIVE_SECS, u64::from))
}

/// The user a call acts as: the name in `Authorization: Basic`, else the default user.
pub(super) fn user(settings: &Settings, headers: &HeaderMap) -> Result<User, ConnectError> {
    let unauthenticated = |message: String| ConnectError::new(Code::Unauthenticated, message);
    let basic = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, credentials) = value.to_str().ok()?.trim().split_once(' ')?;
        scheme.eq_ignore_ascii_case("basic").then(|| credentials.trim().to_owned())
    });
    let name = basic
        .map(|credentials| {
            let decoded = json::decode_base64(&credentials).ok();
            let text = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
            let name = text.and_then(|text| text.split(':').next().map(str::to_owned));
            name.ok_or_else(|| unauthenticated("the Authorization header is malformed".into()))
        })
        .transpose()?;
    settings.user(name.as_deref()).map_err(|error| unauthenticated(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn a_timeout_is_in_milliseconds() {
        let read = |value| timeout(&headers(TIMEOUT_HEADER, value));
        assert_eq!(read("1500"), Ok(Some(Duration::from_millis(1500))));
        assert_eq!(read("0"), Ok(None));
        assert_eq!(read("soon").unwrap_err().code, Code::InvalidArgument);
        assert_eq!(timeout(&HeaderMap::new()), Ok(None));
    }

    #[test]
    fn a_keepalive_is_in_seconds() {
        let read = |value| keepalive(&headers(KEEPALIVE_HEADER, value)).as_secs();
        assert_eq!((read("50"), read("0"), read("x")), (50, 90, 90));
    }

    #[test]
    fn the_user_is_named_by_basic_authorization() {
        // "root:" and "no-such-user:".
        let read = |value| user(&Settings::default(), &headers("authorization", value));
        assert_eq!(read("Basic cm9vdDo=").unwrap().name, "root");
        assert_eq!(read("Basic bm8tc3VjaC11c2VyOg==").unwrap_err().code, Code::Unauthenticated);
        assert_eq!(read("Basic ~~~").unwrap_err().code, Code::Unauthenticated);
    }
}
