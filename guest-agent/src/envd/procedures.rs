//! The procedures of `process.Process`.

use std::rc::Rc;

use bytes::Bytes;
use coppice_agent_protocol::process::{
    Empty, ListResponse, ProcessSelector, SelectRequest, SendInputRequest, SendSignalRequest,
    StartRequest, StreamInputRequest, UpdateRequest,
};
use coppice_agent_protocol::{
    Code, ConnectError, STREAM_CONTENT_TYPE, UNARY_CONTENT_TYPE, envelope,
};
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;

use super::connect::{self, Messages};
use super::headers;
use crate::agent::Agent;
use crate::body::Body;
use crate::process::{ControlError, InputError, Process, Processes, SpawnError, Watch};

/// Answers one call.
pub(super) async fn call(
    agent: &Rc<Agent>,
    procedure: &str,
    request: Request<Incoming>,
) -> Response<Body> {
    let streaming = match procedure {
        "Start" | "Connect" | "StreamInput" => true,
        "List" | "Update" | "SendInput" | "SendSignal" | "CloseStdin" => false,
        _ => {
            let message = format!("process.Process has no procedure {procedure}");
            let error = ConnectError::new(Code::Unimplemented, message);
            return super::json(StatusCode::NOT_FOUND, &error);
        }
    };
    if request.method() != Method::POST {
        let mut response = super::empty(StatusCode::METHOD_NOT_ALLOWED);
        response.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static("POST"));
        return response;
    }
    let (parts, body) = request.into_parts();
    let expected = if streaming { STREAM_CONTENT_TYPE } else { UNARY_CONTENT_TYPE };
    if !connect::has_content_type(&parts.headers, expected) {
        return connect::unsupported_media_type(streaming);
    }
    let call = Call { processes: Rc::clone(&agent.processes), headers: parts.headers, body };
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
    processes: Rc<Processes>,
    headers: HeaderMap,
    body: Incoming,
}

impl Call {
    /// Runs a procedure that is over when it returns, for at most the time the caller gives.
    async fn within_timeout<T>(
        self,
        procedure: impl AsyncFnOnce(Self) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        headers::user(&self.headers)?;
        match headers::timeout(&self.headers)? {
            None => procedure(self).await,
            Some(limit) => tokio::time::timeout(limit, procedure(self)).await.map_err(|_| {
                ConnectError::new(Code::DeadlineExceeded, "the call's time is over")
            })?,
        }
    }

    async fn start(mut self) -> Result<Body, ConnectError> {
        let user = headers::user(&self.headers)?;
        let timeout = headers::timeout(&self.headers)?;
        let watch = Watch { keepalive: headers::keepalive(&self.headers) };
        let request: StartRequest = connect::single_message(&mut self.body).await?;
        let stream = self.processes.start(request, &user, timeout, watch)?;
        Ok(Body::Process(Box::new(stream)))
    }

    async fn connect(mut self) -> Result<Body, ConnectError> {
        headers::user(&self.headers)?;
        let timeout = headers::timeout(&self.headers)?;
        let watch = Watch { keepalive: headers::keepalive(&self.headers) };
        let request: SelectRequest = connect::single_message(&mut self.body).await?;
        let process = find(&self.processes, &request.process)?;
        Ok(Body::Process(Box::new(Processes::connect(&process, timeout, watch))))
    }

    async fn list(mut self) -> Result<ListResponse, ConnectError> {
        let Empty {} = connect::unary_message(&mut self.body).await?;
        Ok(ListResponse { processes: self.processes.list() })
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
                    target = Some(running(&self.processes, &start.process)?);
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
        running(&self.processes, selector)
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
