//! The running load: its threads, and the socket on which it answers.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::random::Draws;
use crate::state::Shared;
use crate::{SOCKET, disk, memory, random, timer};

/// Starts the threads that the words name, then answers questions for ever. The load takes the
/// time that nobody else wants: what asks it must not wait for it.
pub(crate) fn run(dir: &Path, words: &[&str]) -> io::Result<()> {
    rustix::process::nice(19)?;
    fs::create_dir_all(dir)?;
    let mut load = Load { shared: Arc::default(), draws: Vec::new(), mark: 0 };
    let mut pace = Duration::ZERO;
    for (index, word) in words.iter().enumerate() {
        match word.split_once('=') {
            Some(("pace", ms)) => {
                pace = Duration::from_millis(ms.parse().map_err(io::Error::other)?);
            }
            _ => load.start(dir, index, word, pace)?,
        }
    }
    load.set_mark(dir, 0)?;
    // Under another name first: whoever finds it is answered.
    let new = dir.join("socket.new");
    let listener = UnixListener::bind(&new)?;
    fs::rename(&new, dir.join(SOCKET))?;
    for stream in listener.incoming() {
        let mut stream = stream?;
        if let Err(error) = load.answer(dir, &mut stream) {
            load.shared.fail("socket", &error.to_string());
        }
    }
    Ok(())
}

type Body = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// Keeps the calling thread on a processor.
fn pin(cpu: Option<usize>) -> io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    Ok(sched_setaffinity(None, &cpus)?)
}

struct Load {
    shared: Arc<Shared>,
    draws: Vec<Arc<Mutex<Draws>>>,
    mark: u64,
}

impl Load {
    fn start(&mut self, dir: &Path, index: usize, word: &str, pace: Duration) -> io::Result<()> {
        let name = format!("{}-{index}", word.split('=').next().unwrap_or(word));
        let shared = Arc::clone(&self.shared);
        let (thread_name, dir) = (name.clone(), dir.to_owned());
        let (kind, cpu) = word.split_once('=').unzip();
        let cpu = cpu.map(str::parse).transpose().map_err(io::Error::other)?;
        let body: Body = match kind.unwrap_or(word) {
            "memory" => Box::new(move || memory::run(&shared, &name, pace)),
            "disk" => Box::new(move || disk::run(&shared, &name, &dir, pace)),
            "timer" => Box::new(move || timer::run(&shared, &name)),
            kind @ ("getrandom" | "urandom") => {
                let urandom = kind == "urandom";
                let draws: Arc<Mutex<Draws>> = Arc::default();
                self.draws.push(Arc::clone(&draws));
                Box::new(move || random::run(&shared, &name, &draws, urandom, pace))
            }
            _ => return Err(io::Error::other(format!("no such thread: {word}"))),
        };
        self.shared.enter(&thread_name);
        let shared = Arc::clone(&self.shared);
        std::thread::Builder::new().name(thread_name.clone()).spawn(move || {
            if let Err(error) = pin(cpu).and_then(|()| body()) {
                shared.fail(&thread_name, &error.to_string());
            }
        })?;
        Ok(())
    }

    fn set_mark(&mut self, dir: &Path, mark: u64) -> io::Result<()> {
        self.mark = mark;
        disk::write_mark(dir, mark)
    }

    fn answer(&mut self, dir: &Path, stream: &mut UnixStream) -> io::Result<()> {
        let mut question = String::new();
        stream.read_to_string(&mut question)?;
        match question.split_once(' ') {
            Some(("mark", number)) => {
                self.set_mark(dir, number.parse().map_err(io::Error::other)?)?;
                self.print(dir, stream, self.shared.figures())
            }
            None if question == "report" => self.print(dir, stream, self.shared.report()),
            None if question == "stop" => {
                self.each_draws(Draws::stop);
                Ok(())
            }
            None if question == "draws" => {
                let mut all = Vec::new();
                self.each_draws(|draws| draws.write(&mut all));
                stream.write_all(&all)
            }
            _ => writeln!(stream, "failure=no such question: {question}"),
        }
    }

    fn print(&self, dir: &Path, stream: &mut UnixStream, figures: Vec<String>) -> io::Result<()> {
        let mut lines = vec![format!("pid={}", std::process::id())];
        lines.push(format!("mark={}", self.mark));
        lines.push(format!("mark_on_disk={}", disk::read_mark(dir)?));
        lines.extend(figures);
        stream.write_all((lines.join("\n") + "\n").as_bytes())
    }

    fn each_draws(&self, mut with: impl FnMut(&mut Draws)) {
        for draws in &self.draws {
            with(&mut draws.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}
