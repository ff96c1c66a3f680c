//! The serial console, used as a person at a terminal uses it.

use coppice_vmm_protocol::ExitReason;

use crate::common::{block_on, on_lane, shell_machine};

#[test]
fn a_shell_on_the_console_answers_what_is_typed() {
    on_lane!({
        block_on(async {
            let (vmm, mut terminal) = shell_machine(Vec::new()).await;
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
            let (vmm, mut terminal) = shell_machine(Vec::new()).await;
            // Without canonical mode the line discipline keeps what the UART delivers.
            terminal.type_line("stty -icanon -echo min 1; echo ready; head -c 3000 | wc -c");
            terminal.expect_line("ready");
            terminal.send(&[b'x'; 3000]);
            terminal.expect_line("3000");
            vmm.stop().await;
        });
    });
}

#[test]
fn power_off_typed_on_the_console_ends_the_machine() {
    on_lane!({
        block_on(async {
            let (vmm, mut terminal) = shell_machine(Vec::new()).await;
            terminal.type_line("poweroff -f");
            assert_eq!(vmm.ended().await.reason, Some(ExitReason::PowerOff));
        });
    });
}
