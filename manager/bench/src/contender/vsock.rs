//! Ways to a guest's vsock: a Unix socket of the VMM with a line that names the port, as Firecracker
//! began it and Coppice and Cloud Hypervisor have it, or the host's own vsock.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use coppice_agent_protocol::{ENVD_PORT, READY_PORT};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::error::{Doing as _, Error};

/// Opens a stream to the agent's port through the VMM's Unix socket.
pub(super) fn connect(socket: &Path, limit: Duration) -> Result<UnixStream, Error> {
    let mut stream = UnixStream::connect(socket).doing("connecting to the guest's vsock")?;
    limit_reads(&stream, limit)?;
    let command = format!("CONNECT {ENVD_PORT}\n");
    stream.write_all(command.as_bytes()).doing("connecting to the guest's agent")?;
    let mut byte = [0];
    // Byte by byte: what follows belongs to the stream.
    while byte != *b"\n" {
        stream.read_exact(&mut byte).doing("connecting to the guest's agent")?;
    }
    Ok(stream)
}

/// Has reads of a socket end after a while.
pub(super) fn limit_reads(socket: &impl AsFd, limit: Duration) -> Result<(), Error> {
    set_socket_timeout(socket, Timeout::Recv, Some(limit)).doing("limiting a socket's reads")
}

/// Where the agent of a guest that boots says that it serves.
#[derive(Debug)]
pub(super) struct Ready {
    listener: UnixListener,
    path: PathBuf,
}

impl Ready {
    /// Listens beside the vsock socket that will be at `socket`.
    pub(super) fn listen(socket: &Path, limit: Duration) -> Result<Self, Error> {
        let path = PathBuf::from(format!("{}_{READY_PORT}", socket.display()));
        let listener = UnixListener::bind(&path).doing("making the socket for the agent")?;
        limit_reads(&listener, limit)?;
        Ok(Self { listener, path })
    }

    /// Waits for the agent.
    pub(super) fn wait(&self) -> Result<(), Error> {
        let (stream, _) = self.listener.accept().doing("waiting for the guest's agent to serve")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).doing("hearing from the guest's agent")?;
        Ok(())
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        // The directory goes anyway.
        let _ = std::fs::remove_file(&self.path);
    }
}
