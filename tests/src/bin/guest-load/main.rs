//! A load for Linux guests that checks itself, for tests of checkpoints, rollbacks and clones.
//!
//! ```text
//! guest-load run DIR THREAD...   runs threads for ever; answers on the Unix socket DIR/socket
//! guest-load ask DIR QUESTION    asks a running load, prints the answer
//! guest-load clock               for each line of standard input, prints the time of day in ns
//! guest-load stream              prints numbered lines for ever
//! ```
//!
//! Threads: `memory`, `disk`, `getrandom`, `urandom`, `timer`, each as often as wanted, on the
//! processor N as `KIND=N`; `pace=MS` makes those after it rest between steps. Questions: `report` has every thread check
//! all it has and tells its figures as `key=value` lines; `mark N` keeps a number in memory and on
//! disk, and tells the figures without a check; `stop` ends the drawing of
//! random numbers, `draws` gives the last ones.
//!
//! What a thread writes has a nonce in it that is drawn for that write, and the thread keeps the
//! nonce in its memory: content from another time line, however plausible, is not what it expects.

mod block;
mod disk;
mod memory;
mod random;
mod server;
mod state;
mod timer;

use std::io::{self, BufRead as _, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Name of the socket in the load's directory.
const SOCKET: &str = "socket";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args.as_slice() {
        ["run", dir, threads @ ..] => server::run(Path::new(dir), threads),
        ["ask", dir, question @ ..] => ask(Path::new(dir), &question.join(" ")),
        ["clock"] => clock(),
        ["stream"] => stream(),
        _ => Err(io::Error::other("usage: guest-load run|ask|clock|stream ...")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "guest-load: {error}");
            ExitCode::FAILURE
        }
    }
}

fn ask(dir: &Path, question: &str) -> io::Result<()> {
    let mut stream = UnixStream::connect(dir.join(SOCKET))?;
    stream.write_all(question.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    io::stdout().write_all(&answer)
}

fn clock() -> io::Result<()> {
    for line in io::stdin().lock().lines() {
        line?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?;
        let mut out = io::stdout().lock();
        writeln!(out, "{}", now.as_nanos())?;
        out.flush()?;
    }
    Ok(())
}

/// The rest between lines leaves the guest's processors to the other threads.
fn stream() -> io::Result<()> {
    let filler = "=".repeat(200);
    for number in 0u64.. {
        let mut out = io::stdout().lock();
        writeln!(out, "{number} {filler}")?;
        out.flush()?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
