//! `coppice bench`: measures this product, and any peer beside it.

pub mod agent;
pub mod cache;
pub mod clock;
pub mod compare;
pub mod contender;
mod error;
pub mod host;
pub mod html;
pub mod measures;
pub mod model;
pub mod observe;
pub mod process;
pub mod scenario;
pub mod schedule;
pub mod statistics;
mod sys;

pub use error::Error;
