//! The machine: what it is made of, how it is built, and the one place that changes its state.
//!
//! ```text
//! wire spec + descriptors -> Spec -> Machine (vCPUs, devices, memory)
//!                             requests -> policy -> Lifecycle -> Machine
//! ```

mod board;
mod devices;
mod error;
mod host;
mod lifecycle;
mod machine;
mod policy;
mod probe;
mod shell;
mod spec;
mod text;
mod wires;

pub use devices::DeviceError;
pub use error::VmError;
pub use host::KvmError;
pub use lifecycle::Lifecycle;
pub use policy::{Action, Illegal, Progress, next};
pub use probe::{KernelMode, Report, probe};
pub use spec::{Spec, SpecError};
pub use text::one_line;
