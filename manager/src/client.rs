//! The way of the command line to the daemon: requests to the administrator's interface.
//!
//! Where no daemon runs, its place is taken for as long as the client lives, and the interface is
//! there in this process: the same is done by the same code, and nothing that was promised gets
//! lost. What only a daemon that stays can do, such as ending sandboxes in time, waits for one.

use std::io;
use std::path::PathBuf;

use axum::Router;
use axum::body::Body;
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tower::util::ServiceExt as _;

use crate::api::admin::{self, Checkpoint, Checkpointed, Refusal, Resume, Rollback, RolledBack};
use crate::api::events::Line;
use crate::failure::{CLASSES, Class, Failure, chain};
use crate::fleet::{self, Fleet, Settings};
use crate::home::Home;
use crate::registry::Wanted;
use crate::serve::{self, LocalError, Place};
use crate::store::Id;

/// The most bytes of an answer that is read as a whole.
const MAX_ANSWER: usize = 1 << 20;
/// The longest line of a stream.
const MAX_LINE: usize = 64 * 1024;
/// The most sandboxes of each tenant, and the memory that is left free: nothing is made here.
const UNLIMITED: usize = usize::MAX;

/// Failures of requests to the daemon.
#[derive(Debug, Error)]
pub enum Error {
    /// There is no daemon.
    #[error("no daemon serves {}", home.display())]
    Absent {
        /// Where it would be.
        home: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// There is none, and its place cannot be had.
    #[error("there is no daemon, and its place cannot be taken")]
    Place(#[from] LocalError),
    /// Its sandboxes cannot be managed from here.
    #[error("the daemon's sandboxes cannot be managed")]
    Fleet(#[from] fleet::Error),
    /// The daemon broke the exchange off.
    #[error("the daemon broke the exchange off")]
    Http(#[from] hyper::Error),
    /// What it answered is not understood.
    #[error("the daemon's answer is not understood: {0}")]
    Answer(String),
    /// It said no.
    #[error("{0}")]
    Refused(Failure),
}

impl Error {
    /// As it is shown.
    pub fn failure(&self) -> Failure {
        let (class, remedy) = match self {
            Self::Refused(failure) => return failure.clone(),
            Self::Absent { .. } => (Class::Host, "start one with `coppice serve`"),
            Self::Place(LocalError::Served { .. } | LocalError::Held { .. }) => {
                (Class::Conflict, "try again, or see what has become of that process")
            }
            Self::Place(_) => (Class::Host, "see that COPPICE_HOME can be written"),
            Self::Fleet(_) => (Class::StoreDamaged, "see what `coppice fsck` says"),
            Self::Http(_) => (Class::Host, "see the daemon's log"),
            Self::Answer(_) => (Class::Host, "see that both are of the same version"),
        };
        Failure::new(class, chain(self), remedy)
    }
}

/// A way to the administrator's interface.
#[derive(Debug)]
pub struct Client(Way);

#[derive(Debug)]
enum Way {
    /// To a daemon.
    Socket(Home),
    /// In this process, which is the daemon meanwhile.
    Here { router: Router, _place: Place },
}

impl Client {
    /// The daemon of a home.
    ///
    /// # Errors
    /// [`Error::Absent`].
    pub async fn connect(home: &Home) -> Result<Self, Error> {
        let absent = |source| Error::Absent { home: home.path().to_owned(), source };
        serve::connect(home.path()).await.map_err(absent)?;
        Ok(Self(Way::Socket(home.clone())))
    }

    /// The daemon of a home, or its place while there is none. `vmm` is the `coppice-vmm` program.
    ///
    /// # Errors
    /// [`Error::Place`], or [`Error::Fleet`].
    pub async fn open(home: &Home, vmm: PathBuf) -> Result<Self, Error> {
        if let Ok(client) = Self::connect(home).await {
            return Ok(client);
        }
        let place = match Place::take(home.path()).await {
            Ok(place) => place,
            // It came meanwhile.
            Err(LocalError::Served { .. }) => return Self::connect(home).await,
            Err(error) => return Err(error.into()),
        };
        let settings = Settings { home: home.clone(), vmm, max_per_tenant: UNLIMITED, reserve: 0 };
        let fleet = Fleet::open(settings)?;
        fleet.adopt().await?;
        // Nothing is followed here, so nothing has to end.
        let (_, ending) = watch::channel(false);
        Ok(Self(Way::Here { router: admin::router(fleet, ending), _place: place }))
    }

    /// Removes a sandbox.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn kill(&self, id: &Id) -> Result<(), Error> {
        self.ask(Method::DELETE, &format!("/sandboxes/{id}"), &()).await.map(drop)
    }

    /// Suspends a sandbox.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn pause(&self, id: &Id) -> Result<(), Error> {
        self.ask(Method::POST, &format!("/sandboxes/{id}/pause"), &()).await.map(drop)
    }

    /// Has a suspended sandbox go on.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn resume(&self, id: &Id, timeout_ms: Option<u64>) -> Result<(), Error> {
        let body = Resume { timeout_ms };
        self.ask(Method::POST, &format!("/sandboxes/{id}/resume"), &body).await.map(drop)
    }

    /// Makes a checkpoint of a running sandbox.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn checkpoint(&self, id: &Id, body: &Checkpoint) -> Result<Checkpointed, Error> {
        let path = format!("/sandboxes/{id}/checkpoint");
        json(self.ask(Method::POST, &path, body).await?).await
    }

    /// Brings a running sandbox back to a checkpoint.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn roll_back(&self, id: &Id, checkpoint: &Id) -> Result<RolledBack, Error> {
        let body = Rollback { checkpoint: checkpoint.clone() };
        json(self.ask(Method::POST, &format!("/sandboxes/{id}/rollback"), &body).await?).await
    }

    /// Follows the events that are wanted.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn follow(&self, wanted: &Wanted) -> Result<Lines, Error> {
        let response = self.ask(Method::POST, "/events", wanted).await?;
        Ok(Lines { body: response.into_body(), text: Vec::new() })
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<Response<Body>, Error> {
        let wrong = |error: &dyn std::error::Error| Error::Answer(chain(error));
        let body = serde_json::to_vec(body).map_err(|error| wrong(&error))?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Body::from(body))
            .map_err(|error| wrong(&error))?;
        let response = match &self.0 {
            Way::Socket(home) => {
                let absent = |source| Error::Absent { home: home.path().to_owned(), source };
                send(serve::connect(home.path()).await.map_err(absent)?, request).await?
            }
            Way::Here { router, .. } => match router.clone().oneshot(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            },
        };
        if response.status().is_success() {
            return Ok(response);
        }
        let refusal: Refusal = json(response).await?;
        let class = CLASSES.iter().find(|(_, _, name, _)| *name == refusal.class);
        let class = class.map_or(Class::Internal, |(class, ..)| *class);
        Err(Error::Refused(Failure::new(class, refusal.message, refusal.remedy)))
    }
}

async fn send(stream: UnixStream, request: Request<Body>) -> Result<Response<Body>, Error> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Its failures surface in the exchange.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender.send_request(request).await?.map(Body::new))
}

async fn json<T: DeserializeOwned>(response: Response<Body>) -> Result<T, Error> {
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
    let body = body.map_err(|error| Error::Answer(error.to_string()))?.to_bytes();
    serde_json::from_slice(&body).map_err(|error| {
        let start = String::from_utf8_lossy(body.get(..200).unwrap_or(&body)).into_owned();
        Error::Answer(format!("{error} (status {status}: {start})"))
    })
}

/// Lines of a stream.
#[derive(Debug)]
pub struct Lines {
    body: Body,
    text: Vec<u8>,
}

impl Lines {
    /// The next line; nothing when the daemon ended.
    ///
    /// # Errors
    /// [`Error::Answer`] when it is not a line, or the connection broke.
    pub async fn next(&mut self) -> Result<Option<Line>, Error> {
        loop {
            if let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.text.drain(..=end).collect();
                let line = serde_json::from_slice(&line);
                return line.map(Some).map_err(|error| Error::Answer(error.to_string()));
            }
            if self.text.len() > MAX_LINE {
                return Err(Error::Answer("a line is too long".into()));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(Error::Answer(error.to_string())),
                Some(Ok(frame)) => {
                    if let Some(bytes) = frame.data_ref() {
                        self.text.extend_from_slice(bytes);
                    }
                }
            }
        }
    }
}
