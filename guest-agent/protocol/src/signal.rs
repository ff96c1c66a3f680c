//! The words for signals in the status of an ended process: those of Go's `os/exec`, which the
//! SDKs know. The agent writes them and the manager reads them back.

/// Names from signal 1 on; signals after the last one are `signal N`.
const NAMES: [&str; 15] = [
    "hangup",
    "interrupt",
    "quit",
    "illegal instruction",
    "trace/breakpoint trap",
    "aborted",
    "bus error",
    "floating point exception",
    "killed",
    "user defined signal 1",
    "segmentation fault",
    "user defined signal 2",
    "broken pipe",
    "alarm clock",
    "terminated",
];

/// The words for signal `number`.
pub fn name(number: u8) -> String {
    let known = number.checked_sub(1).and_then(|index| NAMES.get(usize::from(index)));
    known.map_or_else(|| format!("signal {number}"), |name| (*name).to_owned())
}

/// The signal that [`name`] gives these words for.
pub fn number(name: &str) -> Option<u8> {
    if let Some(number) = name.strip_prefix("signal ") {
        return number.parse().ok();
    }
    let position = NAMES.iter().position(|known| *known == name)?;
    u8::try_from(position).ok()?.checked_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_signal_is_found_again_by_its_words() {
        for signal in 1..=64 {
            assert_eq!(number(&name(signal)), Some(signal));
        }
    }

    #[test]
    fn the_words_are_those_the_clients_know() {
        assert_eq!((name(9).as_str(), name(15).as_str()), ("killed", "terminated"));
        assert_eq!(name(16), "signal 16");
    }
}
