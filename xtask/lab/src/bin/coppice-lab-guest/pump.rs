//! The threads that move a command's streams: one per output, one for standard input.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;

use coppice_lab::wire::{Kind, write_frame};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::session::{Client, acknowledge, lock};

/// Bytes read at once from an output.
const CHUNK: usize = 32 * 1024;

/// What a terminal takes for the end of its input (Ctrl-D).
const END_OF_TRANSMISSION: u8 = 4;

/// Sends an output to the client until it ends, or until the command has ended (the other end of
/// `ended` closes) and nothing more is to be read.
pub(crate) fn output(kind: Kind, output: OwnedFd, ended: &OwnedFd, client: &Client) {
    if let Err(error) = send_output(kind, output, ended, client) {
        eprintln!("coppice-lab: output: {error}");
    }
}

fn send_output(kind: Kind, output: OwnedFd, ended: &OwnedFd, client: &Client) -> io::Result<()> {
    let flags = OFlag::from_bits_truncate(fcntl(&output, FcntlArg::F_GETFL)?);
    let mut output = File::from(output);
    // On a terminal the flag is shared with the descriptor that feeds input, whose thread copes.
    fcntl(&output, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    let mut buffer = vec![0; CHUNK];
    loop {
        match output.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                let chunk = buffer.get(..count).unwrap_or_default();
                write_frame(&mut *lock(client), kind, chunk)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut waiting = [
                    PollFd::new(output.as_fd(), PollFlags::POLLIN),
                    PollFd::new(ended.as_fd(), PollFlags::POLLIN),
                ];
                poll(&mut waiting, PollTimeout::NONE)?;
                let readable = waiting[0].any().unwrap_or(true);
                if !readable && waiting[1].any().unwrap_or(false) {
                    return Ok(());
                }
            }
            // A terminal whose other side is closed everywhere.
            Err(error) if error.raw_os_error() == Some(Errno::EIO as i32) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Feeds standard input from `receiver` until the client ends it or the command stops reading.
pub(crate) fn input(
    receiver: &mpsc::Receiver<Vec<u8>>,
    mut input: File,
    on_terminal: bool,
    client: &Client,
) {
    while let Ok(bytes) = receiver.recv() {
        // A command that closed its input does not stop the client from sending: take and drop.
        drop(write_all(&mut input, &bytes));
        if acknowledge(client, bytes.len()).is_err() {
            return;
        }
    }
    if on_terminal {
        drop(write_all(&mut input, &[END_OF_TRANSMISSION]));
    }
}

/// `write_all` that waits where the descriptor is non-blocking.
fn write_all(output: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match output.write(bytes) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut waiting = [PollFd::new(output.as_fd(), PollFlags::POLLOUT)];
                poll(&mut waiting, PollTimeout::NONE)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
