//! The command line, read by hand: there are three forms, and a parser library would cost more
//! memory in every machine's process than all of them.

use std::ffi::OsString;

use thiserror::Error;

/// What `--help` prints.
pub(crate) const USAGE: &str = "\
coppice-vmm: one microVM in one process, on KVM

Usage:
  coppice-vmm --control-fd N   serve one machine on the inherited socket N
  coppice-vmm --listen-fd N    serve one machine to whoever connects to the inherited socket N
  coppice-vmm probe            print what this host's /dev/kvm can do, as JSON
  coppice-vmm --help | --version

--control-fd N names a connected SOCK_SEQPACKET Unix socket. Each packet is one JSON
value: requests in, replies and events out, files passed along as descriptors. When the
other end closes, the machine ends at once. --listen-fd N names a listening one: the
machine then outlives its managers. People start machines with `coppice run`.

Environment:
  COPPICE_LOG   log to standard error: error, warn, info, debug or trace

Exit status:
  0  the guest powered off or reset, or the machine was stopped
  1  the process could not do its work (probe: KVM cannot be used)
  2  the command line is wrong
  3  the guest's kernel panicked
  4  the machine could not go on
";

/// What was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Args {
    /// Print the usage.
    Help,
    /// Print the version.
    Version,
    /// Look at the host.
    Probe,
    /// Serve a machine on this connected socket.
    Serve { control_fd: i32 },
    /// Serve a machine to those who connect to this listening socket.
    Listen { listen_fd: i32 },
}

/// What is wrong with a command line.
#[derive(Debug, PartialEq, Eq, Error)]
pub(crate) enum ArgsError {
    #[error("nothing to do: give --control-fd N, --listen-fd N or probe")]
    Nothing,
    #[error("--control-fd and --listen-fd need a descriptor number from 3 on")]
    Descriptor,
    #[error("the argument {0:?} is not known here")]
    Unknown(String),
}

/// Reads the arguments after the program's name.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Args, ArgsError> {
    let mut args = args.into_iter();
    let text = |arg: OsString| arg.to_string_lossy().into_owned();
    let first = args.next().map(text).ok_or(ArgsError::Nothing)?;
    let parsed = match first.as_str() {
        "--help" | "-h" => Args::Help,
        "--version" | "-V" => Args::Version,
        "probe" => Args::Probe,
        other => {
            let (name, value) = match other.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (other.to_owned(), None),
            };
            let mut number = || value.clone().or_else(|| args.next().map(text));
            match name.as_str() {
                "--control-fd" => Args::Serve { control_fd: descriptor(number().as_deref())? },
                "--listen-fd" => Args::Listen { listen_fd: descriptor(number().as_deref())? },
                _ => return Err(ArgsError::Unknown(first)),
            }
        }
    };
    match args.next() {
        None => Ok(parsed),
        Some(extra) => Err(ArgsError::Unknown(text(extra))),
    }
}

fn descriptor(number: Option<&str>) -> Result<i32, ArgsError> {
    number.and_then(|n| n.parse().ok()).filter(|n| *n > 2).ok_or(ArgsError::Descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(args: &[&str]) -> Result<Args, ArgsError> {
        parse(args.iter().map(OsString::from))
    }

    #[test]
    fn each_form_is_understood() {
        assert_eq!(of(&["probe"]), Ok(Args::Probe));
        assert_eq!(of(&["--help"]), Ok(Args::Help));
        assert_eq!(of(&["-V"]), Ok(Args::Version));
        assert_eq!(of(&["--control-fd", "3"]), Ok(Args::Serve { control_fd: 3 }));
        assert_eq!(of(&["--control-fd=17"]), Ok(Args::Serve { control_fd: 17 }));
        assert_eq!(of(&["--listen-fd", "5"]), Ok(Args::Listen { listen_fd: 5 }));
    }

    #[test]
    fn standard_descriptors_and_nonsense_are_no_control_socket() {
        for number in ["0", "2", "-1", "x", "", "99999999999"] {
            assert_eq!(of(&["--control-fd", number]), Err(ArgsError::Descriptor), "{number}");
        }
        assert_eq!(of(&["--control-fd"]), Err(ArgsError::Descriptor));
    }

    #[test]
    fn what_is_not_known_is_named() {
        assert_eq!(of(&[]), Err(ArgsError::Nothing));
        assert_eq!(of(&["run"]), Err(ArgsError::Unknown("run".into())));
        assert_eq!(of(&["probe", "now"]), Err(ArgsError::Unknown("now".into())));
    }
}
