//! What all services of one agent share.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use coppice_agent_protocol::control::Shutdown;
use coppice_agent_protocol::metrics::Metrics;
use tokio::sync::Notify;

use crate::metrics::{self, CpuTime};
use crate::process::Processes;
use crate::settings::Settings;
use crate::watch::Watches;

/// State of the agent; lives on its one thread.
#[derive(Debug)]
pub(crate) struct Agent {
    /// Processes started for the host.
    pub(crate) processes: Rc<Processes>,
    /// Directories watched for the host.
    pub(crate) watches: Watches,
    /// What the host set for requests.
    pub(crate) settings: RefCell<Settings>,
    /// Whether the agent is init (process 1).
    pub(crate) init: bool,
    /// `CLOCK_BOOTTIME` in microseconds when `main` began.
    pub(crate) started_us: u64,
    /// The same when the sockets listened.
    pub(crate) listening_us: Cell<u64>,
    /// The same when requests were served.
    pub(crate) serving_us: Cell<u64>,
    /// The processors' time when metrics were last asked for.
    cpu_time: Cell<CpuTime>,
    shutdown: Cell<Option<Shutdown>>,
    shutdown_asked: Notify,
}

impl Agent {
    pub(crate) fn new(init: bool, started_us: u64) -> Self {
        Self {
            processes: Rc::default(),
            watches: Watches::default(),
            settings: RefCell::default(),
            init,
            started_us,
            listening_us: Cell::new(0),
            serving_us: Cell::new(0),
            cpu_time: Cell::default(),
            shutdown: Cell::new(None),
            shutdown_asked: Notify::new(),
        }
    }

    /// What the guest uses; see [`Metrics`].
    pub(crate) async fn metrics(&self) -> io::Result<Metrics> {
        let since = self.cpu_time.get();
        let measured = tokio::task::spawn_blocking(move || metrics::measure(since)).await;
        let (metrics, now) = measured.map_err(io::Error::other)??;
        self.cpu_time.set(now);
        Ok(metrics)
    }

    /// Asks for the end. The first request decides how.
    pub(crate) fn ask_shutdown(&self, shutdown: Shutdown) {
        if self.shutdown.get().is_none() {
            self.shutdown.set(Some(shutdown));
            self.processes.close();
        }
        self.shutdown_asked.notify_one();
    }

    /// Waits until the end is asked for.
    pub(crate) async fn shutdown_asked(&self) -> Shutdown {
        loop {
            if let Some(shutdown) = self.shutdown.get() {
                return shutdown;
            }
            self.shutdown_asked.notified().await;
        }
    }
}
