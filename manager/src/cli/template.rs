//! `coppice template`: what the daemon makes sandboxes from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coppice_manager::failure::{Class, Failure, chain};
use coppice_manager::home::Home;
use coppice_manager::registry::{
    DEFAULT_TAG, Registry, Template, TemplateKind, Tenant, is_tag, now_ms,
};
use coppice_manager::rootfs;
use coppice_manager::sandbox::Config;
use coppice_manager::store::{GuestSettings, Id, Name, NewImage, Store};
use coppice_manager::template::{self, Commands, Recipe};
use coppice_manager::{vmm, workdir};
use serde_json::json;

use super::command::seconds;
use super::key::failed as registry_failed;
use super::table::{age, columns};

/// Explains what a template is.
pub(super) const HELP: &str = "\
A template is a machine that was booted, had its start command started, and was kept once its ready
command succeeded: a sandbox made from it begins there, with everything running. Building a name
again replaces it for new sandboxes; those made from the old one are not touched. Templates of one
name with different tags, such as web:v1 and web:v2, are there side by side; the name alone means
the one with the tag 'default', else the newest.

An image has coppice-agent as /sbin/init. A directory needs no agent: its files become the root file
system of the template's machine, and the agent is put beside them. It needs /bin/bash.

Examples:
  coppice template build web --start 'python3 -m http.server 8000' \\
      --ready 'curl -s localhost:8000 > /dev/null'
  coppice template build big:v2 --cpus 4 --memory 4096
  coppice template build mine --image ./rootfs/
  coppice template ls
  coppice template rm web";

/// Arguments of `coppice template`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Boot an image, bring it to where it is useful, and keep its state
    Build(Box<Build>),
    /// List the templates
    Ls {
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
    /// Remove templates; sandboxes and snapshots made from them stay
    Rm {
        /// Names, names with tags, or IDs
        #[arg(required = true, value_name = "TEMPLATE")]
        templates: Vec<String>,
        /// Whose they are; without it, everybody's
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
    },
}

#[derive(Debug, clap::Args)]
struct Build {
    /// Its name, and its tag if it has another than `default`
    #[arg(value_name = "NAME[:TAG]")]
    name: Tagged,
    /// Root file system: a name in COPPICE_HOME/images, or the path of an image or a directory, with
    /// a slash
    #[arg(long, value_name = "NAME|PATH", default_value = "base")]
    image: String,
    /// Kernel: a name in COPPICE_HOME/kernels, or a path with a slash
    #[arg(long, value_name = "NAME|PATH", default_value = "agent")]
    kernel: String,
    /// Guest memory in MiB, at least 64
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    memory: u32,
    /// Number of virtual CPUs, 1 to 8
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u8).range(1..=8))]
    cpus: u8,
    /// Shell command to start, which runs on in every sandbox
    #[arg(long, value_name = "COMMAND")]
    start: Option<String>,
    /// Shell command that succeeds when the machine is ready
    #[arg(long, value_name = "COMMAND")]
    ready: Option<String>,
    /// How many seconds it may take to be ready
    #[arg(long, value_name = "SECS", value_parser = seconds, default_value = "300")]
    ready_timeout: Duration,
    /// Who may use it; without it, everybody
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    /// The coppice-vmm program [default: COPPICE_VMM, else the one next to this program]
    #[arg(long, value_name = "PATH")]
    vmm: Option<PathBuf>,
}

/// A template's name and tag.
#[derive(Debug, Clone)]
struct Tagged {
    name: Name,
    tag: String,
}

impl FromStr for Tagged {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, tag) = text.split_once(':').unwrap_or((text, DEFAULT_TAG));
        let tagged = Self { name: name.parse()?, tag: tag.to_owned() };
        if is_tag(tag) {
            Ok(tagged)
        } else {
            Err("a tag has letters, digits, '_', '.', '-'".into())
        }
    }
}

/// Builds, lists or removes templates; 0, or the exit code of the failure.
pub(super) async fn run(args: Args) -> u8 {
    let (json, done) = match args.command {
        Command::Build(args) => (args.json, build(&args).await),
        Command::Ls { json } => (json, list(json)),
        Command::Rm { templates, tenant } => (false, remove(&templates, tenant.as_deref())),
    };
    match done {
        Ok(text) => super::print(&text),
        Err(failure) => super::fail_as(&failure, json),
    }
}

fn open() -> Result<(Home, Store, Registry), Failure> {
    let home = Home::from_env();
    let store = Store::open(&home).map_err(|error| error.failure())?;
    let registry = Registry::open(home.path()).map_err(|error| registry_failed(&error))?;
    Ok((home, store, registry))
}

fn tenant_of(name: Option<&str>) -> Result<Option<Tenant>, Failure> {
    name.map(Tenant::new).transpose().map_err(|error| registry_failed(&error))
}

async fn build(args: &Build) -> Result<String, Failure> {
    let (home, store, registry) = open()?;
    let tenant = tenant_of(args.tenant.as_deref())?;
    let missing = |class, error: &dyn std::fmt::Display| {
        Failure::new(class, error, "see what COPPICE_HOME has")
    };
    let program = vmm::locate(args.vmm.clone()).map_err(|error| {
        Failure::new(Class::ProgramMissing, chain(&error), "name coppice-vmm with --vmm")
    })?;
    let kernel = home.kernel(&args.kernel).map_err(|e| missing(Class::KernelMissing, &e))?;
    let image = home.image(&args.image).map_err(|e| missing(Class::ImageMissing, &e))?;
    // Kept until the template stands on it.
    let own = image.is_dir().then(|| image_of(&image, &home, &store)).transpose()?;
    let config = Config {
        vmm: program,
        kernel,
        image: own.as_ref().map_or(image, |own| own.path().to_owned()),
        memory_mib: args.memory,
        vcpus: args.cpus,
        append: own.as_ref().map(|_| rootfs::KERNEL_OPTION.to_owned()),
        scratch: home.path().to_owned(),
        runtime: workdir::base(),
        boot_timeout: Duration::from_secs(120),
    };
    let (start, ready) = (args.start.clone(), args.ready.clone());
    let commands = Commands { start, ready, ready_timeout: args.ready_timeout };
    let recipe = Recipe { config, commands, labels: BTreeMap::new() };
    let built = template::build(&store, &recipe).await;
    drop(own);
    if built.is_err() {
        // The image of a directory. Whatever cannot be removed now is removed some other time.
        let _ = store.collect();
    }
    let checkpoint = built.map_err(build_failed)?;
    let new = Template {
        id: checkpoint.to_string(),
        tenant,
        kind: TemplateKind::Template,
        name: Some(args.name.name.to_string()),
        checkpoint,
        sandbox: None,
        tags: vec![args.name.tag.clone()],
        defaults: GuestSettings::default(),
        created_ms: now_ms(),
    };
    let replaced = registry.replace_template(&new).map_err(|error| registry_failed(&error))?;
    for old in replaced {
        drop_checkpoint(&store, &old.checkpoint)?;
    }
    Ok(match args.json {
        true => format!("{}\n", json!({"templateID": new.id, "name": new.name, "tags": new.tags})),
        false => format!("{}\n", new.id),
    })
}

/// Makes an image of a directory, which the store owns.
fn image_of(directory: &Path, home: &Home, store: &Store) -> Result<NewImage, Failure> {
    let new = store.new_image().map_err(|error| error.failure())?;
    let made = std::path::absolute(directory)
        .map_err(|source| rootfs::Error::Read { path: directory.to_owned(), source })
        .and_then(|directory| rootfs::make(&directory, &home.agent(), new.path()));
    match made {
        Ok(()) => store.keep_image(new).map_err(|error| error.failure()),
        Err(error) => {
            drop(new);
            // As above.
            let _ = store.collect();
            Err(image_failed(&error))
        }
    }
}

fn image_failed(error: &rootfs::Error) -> Failure {
    use rootfs::Error;
    let (class, hint) = match error {
        Error::Missing { .. } => (Class::ProgramMissing, "install e2fsprogs"),
        Error::NoAgent { .. } => (Class::ProgramMissing, "put the program coppice-agent there"),
        Error::Read { .. } => (Class::ImageMissing, "name a directory that can be read"),
        Error::Start { .. } | Error::Failed { .. } | Error::Write { .. } => {
            (Class::ImageInvalid, "see that the directory can be read and the disk is not full")
        }
    };
    Failure::new(class, chain(error), hint)
}

fn build_failed(error: template::Error) -> Failure {
    let text = chain(&error);
    match error {
        template::Error::Sandbox(error) => error.failure(),
        template::Error::Agent(_) => {
            Failure::new(Class::AgentUnreachable, text, "see that the image has bash")
        }
        template::Error::Start { .. } => {
            Failure::new(Class::RequestRefused, text, "try the command in `coppice run`")
        }
        template::Error::NotReady { .. } => Failure::new(
            Class::RequestRefused,
            text,
            "try the command in `coppice run`, or give it more --ready-timeout",
        ),
    }
}

/// Removes a checkpoint from sight; one that is gone already is no failure.
fn drop_checkpoint(store: &Store, id: &Id) -> Result<(), Failure> {
    match store.remove_checkpoint(id) {
        Ok(_) | Err(coppice_manager::store::Error::NotFound { .. }) => Ok(()),
        Err(error) => Err(error.failure()),
    }
}

fn list(json: bool) -> Result<String, Failure> {
    let (_, _, registry) = open()?;
    let mut all = registry.all_templates().map_err(|error| registry_failed(&error))?;
    all.retain(|template| template.kind == TemplateKind::Template);
    if json {
        let rows: Vec<_> = all
            .iter()
            .map(|template| {
                json!({
                    "templateID": template.id,
                    "name": template.name,
                    "tags": template.tags,
                    "tenant": template.tenant,
                    "checkpoint": template.checkpoint,
                    "created_ms": template.created_ms,
                })
            })
            .collect();
        return Ok(format!("{}\n", serde_json::Value::Array(rows)));
    }
    if all.is_empty() {
        return Ok("There are no templates; `base` is made when it is first used.\n".into());
    }
    let mut rows =
        vec![["TEMPLATE", "NAME", "TAGS", "TENANT", "CREATED"].map(str::to_owned).to_vec()];
    let now = SystemTime::now();
    rows.extend(all.iter().map(|template| {
        let created = UNIX_EPOCH + Duration::from_millis(template.created_ms);
        vec![
            template.id.clone(),
            template.name.clone().unwrap_or_default(),
            template.tags.join(","),
            template.tenant.as_ref().map_or("everybody", Tenant::as_str).to_owned(),
            age(created, now),
        ]
    }));
    Ok(columns(&rows, &[]))
}

fn remove(references: &[String], tenant: Option<&str>) -> Result<String, Failure> {
    let (_, store, registry) = open()?;
    let tenant = tenant_of(tenant)?;
    for reference in references {
        let all = registry.all_templates().map_err(|error| registry_failed(&error))?;
        let usable = |template: &Template| {
            template.kind == TemplateKind::Template
                && template.tenant == tenant
                && template.is_meant_by(reference)
        };
        let found = all.into_iter().filter(usable).max_by_key(Template::rank);
        let Some(template) = found else {
            let message = format!("there is no template '{reference}'");
            return Err(Failure::new(Class::NotFound, message, "see `coppice template ls`"));
        };
        registry.drop_template(&template.id).map_err(|error| registry_failed(&error))?;
        drop_checkpoint(&store, &template.checkpoint)?;
    }
    Ok(String::new())
}
