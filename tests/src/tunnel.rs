//! A way from an address of this host to a port of the nested machine, whose network is its own.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;

use coppice_lab::Lab;

/// Takes connections on a free port of this host and passes each on to `port` in the machine.
/// What arrives is passed on as it comes, and the end of either direction too.
pub(crate) fn open(lab: &'static Lab, port: u16) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    thread::Builder::new().name("tunnel".into()).spawn(move || {
        for connection in listener.incoming().flatten() {
            // A client that is not passed on sees its connection close.
            let _ = thread::Builder::new()
                .name("tunnel-connection".into())
                .spawn(move || pass_on(lab, port, connection));
        }
    })?;
    Ok(address)
}

#[allow(clippy::print_stderr, reason = "this is part of a failed test's output")]
fn pass_on(lab: &Lab, port: u16, mut connection: TcpStream) {
    let attempt = || -> io::Result<TcpStream> {
        connection.set_nodelay(true)?;
        connection.try_clone()
    };
    let input = match attempt() {
        Ok(input) => input,
        Err(error) => return eprintln!("tunnel: {error}"),
    };
    let port = port.to_string();
    let passed = lab
        .command(["nc", "127.0.0.1", &port])
        .stdin(input)
        .run_to(&mut connection, &mut io::stderr());
    match passed {
        // A client that went away first is no news.
        Err(coppice_lab::Error::Remote { source: coppice_lab::RemoteError::Output(_), .. }) => {}
        Err(error) => eprintln!("tunnel: {}", coppice_manager::failure::chain(&error)),
        Ok(_) => {}
    }
    // Also ends the thread that reads from it.
    let _ = connection.shutdown(Shutdown::Both);
}
