//! A `multipart/form-data` reader that is fed pieces and holds no more than one piece, a delimiter
//! and a part's headers.

use std::io;

use http::StatusCode;

use super::HttpError;
use super::query::decode_percent;

/// Most bytes the headers of a part may have.
const MAX_HEADERS: usize = 16 * 1024;

/// Most bytes a boundary may have (RFC 2046 says 70).
const MAX_BOUNDARY: usize = 200;

/// Takes the parts of a form as they come.
pub(super) trait Parts {
    /// A part begins.
    fn begin(&mut self, part: PartHeaders) -> io::Result<()>;
    /// The part goes on.
    fn data(&mut self, data: &[u8]) -> io::Result<()>;
    /// The part ends.
    fn end(&mut self) -> io::Result<()>;
}

/// What `Content-Disposition` says of a part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PartHeaders {
    /// Name of the form's field.
    pub(super) name: Option<String>,
    /// Name of the file, directories included.
    pub(super) file_name: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the first delimiter.
    Preamble,
    /// After a delimiter: a part follows, or `--` and the end.
    Delimiter,
    Headers,
    Data,
    /// After the last delimiter.
    Epilogue,
}

/// The reader; see the module.
#[derive(Debug)]
pub(super) struct Multipart<P> {
    parts: P,
    /// CRLF, two dashes and the boundary.
    delimiter: Vec<u8>,
    /// Bytes not understood yet.
    buffer: Vec<u8>,
    state: State,
}

impl<P: Parts> Multipart<P> {
    /// A reader for the form whose content type is given.
    pub(super) fn new(content_type: &str, parts: P) -> Result<Self, HttpError> {
        let boundary = parameter(content_type, "boundary")
            .filter(|boundary| !boundary.is_empty() && boundary.len() <= MAX_BOUNDARY)
            .ok_or_else(|| bad_request("the multipart content type has no usable boundary"))?;
        let delimiter = format!("\r\n--{boundary}").into_bytes();
        // The first delimiter may stand at the very start, without its CRLF.
        Ok(Self { parts, delimiter, buffer: b"\r\n".to_vec(), state: State::Preamble })
    }

    /// Takes the next piece.
    pub(super) fn push(&mut self, piece: &[u8]) -> io::Result<()> {
        if self.state == State::Epilogue {
            return Ok(());
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.extend_from_slice(piece);
        let mut rest = buffer.as_slice();
        while let Some(after) = self.step(rest)? {
            rest = after;
        }
        if self.state == State::Data || self.state == State::Preamble {
            // What cannot be the start of a delimiter is passed on.
            let keep = rest.len().min(self.delimiter.len().saturating_sub(1));
            let (data, tail) = rest.split_at(rest.len().saturating_sub(keep));
            if self.state == State::Data && !data.is_empty() {
                self.parts.data(data)?;
            }
            rest = tail;
        }
        let consumed = buffer.len().saturating_sub(rest.len());
        buffer.drain(..consumed);
        self.buffer = buffer;
        Ok(())
    }

    /// The form is complete; gives back what took its parts.
    pub(super) fn finish(self) -> io::Result<P> {
        if self.state == State::Epilogue {
            Ok(self.parts)
        } else {
            Err(io::Error::other(bad_request("the multipart body is cut short")))
        }
    }

    /// Understands one thing at the front of `rest`; what follows it, or `None` for lack of bytes.
    fn step<'a>(&mut self, rest: &'a [u8]) -> io::Result<Option<&'a [u8]>> {
        match self.state {
            State::Epilogue => Ok(None),
            State::Preamble | State::Data => {
                let Some(at) = find(rest, &self.delimiter) else { return Ok(None) };
                let (data, after) = rest.split_at(at);
                if self.state == State::Data {
                    if !data.is_empty() {
                        self.parts.data(data)?;
                    }
                    self.parts.end()?;
                }
                self.state = State::Delimiter;
                Ok(after.get(self.delimiter.len()..))
            }
            State::Delimiter => match rest {
                [b'-', b'-', ..] => {
                    self.state = State::Epilogue;
                    Ok(None)
                }
                // Kept in the buffer: a part without headers begins with the blank line.
                [b'\r', b'\n', ..] => {
                    self.state = State::Headers;
                    Ok(Some(rest))
                }
                [b' ' | b'\t', after @ ..] => Ok(Some(after)),
                [] | [b'-' | b'\r'] => Ok(None),
                _ => Err(io::Error::other(bad_request("a multipart delimiter is malformed"))),
            },
            State::Headers => {
                let Some(end) = find(rest, b"\r\n\r\n") else {
                    return if rest.len() > MAX_HEADERS {
                        Err(io::Error::other(bad_request("a part's headers are too long")))
                    } else {
                        Ok(None)
                    };
                };
                let (headers, after) = rest.split_at(end);
                self.parts.begin(part_headers(headers))?;
                self.state = State::Data;
                Ok(after.get(4..))
            }
        }
    }
}

fn bad_request(message: &str) -> HttpError {
    HttpError::new(StatusCode::BAD_REQUEST, message)
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let (first, len) = (needle.first()?, needle.len());
    let mut start = 0;
    loop {
        let rest = haystack.get(start..)?;
        let at = rest.iter().position(|byte| byte == first)?;
        start = start.checked_add(at)?;
        if haystack.get(start..start.checked_add(len)?)? == needle {
            return Some(start);
        }
        start = start.checked_add(1)?;
    }
}

fn part_headers(text: &[u8]) -> PartHeaders {
    let text = String::from_utf8_lossy(text);
    let disposition = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    });
    let Some(disposition) = disposition else { return PartHeaders::default() };
    let extended = parameter(disposition, "filename*").and_then(|value| {
        // RFC 5987: charset'language'text.
        let (_, encoded) = value.rsplit_once('\'')?;
        Some(decode_percent(encoded))
    });
    let file_name = extended.or_else(|| parameter(disposition, "filename"));
    PartHeaders { name: parameter(disposition, "name"), file_name }
}

/// A parameter of a header such as `form-data; name="file"; filename="a\"b"`.
fn parameter(header: &str, name: &str) -> Option<String> {
    let (_, mut rest) = header.split_once(';')?;
    loop {
        let (key, after) = rest.split_once('=')?;
        let key = key.trim_matches([' ', '\t', ';']);
        let after = after.trim_start();
        let (value, tail) = match after.strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => {
                let (value, tail) = after.split_once(';').unwrap_or((after, ""));
                (value.trim_end().to_owned(), tail)
            }
        };
        if key.eq_ignore_ascii_case(name) {
            return Some(value);
        }
        rest = tail;
    }
}

/// The text up to the closing quote, and what follows it.
fn unquote(quoted: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, quoted.get(at..).unwrap_or_default().trim_start_matches('"')),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests;
