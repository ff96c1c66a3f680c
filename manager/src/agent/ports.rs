//! Byte streams to the ports of a guest, for what speaks to programs in it and not to the agent.

use coppice_agent_protocol::ENVD_PORT;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::{Agent, Error};

/// Longest answer to a request for a connection: `ERR ` and a short reason.
const MAX_ANSWER: usize = 128;
/// What the agent answers when nobody listens.
const REFUSED: &str = "ERR refused";

impl Agent {
    /// Opens a stream to a TCP port of the guest, or to the agent's own service if that has the
    /// port.
    ///
    /// # Errors
    /// [`Error::PortClosed`] when nobody listens there.
    pub async fn connect(&self, port: u16) -> Result<UnixStream, Error> {
        if u32::from(port) == ENVD_PORT {
            return self.envd.endpoint().connect().await;
        }
        let mut stream = self.proxy.connect().await?;
        let line = format!("CONNECT {port}\n");
        stream.write_all(line.as_bytes()).await.map_err(Error::Connect)?;
        match answer(&mut stream).await?.as_str() {
            "OK" => Ok(stream),
            REFUSED => Err(Error::PortClosed(port.into())),
            other => Err(Error::Protocol(format!("{other:?} for a connection"))),
        }
    }
}

/// Reads a line byte by byte: what follows it belongs to the stream.
async fn answer(stream: &mut UnixStream) -> Result<String, Error> {
    let mut line = Vec::new();
    loop {
        match stream.read_u8().await.map_err(Error::Connect)? {
            b'\n' => return Ok(String::from_utf8_lossy(&line).into_owned()),
            _ if line.len() == MAX_ANSWER => {
                return Err(Error::Protocol("a long answer for a connection".into()));
            }
            byte => line.push(byte),
        }
    }
}
