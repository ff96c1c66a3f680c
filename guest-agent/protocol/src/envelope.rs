//! Frames of a streaming call: one flag byte, a big-endian 32-bit length, the payload.
//!
//! A frame with [`FLAG_END`] is the last one; its payload is `{}` or `{"error":{…}}`.

use serde::{Deserialize, Serialize};

use crate::error::ConnectError;
use crate::json;

/// Bytes before each payload.
pub const HEADER_LEN: usize = 5;

/// Flag of a payload that is compressed; nothing here compresses or accepts it.
pub const FLAG_COMPRESSED: u8 = 0x01;

/// Flag of a stream's last frame.
pub const FLAG_END: u8 = 0x02;

/// Why bytes are not a stream of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// A frame announces more than the reader accepts.
    #[error("a message of {len} bytes is larger than the limit of {limit} bytes")]
    TooLarge {
        /// What the frame announces.
        len: usize,
        /// What the reader accepts.
        limit: usize,
    },
    /// A frame is compressed, which was not agreed.
    #[error("a message is compressed; compression is not supported")]
    Compressed,
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// [`FLAG_END`] or 0; bits without a meaning are kept.
    pub flags: u8,
    /// The JSON text.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Whether this is the stream's last frame.
    #[must_use]
    pub const fn is_end(&self) -> bool {
        self.flags & FLAG_END != 0
    }
}

/// Payload of a stream's last frame.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndStream {
    /// Why the call failed; absent when it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ConnectError>,
}

/// A frame of `payload`, header included. Payloads past `u32::MAX` cannot be framed and yield an
/// empty buffer; callers never come near.
#[must_use]
pub fn encode(flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = begin(flags, payload.len());
    frame.extend_from_slice(payload);
    finish(frame)
}

/// A frame that carries `message` as JSON.
///
/// # Errors
/// When `message` has no JSON form.
pub fn encode_message<T: Serialize>(message: &T) -> Result<Vec<u8>, serde_json::Error> {
    let mut frame = begin(0, 0);
    serde_json::to_writer(&mut frame, message)?;
    Ok(finish(frame))
}

/// A stream's last frame.
#[must_use]
pub fn encode_end(error: Option<ConnectError>) -> Vec<u8> {
    let payload = serde_json::to_vec(&EndStream { error }).unwrap_or_else(|_| b"{}".to_vec());
    encode(FLAG_END, &payload)
}

/// A frame whose payload is `before`, then base64 of `data`, then `after`, built without a copy in
/// between: the path every byte of a process' output takes.
pub(crate) fn encode_bytes(before: &str, data: &[u8], after: &str) -> Vec<u8> {
    let base64_len = data.len().div_ceil(3).saturating_mul(4);
    let mut frame = begin(0, before.len().saturating_add(base64_len).saturating_add(after.len()));
    frame.extend_from_slice(before.as_bytes());
    json::append_base64(&mut frame, data);
    frame.extend_from_slice(after.as_bytes());
    finish(frame)
}

fn begin(flags: u8, payload_len: usize) -> Vec<u8> {
    let mut frame = Vec::with_capacity(payload_len.saturating_add(HEADER_LEN));
    frame.extend_from_slice(&[flags, 0, 0, 0, 0]);
    frame
}

fn finish(mut frame: Vec<u8>) -> Vec<u8> {
    let len = frame.len().checked_sub(HEADER_LEN).and_then(|len| u32::try_from(len).ok());
    match (len, frame.get_mut(1..HEADER_LEN)) {
        (Some(len), Some(field)) => field.copy_from_slice(&len.to_be_bytes()),
        _ => frame.clear(),
    }
    frame
}

/// Cuts a byte stream into frames, in whatever pieces it arrives.
///
/// Holds at most one partial frame within the limit plus the last piece pushed, provided that
/// [`FrameDecoder::next_frame`] is called until it yields nothing.
#[derive(Debug)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    /// Bytes at the front of `buffer` that were handed out already.
    consumed: usize,
    limit: usize,
}

impl FrameDecoder {
    /// A decoder that refuses payloads over `limit` bytes.
    #[must_use]
    pub const fn new(limit: usize) -> Self {
        Self { buffer: Vec::new(), consumed: 0, limit }
    }

    /// Takes the next piece of the stream.
    pub fn push(&mut self, piece: &[u8]) {
        if self.consumed > 0 {
            self.buffer.drain(..self.consumed);
            self.consumed = 0;
        }
        self.buffer.extend_from_slice(piece);
    }

    /// Whether the stream may end here: no partial frame is pending.
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        self.consumed == self.buffer.len()
    }

    /// The next complete frame, or nothing until more is pushed.
    ///
    /// # Errors
    /// When the frame is too large or compressed. The stream cannot be continued after that.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, EnvelopeError> {
        let pending = self.buffer.get(self.consumed..).unwrap_or_default();
        let Some((header, rest)) = pending.split_first_chunk::<HEADER_LEN>() else {
            return Ok(None);
        };
        let [flags, length @ ..] = *header;
        if flags & FLAG_COMPRESSED != 0 {
            return Err(EnvelopeError::Compressed);
        }
        let len = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if len > self.limit {
            return Err(EnvelopeError::TooLarge { len, limit: self.limit });
        }
        let Some(payload) = rest.get(..len) else {
            return Ok(None);
        };
        let frame = Frame { flags, payload: payload.to_vec() };
        self.consumed = self.consumed.saturating_add(HEADER_LEN).saturating_add(len);
        if self.is_at_boundary() {
            // A large message must not pin its buffer for the rest of a long stream.
            self.buffer = Vec::new();
            self.consumed = 0;
        }
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Code;
    use proptest::prelude::*;

    fn frames_of(decoder: &mut FrameDecoder) -> Vec<Frame> {
        std::iter::from_fn(|| decoder.next_frame().unwrap()).collect()
    }

    fn frames() -> impl Strategy<Value = Vec<Frame>> {
        let payload = proptest::collection::vec(any::<u8>(), 0..40);
        let frame = (prop_oneof![Just(0), Just(FLAG_END)], payload)
            .prop_map(|(flags, payload)| Frame { flags, payload });
        proptest::collection::vec(frame, 0..8)
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_frames(frames in frames(), cuts in proptest::collection::vec(1usize..30, 1..50)) {
            let stream: Vec<u8> =
                frames.iter().flat_map(|frame| encode(frame.flags, &frame.payload)).collect();
            let mut decoder = FrameDecoder::new(64);
            let mut found = Vec::new();
            let (mut rest, mut cuts) = (stream.as_slice(), cuts.iter().cycle());
            while !rest.is_empty() {
                let (piece, tail) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
                decoder.push(piece);
                found.extend(frames_of(&mut decoder));
                rest = tail;
            }
            prop_assert_eq!(found, frames);
            prop_assert!(decoder.is_at_boundary());
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut decoder = FrameDecoder::new(100);
            decoder.push(&bytes);
            while let Ok(Some(frame)) = decoder.next_frame() {
                prop_assert!(frame.payload.len() <= 100);
            }
        }
    }

    #[test]
    fn the_limit_holds_before_the_payload_arrives() {
        let mut decoder = FrameDecoder::new(9);
        decoder.push(&[0, 0, 0, 0, 10]);
        assert_eq!(decoder.next_frame(), Err(EnvelopeError::TooLarge { len: 10, limit: 9 }));
    }

    #[test]
    fn compressed_frames_are_refused() {
        let mut decoder = FrameDecoder::new(9);
        decoder.push(&[FLAG_COMPRESSED, 0, 0, 0, 0]);
        assert_eq!(decoder.next_frame(), Err(EnvelopeError::Compressed));
    }

    #[test]
    fn the_last_frame_has_the_form_the_protocol_demands() {
        assert_eq!(encode_end(None), b"\x02\x00\x00\x00\x02{}");
        let error = ConnectError::new(Code::NotFound, "gone");
        let frame = encode_end(Some(error));
        assert_eq!(&frame[HEADER_LEN..], br#"{"error":{"code":"not_found","message":"gone"}}"#);
    }
}
