//! Builds of templates as E2B's clients ask for them: a sandbox, brought on step by step, whose
//! state is kept in the end.
//!
//! [`Spec`] is what is asked for, checked as a whole before anything is done; [`Runner`] does the
//! steps through the agent of a guest; [`Log`] keeps what clients read meanwhile. Who has the
//! machine and what becomes of it is the fleet's matter.

mod log;
mod run;
mod spec;

pub use log::{Entry, Level, Log};
pub use run::{Error, Runner};
pub use spec::{Parent, RawStep, Spec, SpecError, Step, is_hash};
