//! Connections of clients: how many there may be at a time, how long one may be silent between
//! requests, and their end when the daemon ends.
//!
//! A connection has [`HEAD_TIME`] from its beginning, or from the end of an answer, until the head
//! of its next request is whole. What comes after a head is bounded where it is known what it is:
//! bodies of the API in [`crate::api`]; streams of guests are not, for they may be silent for
//! hours. A client that vanished from the network is found out by TCP's own probes.

use std::collections::HashMap;
use std::future::{Ready, ready};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::serve::Listener;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::{IntCounter, IntGauge};
use rustix::net::sockopt;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::time::timeout;
use tower::ServiceExt as _;

/// Time for a request's head, and for a connection that is kept without being used.
const HEAD_TIME: Duration = Duration::from_secs(75);
/// The most bytes of a head.
const MAX_HEAD: usize = 64 * 1024;
/// How long requests under way may take when the daemon ends.
const GRACE: Duration = Duration::from_secs(30);
/// The part of all connections that one address may have.
const PEER_PART: usize = 4;
/// When TCP begins to ask whether a silent peer is still there, how often, and how many times.
const PROBE_AFTER: Duration = Duration::from_secs(60);
const PROBE_EVERY: Duration = Duration::from_secs(15);
const PROBES: u32 = 4;

/// What a client gets that there is no place for.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
    content-length: 72\r\nretry-after: 1\r\nconnection: close\r\n\r\n\
    {\"code\":503,\"message\":\"there are too many connections: try again later\"}";

/// Who is at the other end of a connection; an extension of each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Whoever has this address.
    Tcp(SocketAddr),
    /// A process of this host.
    Unix,
}

impl From<SocketAddr> for Peer {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }
}

impl From<tokio::net::unix::SocketAddr> for Peer {
    fn from(_: tokio::net::unix::SocketAddr) -> Self {
        Self::Unix
    }
}

impl Peer {
    /// What one client cannot choose freely: an address, of IPv6 the network's part. Nothing for
    /// this host, which a proxy for many clients may be on.
    pub fn network(self) -> Option<IpAddr> {
        let Self::Tcp(address) = self else { return None };
        match address.ip().to_canonical() {
            ip if ip.is_loopback() => None,
            IpAddr::V6(ip) => {
                Some(Ipv6Addr::from_bits(ip.to_bits() & (u128::from(u64::MAX) << 64)).into())
            }
            ip => Some(ip),
        }
    }
}

/// What is counted about connections.
#[derive(Debug, Clone)]
pub struct Meters {
    /// Those that are open.
    pub open: IntGauge,
    /// Those that there was no place for.
    pub refused: IntCounter,
}

/// Where connections are let in, by any number of listeners.
#[derive(Debug, Clone)]
pub struct Door {
    places: Arc<Places>,
    head_time: Duration,
    grace: Duration,
}

#[derive(Debug)]
struct Places {
    most: usize,
    taken: Mutex<Taken>,
    meters: Meters,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    by_network: HashMap<IpAddr, usize>,
}

/// The place of a connection, free again when all copies are dropped; an extension of each
/// request, for what goes on after the connection was upgraded.
#[derive(Debug, Clone)]
pub struct Place(#[expect(dead_code, reason = "it is there to be dropped")] Arc<Held>);

#[derive(Debug)]
struct Held {
    places: Arc<Places>,
    network: Option<IpAddr>,
}

impl Places {
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let network = peer.network();
        let mut taken = self.taken();
        let own = network.and_then(|network| taken.by_network.get(&network)).copied();
        let per_network = self.most.div_ceil(PEER_PART);
        if taken.all >= self.most || own.is_some_and(|own| own >= per_network) {
            self.meters.refused.inc();
            return None;
        }
        taken.all += 1;
        if let Some(network) = network {
            *taken.by_network.entry(network).or_default() += 1;
        }
        self.meters.open.inc();
        Some(Place(Arc::new(Held { places: Arc::clone(self), network })))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        taken.all = taken.all.saturating_sub(1);
        if let Some(network) = self.network
            && let Some(own) = taken.by_network.get_mut(&network)
        {
            *own = own.saturating_sub(1);
            if *own == 0 {
                taken.by_network.remove(&network);
            }
        }
        self.places.meters.open.dec();
    }
}

/// How far the daemon's end is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It serves.
    Serving,
    /// Requests under way are finished.
    Finishing,
    /// They took too long.
    Over,
}

impl Door {
    /// A door for so many connections at a time; one address may have a quarter of them.
    pub fn new(connections: usize, meters: Meters) -> Self {
        let places = Places { most: connections, taken: Mutex::default(), meters };
        Self { places: Arc::new(places), head_time: HEAD_TIME, grace: GRACE }
    }

    /// Takes connections from a listener until `stop` comes, and then waits for the requests
    /// under way, for a while.
    pub async fn serve<L>(&self, mut listener: L, app: Router, stop: impl Future<Output = ()>)
    where
        L: Listener<Io: AsFd, Addr: Into<Peer>>,
    {
        let mut stop = pin!(stop);
        let (stage, watched) = watch::channel(Stage::Serving);
        loop {
            let (mut io, address) = tokio::select! {
                accepted = listener.accept() => accepted,
                () = &mut stop => break,
            };
            let peer = address.into();
            match self.places.take(peer) {
                Some(place) => {
                    tune(&io);
                    let (app, watched) = (app.clone(), watched.clone());
                    let head_time = self.head_time;
                    tokio::spawn(connection(io, (peer, place), app, head_time, watched));
                }
                None => refuse(&mut io).await,
            }
        }
        // Nobody else is to get in.
        drop((listener, watched));
        // Without connections there is nobody to tell, which is no failure.
        let _ = stage.send(Stage::Finishing);
        if timeout(self.grace, stage.closed()).await.is_err() {
            let _ = stage.send(Stage::Over);
            stage.closed().await;
        }
    }
}

async fn connection<I>(
    io: I,
    (peer, place): (Peer, Place),
    app: Router,
    head_time: Duration,
    mut stage: watch::Receiver<Stage>,
) where
    I: tokio::io::AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(place.clone());
        if let Peer::Tcp(address) = peer {
            request.extensions_mut().insert(ConnectInfo(address));
        }
        app.clone().oneshot(request)
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(head_time).max_buf_size(MAX_HEAD);
    let mut served = pin!(builder.serve_connection(TokioIo::new(io), service).with_upgrades());
    loop {
        tokio::select! {
            // A client may do anything with its connection; there is nobody to tell.
            _ended = served.as_mut() => return,
            told = stage.changed() => match told.map(|()| *stage.borrow_and_update()) {
                Ok(Stage::Serving) => {}
                Ok(Stage::Finishing) => served.as_mut().graceful_shutdown(),
                Ok(Stage::Over) | Err(_) => return,
            },
        }
    }
}

/// Has small pieces sent at once, and vanished peers found out. What a socket does not know is
/// left as it is.
fn tune(io: &impl AsFd) {
    let _ = sockopt::set_tcp_nodelay(io, true);
    let _ = sockopt::set_socket_keepalive(io, true);
    let _ = sockopt::set_tcp_keepidle(io, PROBE_AFTER);
    let _ = sockopt::set_tcp_keepintvl(io, PROBE_EVERY);
    let _ = sockopt::set_tcp_keepcnt(io, PROBES);
}

/// Tells a client that there is no place for it, if that can be done without waiting for it.
async fn refuse(io: &mut (impl AsyncWrite + Unpin)) {
    let now: Ready<()> = ready(());
    tokio::select! {
        biased;
        _written = io.write_all(FULL) => {}
        () = now => {}
    }
}

#[cfg(test)]
mod tests;
