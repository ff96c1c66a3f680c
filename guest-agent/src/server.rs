//! Accepts connections and speaks HTTP on them.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::{Method, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use tokio::sync::Semaphore;

use crate::agent::Agent;
use crate::body::Body;
use crate::log;
use crate::net::Listener;

/// Header with a request's ID, and the most bytes of one.
const REQUEST_ID: &str = "x-request-id";
const MAX_ID: usize = 64;

/// Connections served at once per port; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 1024;

/// Time for a request's head to arrive, idle time between requests included.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Most bytes of a request's head, and of what is written ahead of a slow client.
const MAX_BUFFER: usize = 64 * 1024;

/// Pause after a failed accept: what it lacked, descriptors as a rule, comes back with time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves one listener for ever.
pub(crate) async fn serve<F>(
    listener: Listener,
    agent: Rc<Agent>,
    route: fn(Rc<Agent>, Request<Incoming>) -> F,
) where
    F: Future<Output = Response<Body>> + 'static,
{
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                log::warn(format_args!("accepting a connection: {error}"));
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let agent = Rc::clone(&agent);
        let service = service_fn(move |request: Request<Incoming>| {
            let told = Told::of(&request);
            let answer = route(Rc::clone(&agent), request);
            async {
                let response = answer.await;
                if let Some(told) = told {
                    told.answered(&response);
                }
                Ok::<_, Infallible>(response)
            }
        });
        let departure = stream.departure();
        let connection = http1::Builder::new()
            .timer(TokioTimer)
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_BUFFER)
            // A client that has sent all it has to say still gets its answer.
            .half_close(true)
            .serve_connection(stream, service);
        tokio::task::spawn_local(async move {
            // Whoever left frees what its requests hold, though there may be nothing to write for
            // long. Without a way to learn of it, the next write has to tell.
            let left = async {
                match &departure {
                    Ok(departure) => departure.wait().await,
                    Err(_) => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                // A connection that breaks is its client's affair.
                _ = connection => {}
                () = left => {}
            }
            drop(slot);
        });
    }
}

/// A request that the log tells of: one whose sender gave it an ID, so that it is found again.
#[derive(Debug)]
struct Told {
    id: String,
    method: Method,
    path: String,
    began: Instant,
}

impl Told {
    /// Nothing of a request without an ID, or with one that cannot be in a line.
    fn of(request: &Request<Incoming>) -> Option<Self> {
        let id = request.headers().get(REQUEST_ID)?.to_str().ok()?;
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if !(1..=MAX_ID).contains(&id.len()) || !id.bytes().all(fits) {
            return None;
        }
        // Without the query: it may have a signature in it.
        let path = request.uri().path().to_owned();
        Some(Self {
            id: id.to_owned(),
            method: request.method().clone(),
            path,
            began: Instant::now(),
        })
    }

    fn answered(self, response: &Response<Body>) {
        let Self { id, method, path, began } = self;
        let (status, us) = (response.status().as_u16(), began.elapsed().as_micros());
        log::note(format_args!("request {id}: {method} {path}: {status} after {us} us"));
    }
}

/// Lets hyper use the runtime's timers.
#[derive(Debug, Clone, Copy)]
struct TokioTimer;

struct TokioSleep(Pin<Box<tokio::time::Sleep>>);

impl hyper::rt::Timer for TokioTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn hyper::rt::Sleep>> {
        Box::pin(TokioSleep(Box::pin(tokio::time::sleep(duration))))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn hyper::rt::Sleep>> {
        Box::pin(TokioSleep(Box::pin(tokio::time::sleep_until(deadline.into()))))
    }
}

impl Future for TokioSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl hyper::rt::Sleep for TokioSleep {}
