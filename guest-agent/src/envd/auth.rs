//! Who may use the service: whoever knows the access token, once one was set.
//!
//! The token comes in a header. A file's URL may carry a signature instead, made of the token and
//! of all that the URL asks for, so that it can be handed to somebody who must not know the token.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use coppice_agent_protocol::{ACCESS_TOKEN_HEADER, Code, ConnectError};
use http::{Method, Request, Response, StatusCode};
use sha2::{Digest as _, Sha256};

use super::query::parameter;
use crate::body::Body;
use crate::clock;
use crate::settings::{Settings, Token, same};

/// Why a request is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Denied {
    /// It has neither token nor signature.
    #[error("the request needs the sandbox' access token: send it as X-Access-Token")]
    NoToken,
    /// Its token is another one.
    #[error("the access token is not the one of this sandbox")]
    WrongToken,
    /// Its signature does not fit the token or the request.
    #[error("the signature does not fit: sign the same path, operation, user and expiration")]
    WrongSignature,
    /// Its signature was valid once. Clients know this text.
    #[error("signature is already expired")]
    Expired,
}

/// Whether a request may be answered.
pub(super) fn check<B>(settings: &Settings, request: &Request<B>) -> Result<(), Denied> {
    let Some(token) = settings.token() else { return Ok(()) };
    let path = request.uri().path();
    if path == "/health" {
        return Ok(());
    }
    if let Some(guess) = request.headers().get(ACCESS_TOKEN_HEADER) {
        return if token.is(guess.as_bytes()) { Ok(()) } else { Err(Denied::WrongToken) };
    }
    let operation = match (path, request.method()) {
        ("/files", &Method::GET) => "read",
        ("/files", &Method::POST) => "write",
        _ => return Err(Denied::NoToken),
    };
    let now = clock::unix_ns() / 1_000_000_000;
    check_signature(token, operation, request.uri(), now)
}

fn check_signature(
    token: &Token,
    operation: &str,
    uri: &http::Uri,
    now: u64,
) -> Result<(), Denied> {
    let guess = parameter(uri, "signature").ok_or(Denied::NoToken)?;
    let expiration = match parameter(uri, "signature_expiration") {
        None => None,
        Some(text) => Some(text.parse::<u64>().map_err(|_| Denied::WrongSignature)?),
    };
    let path = parameter(uri, "path").unwrap_or_default();
    let user = parameter(uri, "username").unwrap_or_default();
    let expected = signature(token, operation, &path, &user, expiration);
    if !same(expected.as_bytes(), guess.as_bytes()) {
        return Err(Denied::WrongSignature);
    }
    if expiration.is_some_and(|expiration| expiration < now) {
        return Err(Denied::Expired);
    }
    Ok(())
}

/// The signature under which `user` may do `operation` with the file at `path`, until `expiration`
/// (seconds since the Unix epoch), if there is one.
fn signature(
    token: &Token,
    operation: &str,
    path: &str,
    user: &str,
    expiration: Option<u64>,
) -> String {
    let mut text = format!("{path}:{operation}:{user}:{}", token.text());
    if let Some(expiration) = expiration {
        text.push_str(&format!(":{expiration}"));
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// The answer to a request that was denied.
pub(super) fn response<B>(request: &Request<B>, denied: &Denied) -> Response<Body> {
    let path = request.uri().path();
    if path.starts_with("/files") || request.method() != Method::POST {
        return super::error(StatusCode::UNAUTHORIZED, &denied.to_string());
    }
    // Callers of procedures look for the code's name.
    let error = ConnectError::new(Code::Unauthenticated, denied.to_string());
    super::json(StatusCode::UNAUTHORIZED, &error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use coppice_agent_protocol::control::Init;

    fn settings() -> Settings {
        let mut settings = Settings::default();
        settings.apply(Init { access_token: Some("tok".into()), ..Init::default() }).unwrap();
        settings
    }

    fn signed(uri: &str, now: u64) -> Result<(), Denied> {
        let settings = settings();
        check_signature(settings.token().unwrap(), "read", &uri.parse().unwrap(), now)
    }

    // SHA-256 of "/tmp/a b:read:root:tok" and of "f:read::tok:1000", by OpenSSL.
    const PLAIN: &str = "v1_9VLD1E7/tBhd1rdliqZESucZoyczJBtFcahhsIF4x3Y";
    const EXPIRING: &str = "v1_FAJLG1YxWKMRiphiiO8yUuiRKMsZQxCeST3NqfCrdpY";

    fn escaped(signature: &str) -> String {
        signature.replace('+', "%2B").replace('/', "%2F")
    }

    #[test]
    fn a_signature_covers_path_operation_and_user() {
        let uri = |path: &str, user: &str| {
            format!("/files?path={path}&username={user}&signature={}", escaped(PLAIN))
        };
        assert_eq!(signed(&uri("%2Ftmp%2Fa%20b", "root"), 0), Ok(()));
        assert_eq!(signed(&uri("%2Ftmp%2Fa", "root"), 0), Err(Denied::WrongSignature));
        assert_eq!(signed(&uri("%2Ftmp%2Fa%20b", ""), 0), Err(Denied::WrongSignature));
    }

    #[test]
    fn a_signature_ends_when_it_says() {
        let uri = |expiration: u32| {
            let signature = escaped(EXPIRING);
            format!("/files?path=f&signature={signature}&signature_expiration={expiration}")
        };
        assert_eq!(signed(&uri(1000), 1000), Ok(()));
        assert_eq!(signed(&uri(1000), 1001), Err(Denied::Expired));
        assert_eq!(signed(&uri(1001), 1000), Err(Denied::WrongSignature));
    }

    #[test]
    fn without_a_token_all_is_open() {
        let request = Request::get("/files?path=/etc/passwd").body(()).unwrap();
        assert_eq!(check(&Settings::default(), &request), Ok(()));
    }
}
