//! The terminal and the signals of this process while a command runs.

use std::io::{self, IsTerminal, Write as _};
use std::sync::Mutex;

use coppice_agent_protocol::process::PtySize;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that ask this process to end, and news of the terminal's size.
#[derive(Debug)]
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    quit: Signal,
    resize: Signal,
}

impl Signals {
    /// Takes the signals over.
    pub(super) fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
            resize: signal(SignalKind::window_change())?,
        })
    }

    /// Waits for a signal that asks to end; its number.
    pub(super) async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
            _ = self.hangup.recv() => 1,
            _ = self.quit.recv() => 3,
        }
    }

    /// Waits for a signal that asks to end (its number), or a new size of the terminal.
    pub(super) async fn next_or_resize(&mut self) -> Option<u8> {
        tokio::select! {
            _ = self.interrupt.recv() => Some(2),
            _ = self.terminate.recv() => Some(15),
            _ = self.hangup.recv() => Some(1),
            _ = self.quit.recv() => Some(3),
            _ = self.resize.recv() => None,
        }
    }
}

/// Size of our terminal; 80 by 24 without one.
pub(super) fn size() -> PtySize {
    let found = [tcgetwinsize(io::stdout()), tcgetwinsize(io::stdin())];
    let known = found.into_iter().flatten().find(|size| size.ws_col > 0 && size.ws_row > 0);
    known.map_or(PtySize { cols: 80, rows: 24 }, |size| PtySize {
        cols: size.ws_col.into(),
        rows: size.ws_row.into(),
    })
}

/// What the terminal was set to before it was made raw. A static, so that a panic can restore it.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// The terminal in raw mode; restored when dropped, and by a panic.
#[derive(Debug)]
pub(super) struct Raw(());

impl Raw {
    /// Makes standard input raw; nothing when it is no terminal.
    pub(super) fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        if let Ok(mut slot) = BEFORE.lock() {
            *slot = Some(before);
        }
        let default_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            default_hook(info);
        }));
        tcsetattr(&stdin, OptionalActions::Flush, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// A screen of its own on the terminal; the one before comes back when this is dropped.
#[derive(Debug)]
pub(super) struct Screen(());

impl Screen {
    /// Goes over to it, without a cursor.
    pub(super) fn enter() -> io::Result<Self> {
        io::stdout().write_all(b"\x1b[?1049h\x1b[?25l")?;
        Ok(Self(()))
    }

    /// Shows lines instead of those of before.
    pub(super) fn show(&self, text: &str) -> io::Result<()> {
        let PtySize { cols, rows } = size();
        let (cols, rows) =
            (usize::try_from(cols).unwrap_or(80), usize::try_from(rows).unwrap_or(24));
        let mut shown = String::from("\x1b[H");
        for (number, line) in text.lines().take(rows).enumerate() {
            shown.push_str(if number == 0 { "" } else { "\r\n" });
            shown.extend(line.chars().take(cols));
            shown.push_str("\x1b[K");
        }
        shown.push_str("\x1b[J");
        io::stdout().write_all(shown.as_bytes())?;
        io::stdout().flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // There is nobody to tell when the terminal is gone.
        let _ = io::stdout().write_all(b"\x1b[?25h\x1b[?1049l");
        let _ = io::stdout().flush();
    }
}

fn restore() {
    if let Ok(mut slot) = BEFORE.try_lock()
        && let Some(before) = slot.take()
    {
        // A terminal that is gone needs no restoring.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
    }
}
