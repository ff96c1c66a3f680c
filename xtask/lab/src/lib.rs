//! The lab: runs commands on the best machine at hand that can boot Linux guests.
//!
//! Where the host's own /dev/kvm runs guest kernels in hardware, commands run on the host. Where
//! it does not, they run in a nested machine: QEMU emulates an AMD processor with SVM, and the
//! stock Debian kernel in it offers a real /dev/kvm. `cargo xtask lab` and the tests use this
//! crate alike.
//!
//! ```no_run
//! use coppice_lab::{Lab, LaneChoice, Options};
//! let lab = Lab::open(LaneChoice::Best, &Options::default())?;
//! let output = lab.command(["uname", "-r"]).output()?;
//! println!("{} in the {} lane", String::from_utf8_lossy(&output.stdout), lab.lane());
//! # Ok::<(), coppice_lab::Error>(())
//! ```

pub mod machine;
pub mod paths;
pub mod plan;
pub mod sys;
pub mod wire;

mod command;
mod direct;
mod initramfs;
mod lane;
mod packages;
mod remote;
mod terminal;

pub use command::{Command, Error, Lab, Options, Output};
pub use direct::Error as DirectError;
pub use initramfs::Error as InitramfsError;
pub use lane::{Error as LaneError, Lane, LaneChoice};
pub use packages::{Error as PackagesError, HostKernel};
pub use remote::Error as RemoteError;
pub use wire::{Exit, Status};
