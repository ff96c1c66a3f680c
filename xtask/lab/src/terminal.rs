//! The caller's terminal, when a command in the nested machine runs on one.

use std::io;
use std::os::fd::AsFd;
use std::thread;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::termios::{LocalFlags, SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

use crate::remote::Sender;
use crate::sys;
use crate::wire::{Kind, TerminalSize};

/// Raw mode: every key goes to the command. Dropping it gives the terminal its settings back.
pub(crate) struct Raw {
    before: Termios,
}

impl Raw {
    pub(crate) fn enter() -> io::Result<Self> {
        let before = tcgetattr(io::stdin().as_fd())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        raw.local_flags.remove(LocalFlags::ECHO);
        tcsetattr(io::stdin().as_fd(), SetArg::TCSADRAIN, &raw)?;
        // Blocked before any other thread starts, so that the one below is who gets it.
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGWINCH);
        signals.thread_block()?;
        Ok(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Nothing better can be done with a terminal that is gone.
        let _ = tcsetattr(io::stdin().as_fd(), SetArg::TCSADRAIN, &self.before);
    }
}

/// The terminal's size now.
pub(crate) fn size() -> io::Result<TerminalSize> {
    Ok(sys::terminal_size(io::stdin())?)
}

/// Passes changes of the terminal's size on, on a thread that lives as long as the program.
pub(crate) fn follow_size(sender: Sender) {
    thread::spawn(move || {
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGWINCH);
        while signals.wait().is_ok() {
            let Ok(size) = size() else { return };
            let Ok(payload) = serde_json::to_vec(&size) else { return };
            if sender.send(Kind::Resize, &payload).is_err() {
                return;
            }
        }
    });
}
