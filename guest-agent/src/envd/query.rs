//! Parameters in a request's query.

use http::Uri;

/// The first parameter of that name, decoded.
pub(super) fn parameter(uri: &Uri, name: &str) -> Option<String> {
    uri.query()?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(key) == name).then(|| decode(value))
    })
}

/// Decodes `+` and `%XX`; what is not UTF-8 after that is replaced.
fn decode(text: &str) -> String {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        (rest, _) = match (*first, tail) {
            (b'%', [high, low, after @ ..]) if hex(*high).is_some() && hex(*low).is_some() => {
                let byte = hex(*high).unwrap_or(0) << 4 | hex(*low).unwrap_or(0);
                (after, decoded.push(byte))
            }
            (b'+', _) => (tail, decoded.push(b' ')),
            (byte, _) => (tail, decoded.push(byte)),
        };
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// Decodes `%XX` alone, as header parameters have it.
pub(super) fn decode_percent(text: &str) -> String {
    decode(&text.replace('+', "%2B"))
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parameters_are_found_and_decoded() {
        let uri: Uri = "/files?username=&path=%2Ftmp%2Fa+b%2Bc%zz&path=second".parse().unwrap();
        assert_eq!(parameter(&uri, "path").as_deref(), Some("/tmp/a b+c%zz"));
        assert_eq!(parameter(&uri, "username").as_deref(), Some(""));
        assert_eq!(parameter(&uri, "signature"), None);
    }

    proptest! {
        #[test]
        fn any_text_decodes(text in ".{0,40}") {
            let _ = decode(&text);
        }
    }
}
