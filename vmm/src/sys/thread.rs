//! Threads made before it is known what they are for: starting one costs a clone the time to map
//! its stack and to have it scheduled first, waking one does not.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

type Work = Box<dyn FnOnce() + Send>;

/// A thread that waits for its work; dropping it ends the thread.
#[derive(Debug)]
pub struct SpareThread {
    give: SyncSender<Work>,
    thread: JoinHandle<()>,
}

impl SpareThread {
    /// Starts a thread with a stack of `stack_size` bytes. `name` is shown by the kernel, up to
    /// 15 bytes.
    ///
    /// # Errors
    /// When the host has no room for another thread.
    pub fn new(name: &str, stack_size: usize) -> io::Result<Self> {
        let (give, take) = sync_channel::<Work>(1);
        let thread =
            Builder::new().name(name.to_owned()).stack_size(stack_size).spawn(move || {
                if let Ok(work) = take.recv() {
                    work();
                }
            })?;
        Ok(Self { give, thread })
    }

    /// Has the thread do `work` and then end.
    ///
    /// # Errors
    /// Never in practice: the thread is gone.
    pub fn run(self, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        self.give.send(Box::new(work)).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(self.thread)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn the_thread_does_its_work_under_its_name() {
        let thread = SpareThread::new("spare", 64 << 10).unwrap();
        let (tell, told) = channel();
        let handle = thread
            .run(move || {
                let name = std::thread::current().name().map(str::to_owned);
                tell.send(name).unwrap();
            })
            .unwrap();
        assert_eq!(told.recv().unwrap().as_deref(), Some("spare"));
        handle.join().unwrap();
    }
}
