//! Byte streams to the ports of a guest, for what speaks to programs in it and not to the agent.

use coppice_agent_protocol::ENVD_PORT;
use coppice_agent_protocol::proxy::{MAX_REPLY, Reply, encode_request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::{Agent, Error};

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
        stream.write_all(&encode_request(port)).await.map_err(Error::Connect)?;
        match reply(&mut stream).await? {
            Reply::Connected => Ok(stream),
            Reply::Refused => Err(Error::PortClosed(port.into())),
            Reply::Failed(reason) => Err(Error::Protocol(format!("port {port}: {reason}"))),
        }
    }
}

/// Reads the agent's line byte by byte: what follows it belongs to the stream.
async fn reply(stream: &mut UnixStream) -> Result<Reply, Error> {
    let wrong = || Error::Protocol("no answer for a connection".into());
    let mut line = Vec::new();
    loop {
        match stream.read_u8().await.map_err(Error::Connect)? {
            b'\n' => return Reply::decode(&line).ok_or_else(wrong),
            _ if line.len() == MAX_REPLY => return Err(wrong()),
            byte => line.push(byte),
        }
    }
}
