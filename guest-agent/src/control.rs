//! The private control service: what only the manager may ask.

use std::fs::File;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use coppice_agent_protocol::control::{Identity, Info, Init, ReadLog, SetTime, Shutdown, TimeSet};
use coppice_agent_protocol::{Code, ConnectError};
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::agent::Agent;
use crate::body::Body;
use crate::{clock, log, sys};

/// Most bytes of a request's body.
const MAX_BODY: usize = 16 * 1024;

/// Answers one request.
pub(crate) async fn route(agent: Rc<Agent>, request: Request<Incoming>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let outcome = match (&parts.method, parts.uri.path()) {
        (&Method::GET, "/info") => Ok(json(StatusCode::OK, &info(&agent))),
        (&Method::GET, "/metrics") => metrics(&agent).await,
        (&Method::POST, "/shutdown") => shutdown(&agent, body).await,
        (&Method::POST, "/time") => set_time(body).await,
        (&Method::POST, "/identity") => set_identity(body).await,
        (&Method::POST, "/init") => init(&agent, body).await,
        (&Method::POST, "/log") => read_log(body).await,
        (_, path) => {
            Err(ConnectError::new(Code::NotFound, format!("no such control call: {path}")))
        }
    };
    outcome.unwrap_or_else(|error| {
        let status = StatusCode::from_u16(error.code.http_status());
        json(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), &error)
    })
}

fn json<T: Serialize>(status: StatusCode, value: &T) -> Response<Body> {
    let mut response =
        Response::new(Body::Full(Bytes::from(serde_json::to_vec(value).unwrap_or_default())));
    *response.status_mut() = status;
    response
}

fn done(status: StatusCode) -> Result<Response<Body>, ConnectError> {
    let mut response = Response::new(Body::EMPTY);
    *response.status_mut() = status;
    Ok(response)
}

async fn read<T: DeserializeOwned>(body: Incoming) -> Result<T, ConnectError> {
    read_up_to(MAX_BODY, body).await
}

async fn read_up_to<T: DeserializeOwned>(limit: usize, body: Incoming) -> Result<T, ConnectError> {
    let invalid = |message: String| ConnectError::new(Code::InvalidArgument, message);
    let limited = http_body_util::Limited::new(body, limit);
    let text = limited.collect().await.map_err(|error| invalid(error.to_string()))?.to_bytes();
    serde_json::from_slice(&text)
        .map_err(|error| invalid(format!("the body is not valid: {error}")))
}

fn internal(what: &str) -> impl FnOnce(io::Error) -> ConnectError {
    move |error| ConnectError::new(Code::Internal, format!("{what}: {error}"))
}

fn info(agent: &Agent) -> Info {
    Info {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel: kernel_text("osrelease"),
        boot_id: kernel_text("random/boot_id"),
        hostname: kernel_text("hostname"),
        init: agent.init,
        uptime_us: clock::boottime_us(),
        started_us: agent.started_us,
        listening_us: agent.listening_us.get(),
        serving_us: agent.serving_us.get(),
        unix_ns: clock::unix_ns(),
        processes: u32::try_from(agent.processes.running()).unwrap_or(u32::MAX),
    }
}

/// One line of `/proc/sys/kernel`, empty when there is none.
fn kernel_text(name: &str) -> String {
    let text = std::fs::read_to_string(Path::new("/proc/sys/kernel").join(name));
    text.unwrap_or_default().trim_end().to_owned()
}

async fn shutdown(agent: &Agent, body: Incoming) -> Result<Response<Body>, ConnectError> {
    let shutdown: Shutdown = read(body).await?;
    if !agent.init {
        let message = "the agent is not init here: ask the guest's init to shut down";
        return Err(ConnectError::new(Code::FailedPrecondition, message));
    }
    agent.ask_shutdown(shutdown);
    done(StatusCode::ACCEPTED)
}

async fn set_time(body: Incoming) -> Result<Response<Body>, ConnectError> {
    let SetTime { unix_ns, uptime_us } = read(body).await?;
    let now_us = clock::boottime_us();
    let since_us = now_us.checked_sub(uptime_us.unwrap_or(now_us)).ok_or_else(|| {
        ConnectError::new(Code::InvalidArgument, "uptime_us is a moment that is not yet".to_owned())
    })?;
    let time = Duration::from_nanos(unix_ns).saturating_add(Duration::from_micros(since_us));
    clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(time))
        .map_err(io::Error::from)
        .map_err(internal("setting the clock"))?;
    Ok(json(StatusCode::OK, &TimeSet { uptime_us: now_us }))
}

async fn set_identity(body: Incoming) -> Result<Response<Body>, ConnectError> {
    let identity: Identity = read(body).await?;
    check(&identity)?;
    if let Some(entropy) = &identity.entropy {
        let device = File::open("/dev/urandom").map_err(internal("opening /dev/urandom"))?;
        sys::add_entropy(&device, &entropy.0).map_err(internal("adding entropy"))?;
        sys::reseed(&device).map_err(internal("reseeding the kernel's generator"))?;
    }
    if let Some(hostname) = &identity.hostname {
        nix::unistd::sethostname(hostname)
            .map_err(io::Error::from)
            .map_err(internal("setting the host name"))?;
        // The file serves the next boot; on a read-only root there is none to serve.
        if let Err(error) = std::fs::write("/etc/hostname", format!("{hostname}\n")) {
            log::warn(format_args!("writing /etc/hostname: {error}"));
        }
    }
    if let Some(machine_id) = &identity.machine_id {
        write_machine_id(machine_id).map_err(internal("writing /etc/machine-id"))?;
    }
    done(StatusCode::NO_CONTENT)
}

async fn metrics(agent: &Agent) -> Result<Response<Body>, ConnectError> {
    let metrics = agent.metrics().await.map_err(internal("measuring"))?;
    Ok(json(StatusCode::OK, &metrics))
}

async fn init(agent: &Agent, body: Incoming) -> Result<Response<Body>, ConnectError> {
    let init: Init = read_up_to(Init::MAX_BYTES, body).await?;
    let applied = agent.settings.borrow_mut().apply(init);
    applied.map_err(|error| ConnectError::new(Code::InvalidArgument, error.to_string()))?;
    done(StatusCode::NO_CONTENT)
}

async fn read_log(body: Incoming) -> Result<Response<Body>, ConnectError> {
    let wanted: ReadLog = read(body).await?;
    Ok(json(StatusCode::OK, &log::read(&wanted).await))
}

/// Refuses an identity as a whole before any part of it takes effect.
fn check(identity: &Identity) -> Result<(), ConnectError> {
    let invalid = |message: &str| Err(ConnectError::new(Code::InvalidArgument, message));
    let entropy = identity.entropy.as_ref().map(|entropy| entropy.0.len());
    if entropy.is_some_and(|len| len == 0 || len > Identity::MAX_ENTROPY) {
        return invalid("entropy is 1 to 4096 bytes");
    }
    let in_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    let hostname = identity.hostname.as_deref();
    if hostname.is_some_and(|name| !(1..=64).contains(&name.len()) || !name.bytes().all(in_name)) {
        return invalid("hostname is 1 to 64 letters, digits, dots or hyphens");
    }
    let in_id = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let machine_id = identity.machine_id.as_deref();
    if machine_id.is_some_and(|id| id.len() != 32 || !id.bytes().all(in_id)) {
        return invalid("machine_id is 32 lowercase hexadecimal digits");
    }
    Ok(())
}

/// Readers see the old identity or the new one, never a part.
fn write_machine_id(machine_id: &str) -> io::Result<()> {
    let temporary = "/etc/.machine-id.new";
    std::fs::write(temporary, format!("{machine_id}\n"))?;
    std::fs::rename(temporary, "/etc/machine-id")
}

#[cfg(test)]
mod tests {
    use super::*;
    use coppice_agent_protocol::json::Blob;

    fn refused(identity: &Identity) -> bool {
        check(identity).is_err_and(|error| error.code == Code::InvalidArgument)
    }

    #[test]
    fn an_identity_in_form_is_taken() {
        let identity = Identity {
            hostname: Some("box-1.local".into()),
            machine_id: Some("0123456789abcdef0123456789abcdef".into()),
            entropy: Some(Blob(vec![1; 32])),
        };
        assert_eq!(check(&identity), Ok(()));
        assert_eq!(check(&Identity::default()), Ok(()));
    }

    #[test]
    fn host_names_out_of_form_are_refused() {
        for name in ["", "a b", "a\nb", &"x".repeat(65)] {
            assert!(refused(&Identity { hostname: Some(name.into()), ..Identity::default() }));
        }
    }

    #[test]
    fn machine_ids_out_of_form_are_refused() {
        for id in ["", "0123456789ABCDEF0123456789ABCDEF", "0123"] {
            assert!(refused(&Identity { machine_id: Some(id.into()), ..Identity::default() }));
        }
    }

    #[test]
    fn entropy_out_of_bounds_is_refused() {
        for len in [0, Identity::MAX_ENTROPY + 1] {
            let entropy = Some(Blob(vec![0; len]));
            assert!(refused(&Identity { entropy, ..Identity::default() }));
        }
    }
}
