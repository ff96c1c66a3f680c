//! `coppice key`: API keys of the daemon.

use coppice_manager::failure::{Class, Failure, chain};
use coppice_manager::home::Home;
use coppice_manager::registry::{self, Quota, Registry, Tenant};
use coppice_manager::store::Store;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::table::{age, columns};

/// Explains what a tenant is.
pub(super) const HELP: &str = "\
A key belongs to a tenant, and tenants do not see each other's sandboxes. Keys are kept as hashes:
a key is shown once, when it is made. A removed key is refused at once. Limits are the tenant's:
those of a new key go before those that were set with an earlier one.

Examples:
  export E2B_API_KEY=$(coppice key create)
  coppice key create --tenant team-a --json
  coppice key create --tenant team-a --max-sandboxes 20 --max-memory 8192
  coppice key rm 1f2e3d4c";

/// Arguments of `coppice key`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Make a key and print it; it cannot be had again
    Create {
        /// Whose it is
        #[arg(long, value_name = "NAME", default_value = "default")]
        tenant: String,
        /// The most sandboxes, running and paused, of the tenant
        #[arg(long, value_name = "N")]
        max_sandboxes: Option<u64>,
        /// The most memory of those that are not paused
        #[arg(long, value_name = "MIB")]
        max_memory: Option<u64>,
        /// The most vCPUs of those that are not paused
        #[arg(long, value_name = "N")]
        max_vcpus: Option<u64>,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// List the keys, by the short names that say nothing about them
    Ls {
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
    /// Remove keys
    Rm {
        /// Short names, as listed
        #[arg(required = true, value_name = "KEY")]
        keys: Vec<String>,
    },
}

/// Makes, lists or removes keys; 0, or the exit code of the failure.
pub(super) fn run(args: &Args) -> u8 {
    let json = match args.command {
        Command::Create { json, .. } | Command::Ls { json } => json,
        Command::Rm { .. } => false,
    };
    match attempt(&args.command) {
        Ok(text) => super::print(&text),
        Err(failure) => super::fail_as(&failure, json),
    }
}

fn attempt(command: &Command) -> Result<String, Failure> {
    let home = Home::from_env();
    // Makes the directory if need be.
    Store::open(&home).map_err(|error| error.failure())?;
    let registry = Registry::open(home.path()).map_err(|error| failed(&error))?;
    match command {
        Command::Create { tenant, max_sandboxes, max_memory, max_vcpus, json } => {
            let tenant = Tenant::new(tenant).map_err(|error| failed(&error))?;
            let (sandboxes, memory_mib, vcpus) = (*max_sandboxes, *max_memory, *max_vcpus);
            let quota = Quota { sandboxes, memory_mib, vcpus };
            if quota != Quota::default() {
                registry.set_quota(&tenant, quota).map_err(|error| failed(&error))?;
            }
            let new = registry.create_key(tenant).map_err(|error| failed(&error))?;
            Ok(if *json { format!("{}\n", as_json(&new)?) } else { format!("{}\n", new.key) })
        }
        Command::Ls { json } => {
            let keys = registry.keys().map_err(|error| failed(&error))?;
            Ok(if *json { format!("{}\n", as_json(&keys)?) } else { as_text(&keys) })
        }
        Command::Rm { keys } => {
            for key in keys {
                if !registry.remove_key(key).map_err(|error| failed(&error))? {
                    let message = format!("there is no key {key}");
                    return Err(Failure::new(Class::NotFound, message, "see `coppice key ls`"));
                }
            }
            Ok(String::new())
        }
    }
}

fn as_json(value: &impl serde::Serialize) -> Result<String, Failure> {
    serde_json::to_string(value)
        .map_err(|error| Failure::new(Class::Internal, error, "report it as a fault"))
}

fn as_text(keys: &[registry::ApiKey]) -> String {
    if keys.is_empty() {
        return "There are no keys.\n".into();
    }
    let mut rows = vec![["KEY", "TENANT", "CREATED"].map(str::to_owned).to_vec()];
    let now = SystemTime::now();
    rows.extend(keys.iter().map(|key| {
        let created = UNIX_EPOCH + Duration::from_millis(key.created_ms);
        vec![key.id.clone(), key.tenant.as_str().to_owned(), age(created, now)]
    }));
    columns(&rows, &[])
}

/// A failure of the registry, with what to do about it.
pub(super) fn failed(error: &registry::Error) -> Failure {
    let (class, remedy) = match error {
        registry::Error::Tenant => (Class::Usage, "choose another --tenant"),
        registry::Error::Version { .. } => (Class::StoreDamaged, "use the newer program"),
        _ => (Class::Host, "see that COPPICE_HOME can be written and has space"),
    };
    Failure::new(class, chain(error), remedy)
}
