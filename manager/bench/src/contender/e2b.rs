//! A service with E2B's API: sandboxes are made of a template, the first command goes to envd's
//! process API, and the sandbox is killed.
//!
//! It is asked as E2B's clients ask it. Where `E2B_SANDBOX_URL` is set, or the service is named by
//! an address, sandboxes are reached there, by header; else at `49983-ID.DOMAIN`. The clock includes
//! the way to the service, and its guests are its own: kernel, image, memory and vCPUs are those of
//! the template.

use std::collections::BTreeSet;
use std::net::{IpAddr, TcpStream, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coppice_agent_protocol::{ACCESS_TOKEN_HEADER, ENVD_PORT};
use serde::Deserialize;
use serde_json::{Value, json};

use super::http::Call;
use super::{Boot, Contender, Extent, Feature, Guest, Place, Saved, Saving, Vm};
use crate::agent::{self, Command, Head};
use crate::clock::Clock;
use crate::error::{Doing as _, Error};
use crate::model;

/// How long a sandbox lives that this benchmark could not kill.
const LIFE_SECS: u32 = 300;

/// Where a service listens.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Url {
    host: String,
    port: u16,
}

impl Url {
    fn parse(text: &str) -> Result<Self, Error> {
        let wrong = || Error::Missing(format!("{text} is not of the form http://HOST[:PORT]"));
        let rest = text.strip_prefix("http://").ok_or_else(wrong)?;
        let rest = rest.trim_end_matches('/');
        let (host, port) = match rest.rsplit_once(':').filter(|(_, port)| !port.contains(']')) {
            Some((host, port)) => (host, port.parse().map_err(|_| wrong())?),
            None => (rest, 80),
        };
        if host.is_empty() || host.contains(['/', '?', '#', '@', ' ']) {
            return Err(wrong());
        }
        Ok(Self { host: host.to_owned(), port })
    }

    fn is_address(&self) -> bool {
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        bare == "localhost" || bare.parse::<IpAddr>().is_ok()
    }

    fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    fn connect(&self, limit: Duration) -> Result<TcpStream, Error> {
        let doing = || format!("connecting to {}", self.authority());
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let address = (host, self.port).to_socket_addrs().doing(doing())?.next();
        let address = address.ok_or_else(|| Error::Missing(format!("{host} has no address")))?;
        let stream = TcpStream::connect_timeout(&address, limit).doing(doing())?;
        stream.set_nodelay(true).doing(doing())?;
        stream.set_read_timeout(Some(limit)).doing(doing())?;
        Ok(stream)
    }
}

/// The service.
#[derive(Debug)]
pub struct E2b {
    name: String,
    service: Arc<Service>,
}

/// What the sandboxes of a service share.
#[derive(Debug)]
struct Service {
    api: Url,
    sandboxes: Option<Url>,
    key: String,
    template: String,
    /// Those not killed yet.
    alive: Mutex<BTreeSet<String>>,
}

/// The answer to a create.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Created {
    #[serde(rename = "sandboxID")]
    id: String,
    domain: Option<String>,
    envd_access_token: Option<String>,
}

impl E2b {
    /// The service at a URL, with sandboxes of `template`; the API key is that of `key`.
    ///
    /// # Errors
    /// When a URL makes no sense.
    pub fn new(
        name: String,
        url: &str,
        sandbox_url: Option<&str>,
        key: String,
        template: String,
    ) -> Result<Self, Error> {
        let api = Url::parse(url)?;
        let sandboxes = match sandbox_url {
            Some(url) => Some(Url::parse(url)?),
            None => api.is_address().then(|| api.clone()),
        };
        let service = Service { api, sandboxes, key, template, alive: Mutex::default() };
        Ok(Self { name, service: Arc::new(service) })
    }
}

impl Service {
    fn alive(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        limit: Duration,
    ) -> Result<Vec<u8>, Error> {
        let call = Call {
            who: "the service",
            method,
            path,
            host: &self.api.authority(),
            more: &format!("x-api-key: {}\r\nconnection: close\r\n", self.key),
            body,
        };
        call.make(self.api.connect(limit)?)
    }

    fn create(self: &Arc<Self>, template: &str, limit: Duration) -> Result<Sandbox, Error> {
        let body = json!({ "templateID": template, "timeout": LIFE_SECS });
        let answer = self.call("POST", "/v2/sandboxes", Some(&body), limit)?;
        let created: Created = serde_json::from_slice(&answer).map_err(|error| Error::Refused {
            who: "the service".into(),
            what: "a sandbox".into(),
            answer: error.to_string(),
        })?;
        self.alive().insert(created.id.clone());
        Sandbox::new(self.clone(), created, limit)
    }

    fn kill(&self, id: &str, limit: Duration) -> Result<(), Error> {
        self.call("DELETE", &format!("/sandboxes/{id}"), None, limit)?;
        self.alive().remove(id);
        Ok(())
    }
}

const NO_BOOT: &str = "a service starts its own templates, and does not boot what it is given";
const NO_SAVE: &str = "saving sandboxes is no part of every service with E2B's API";
const NO_MEMORY: &str = "a service's processes are not seen from here";

impl Contender for E2b {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> model::Contender {
        model::Contender {
            name: self.name.clone(),
            version: format!("template {}", self.service.template),
            program: format!("http://{}", self.service.api.authority()),
            kind: "e2b".into(),
        }
    }

    fn lacks(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::Boot => Some(NO_BOOT),
            Feature::Save | Feature::Diff => Some(NO_SAVE),
            Feature::Memory => Some(NO_MEMORY),
            Feature::Many => None,
        }
    }

    fn template(&self) -> Option<Saved> {
        Some(Saved::Named(self.service.template.clone()))
    }

    fn place(&self, _guest: &Guest, _from: Option<&Saved>) -> Result<Place, Error> {
        Ok(Place::nowhere())
    }

    fn boot_to_console(
        &self,
        _guest: &Guest,
        _token: &str,
        _place: Place,
        _clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error> {
        Err(Error::Missing(NO_BOOT.into()))
    }

    fn boot(&self, _guest: &Guest, _how: Boot, _clock: &mut Clock) -> Result<Box<dyn Vm>, Error> {
        Err(Error::Missing(NO_BOOT.into()))
    }

    fn restore(
        &self,
        guest: &Guest,
        from: &Saved,
        _place: Place,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error> {
        let Saved::Named(template) = from else {
            return Err(Error::Missing("what was saved is of another contender".into()));
        };
        let sandbox = self.service.create(template, guest.limit)?;
        clock.mark("running");
        Ok(Box::new(sandbox))
    }

    fn abandon(&self) {
        let alive: Vec<String> = self.service.alive().iter().cloned().collect();
        for id in alive {
            // It ends by itself when its time is over.
            let _ = self.service.kill(&id, Duration::from_secs(5));
        }
    }
}

/// A sandbox; it is killed when dropped.
#[derive(Debug)]
struct Sandbox {
    service: Arc<Service>,
    id: String,
    url: Url,
    head: Head,
    limit: Duration,
}

impl Sandbox {
    fn new(service: Arc<Service>, created: Created, limit: Duration) -> Result<Self, Error> {
        let Created { id, domain, envd_access_token } = created;
        let mut more = String::from("connection: close\r\n");
        if let Some(token) = envd_access_token {
            more += &format!("{ACCESS_TOKEN_HEADER}: {token}\r\n");
        }
        let (url, host) = match &service.sandboxes {
            Some(url) => {
                more += &format!("e2b-sandbox-id: {id}\r\ne2b-sandbox-port: {ENVD_PORT}\r\n");
                (url.clone(), url.authority())
            }
            None => {
                let domain = domain.ok_or_else(|| {
                    Error::Missing("the service names no domain: set E2B_SANDBOX_URL".into())
                })?;
                let host = format!("{ENVD_PORT}-{id}.{domain}");
                (Url::parse(&format!("http://{host}"))?, host)
            }
        };
        Ok(Self { service, id, url, head: Head { host, more }, limit })
    }
}

impl Vm for Sandbox {
    fn pid(&self) -> Option<u32> {
        None
    }

    fn wait_for_line(&mut self, _token: &str) -> Result<(), Error> {
        Err(Error::Missing("a service shows no console".into()))
    }

    fn run(&self, command: &Command, on_output: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let stream = self.url.connect(self.limit)?;
        agent::run(stream, &self.head, command, self.limit, on_output)
    }

    fn save(&mut self, _guest: &Guest, _extent: Extent) -> Result<(Saved, Saving), Error> {
        Err(Error::Missing(NO_SAVE.into()))
    }

    fn end(&mut self) -> Result<(), Error> {
        if self.service.alive().contains(&self.id) {
            self.service.kill(&self.id, self.limit)?;
        }
        Ok(())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // It ends by itself when its time is over.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart() {
        let url = |text| Url::parse(text).map(|url| (url.authority(), url.is_address())).ok();
        assert_eq!(url("http://127.0.0.1:49380"), Some(("127.0.0.1:49380".into(), true)));
        assert_eq!(url("http://[::1]:80/"), Some(("[::1]:80".into(), true)));
        assert_eq!(url("http://api.example.org"), Some(("api.example.org:80".into(), false)));
        for wrong in ["", "127.0.0.1:1", "ftp://x", "http://", "http://x:y", "http://a/b"] {
            assert_eq!(url(wrong), None, "{wrong}");
        }
    }
}
