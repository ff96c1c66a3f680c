//! The guest's init of the boot benchmark: says that it runs, then waits to be killed.

use std::io::Write as _;

fn main() {
    // Nobody is there to hear of a failed write; the benchmark sees the missing line.
    let _ = writeln!(std::io::stdout(), "{}", coppice_benches::boot::INIT_MARKER);
    loop {
        std::thread::park();
    }
}
