//! `/files`: whole files in and out of the guest, streamed.

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use tokio::io::AsyncRead;

use super::transport::{self, request};
use super::{Agent, Error};

/// A file on its way out of the guest.
#[derive(Debug)]
pub struct Download {
    body: Incoming,
    size: Option<u64>,
}

impl Download {
    /// Size in bytes, if the agent told it.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// The next piece, or nothing at the end of the file.
    ///
    /// # Errors
    /// [`Error::Http`] when the connection breaks before the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(Error::Http(error)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }
}

impl Agent {
    /// Writes what `data` gives to the file `path` in the guest, making its directories.
    /// A relative path starts at the user's home.
    ///
    /// # Errors
    /// [`Error::Refused`] when the path cannot be written or the guest's disk is full.
    pub async fn upload(
        &self,
        path: &str,
        user: Option<&str>,
        data: impl AsyncRead + Send + Unpin + 'static,
    ) -> Result<(), Error> {
        let request = request("POST", &files_uri(path, user), user)
            .header("content-type", "application/octet-stream")
            .body(transport::read_from(data))
            .map_err(Error::Request)?;
        transport::whole(self.envd.open(request).await?).await.map(drop)
    }

    /// Opens the file `path` in the guest for reading.
    ///
    /// # Errors
    /// [`Error::Refused`] when it is not there or not readable for the user.
    pub async fn download(&self, path: &str, user: Option<&str>) -> Result<Download, Error> {
        let request = request("GET", &files_uri(path, user), user)
            .body(transport::empty())
            .map_err(Error::Request)?;
        let body = self.envd.open(request).await?;
        let size = body.size_hint().exact();
        Ok(Download { body, size })
    }
}

fn files_uri(path: &str, user: Option<&str>) -> String {
    let mut uri = format!("/files?path={}", encode(path));
    if let Some(user) = user {
        uri.push_str("&username=");
        uri.push_str(&encode(user));
    }
    uri
}

/// Percent-encodes everything but the unreserved characters of RFC 3986.
fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            for digit in [byte >> 4, byte & 15] {
                let digit = char::from_digit(u32::from(digit), 16).unwrap_or('0');
                out.push(digit.to_ascii_uppercase());
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_travel_whole() {
        assert_eq!(
            files_uri("/tmp/a b&c=%", Some("ü")),
            "/files?path=%2Ftmp%2Fa%20b%26c%3D%25&username=%C3%BC"
        );
    }
}
