//! A thread that draws random numbers in a tight loop and keeps the last ones, until it is told to
//! stop or the machine gets another name. A clone gets its own once it runs, and draws a few more
//! then: so it keeps what it drew first, and has some of its own however late its threads ran.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::rand::{GetRandomFlags, getrandom};
use rustix::system::uname;

use crate::state::{Shared, monotonic_ns};

/// How many draws are kept: those of a second or more.
const KEPT: usize = 1 << 16;
/// How many are drawn under the new name.
const UNDER_NEW_NAME: u32 = 256;

/// What a thread has drawn.
#[derive(Debug, Default)]
pub(crate) struct Draws {
    /// When a draw began, and what was drawn; the last ones.
    kept: VecDeque<(i64, u64)>,
    stopped: bool,
}

impl Draws {
    /// Draws no more.
    pub(crate) fn stop(&mut self) {
        self.stopped = true;
    }

    /// Appends all that is kept to `out`, each as two little-endian words.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        for (began, value) in &self.kept {
            out.extend(began.to_le_bytes());
            out.extend(value.to_le_bytes());
        }
    }
}

/// Runs until something fails; draws from `/dev/urandom` or with the system call.
pub(crate) fn run(
    shared: &Shared,
    name: &str,
    draws: &Mutex<Draws>,
    urandom: bool,
    pace: Duration,
) -> io::Result<()> {
    let mut device = File::open("/dev/urandom")?;
    let named = uname().nodename().to_owned();
    let mut left = None;
    loop {
        let mut bytes = [0; 8];
        let began = monotonic_ns()?;
        if urandom {
            device.read_exact(&mut bytes)?;
        } else {
            getrandom(&mut bytes, GetRandomFlags::empty())?;
        }
        let mut draws = draws.lock().unwrap_or_else(PoisonError::into_inner);
        if left.is_none() && uname().nodename() != named.as_c_str() {
            left = Some(UNDER_NEW_NAME);
        }
        if draws.stopped || left == Some(0) {
            return Ok(());
        }
        left = left.map(|left| left - 1);
        if draws.kept.len() == KEPT {
            draws.kept.pop_front();
        }
        draws.kept.push_back((began, u64::from_le_bytes(bytes)));
        drop(draws);
        if let Some(round) = shared.step(name, 0) {
            shared.checked(name, round);
        }
        if !pace.is_zero() {
            std::thread::sleep(pace);
        }
    }
}
