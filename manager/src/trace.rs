//! One ID for each request, from the API to the agent in the guest.
//!
//! It is in every log line of the daemon about the request, on its answer, and on whatever is
//! asked of a guest for it. Work for a request that goes on in a task of its own takes the ID
//! along with [`carried`].

use std::time::Instant;

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::{Instrument as _, Span};

use crate::random::random_bytes;

/// Header with a request's ID.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// The most characters of an ID that a client sends.
const MAX: usize = 64;

tokio::task_local! {
    /// The ID of the request that this task works for.
    static CURRENT: HeaderValue;
}

/// The ID of the request that this task works for.
pub(crate) fn current() -> Option<HeaderValue> {
    CURRENT.try_with(HeaderValue::clone).ok()
}

/// The request that a task works for, if it does for one.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    id: Option<HeaderValue>,
    span: Span,
}

impl Work {
    /// That of this task.
    pub(crate) fn current() -> Self {
        Self { id: current(), span: Span::current() }
    }

    /// A job that is part of it, wherever it runs.
    pub(crate) async fn of<T>(self, job: impl Future<Output = T>) -> T {
        let job = job.instrument(self.span);
        match self.id {
            Some(id) => CURRENT.scope(id, job).await,
            None => job.await,
        }
    }
}

/// A job that goes on in another task, with the ID and the span of this one.
pub(crate) fn carried<T>(job: impl Future<Output = T>) -> impl Future<Output = T> {
    Work::current().of(job)
}

/// Marks answers that were logged.
#[derive(Debug, Clone, Copy)]
struct Logged;

/// Gives a request its ID: the client's if it is well formed, else a new one.
pub(crate) async fn identified(mut request: Request, next: Next) -> Response {
    let id = theirs(&request).unwrap_or_else(drawn);
    // Whatever a client sent, this is what a guest gets.
    request.headers_mut().insert(HEADER, id.clone());
    let span = tracing::info_span!(
        "request",
        id = id.to_str().unwrap_or_default(),
        method = %request.method(),
        // Without the query: it may have tokens in it.
        path = request.uri().path(),
        queue = tracing::field::Empty,
        shell = tracing::field::Empty,
        restore = tracing::field::Empty,
        prove = tracing::field::Empty,
    );
    let began = Instant::now();
    let answer = async {
        let mut response = next.run(request).await;
        if response.extensions_mut().remove::<Logged>().is_none() {
            let (status, ms) = (response.status().as_u16(), milliseconds(began));
            tracing::debug!(status, ms, "answered by a guest");
        }
        response
    };
    let mut response = CURRENT.scope(id.clone(), answer.instrument(span)).await;
    response.headers_mut().insert(HEADER, id);
    response
}

/// Logs a request and its answer.
pub(crate) async fn logged(request: Request, next: Next) -> Response {
    let began = Instant::now();
    let mut response = next.run(request).await;
    let (status, ms) = (response.status().as_u16(), milliseconds(began));
    tracing::info!(status, ms, "answered");
    response.extensions_mut().insert(Logged);
    response
}

/// The ID that a client sent, if it sent one that can be in a log line.
fn theirs(request: &Request) -> Option<HeaderValue> {
    let mut sent = request.headers().get_all(HEADER).iter();
    let (Some(id), None) = (sent.next(), sent.next()) else { return None };
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
    let well_formed = (1..=MAX).contains(&id.len()) && id.as_bytes().iter().all(fits);
    well_formed.then(|| id.clone())
}

fn drawn() -> HeaderValue {
    // Without random bytes the system is in such a state that its log is the least concern.
    let number = u64::from_ne_bytes(random_bytes().unwrap_or_default());
    HeaderValue::from_str(&format!("{number:016x}"))
        .unwrap_or_else(|_| HeaderValue::from_static("0"))
}

/// Milliseconds since then, with what is below them.
pub(crate) fn milliseconds(began: Instant) -> f64 {
    let us = u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX);
    f64::from(us) / 1000.0
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn theirs_of(ids: &[&str]) -> Option<HeaderValue> {
        let builder = Request::builder();
        let builder = ids.iter().fold(builder, |builder, id| builder.header(HEADER, *id));
        theirs(&builder.body(Body::empty()).unwrap())
    }

    #[test]
    fn only_a_well_formed_id_is_taken_over() {
        assert_eq!(theirs_of(&["a.B-1_"]).unwrap(), "a.B-1_");
        for ids in [&[][..], &[""], &["a b"], &["a\"b"], &["a", "b"], &["\u{e9}"]] {
            assert_eq!(theirs_of(ids), None, "{ids:?}");
        }
        assert_eq!(theirs_of(&[&"x".repeat(64)]).unwrap().len(), 64);
        assert_eq!(theirs_of(&[&"x".repeat(65)]), None);
    }

    #[test]
    fn drawn_ids_differ_and_are_well_formed() {
        let ids = [drawn(), drawn()];
        assert_ne!(ids[0], ids[1]);
        assert_eq!(theirs_of(&[ids[0].to_str().unwrap()]).as_ref(), Some(&ids[0]));
    }

    #[tokio::test]
    async fn a_task_takes_the_id_along() {
        let id = HeaderValue::from_static("x");
        let spawning = async { tokio::spawn(carried(async { current() })).await };
        assert_eq!(CURRENT.scope(id.clone(), spawning).await.unwrap(), Some(id));
        assert_eq!(tokio::spawn(carried(async { current() })).await.unwrap(), None);
    }
}
