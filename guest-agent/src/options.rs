//! Command line of the agent.

use coppice_agent_protocol::{CONTROL_PORT, ENVD_PORT, PROXY_PORT, READY_PORT};

use crate::net::Endpoint;

/// How to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Where the envd service listens.
    pub listen: Endpoint,
    /// Where the control service listens.
    pub control: Endpoint,
    /// Where the way to TCP ports listens, if there is to be one.
    pub proxy: Option<Endpoint>,
    /// Where the ready line goes once all listen; a vsock port is one of the host.
    pub ready: Endpoint,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: Endpoint::Vsock(ENVD_PORT),
            control: Endpoint::Vsock(CONTROL_PORT),
            proxy: Some(Endpoint::Vsock(PROXY_PORT)),
            ready: Endpoint::Vsock(READY_PORT),
        }
    }
}

/// Why a command line is not understood.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// An option nobody knows.
    #[error("unknown option {0:?}: the options are --listen, --control, --proxy and --ready")]
    Unknown(String),
    /// An option without its value.
    #[error("{0} needs an endpoint: vsock:PORT, tcp:ADDRESS:PORT or unix:PATH")]
    Missing(String),
    /// A value that is no endpoint.
    #[error(transparent)]
    Endpoint(#[from] crate::net::EndpointError),
}

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// When an argument is not known or not complete. With `lenient`, as for init (which gets the
    /// kernel's leftovers), unknown arguments are skipped. Without `--proxy`, there is a way to TCP
    /// ports if the envd service listens on vsock.
    pub fn parse(
        arguments: impl IntoIterator<Item = String>,
        lenient: bool,
    ) -> Result<Self, OptionsError> {
        let mut options = Self { proxy: None, ..Self::default() };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let target = match argument.as_str() {
                "--listen" => &mut options.listen,
                "--control" => &mut options.control,
                "--ready" => &mut options.ready,
                "--proxy" => options.proxy.insert(Endpoint::Vsock(PROXY_PORT)),
                _ if lenient => continue,
                _ => return Err(OptionsError::Unknown(argument)),
            };
            let value = arguments.next().ok_or(OptionsError::Missing(argument))?;
            *target = value.parse()?;
        }
        if options.proxy.is_none() && matches!(options.listen, Endpoint::Vsock(_)) {
            // Elsewhere, anyone could be the host.
            options.proxy = Self::default().proxy;
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, lenient: bool) -> Result<Options, OptionsError> {
        Options::parse(text.split_whitespace().map(str::to_owned), lenient)
    }

    #[test]
    fn without_arguments_it_listens_on_vsock() {
        let options = parse("", false).unwrap();
        assert_eq!(options.listen.to_string(), "vsock:49983");
        assert_eq!(options.control.to_string(), "vsock:49982");
        assert_eq!(options.ready.to_string(), "vsock:49981");
        assert_eq!(options.proxy, Some(Endpoint::Vsock(49984)));
    }

    #[test]
    fn the_way_to_tcp_ports_is_open_on_vsock_or_where_it_is_told_to() {
        assert_eq!(parse("--listen unix:/a", false).unwrap().proxy, None);
        let options = parse("--listen unix:/a --proxy unix:/b", false).unwrap();
        assert_eq!(options.proxy, Some(Endpoint::Unix("/b".into())));
    }

    #[test]
    fn endpoints_are_read_and_printed_alike() {
        for text in ["vsock:1", "tcp:127.0.0.1:80", "tcp:[::1]:80", "unix:/a/b"] {
            let options = parse(&format!("--listen {text}"), false).unwrap();
            assert_eq!(options.listen.to_string(), text);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["--listen", "--listen vsock:x", "--listen unix:", "--listen 80", "quiet"] {
            assert!(parse(text, false).is_err(), "{text}");
        }
    }

    #[test]
    fn the_kernels_leftovers_do_not_stop_init() {
        let options = parse("splash --control unix:/x auto", true).unwrap();
        assert_eq!(options.control, Endpoint::Unix("/x".into()));
    }
}
