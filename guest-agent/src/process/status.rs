//! The words for how a process ended, as the SDKs know them (those of Go's `os/exec`).

use coppice_agent_protocol::process::EndEvent;

use crate::sys::RawStatus;

/// The end event of a process with this status.
pub(crate) fn end_event(status: RawStatus) -> EndEvent {
    let RawStatus(raw) = status;
    if libc::WIFSIGNALED(raw) {
        let signal = libc::WTERMSIG(raw);
        // The kernel keeps the signal in seven bits.
        let name = u8::try_from(signal)
            .map_or_else(|_| format!("signal {signal}"), coppice_agent_protocol::signal::name);
        let core = if libc::WCOREDUMP(raw) { " (core dumped)" } else { "" };
        let status = format!("signal: {name}{core}");
        let error = Some(status.clone());
        return EndEvent { exit_code: -1, exited: false, status, error };
    }
    let exit_code = libc::WEXITSTATUS(raw);
    let status = format!("exit status {exit_code}");
    let error = (exit_code != 0).then(|| status.clone());
    EndEvent { exit_code, exited: true, status, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(exit_code: i32, exited: bool, status: &str, error: bool) -> EndEvent {
        let error = error.then(|| status.to_owned());
        EndEvent { exit_code, exited, status: status.to_owned(), error }
    }

    #[test]
    fn success_has_no_error() {
        assert_eq!(end_event(RawStatus(0)), event(0, true, "exit status 0", false));
    }

    #[test]
    fn failure_repeats_the_status_as_error() {
        assert_eq!(end_event(RawStatus(3 << 8)), event(3, true, "exit status 3", true));
    }

    #[test]
    fn signals_have_names_or_numbers() {
        assert_eq!(end_event(RawStatus(9)), event(-1, false, "signal: killed", true));
        assert_eq!(end_event(RawStatus(34)), event(-1, false, "signal: signal 34", true));
    }

    #[test]
    fn a_core_dump_is_told() {
        let expected = event(-1, false, "signal: segmentation fault (core dumped)", true);
        assert_eq!(end_event(RawStatus(11 | 0x80)), expected);
    }
}
