//! The procedures of `filesystem.Filesystem`.

use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use bytes::Bytes;
use coppice_agent_protocol::filesystem::{
    EntryResponse, GetWatcherEventsResponse, ListDirRequest, MoveRequest, PathRequest,
    WatchRequest, Watcher,
};
use coppice_agent_protocol::process::Empty;
use coppice_agent_protocol::{Code, ConnectError, UNARY_CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use hyper::body::Incoming;

use super::{connect, headers};
use crate::agent::Agent;
use crate::body::Body;
use crate::files::{self, Scope};
use crate::users::{Names, User};

/// Answers one call.
pub(super) async fn call(
    agent: &Rc<Agent>,
    procedure: &str,
    request: Request<Incoming>,
) -> Response<Body> {
    let streaming = match procedure {
        "WatchDir" => true,
        "Stat" | "MakeDir" | "Move" | "ListDir" | "Remove" | "CreateWatcher"
        | "GetWatcherEvents" | "RemoveWatcher" => false,
        _ => return connect::no_procedure("filesystem.Filesystem", procedure),
    };
    let (headers, body) = match connect::accept(request, streaming) {
        Ok(parts) => parts,
        Err(response) => return *response,
    };
    let user = match headers::user(&agent.settings.borrow(), &headers) {
        Ok(user) => user,
        Err(error) if streaming => return connect::stream_response(Err(error)),
        Err(error) => return connect::unary_response::<Empty>(Err(error)),
    };
    let call = Call { agent, user, body };
    match procedure {
        "WatchDir" => connect::stream_response(call.watch_dir(&headers).await),
        "Stat" => unary(&headers, call.stat()).await,
        "MakeDir" => unary(&headers, call.make_dir()).await,
        "Move" => unary(&headers, call.rename()).await,
        "ListDir" => {
            let listed = connect::within_timeout(&headers, call.list_dir()).await;
            listed.map_or_else(|error| connect::unary_response::<Empty>(Err(error)), text)
        }
        "Remove" => unary(&headers, call.remove()).await,
        "CreateWatcher" => unary(&headers, call.create_watcher()).await,
        "GetWatcherEvents" => unary(&headers, call.watcher_events()).await,
        _ => unary(&headers, call.remove_watcher()).await,
    }
}

async fn unary<T: serde::Serialize>(
    headers: &HeaderMap,
    call: impl Future<Output = Result<T, ConnectError>>,
) -> Response<Body> {
    connect::unary_response(connect::within_timeout(headers, call).await)
}

/// A response whose JSON is written already.
fn text(json: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::Full(Bytes::from(json)));
    let content_type = HeaderValue::from_static(UNARY_CONTENT_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

struct Call<'a> {
    agent: &'a Agent,
    user: User,
    body: Incoming,
}

impl Call<'_> {
    async fn stat(mut self) -> Result<EntryResponse, ConnectError> {
        let request: PathRequest = connect::unary_message(&mut self.body).await?;
        let path = self.user.resolve(&request.path);
        blocking(move || entry(&path)).await
    }

    async fn make_dir(mut self) -> Result<EntryResponse, ConnectError> {
        let request: PathRequest = connect::unary_message(&mut self.body).await?;
        let path = self.user.resolve(&request.path);
        blocking(move || {
            files::make_directory(&path, &self.user)?;
            entry(&path)
        })
        .await
    }

    async fn rename(mut self) -> Result<EntryResponse, ConnectError> {
        let request: MoveRequest = connect::unary_message(&mut self.body).await?;
        if request.source.is_empty() || request.destination.is_empty() {
            return Err(connect::invalid("a move needs a source and a destination"));
        }
        let source = self.user.resolve(&request.source);
        let destination = self.user.resolve(&request.destination);
        blocking(move || {
            files::rename(&source, &destination, &self.user)?;
            entry(&destination)
        })
        .await
    }

    async fn list_dir(mut self) -> Result<Vec<u8>, ConnectError> {
        let request: ListDirRequest = connect::unary_message(&mut self.body).await?;
        let path = self.user.resolve(&request.path);
        blocking(move || files::list(&path, request.depth.max(1))).await
    }

    async fn remove(mut self) -> Result<Empty, ConnectError> {
        let request: PathRequest = connect::unary_message(&mut self.body).await?;
        let path = self.user.resolve(&request.path);
        // Elsewhere an empty path means home, which nobody means here.
        if request.path.is_empty() || path == Path::new("/") {
            return Err(connect::invalid("the path to remove is missing or the root"));
        }
        blocking(move || {
            files::remove(&path).map_err(|error| files::failure("removing", &path, &error))
        })
        .await?;
        Ok(Empty {})
    }

    async fn watch_dir(mut self, headers: &HeaderMap) -> Result<Body, ConnectError> {
        let timeout = headers::timeout(headers)?;
        let keepalive = headers::keepalive(headers);
        let request: WatchRequest = connect::single_message(&mut self.body).await?;
        let scope = scope(&request, self.user.resolve(&request.path));
        let stream = self.agent.watches.stream(scope, timeout, keepalive).await?;
        Ok(Body::Watch(Box::new(stream)))
    }

    async fn create_watcher(mut self) -> Result<Watcher, ConnectError> {
        let request: WatchRequest = connect::unary_message(&mut self.body).await?;
        let scope = scope(&request, self.user.resolve(&request.path));
        Ok(Watcher { watcher_id: self.agent.watches.create(scope).await? })
    }

    async fn watcher_events(mut self) -> Result<GetWatcherEventsResponse, ConnectError> {
        let Watcher { watcher_id } = connect::unary_message(&mut self.body).await?;
        Ok(GetWatcherEventsResponse { events: self.agent.watches.events(&watcher_id).await? })
    }

    async fn remove_watcher(mut self) -> Result<Empty, ConnectError> {
        let Watcher { watcher_id } = connect::unary_message(&mut self.body).await?;
        self.agent.watches.remove(&watcher_id)?;
        Ok(Empty {})
    }
}

fn scope(request: &WatchRequest, path: PathBuf) -> Scope {
    Scope {
        path,
        recursive: request.recursive,
        include_entry: request.include_entry,
        allow_network_mounts: request.allow_network_mounts,
    }
}

fn entry(path: &Path) -> Result<EntryResponse, ConnectError> {
    let entry = files::describe(path, &Names::read()).map_err(|error| match error.kind() {
        // Nothing is below what is not a directory.
        io::ErrorKind::NotADirectory => {
            files::failure("reading", path, &io::ErrorKind::NotFound.into())
        }
        _ => files::failure("reading", path, &error),
    })?;
    Ok(EntryResponse { entry: Some(entry) })
}

/// Runs `work` on a helper thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ConnectError> + Send + 'static,
) -> Result<T, ConnectError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(ConnectError::new(Code::Internal, "the agent failed on this path")))
}
