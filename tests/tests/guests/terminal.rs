//! `coppice run -t` on a real terminal: what a person sees, and the state it is left in.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};

use crate::common::{on_lane, tiny};

/// The person's side of a pseudoterminal.
struct Screen {
    master: File,
    /// Kept, so that the terminal outlives the programs on it.
    slave: OwnedFd,
    seen: Vec<u8>,
}

impl Screen {
    fn new(rows: u16, columns: u16) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let slave = ioctl_tiocgptpeer(&master, flags).unwrap();
        let screen = Self { master: File::from(master), slave, seen: Vec::new() };
        screen.resize(rows, columns);
        screen
    }

    fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.master, size).unwrap();
    }

    fn settings(&self) -> Termios {
        tcgetattr(&self.slave).unwrap()
    }

    /// Starts a command in a session of its own, with this as its controlling terminal.
    fn run(&self, command: &Command) -> Child {
        let end = || Stdio::from(self.slave.try_clone().unwrap());
        let mut session = Command::new("setsid");
        session.arg("-c").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            session.env(name, value.unwrap());
        }
        session.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap()
    }

    /// Reads until `wanted` was on the screen since the last call.
    fn expect(&mut self, wanted: &str) {
        let find = |seen: &[u8]| seen.windows(wanted.len()).position(|w| w == wanted.as_bytes());
        loop {
            if let Some(at) = find(&self.seen) {
                self.seen.drain(..at + wanted.len());
                return;
            }
            let limit = Timespec { tv_sec: 120, tv_nsec: 0 };
            let mut fds = [PollFd::new(&self.master, PollFlags::IN)];
            let ready = poll(&mut fds, Some(&limit)).unwrap();
            let seen = String::from_utf8_lossy(&self.seen);
            assert_eq!(ready, 1, "no {wanted:?} on the terminal; it shows: {seen}");
            let mut piece = [0u8; 512];
            let got = self.master.read(&mut piece).unwrap();
            self.seen.extend_from_slice(&piece[..got]);
        }
    }
}

/// `coppice run -i -t` of a shell script.
fn interactive(script: &str) -> Command {
    tiny(&["-i", "-t"], &["sh", "-c", script])
}

#[test]
fn the_commands_terminal_has_our_size_and_follows_it() {
    on_lane!({
        let mut screen = Screen::new(41, 103);
        let script = "trap 'stty size; exit 7' WINCH; stty size; echo ready; sleep 1000 & wait";
        let mut child = screen.run(&interactive(script));
        screen.expect("41 103\r\n");
        screen.expect("ready\r\n");
        screen.resize(52, 117);
        screen.expect("52 117\r\n");
        assert_eq!(child.wait().unwrap().code(), Some(7));
    });
}

#[test]
fn what_is_typed_reaches_the_command_byte_by_byte() {
    on_lane!({
        let mut screen = Screen::new(24, 80);
        let script = "stty raw -echo; echo ready; head -c 3 | od -An -tx1";
        let mut child = screen.run(&interactive(script));
        screen.expect("ready");
        // An interrupt, an end of file and a line that was not finished.
        screen.master.write_all(b"\x03\x04x").unwrap();
        screen.expect("03 04 78");
        assert!(child.wait().unwrap().success());
    });
}

/// Whether the terminal edits lines itself, as it does outside raw mode.
fn edits_lines(settings: &Termios) -> bool {
    settings.local_modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
}

#[test]
fn the_terminal_is_raw_meanwhile_and_restored_afterwards() {
    on_lane!({
        let mut screen = Screen::new(24, 80);
        let before = screen.settings();
        assert!(edits_lines(&before));
        let mut child = screen.run(&interactive("echo ready; read line; echo got $line"));
        screen.expect("ready\r\n");
        assert!(!screen.settings().local_modes.intersects(LocalModes::ICANON | LocalModes::ECHO));
        screen.master.write_all(b"it\r").unwrap();
        screen.expect("got it\r\n");
        assert!(child.wait().unwrap().success());
        assert_eq!(format!("{:?}", screen.settings()), format!("{before:?}"));
    });
}

#[test]
fn a_signal_that_ends_the_run_leaves_the_terminal_restored() {
    on_lane!({
        let mut screen = Screen::new(24, 80);
        let before = screen.settings();
        let mut child = screen.run(&interactive("echo ready; sleep 1000"));
        screen.expect("ready\r\n");
        let pid = child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
        assert_eq!(format!("{:?}", screen.settings()), format!("{before:?}"));
    });
}
