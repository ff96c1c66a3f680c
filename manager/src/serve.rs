//! `coppice serve`: the daemon, from its sockets to its end.

mod local;
mod systemd;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::{Router, middleware};
use thiserror::Error;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;

use crate::api::{self, Api, Limits, admin};
use crate::fleet::{self, Adopted, Fleet, Settings};
use crate::gateway;
use crate::listen::{Door, Meters};
use crate::trace;

pub use local::{Error as LocalError, Place, connect};
pub use systemd::Error as PassedError;

/// Connections to the administrator's interface at a time: they are not among those of clients,
/// who could lock the administrator out otherwise.
const LOCAL_CONNECTIONS: usize = 256;

/// Failures of the daemon's start.
#[derive(Debug, Error)]
pub enum Error {
    /// The address cannot be had.
    #[error("cannot listen on {address}")]
    Listen {
        /// As asked for.
        address: SocketAddr,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The place in the home cannot be had.
    #[error("there can be no daemon here")]
    Local(#[from] LocalError),
    /// The sockets that a service manager passed cannot be used.
    #[error("the service manager's sockets do not fit")]
    Passed(#[from] PassedError),
    /// The sandboxes cannot be managed.
    #[error("the sandboxes cannot be managed")]
    Fleet(#[from] fleet::Error),
}

/// How the daemon is reached.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where it listens, unless a service manager passes a socket.
    pub listen: SocketAddr,
    /// The domain that sandboxes are told to be in; from the address when absent.
    pub domain: Option<String>,
    /// How it runs sandboxes.
    pub settings: Settings,
    /// How fast tenants may ask.
    pub limits: Limits,
    /// The most connections at a time.
    pub max_connections: usize,
}

/// A daemon that listens.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    local: UnixListener,
    address: SocketAddr,
    api: Api,
    door: Door,
    local_door: Door,
    adopted: Adopted,
    /// Let go last.
    place: Place,
}

impl Server {
    /// Takes over what an earlier daemon left, and listens.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn start(options: Options) -> Result<Self, Error> {
        let passed = systemd::Passed::take()?;
        // The place first: a second daemon must not touch the sandboxes of the first. Who
        // connects from now on waits until they are found.
        let place = Place::take(options.settings.home.path()).await?;
        let local = passed.local.map_or_else(|| place.listen(), Ok)?;
        let address = options.listen;
        let failed = |source| Error::Listen { address, source };
        let listener = match passed.tcp {
            Some(listener) => listener,
            None => TcpListener::bind(address).await.map_err(failed)?,
        };
        let address = listener.local_addr().map_err(failed)?;
        let fleet = Fleet::open(options.settings)?;
        let adopted = fleet.adopt().await?;
        let domain = options.domain.unwrap_or_else(|| format!("localhost:{}", address.port()));
        let meters = Meters { open: fleet.connections(), refused: fleet.refused("connections") };
        let local_door = Door::new(LOCAL_CONNECTIONS, meters.clone());
        let door = Door::new(options.max_connections, meters);
        let api = Api::new(fleet, domain.into(), options.limits);
        Ok(Self { listener, local, address, api, door, local_door, adopted, place })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What became of the sandboxes of before.
    pub fn adopted(&self) -> &Adopted {
        &self.adopted
    }

    /// Whether anybody can use it.
    ///
    /// # Errors
    /// The registry's.
    pub fn has_keys(&self) -> Result<bool, Error> {
        let keys = self.api.fleet.registry().keys().map_err(fleet::Error::from)?;
        Ok(!keys.is_empty())
    }

    /// Serves until `stop` comes, then lets the requests under way finish. Sandboxes run on.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) {
        let Self { listener, local, api, door, local_door, place, .. } = self;
        let fleet = Arc::clone(&api.fleet);
        let expiry = tokio::spawn(Arc::clone(&fleet).expire());
        let warm = tokio::spawn(Arc::clone(&fleet).keep_warm());
        let samples = tokio::spawn(Arc::clone(&fleet).sample());
        let alive = tokio::spawn(systemd::keep_alive());
        let (ending, ended) = watch::channel(false);
        tokio::spawn(async move {
            stop.await;
            systemd::notify("STOPPING=1");
            ending.send_replace(true);
        });
        let app = app(api);
        let admin = admin::router(Arc::clone(&fleet), ended.clone())
            .layer(middleware::from_fn(trace::logged))
            .layer(middleware::from_fn(trace::identified));
        systemd::notify("READY=1");
        tokio::join!(
            door.serve(listener, app, became(ended.clone())),
            local_door.serve(local, admin, became(ended)),
        );
        for task in [expiry, samples, alive] {
            task.abort();
        }
        fleet.close_pool();
        // It only fails by a panic, of which there is word already.
        let _ = warm.await;
        fleet.empty_pool().await;
        drop(place);
    }
}

/// Waits until the daemon is to end.
async fn became(mut ending: watch::Receiver<bool>) {
    // Without its sender there is no daemon any more either.
    let _ = ending.wait_for(|ending| *ending).await;
}

fn app(api: Api) -> Router {
    let forward = middleware::from_fn_with_state(Arc::clone(&api.fleet), gateway::guests_first);
    let api = api::router(api).layer(middleware::from_fn(trace::logged));
    // Around the whole API: a guest's path may be one of the API's.
    let all = Router::new().fallback_service(api).layer(forward);
    all.layer(middleware::from_fn(trace::identified))
}

#[cfg(test)]
mod scale;
