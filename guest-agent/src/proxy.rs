//! Connections from the host to TCP ports of the guest; see [`coppice_agent_protocol::proxy`].

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use coppice_agent_protocol::proxy::{MAX_REQUEST, Reply, decode_request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional_with_sizes};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::log;
use crate::net::{Listener, Stream};

/// Connections at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 1024;

/// Pause after a failed accept: what it lacked, descriptors as a rule, comes back with time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time for the request to arrive, and again for the port to answer. The way is short: only a
/// listener that does not accept takes long.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time a server has to take what a client sent before it left.
const LINGER: Duration = Duration::from_secs(30);

/// Bytes on their way in one direction, per connection.
const BUFFER: usize = 16 * 1024;

/// Serves the listener for ever.
pub(crate) async fn serve(listener: Listener) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                log::warn(format_args!("accepting a connection: {error}"));
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        tokio::task::spawn_local(async move {
            // A connection that breaks is its ends' affair.
            let _ = forward(stream).await;
            drop(slot);
        });
    }
}

async fn forward(mut client: Stream) -> io::Result<()> {
    let (port, early) = timeout(PATIENCE, request(&mut client)).await??;
    let opened = match port {
        Some(port) => open(port).await,
        None => Err(Reply::Failed("invalid request: send CONNECT and a port".to_owned())),
    };
    let mut server = match opened {
        Ok(server) => server,
        Err(reply) => {
            client.write_all(&reply.encode()).await?;
            return client.shutdown().await;
        }
    };
    client.write_all(&Reply::Connected.encode()).await?;
    let departure = client.departure()?;
    let copy = async {
        server.write_all(&early).await?;
        copy_bidirectional_with_sizes(&mut client, &mut server, BUFFER, BUFFER).await
    };
    let left = async {
        departure.wait().await;
        tokio::time::sleep(LINGER).await;
    };
    tokio::select! {
        copied = copy => copied.map(drop),
        // A server that has nothing to say would keep the connection for ever.
        () = left => Ok(()),
    }
}

/// The port a client asks for, unless its request is malformed, and what it sent after that.
async fn request(client: &mut Stream) -> io::Result<(Option<u16>, Vec<u8>)> {
    let mut bytes = Vec::with_capacity(BUFFER);
    loop {
        if client.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = bytes.iter().take(MAX_REQUEST).position(|byte| *byte == b'\n');
        if let Some(end) = line {
            let early = bytes.split_off(end.saturating_add(1));
            return Ok((decode_request(bytes.get(..end).unwrap_or_default()), early));
        }
        if bytes.len() >= MAX_REQUEST {
            return Ok((None, Vec::new()));
        }
    }
}

/// Connects to a port of the loopback.
async fn open(port: u16) -> Result<TcpStream, Reply> {
    let mut reply = Reply::Refused;
    for address in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        match timeout(PATIENCE, TcpStream::connect((address, port))).await {
            Ok(Ok(stream)) => {
                // Pieces arrive as their sender meant them. Without it they are only later.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) if is_absence(&error) => {}
            Ok(Err(error)) => reply = Reply::Failed(error.to_string()),
            Err(_) => reply = Reply::Failed("timeout".to_owned()),
        }
    }
    Err(reply)
}

/// Whether nothing listens, or could listen: the kernel may lack a version of IP.
fn is_absence(error: &io::Error) -> bool {
    let lacking = [libc::EAFNOSUPPORT, libc::EADDRNOTAVAIL, libc::ENETUNREACH];
    error.kind() == io::ErrorKind::ConnectionRefused
        || error.raw_os_error().is_some_and(|code| lacking.contains(&code))
}
