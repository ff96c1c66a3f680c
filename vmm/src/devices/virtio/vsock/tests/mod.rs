//! The device as a whole: real Unix sockets on one side, a test driver on real queues on the
//! other.

mod driver;
mod hostile;
mod lifecycle;
mod parallel;
mod pressure;
mod single;
mod state;
