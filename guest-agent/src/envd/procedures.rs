//! The procedures of `process.Process`.

use std::rc::Rc;

use bytes::Bytes;
use coppice_agent_protocol::process::{
    Empty, ListResponse, ProcessSelector, SelectRequest, SendInputRequest, SendSignalRequest,
    StartRequest, StreamInputRequest, UpdateRequest,
};
use coppice_agent_protocol::{Code, ConnectError, envelope};
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;

use super::connect::{self, Messages};
use super::headers;
use crate::agent::Agent;
use crate::body::Body;
use crate::process::{ControlError, InputError, Process, Processes, SpawnError, Watch};
use crate::users::User;

/// Answers one call.
pub(super) async fn call(
    agent: &Rc<Agent>,
    procedure: &str,
    request: Request<Incoming>,
) -> Response<Body> {
    let streaming = match procedure {
        "Start" | "Connect" | "StreamInput" => true,
        "List" | "Update" | "SendInput" | "SendSignal" | "CloseStdin" => false,
        _ => return connect::no_procedure("process.Process", procedure),
    };
    let (headers, body) = match connect::accept(request, streaming) {
        Ok(parts) => parts,
        Err(response) => return *response,
    };
    let call = Call { agent: Rc::clone(agent), headers, body };
    match procedure {
        "Start" => connect::stream_response(call.start().await),
        "Connect" => connect::stream_response(call.connect().await),
        "StreamInput" => connect::stream_response(call.within_timeout(Call::stream_input).await),
        "List" => connect::unary_response(call.within_timeout(Call::list).await),
        "Update" => connect::unary_response(call.within_timeout(Call::update).await),
        "SendInput" => connect::unary_response(call.within_timeout(Call::send_input).await),
        "SendSignal" => connect::unary_response(call.within_timeout(Call::send_signal).await),
        _ => connect::unary_response(call.within_timeout(Call::close_stdin).await),
    }
}

struct Call {
    agent: Rc<Agent>,
    headers: HeaderMap,
    body: Incoming,
}

impl Call {
    /// Runs a procedure that is over when it returns, for at most the time the caller gives.
    async fn within_timeout<T>(
        self,
        procedure: impl AsyncFnOnce(Self) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        self.user()?;
        let headers = self.headers.clone();
        connect::within_timeout(&headers, procedure(self)).await
    }

    /// The user the call acts as.
    fn user(&self) -> Result<User, ConnectError> {
        headers::user(&self.agent.settings.borrow(), &self.headers)
    }

    async fn start(mut self) -> Result<Body, ConnectError> {
        let user = self.user()?;
        let timeout = headers::timeout(&self.headers)?;
        let watch = Watch { keepalive: headers::keepalive(&self.headers) };
        let request: StartRequest = connect::single_message(&mut self.body).await?;
        let settings = self.agent.settings.borrow();
        let processes = &self.agent.processes;
        let stream = processes.start(request, &user, settings.envs(), timeout, watch)?;
        Ok(Body::Process(Box::new(stream)))
    }

    async fn connect(mut self) -> Result<Body, ConnectError> {
        self.user()?;
        let timeout = headers::timeout(&self.headers)?;
        let watch = Watch { keepalive: headers::keepalive(&self.headers) };
        let request: SelectRequest = connect::single_message(&mut self.body).await?;
        let process = find(&self.agent.processes, &request.process)?;
        Ok(Body::Process(Box::new(Processes::connect(&process, timeout, watch))))
    }

    async fn list(mut self) -> Result<ListResponse, ConnectError> {
        let Empty {} = connect::unary_message(&mut self.body).await?;
        Ok(ListResponse { processes: self.agent.processes.list() })
    }

    async fn update(mut self) -> Result<Empty, ConnectError> {
        let request: UpdateRequest = connect::unary_message(&mut self.body).await?;
        let process = self.running(&request.process)?;
        if let Some(size) = request.pty.and_then(|pty| pty.size) {
            process.resize(size)?;
        }
        Ok(Empty {})
    }

    async fn send_input(mut self) -> Result<Empty, ConnectError> {
        let request: SendInputRequest = connect::unary_message(&mut self.body).await?;
        self.running(&request.process)?.send(&request.input).await?;
        Ok(Empty {})
    }

    async fn send_signal(mut self) -> Result<Empty, ConnectError> {
        let request: SendSignalRequest = connect::unary_message(&mut self.body).await?;
        self.running(&request.process)?.signal(request.signal)?;
        Ok(Empty {})
    }

    async fn close_stdin(mut self) -> Result<Empty, ConnectError> {
        let request: SelectRequest = connect::unary_message(&mut self.body).await?;
        self.running(&request.process)?.close_stdin().await?;
        Ok(Empty {})
    }

    /// Feeds a process from a stream of messages; the end of the stream leaves its input open.
    async fn stream_input(self) -> Result<Body, ConnectError> {
        let mut messages = Messages::new(self.body);
        let mut target: Option<Rc<Process>> = None;
        while let Some(message) = messages.next().await? {
            match (message, &target) {
                (StreamInputRequest::Start(start), None) => {
                    target = Some(running(&self.agent.processes, &start.process)?);
                }
                (StreamInputRequest::Start(_), Some(_)) => {
                    return Err(connect::invalid("the stream has more than one start"));
                }
                (StreamInputRequest::Data(data), Some(process)) => {
                    process.send(&data.input).await?
                }
                (StreamInputRequest::Data(_), None) => {
                    return Err(connect::invalid("the stream has data before its start"));
                }
                (StreamInputRequest::Keepalive(_), _) => {}
            }
        }
        let mut reply = envelope::encode_message(&Empty {}).unwrap_or_default();
        reply.extend(envelope::encode_end(None));
        Ok(Body::Full(Bytes::from(reply)))
    }

    fn running(&self, selector: &ProcessSelector) -> Result<Rc<Process>, ConnectError> {
        running(&self.agent.processes, selector)
    }
}

/// The process a request means, ended ones included.
fn find(processes: &Processes, selector: &ProcessSelector) -> Result<Rc<Process>, ConnectError> {
    processes.find(selector).ok_or_else(|| not_found(selector))
}

/// The process a request means, if it runs.
fn running(processes: &Processes, selector: &ProcessSelector) -> Result<Rc<Process>, ConnectError> {
    find(processes, selector)
        .and_then(|process| if process.runs() { Ok(process) } else { Err(not_found(selector)) })
}

fn not_found(selector: &ProcessSelector) -> ConnectError {
    let message = match selector {
        ProcessSelector::Pid(pid) => format!("process with pid {pid} not found"),
        ProcessSelector::Tag(tag) => format!("process with tag {tag} not found"),
    };
    ConnectError::new(Code::NotFound, message)
}

impl From<SpawnError> for ConnectError {
    fn from(error: SpawnError) -> Self {
        let code = match error {
            SpawnError::User(_) | SpawnError::Streams(_) => Code::Internal,
            SpawnError::Closed => Code::Unavailable,
            SpawnError::NoProgram
            | SpawnError::Text
            | SpawnError::NoDirectory(_)
            | SpawnError::TerminalSize
            | SpawnError::Exec { .. } => Code::InvalidArgument,
        };
        Self::new(code, error.to_string())
    }
}

impl From<ControlError> for ConnectError {
    fn from(error: ControlError) -> Self {
        let code = match error {
            ControlError::Ended(_) => Code::NotFound,
            ControlError::NoTerminal(_) => Code::FailedPrecondition,
            ControlError::Size => Code::InvalidArgument,
            ControlError::Kernel { .. } => Code::Internal,
        };
        Self::new(code, error.to_string())
    }
}

impl From<InputError> for ConnectError {
    fn from(error: InputError) -> Self {
        let code = match error {
            InputError::Ended(_) => Code::NotFound,
            InputError::IsTerminal(_)
            | InputError::NoTerminal(_)
            | InputError::CloseTerminal(_)
            | InputError::Closed(_) => Code::FailedPrecondition,
            InputError::Write { .. } => Code::Internal,
        };
        Self::new(code, error.to_string())
    }
}
