//! Calls of the HTTP APIs that VMMs and services offer, over any stream.

use std::io::{Read, Write};

use serde_json::Value;

use crate::error::{Doing as _, Error};

/// Longest answer that is read.
const MAX_ANSWER: usize = 4 << 20;

/// A call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a> {
    /// Who is asked, for errors.
    pub(super) who: &'a str,
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    pub(super) host: &'a str,
    /// Whole lines, each with its end.
    pub(super) more: &'a str,
    pub(super) body: Option<&'a Value>,
}

impl Call<'_> {
    /// Makes the call; gives the body of a successful answer.
    pub(super) fn make(&self, mut stream: impl Read + Write) -> Result<Vec<u8>, Error> {
        let Call { who, method, path, host, more, body } = *self;
        let body = body.map(ToString::to_string).unwrap_or_default();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\naccept: application/json\r\n{more}\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).doing(format!("asking {who}"))?;
        let answer = answer(&mut stream, who)?;
        if answer.success {
            return Ok(answer.body);
        }
        let text = format!("{} {}", answer.status, String::from_utf8_lossy(&answer.body));
        Err(Error::Refused {
            who: who.to_owned(),
            what: format!("{method} {path}"),
            answer: text.trim().to_owned(),
        })
    }
}

struct Answer {
    status: String,
    success: bool,
    body: Vec<u8>,
}

/// Reads an answer whose length is told, by a header or by the stream's end.
fn answer(stream: &mut impl Read, who: &str) -> Result<Answer, Error> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    let mut head: Option<Head> = None;
    loop {
        if head.is_none() {
            head = Head::parse(&bytes);
        }
        if let Some(head) = &head
            && let Some(body) = head.body(&bytes)
        {
            return Ok(Answer { status: head.status.clone(), success: head.success, body });
        }
        let count = stream.read(&mut piece).doing(format!("waiting for an answer of {who}"))?;
        bytes.extend_from_slice(piece.get(..count).unwrap_or_default());
        if count == 0 {
            // The end of the stream is the end of a body without a length.
            return match head {
                Some(Head { status, success, start, length: Length::ToTheEnd }) => {
                    let body = bytes.get(start..).unwrap_or_default().to_vec();
                    Ok(Answer { status, success, body })
                }
                _ => Err(Error::Missing(format!("{who} hung up before it answered"))),
            };
        }
        if bytes.len() > MAX_ANSWER {
            return Err(Error::Missing(format!("{who} answers with more than {MAX_ANSWER} bytes")));
        }
    }
}

enum Length {
    Bytes(usize),
    Chunked,
    ToTheEnd,
}

struct Head {
    status: String,
    success: bool,
    /// Where the body begins.
    start: usize,
    length: Length,
}

impl Head {
    /// The head, once it is all there.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
        let text = String::from_utf8_lossy(bytes.get(..end)?).into_owned();
        let mut lines = text.split("\r\n");
        let status = lines.next()?.split_once(' ')?.1.to_owned();
        let mut length =
            if status.starts_with("204") { Length::Bytes(0) } else { Length::ToTheEnd };
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            if name.eq_ignore_ascii_case("content-length") {
                length = Length::Bytes(value.trim().parse().ok()?);
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                length = Length::Chunked;
            }
        }
        let success = status.starts_with('2');
        Some(Self { status, success, start: end + 4, length })
    }

    /// The body, once it is all there.
    fn body(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let bytes = bytes.get(self.start..)?;
        match self.length {
            Length::Bytes(length) => bytes.get(..length).map(<[u8]>::to_vec),
            Length::Chunked => unchunked(bytes),
            Length::ToTheEnd => None,
        }
    }
}

/// The content of a chunked body, once it is all there.
fn unchunked(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = bytes.windows(2).position(|window| window == b"\r\n")?;
        let line = std::str::from_utf8(bytes.get(..end)?).ok()?;
        let length = usize::from_str_radix(line.split(';').next()?.trim(), 16).ok()?;
        let start = end.checked_add(2)?;
        body.extend_from_slice(bytes.get(start..start.checked_add(length)?)?);
        bytes = bytes.get(start.checked_add(length)?.checked_add(2)?..)?;
        if length == 0 {
            return Some(body);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a call gives that is answered with these bytes, which come one by one.
    fn answered(bytes: &str) -> Result<String, String> {
        let mut bytes = bytes.as_bytes();
        let mut slow = SlowReader(&mut bytes);
        let answer = answer(&mut slow, "peer").map_err(|error| error.chain())?;
        Ok(format!("{} {}", answer.success, String::from_utf8(answer.body).unwrap()))
    }

    struct SlowReader<'a>(&'a mut &'a [u8]);

    impl Read for SlowReader<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(&mut buffer[..1])
        }
    }

    #[test]
    fn bodies_of_every_length_are_read() {
        let cases = [
            ("HTTP/1.1 204 No Content\r\n\r\n", "true "),
            ("HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}rest", "true {}"),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{\"\r\n3\r\n\":1\r\n0\r\n\r\n",
                "true {\"\":1",
            ),
            ("HTTP/1.1 404 Not Found\r\n\r\nnothing", "false nothing"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(answered(bytes).as_deref(), Ok(expected), "{bytes}");
        }
    }

    #[test]
    fn an_answer_that_breaks_off_is_none() {
        for bytes in ["", "HTTP/1.1 200", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort"] {
            assert!(answered(bytes).is_err(), "{bytes}");
        }
    }
}
