//! Why something could not be measured.

use std::io;

use coppice_vmm_protocol::SocketError;
use thiserror::Error;

/// Failures of contenders, of their guests and of what surrounds them. A report keeps them as
/// text, with their sources.
#[derive(Debug, Error)]
pub enum Error {
    /// The system refused something.
    #[error("{doing} failed")]
    Io {
        /// What was tried.
        doing: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// `coppice-vmm` is not understood.
    #[error("the control socket of coppice-vmm failed")]
    Control(#[from] SocketError),
    /// A contender said no, or something that makes no sense.
    #[error("{who} refused {what}: {answer}")]
    Refused {
        /// The contender's program or service.
        who: String,
        /// What was asked.
        what: String,
        /// What it answered.
        answer: String,
    },
    /// The guest's agent said no, or something that makes no sense.
    #[error("the guest's agent {0}")]
    Agent(String),
    /// Something did not come in time.
    #[error("{0}")]
    Late(String),
    /// The first command answered something else than this round's token.
    #[error(
        "the answer is {found:?} and not this round's token: what answered is not the machine that \
         was asked for"
    )]
    Token {
        /// What came instead.
        found: String,
    },
    /// The machine is gone.
    #[error("the machine ended; its console said:\n{console}")]
    Ended {
        /// The end of its console's output.
        console: String,
    },
    /// A figure that should be there is not.
    #[error("{0}")]
    Missing(String),
}

impl Error {
    /// The text with all its causes, in one line where they are.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        text
    }
}

/// Puts what was tried before an error of the system.
pub(crate) trait Doing<T> {
    /// `text` is what was tried, as the subject of "failed".
    fn doing(self, text: impl Into<String>) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, text: impl Into<String>) -> Result<T, Error> {
        self.map_err(|error| {
            let source = error.into();
            let doing = text.into();
            // What a time limit of a socket gives.
            match source.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    Error::Late(format!("{doing} took longer than the limit"))
                }
                _ => Error::Io { doing, source },
            }
        })
    }
}
