//! Threads made before it is known what they are for: starting one costs a clone the time to map
//! its stack and to have it scheduled first, waking one does not.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
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
        let (give, take) = sync_channel::<Work>(2);
        let thread =
            Builder::new().name(name.to_owned()).stack_size(stack_size).spawn(move || {
                take.iter().for_each(|work| work());
            })?;
        Ok(Self { give, thread })
    }

    /// Has the thread do `work` before what [`SpareThread::run`] will give it.
    ///
    /// # Errors
    /// Never in practice: the thread is gone.
    pub fn begin<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Begun<T>> {
        let (tell, told) = sync_channel(1);
        // Nobody may be left to hear of it.
        let work = move || drop(tell.send(work()));
        self.give.send(Box::new(work)).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(Begun(told))
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

/// Work that a [`SpareThread`] has begun. When it is dropped the work goes on all the same.
#[derive(Debug)]
pub struct Begun<T>(Receiver<T>);

impl<T> Begun<T> {
    /// Waits for what the work gives.
    ///
    /// # Errors
    /// Never in practice: the work panicked.
    pub fn wait(self) -> io::Result<T> {
        self.0.recv().map_err(|_| io::ErrorKind::BrokenPipe.into())
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

    #[test]
    fn the_thread_does_first_what_was_begun_first() {
        let thread = SpareThread::new("spare", 64 << 10).unwrap();
        let (tell, told) = channel();
        let tell_too = tell.clone();
        let begun = thread.begin(move || tell_too.send(1).unwrap()).unwrap();
        let handle = thread.run(move || tell.send(2).unwrap()).unwrap();
        begun.wait().unwrap();
        handle.join().unwrap();
        assert_eq!(told.iter().collect::<Vec<_>>(), [1, 2]);
    }
}
