//! The client that has the guest's agent run a command: the same code, byte for byte, for every
//! contender, since all of them offer the guest's vsock by the same kind of Unix socket.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use coppice_agent_protocol::envelope::{FrameDecoder, encode_message};
use coppice_agent_protocol::process::{
    ProcessConfig, ProcessEvent, SERVICE, StartRequest, StreamResponse,
};
use coppice_agent_protocol::{ENVD_PORT, READY_PORT, STREAM_CONTENT_TYPE};

/// Longest message of a stream; those of this client's command are tiny.
const MAX_MESSAGE: usize = 1 << 16;

/// The command that is run.
const COMMAND: [&str; 2] = ["/bin/echo", "hello"];

/// What is sent to the agent, made ahead of time.
#[derive(Debug)]
pub(super) struct Client {
    request: Vec<u8>,
}

impl Client {
    pub(super) fn new() -> anyhow::Result<Self> {
        let [cmd, argument] = COMMAND;
        let start = StartRequest {
            process: ProcessConfig {
                cmd: cmd.into(),
                args: vec![argument.into()],
                ..ProcessConfig::default()
            },
            pty: None,
            tag: None,
            stdin: Some(false),
        };
        let body = encode_message(&start)?;
        let mut request = format!(
            "POST {SERVICE}Start HTTP/1.1\r\nhost: localhost\r\ncontent-type: \
             {STREAM_CONTENT_TYPE}\r\nconnect-protocol-version: 1\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend(body);
        Ok(Self { request })
    }

    /// Runs the command; `on_output` is called when the first bytes of its output are there, then
    /// the rest is read.
    ///
    /// # Errors
    /// When the agent is not reached, or the command does not do what it should.
    pub(super) fn run(&self, vsock: &Path, on_output: impl FnOnce()) -> anyhow::Result<()> {
        let mut stream = BufReader::new(connect(vsock)?);
        stream.get_mut().write_all(&self.request).context("the agent does not listen")?;
        let mut status = String::new();
        stream.read_line(&mut status).context("the agent does not answer")?;
        if !status.starts_with("HTTP/1.1 200 ") {
            bail!("the agent answers {status:?}");
        }
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            stream.read_line(&mut line).context("the agent breaks off")?;
        }
        let mut on_output = Some(on_output);
        let mut decoder = FrameDecoder::new(MAX_MESSAGE);
        while let Some(chunk) = read_chunk(&mut stream)? {
            decoder.push(&chunk);
            while let Some(frame) = decoder.next_frame()? {
                if frame.is_end() {
                    continue;
                }
                let response: StreamResponse = serde_json::from_slice(&frame.payload)?;
                match response.event {
                    ProcessEvent::Data(data) if data.stdout.is_some() => {
                        if let Some(on_output) = on_output.take() {
                            on_output();
                        }
                    }
                    ProcessEvent::End(end) if !end.exited || end.exit_code != 0 => {
                        bail!("the command failed: {}", end.status);
                    }
                    _ => {}
                }
            }
        }
        if on_output.is_some() {
            bail!("the command printed nothing");
        }
        Ok(())
    }
}

/// Opens a stream to the agent's port.
fn connect(vsock: &Path) -> anyhow::Result<UnixStream> {
    let mut stream = UnixStream::connect(vsock).context("the vsock socket is not there")?;
    let command = format!("CONNECT {ENVD_PORT}\n");
    stream.write_all(command.as_bytes()).context("the vsock socket takes no command")?;
    let mut byte = [0];
    // Byte by byte: what follows belongs to the stream.
    while byte != *b"\n" {
        stream.read_exact(&mut byte).context("nothing in the guest listens")?;
    }
    Ok(stream)
}

/// Reads one chunk of a chunked body; nothing at its end.
fn read_chunk(stream: &mut BufReader<UnixStream>) -> anyhow::Result<Option<Vec<u8>>> {
    let mut line = String::new();
    stream.read_line(&mut line).context("the answer breaks off")?;
    let length = usize::from_str_radix(line.trim_end(), 16)
        .with_context(|| format!("not the length of a chunk: {line:?}"))?;
    let mut chunk = vec![0; length + 2];
    stream.read_exact(&mut chunk).context("the answer breaks off")?;
    chunk.truncate(length);
    Ok((length > 0).then_some(chunk))
}

/// Where the agent of a guest that boots says that it serves.
#[derive(Debug)]
pub(super) struct Ready {
    listener: UnixListener,
    path: PathBuf,
}

impl Ready {
    /// Listens beside the vsock socket that will be at `vsock`.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub(super) fn listen(vsock: &Path) -> anyhow::Result<Self> {
        let path = PathBuf::from(format!("{}_{READY_PORT}", vsock.display()));
        let listener = UnixListener::bind(&path).context("the ready socket cannot be made")?;
        Ok(Self { listener, path })
    }

    /// Waits for the agent.
    ///
    /// # Errors
    /// When the socket fails.
    pub(super) fn wait(&self) -> anyhow::Result<()> {
        let (stream, _) = self.listener.accept().context("the agent cannot be waited for")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).context("the agent says nothing")?;
        Ok(())
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
