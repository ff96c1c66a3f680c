//! The reader against forms cut at any place.

use super::*;
use proptest::prelude::*;

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Collected {
    parts: Vec<(PartHeaders, Vec<u8>)>,
    open: bool,
}

impl Parts for Collected {
    fn begin(&mut self, part: PartHeaders) -> io::Result<()> {
        assert!(!self.open, "a part began within another");
        self.open = true;
        self.parts.push((part, Vec::new()));
        Ok(())
    }

    fn data(&mut self, data: &[u8]) -> io::Result<()> {
        assert!(self.open, "data outside a part");
        self.parts.last_mut().unwrap().1.extend_from_slice(data);
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        self.open = false;
        Ok(())
    }
}

fn headers(name: &str, file_name: Option<&str>) -> PartHeaders {
    PartHeaders { name: Some(name.into()), file_name: file_name.map(str::to_owned) }
}

fn form(parts: &[(PartHeaders, Vec<u8>)]) -> Vec<u8> {
    let mut form = Vec::new();
    for (part, data) in parts {
        form.extend_from_slice(b"--XX\r\nContent-Disposition: form-data");
        for (key, value) in [("name", &part.name), ("filename", &part.file_name)] {
            if let Some(value) = value {
                form.extend_from_slice(format!("; {key}=\"{value}\"").as_bytes());
            }
        }
        form.extend_from_slice(b"\r\nContent-Type: text/plain\r\n\r\n");
        form.extend_from_slice(data);
        form.extend_from_slice(b"\r\n");
    }
    form.extend_from_slice(b"--XX--\r\n");
    form
}

fn read(pieces: &[&[u8]]) -> io::Result<Collected> {
    let content_type = "multipart/form-data; boundary=XX";
    let mut reader = Multipart::new(content_type, Collected::default()).unwrap();
    for piece in pieces {
        reader.push(piece)?;
    }
    reader.finish()
}

proptest! {
    #[test]
    fn any_split_gives_the_same_parts(
        contents in proptest::collection::vec(proptest::collection::vec(prop_oneof![
            Just(b'\r'), Just(b'\n'), Just(b'-'), Just(b'X'), any::<u8>()], 0..40), 1..4),
        cut in 0usize..400, second in 0usize..400,
    ) {
        let delimiter = b"\r\n--XX";
        prop_assume!(contents.iter().all(|data| {
            let framed = [b"\r\n", data.as_slice()].concat();
            find(&framed, delimiter).is_none()
        }));
        let parts: Vec<_> =
            contents.into_iter().map(|data| (headers("file", Some("/a b/c")), data)).collect();
        let text = form(&parts);
        let (first, rest) = text.split_at(cut.min(text.len()));
        let (middle, last) = rest.split_at(second.min(rest.len()));
        prop_assert_eq!(read(&[first, middle, last]).unwrap().parts, parts);
    }

    #[test]
    fn any_bytes_are_read_or_refused(text in r#"(\r\n|--XX|--|:|;|"|=|name|filename\*?|[a-z'\\ ]){0,40}"#) {
        let _ = read(&[text.as_bytes()]);
    }
}

#[test]
fn preamble_padding_and_epilogue_are_skipped() {
    let text = b"hello\r\n--XX \t\r\ncontent-disposition: form-data; name=a\r\n\r\n1\r\n--XX--bye";
    assert_eq!(read(&[text]).unwrap().parts, [(headers("a", None), b"1".to_vec())]);
}

#[test]
fn a_part_without_headers_has_no_name() {
    let read = read(&[b"--XX\r\n\r\n1\r\n--XX--"]).unwrap();
    assert_eq!(read.parts, [(PartHeaders::default(), b"1".to_vec())]);
}

#[test]
fn file_names_may_be_quoted_escaped_or_extended() {
    let file_name = |text: &str| {
        let line = format!("Content-Disposition: form-data; name=\"file\"; {text}");
        part_headers(line.as_bytes()).file_name
    };
    assert_eq!(file_name(r#"filename="a;\"b\\c""#).as_deref(), Some(r#"a;"b\c"#));
    assert_eq!(file_name("filename=plain").as_deref(), Some("plain"));
    let extended = "filename=\"x\"; filename*=UTF-8''%C3%A4%20+";
    assert_eq!(file_name(extended).as_deref(), Some("ä +"));
}

#[test]
fn a_form_cut_short_is_refused() {
    let text = form(&[(headers("file", None), b"data".to_vec())]);
    assert!(read(&[&text[..text.len() - 6]]).is_err());
}

#[test]
fn endless_headers_are_refused() {
    let text = [b"--XX\r\n".as_slice(), &vec![b'a'; MAX_HEADERS + 1]].concat();
    assert!(read(&[&text]).is_err());
}

#[test]
fn a_content_type_without_boundary_is_refused() {
    assert!(Multipart::new("multipart/form-data", Collected::default()).is_err());
}
