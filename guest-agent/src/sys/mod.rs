//! All `unsafe` of the agent: the few system calls no safe wrapper covers.

mod child;
mod entropy;
mod io;
mod link;
mod tty;
mod vsock;
mod wait;

pub(crate) use child::{ChildSetup, prepare};
pub(crate) use entropy::{add_entropy, reseed};
pub(crate) use io::{own, pending_bytes, receive, watch};
pub(crate) use link::bring_up;
pub(crate) use tty::set_window_size;
pub(crate) use vsock::local_cid;
pub(crate) use wait::{RawStatus, Reaped, reap_one};
