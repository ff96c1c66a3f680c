//! The serial console, used as a person at a terminal uses it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use coppice_vmm_protocol::ExitReason;

use crate::common::{bare_machine, block_on, on_lane};

/// A console read line by line; a guest that falls silent fails the test by itself.
struct Terminal {
    input: UnixStream,
    output: BufReader<UnixStream>,
}

impl Terminal {
    fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        Self { input: stream.try_clone().unwrap(), output: BufReader::new(stream) }
    }

    fn type_line(&mut self, line: &str) {
        self.input.write_all(line.as_bytes()).unwrap();
        self.input.write_all(b"\n").unwrap();
    }

    /// Reads until a line is exactly `wanted`; the echo of what was typed never is.
    fn expect_line(&mut self, wanted: &str) {
        let mut line = String::new();
        loop {
            line.clear();
            let got = self.output.read_line(&mut line).unwrap();
            assert!(got > 0, "the console ended before {wanted:?}");
            if line.trim_end_matches(['\r', '\n']) == wanted {
                return;
            }
        }
    }
}

#[test]
fn a_shell_on_the_console_answers_what_is_typed() {
    on_lane!({
        block_on(async {
            let (vmm, stream) = bare_machine("/bin/sh", Vec::new()).await;
            let mut terminal = Terminal::new(stream);
            terminal.type_line("echo $((6 * 7))");
            terminal.expect_line("42");
            terminal.type_line("read name; echo hello $name");
            terminal.type_line("world");
            terminal.expect_line("hello world");
            vmm.stop().await;
        });
    });
}

#[test]
fn a_long_paste_loses_no_byte() {
    on_lane!({
        block_on(async {
            let (vmm, stream) = bare_machine("/bin/sh", Vec::new()).await;
            let mut terminal = Terminal::new(stream);
            // Without canonical mode the line discipline keeps what the UART delivers.
            terminal.type_line("stty -icanon -echo min 1; echo ready; head -c 3000 | wc -c");
            terminal.expect_line("ready");
            terminal.input.write_all(&[b'x'; 3000]).unwrap();
            terminal.expect_line("3000");
            vmm.stop().await;
        });
    });
}

#[test]
fn power_off_typed_on_the_console_ends_the_machine() {
    on_lane!({
        block_on(async {
            let (vmm, stream) = bare_machine("/bin/sh", Vec::new()).await;
            let mut terminal = Terminal::new(stream);
            terminal.type_line("poweroff -f");
            assert_eq!(vmm.ended().await.reason, Some(ExitReason::PowerOff));
        });
    });
}
