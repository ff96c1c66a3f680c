//! What a service manager passes to the daemon, and what the daemon tells it: sd_listen_fds(3) and
//! sd_notify(3), by what those pages say is on the wire.
//!
//! Which socket is for what shows on the socket itself: all sockets of one unit have one name.

use std::env;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::time::Duration;

use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, getsockname, sendto,
    socket_with, sockopt,
};
use thiserror::Error;
use tokio::net::{TcpListener, UnixListener};

use crate::sys;

/// The first descriptor that is passed.
const FIRST: RawFd = 3;
/// The most that are looked at.
const MAX: RawFd = 16;

/// What was passed cannot be used.
#[derive(Debug, Error)]
pub enum Error {
    /// A descriptor is something else than a listening TCP or Unix socket, or one too many.
    #[error("descriptor {number} that was passed is {what}")]
    Unfit {
        /// Its number.
        number: RawFd,
        /// What it is.
        what: &'static str,
    },
    /// The runtime cannot watch one.
    #[error("a socket that was passed cannot be used")]
    Io(#[from] io::Error),
}

/// The sockets that were passed.
#[derive(Debug, Default)]
pub(super) struct Passed {
    /// For the API and guests.
    pub(super) tcp: Option<TcpListener>,
    /// For the command line.
    pub(super) local: Option<UnixListener>,
}

impl Passed {
    /// Those of this process, if it was started with any. To be called once: they are taken.
    ///
    /// # Errors
    /// [`Error::Unfit`] for what the daemon does not know what to do with.
    pub(super) fn take() -> Result<Self, Error> {
        let number = |name| env::var(name).ok()?.parse::<RawFd>().ok();
        let own = i32::try_from(std::process::id()).ok();
        if own.is_none() || number("LISTEN_PID") != own {
            return Ok(Self::default());
        }
        let count = number("LISTEN_FDS").unwrap_or(0).clamp(0, MAX);
        let mut passed = Self::default();
        for number in FIRST..FIRST.saturating_add(count) {
            let fd = sys::take_inherited(number)?;
            passed.add(number, fd)?;
        }
        Ok(passed)
    }

    fn add(&mut self, number: RawFd, fd: OwnedFd) -> Result<(), Error> {
        let unfit = |what| Error::Unfit { number, what };
        let listens = sockopt::socket_acceptconn(&fd).unwrap_or(false);
        let stream = sockopt::socket_type(&fd).is_ok_and(|kind| kind == SocketType::STREAM);
        if !listens || !stream {
            return Err(unfit("no listening stream socket"));
        }
        rustix::io::ioctl_fionbio(fd.as_fd(), true).map_err(io::Error::from)?;
        let family = getsockname(&fd).map_err(io::Error::from)?.address_family();
        let before = match family {
            AddressFamily::INET | AddressFamily::INET6 => {
                self.tcp.replace(TcpListener::from_std(fd.into())?).is_some()
            }
            AddressFamily::UNIX => self.local.replace(UnixListener::from_std(fd.into())?).is_some(),
            _ => return Err(unfit("neither a TCP nor a Unix socket")),
        };
        if before { Err(unfit("one more of its kind")) } else { Ok(()) }
    }
}

/// Tells the service manager something, if there is one that listens.
pub(super) fn notify(state: &str) {
    let Some(socket) = env::var_os("NOTIFY_SOCKET") else { return };
    let bytes = socket.as_bytes();
    let address = match bytes.strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name),
        None => SocketAddrUnix::new(bytes),
    };
    let sent = address.and_then(|address| {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        sendto(&socket, state.as_bytes(), SendFlags::NOSIGNAL, &address)
    });
    if let Err(error) = sent {
        tracing::warn!(%error, state, "the service manager cannot be told");
    }
}

/// Tells the service manager that the event loop turns, as often as it wants to hear it; never
/// returns.
pub(super) async fn keep_alive() {
    let number = |name| env::var(name).ok()?.parse::<u64>().ok();
    let for_us = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    let Some(us) = number("WATCHDOG_USEC").filter(|us| *us > 0 && for_us) else {
        return std::future::pending().await;
    };
    let mut ticks = tokio::time::interval(Duration::from_micros(us.div_ceil(2)));
    loop {
        ticks.tick().await;
        notify("WATCHDOG=1");
    }
}
