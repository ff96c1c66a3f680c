//! Errors as people read them.

use std::error::Error;
use std::fmt::Write;

/// Renders an error and its causes as one line, outermost first.
pub fn one_line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        // Writing to a string cannot fail.
        let _ = write!(line, ": {cause}");
        source = cause.source();
    }
    line.replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn causes_follow_on_the_same_line() {
        #[derive(Debug, thiserror::Error)]
        #[error("the disk\nfailed")]
        struct Outer(#[source] io::Error);
        assert_eq!(one_line(&Outer(io::Error::other("it is full"))), "the disk failed: it is full");
    }
}
