//! From start to end of the agent's life.

use std::io;
use std::rc::Rc;

use coppice_agent_protocol::ReadyLine;
use coppice_agent_protocol::control::{Shutdown, ShutdownMode};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::LocalSet;

use crate::agent::Agent;
use crate::net::{self, Endpoint, Listener};
use crate::options::Options;
use crate::{boot, clock, control, envd, proxy, server, shutdown};

/// Helper threads for file systems. More work waits; if all are stuck in a dead file system, only
/// file requests are.
const FILE_THREADS: usize = 4;

/// Stack of a helper thread.
const THREAD_STACK: usize = 256 * 1024;

/// A helper thread without work ends after this time.
const THREAD_IDLE: std::time::Duration = std::time::Duration::from_secs(2);

/// Why the agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No runtime.
    #[error("starting the event loop: {0}")]
    Runtime(io::Error),
    /// No signals.
    #[error("watching signals: {0}")]
    Signals(io::Error),
    /// A port or path cannot be listened on.
    #[error("listening on {endpoint}: {source}")]
    Listen {
        /// Where.
        endpoint: String,
        /// Why not.
        source: io::Error,
    },
    /// There is vsock, but no way from it to the host.
    #[error("vsock leads to no host: the kernel lacks virtio-vsock, or the machine has no device")]
    NoHost,
    /// The machine does not go down.
    #[error("ending the machine: {0}")]
    Reboot(io::Error),
}

/// Whether this process is init.
#[must_use]
pub fn is_init() -> bool {
    std::process::id() == 1
}

/// Runs the agent until a signal or the host ends it. As init it does not return but ends the
/// machine.
///
/// # Errors
/// When it cannot listen, or the machine cannot be ended.
pub fn run(options: &Options) -> Result<(), RunError> {
    let agent = Rc::new(Agent::new(is_init(), clock::boottime_us()));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(FILE_THREADS)
        .thread_stack_size(THREAD_STACK)
        .thread_keep_alive(THREAD_IDLE)
        .build()
        .map_err(RunError::Runtime)?;
    let tasks = LocalSet::new();
    let end = tasks.block_on(&runtime, live(Rc::clone(&agent), options))?;
    // Helper threads stuck in a file system must not keep the agent.
    runtime.shutdown_background();
    match end {
        Some(mode) => Err(RunError::Reboot(shutdown::end_machine(mode))),
        None => Ok(()),
    }
}

/// Serves until the end; how the machine ends, if it does.
async fn live(agent: Rc<Agent>, options: &Options) -> Result<Option<ShutdownMode>, RunError> {
    let children = signal(SignalKind::child()).map_err(RunError::Signals)?;
    let envd = listen(&options.listen)?;
    let control = listen(&options.control)?;
    let proxy = options.proxy.as_ref().map(listen).transpose()?;
    agent.listening_us.set(clock::boottime_us());
    // The host may connect from here on; it is answered when the userland is prepared. Meanwhile
    // the connection below is made.
    let ready =
        ReadyLine { version: env!("CARGO_PKG_VERSION").to_owned(), uptime_us: agent.started_us };
    let host = options.ready.clone();
    tokio::task::spawn_local(async move {
        // A host that does not wait for the agent refuses; that is its choice.
        let _ = net::tell_host(&host, &ready.encode()).await;
    });
    tokio::task::yield_now().await;
    if agent.init {
        boot::prepare();
    }
    if matches!(options.listen, Endpoint::Vsock(_)) && !net::has_host() {
        return Err(RunError::NoHost);
    }
    agent.serving_us.set(clock::boottime_us());
    tokio::task::spawn_local(reap(Rc::clone(&agent), children));
    tokio::task::spawn_local(server::serve(envd, Rc::clone(&agent), envd::route));
    tokio::task::spawn_local(server::serve(control, Rc::clone(&agent), control::route));
    if let Some(proxy) = proxy {
        tokio::task::spawn_local(proxy::serve(proxy));
    }
    obey_signals(&agent)?;

    let how = agent.shutdown_asked().await;
    if agent.init {
        shutdown::end_processes(how, &agent.processes).await;
        return Ok(Some(how.mode));
    }
    agent.processes.terminate();
    let _ = tokio::time::timeout(how.grace(), agent.processes.all_ended()).await;
    Ok(None)
}

fn listen(endpoint: &Endpoint) -> Result<Listener, RunError> {
    Listener::bind(endpoint)
        .map_err(|source| RunError::Listen { endpoint: endpoint.to_string(), source })
}

/// Reaps whenever a child has ended. Children that end before the first wait are not missed: the
/// signal was watched before anything could start.
async fn reap(agent: Rc<Agent>, mut children: Signal) {
    loop {
        agent.processes.reap();
        if children.recv().await.is_none() {
            return;
        }
    }
}

/// Signals that end the agent. For init they are those of the usual `reboot` and `poweroff`
/// commands, and Ctrl-Alt-Del.
fn obey_signals(agent: &Rc<Agent>) -> Result<(), RunError> {
    let modes = [
        (SignalKind::interrupt(), ShutdownMode::Reboot),
        (SignalKind::terminate(), ShutdownMode::Reboot),
        (SignalKind::user_defined1(), ShutdownMode::Poweroff),
        (SignalKind::user_defined2(), ShutdownMode::Poweroff),
    ];
    for (kind, mode) in modes {
        let mut signals = signal(kind).map_err(RunError::Signals)?;
        let agent = Rc::clone(agent);
        tokio::task::spawn_local(async move {
            if signals.recv().await.is_some() {
                agent.ask_shutdown(Shutdown { mode, grace_ms: Shutdown::DEFAULT_GRACE_MS });
            }
        });
    }
    Ok(())
}
