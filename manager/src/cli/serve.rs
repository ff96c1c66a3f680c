//! `coppice serve`: the daemon that E2B's clients use.

use std::net::SocketAddr;
use std::path::PathBuf;

use coppice_manager::api::Limits;
use coppice_manager::failure::{Class, Failure, chain};
use coppice_manager::fleet::Settings;
use coppice_manager::home::Home;
use coppice_manager::serve::{Error, LocalError, Options, Server};
use coppice_manager::vmm;
use tracing_subscriber::EnvFilter;

use super::terminal::Signals;

/// Shown by `-h`.
pub(super) const HELP: &str = "\
Point an E2B client at it:
  export E2B_API_KEY=$(coppice key create)
  export E2B_API_URL=http://127.0.0.1:49380 E2B_SANDBOX_URL=http://127.0.0.1:49380
  python3 -c 'from e2b import Sandbox; print(Sandbox.create().commands.run(\"uname -a\").stdout)'

Sandboxes outlive the daemon: they run on when it ends, and it finds them again when it starts.
What is logged is chosen by COPPICE_LOG: error, warn, info (as without it), debug. Every request has
an ID, its own X-Request-Id or a new one: in the log, on the answer, and in `coppice logs`.";

/// Arguments of `coppice serve`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Address to listen on; anybody who reaches it can try API keys
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:49380")]
    listen: SocketAddr,
    /// Domain of the sandboxes' own hosts, PORT-ID.DOMAIN [default: localhost:PORT]
    #[arg(long, value_name = "DOMAIN")]
    domain: Option<String>,
    /// The most sandboxes, running and paused, of each tenant
    #[arg(long, value_name = "N", default_value_t = 1000)]
    max_sandboxes: usize,
    /// Requests of each tenant per second; twice as many may come at once
    #[arg(long, value_name = "N", default_value_t = 500)]
    max_requests: u32,
    /// Sandboxes that each tenant may make per second; ten times as many may come at once
    #[arg(long, value_name = "N", default_value_t = 100)]
    max_creates: u32,
    /// The most connections at a time; one address may have a quarter of them
    #[arg(long, value_name = "N", default_value_t = 4096)]
    max_connections: usize,
    /// Memory in MiB that new sandboxes leave free on the host
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    reserve: u64,
    /// How the log is written
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// The coppice-vmm program [default: COPPICE_VMM, else the one next to this program]
    #[arg(long, value_name = "PATH")]
    vmm: Option<PathBuf>,
}

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum LogFormat {
    /// A line for people
    Text,
    /// A JSON object per line
    Json,
}

/// Serves until a signal asks it to end.
pub(super) async fn run(args: Args) -> u8 {
    match attempt(args).await {
        Ok(()) => 0,
        Err(failure) => super::fail(&failure),
    }
}

async fn attempt(args: Args) -> Result<(), Failure> {
    let filter = EnvFilter::try_from_env("COPPICE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Another one that is set already does as well.
    let _ = match args.log_format {
        LogFormat::Text => log.try_init(),
        LogFormat::Json => log.json().try_init(),
    };
    let mut signals = Signals::listen()
        .map_err(|e| Failure::new(Class::Host, e, "see what `coppice doctor` says"))?;
    let program = vmm::locate(args.vmm).map_err(|error| {
        Failure::new(Class::ProgramMissing, chain(&error), "name coppice-vmm with --vmm")
    })?;
    let settings = Settings {
        home: Home::from_env(),
        vmm: program,
        max_per_tenant: args.max_sandboxes,
        reserve: args.reserve.saturating_mul(1 << 20),
    };
    let options = Options {
        listen: args.listen,
        domain: args.domain,
        settings,
        limits: Limits { requests: args.max_requests, creates: args.max_creates },
        max_connections: args.max_connections,
    };
    let server = Server::start(options).await.map_err(|error| failed(&error))?;
    let (address, adopted) = (server.address(), server.adopted());
    tracing::info!(
        running = adopted.running,
        paused = adopted.paused,
        removed = adopted.removed,
        lost = adopted.lost.len(),
        "listening on http://{address}"
    );
    // For whoever started it with port 0, or waits until it listens.
    if super::print(&format!("http://{address}\n")) != 0 {
        tracing::warn!("nobody reads where the daemon listens");
    }
    if !server.has_keys().map_err(|error| failed(&error))? {
        tracing::warn!("there is no API key yet: make one with `coppice key create`");
    }
    let stop = async move {
        let signal = signals.next().await;
        tracing::info!(signal, "ending; sandboxes run on");
    };
    server.run(stop).await;
    Ok(())
}

fn failed(error: &Error) -> Failure {
    let (class, remedy) = match error {
        Error::Listen { .. } => (Class::Host, "choose another --listen, or end who has it"),
        Error::Local(LocalError::Served { .. }) => {
            (Class::Conflict, "use it, or give this one another COPPICE_HOME")
        }
        Error::Local(LocalError::Held { .. }) => {
            (Class::Conflict, "see what has become of that process")
        }
        Error::Local(LocalError::Io { .. }) => {
            (Class::Host, "point COPPICE_HOME to a directory this user can write")
        }
        Error::Passed(_) => (Class::Usage, "pass at most one TCP and one Unix socket that listen"),
        Error::Fleet(_) => (Class::StoreDamaged, "see what `coppice fsck` says"),
    };
    Failure::new(class, chain(error), remedy)
}
