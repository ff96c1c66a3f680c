//! `coppice serve`: the daemon, from its address to its end.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::{Router, middleware};
use thiserror::Error;
use tokio::net::TcpListener;

use crate::api::{self, Api, Limits};
use crate::fleet::{self, Adopted, Fleet, Settings};
use crate::gateway;
use crate::listen::{Door, Meters};

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
    /// The sandboxes cannot be managed.
    #[error("the sandboxes cannot be managed")]
    Fleet(#[from] fleet::Error),
}

/// How the daemon is reached.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where it listens.
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
    address: SocketAddr,
    api: Api,
    door: Door,
    adopted: Adopted,
}

impl Server {
    /// Takes over what an earlier daemon left, and listens.
    ///
    /// # Errors
    /// [`Error::Listen`] or [`Error::Fleet`].
    pub async fn start(options: Options) -> Result<Self, Error> {
        let address = options.listen;
        let failed = |source| Error::Listen { address, source };
        // The address first: a second daemon must not touch the sandboxes of the first.
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let fleet = Fleet::open(options.settings)?;
        let adopted = fleet.adopt().await?;
        let domain = options.domain.unwrap_or_else(|| format!("localhost:{}", address.port()));
        let meters = Meters { open: fleet.connections(), refused: fleet.refused("connections") };
        let door = Door::new(options.max_connections, meters);
        let api = Api::new(fleet, domain.into(), options.limits);
        Ok(Self { listener, address, api, door, adopted })
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
        let fleet = Arc::clone(&self.api.fleet);
        let expiry = tokio::spawn(Arc::clone(&fleet).expire());
        let warm = tokio::spawn(Arc::clone(&fleet).keep_warm());
        let samples = tokio::spawn(Arc::clone(&fleet).sample());
        let app = app(self.api);
        self.door.serve(self.listener, app, stop).await;
        expiry.abort();
        samples.abort();
        fleet.close_pool();
        // It only fails by a panic, of which there is word already.
        let _ = warm.await;
        fleet.empty_pool().await;
    }
}

fn app(api: Api) -> Router {
    let forward = middleware::from_fn_with_state(Arc::clone(&api.fleet), gateway::guests_first);
    let api = api::router(api);
    // Around the whole API: a guest's path may be one of the API's.
    Router::new().fallback_service(api).layer(forward)
}

#[cfg(test)]
mod scale;
