//! The agent inside the guest.
//!
//! It starts as init (process 1) of a Coppice guest, or as a service of another init, and does
//! for the host what the host cannot do from outside: it runs commands and moves files (the envd
//! protocol, [`coppice_agent_protocol::ENVD_PORT`]) and ends, identifies and clocks the guest (the
//! control service, [`coppice_agent_protocol::CONTROL_PORT`]). It also connects the host to the
//! guest's TCP ports ([`coppice_agent_protocol::PROXY_PORT`]). It talks to the host over vsock only.
//!
//! It lives in every guest, so it is small: one thread, no allocation that a client could make
//! large, nothing running while nothing happens. File systems, which a guest may make block for
//! ever, are touched on short-lived helper threads.

mod agent;
mod body;
mod boot;
mod clock;
mod control;
mod envd;
mod files;
mod log;
mod metrics;
mod net;
mod options;
mod process;
mod proxy;
mod run;
mod server;
mod settings;
mod shutdown;
mod sys;
mod users;
mod watch;

pub use net::{Endpoint, EndpointError};
pub use options::{Options, OptionsError};
pub use run::{RunError, is_init, run};
