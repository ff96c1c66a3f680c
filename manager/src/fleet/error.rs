//! Why the fleet did not do what it was asked.

use thiserror::Error;

use crate::registry::{self, State};
use crate::{agent, diff, home, sandbox, store, template};

/// Failures of the fleet.
#[derive(Debug, Error)]
pub enum Error {
    /// There is no such sandbox, or it is another tenant's.
    #[error("sandbox {id} was not found")]
    NotFound {
        /// As asked for.
        id: String,
    },
    /// There is no such template or snapshot, or it is another tenant's.
    #[error("template '{reference}' was not found")]
    NoTemplate {
        /// As asked for.
        reference: String,
    },
    /// The sandbox is in a state in which this cannot be done.
    #[error("sandbox {id} is {}", word(*state))]
    State {
        /// The sandbox.
        id: String,
        /// Its state.
        state: State,
    },
    /// The tenant would have more than it may.
    #[error("a tenant has at most {limit} {what}: remove or pause some sandboxes first")]
    Quota {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// Too many sandboxes of the tenant wait to be started.
    #[error("{limit} sandboxes wait to be started already: try later")]
    Queue {
        /// The limit.
        limit: usize,
    },
    /// Too many sandboxes wait to be started.
    #[error("too many sandboxes wait to be started: try later")]
    Busy,
    /// The host is short of memory.
    #[error("the host has not enough free memory for another sandbox: remove some or try later")]
    Memory,
    /// The same idempotency key came with another request.
    #[error("the idempotency key was used for another request")]
    KeyReused,
    /// The name is not one.
    #[error("'{name}' is no name: {reason}")]
    Name {
        /// As asked for.
        name: String,
        /// What a name has to be.
        reason: String,
    },
    /// The guest did not run a command.
    #[error("the new sandbox does not run commands ({0})")]
    Useless(String),
    /// A template is still used by a snapshot or is everybody's.
    #[error("template '{reference}' is built in")]
    BuiltIn {
        /// As asked for.
        reference: String,
    },
    /// A template would be left without a tag.
    #[error(
        "'{tag}' is the only tag of a template: remove the template, or tag it otherwise first"
    )]
    LastTag {
        /// The tag.
        tag: String,
    },
    /// There is no such build of a template, or it is another tenant's.
    #[error("build {id} was not found")]
    NoBuild {
        /// As asked for.
        id: String,
    },
    /// The build was started before.
    #[error("build {id} was started already: ask for a new one")]
    BuildStarted {
        /// The build.
        id: String,
    },
    /// A template of this name is being built.
    #[error("template '{name}' is being built: wait until it is ready")]
    BuildBusy {
        /// The name.
        name: String,
    },
    /// What is asked for cannot be built.
    #[error("{0}")]
    Unbuildable(String),
    /// An upload's address is not known, or not any more.
    #[error("the upload's address is not known or not valid any more: ask for a new one")]
    NoUpload,
    /// The tenant uploads as many files at a time as it may.
    #[error("{limit} files are being uploaded already: wait until one is there")]
    Uploads {
        /// The limit.
        limit: usize,
    },
    /// An upload is too long.
    #[error("an upload has at most {} MiB, and those of a tenant {} MiB", each >> 20, all >> 20)]
    UploadTooLong {
        /// The most bytes of one.
        each: u64,
        /// The most bytes of all.
        all: u64,
    },
    /// An upload cannot be kept.
    #[error("the upload cannot be kept")]
    Upload(#[source] std::io::Error),
    /// A step of a build failed.
    #[error("a step of the build failed")]
    Step(#[from] crate::build::Error),
    /// The commands at the end of a build failed.
    #[error("the template's commands failed")]
    BringUp(#[source] Box<template::Error>),
    /// A build took too long.
    #[error("the build took longer than {} minutes", .0.as_secs() / 60)]
    BuildTime(std::time::Duration),
    /// The built-in template cannot be made.
    #[error("the built-in template failed")]
    Template(#[source] Box<template::Error>),
    /// The sandbox failed.
    #[error("the sandbox failed")]
    Sandbox(#[from] sandbox::Error),
    /// The guest's agent failed.
    #[error("the guest's agent failed")]
    Agent(#[from] agent::Error),
    /// Two checkpoints cannot be compared.
    #[error("they cannot be compared")]
    Diff(#[from] diff::Error),
    /// The store failed.
    #[error("the store failed")]
    Store(#[from] store::Error),
    /// The registry failed.
    #[error("the registry failed")]
    Registry(#[from] registry::Error),
    /// The meters cannot be made.
    #[error("the meters cannot be made")]
    Meters(#[from] prometheus::Error),
    /// A kernel or image is missing.
    #[error("the built-in template cannot be made")]
    Home(#[from] home::Error),
    /// The system has no random bytes.
    #[error("no ID can be drawn")]
    Random(#[source] std::io::Error),
}

fn word(state: State) -> &'static str {
    match state {
        State::Creating => "still being made",
        State::Running => "running",
        State::Pausing => "being paused",
        State::Paused => "paused",
        State::Resuming => "being resumed",
        State::Killing => "being removed",
    }
}
