//! The thread that does the work of virtio devices: it waits for the guest's kicks and for the
//! devices' host descriptors, and calls the devices with their locks held.
//!
//! One thread serves any number of devices. A device whose host side may be slow, such as a disk,
//! gets a thread of its own so that it stalls no other. Whoever takes a device's lock has it
//! quiet: the thread then waits at that lock.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use event_manager::{
    EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps as _,
};
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{VirtioDevice, lock};
use crate::sys::jail::{self, Role};
use crate::sys::thread::{Begun, SpareThread};

/// Enough for the deepest call of a device, in bytes; only pages touched cost memory.
const STACK_SIZE: usize = 256 * 1024;

/// Ready descriptors taken per wait; more wait for the next round.
const READY_EVENTS: usize = 16;

/// The number that marks an event of a host descriptor; queues have their index.
const HOST_EVENT: u32 = u32::MAX;

/// Why an I/O thread could not start.
#[derive(Debug, Error)]
pub enum IoThreadError {
    /// The process is out of descriptors or watches.
    #[error("the I/O thread {name} cannot watch its events")]
    Watch {
        /// The thread's name.
        name: String,
        /// What the event manager says.
        #[source]
        source: event_manager::Error,
    },
    /// The thread or its stop event could not be made.
    #[error("the I/O thread {name} cannot be started")]
    Start {
        /// The thread's name.
        name: String,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
}

/// One device and the events that drive it.
pub struct Source {
    /// The device; shared with its transport.
    pub device: Arc<Mutex<dyn VirtioDevice>>,
    /// For each queue in index order, the non-blocking eventfd that is written when the guest
    /// kicks it (an ioeventfd on QueueNotify). There may be fewer than queues.
    pub queue_events: Vec<Arc<EventFd>>,
}

/// A thread that waits for devices to come, with what it will watch their events by. Dropping it
/// ends the thread.
pub struct SpareIoThread {
    name: &'static str,
    control: Arc<Control>,
    events: EventManager<Subscriber>,
    thread: SpareThread,
    confined: Option<Begun<()>>,
}

impl SpareIoThread {
    /// Waits until the thread has taken its role.
    ///
    /// # Errors
    /// Never in practice: the thread is gone.
    pub fn make_ready(&mut self) -> Result<(), IoThreadError> {
        let confined = self.confined.take().map_or(Ok(()), Begun::wait);
        confined.map_err(|source| IoThreadError::Start { name: self.name.to_owned(), source })
    }
}

/// A running I/O thread. Dropping it stops the thread and waits for its end.
#[derive(Debug)]
pub struct IoThread {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread is told between two rounds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    Run,
    Pause,
    Stop,
}

/// The wish, whether the thread has met a wish to pause, and what wakes it to look.
#[derive(Debug)]
struct Control {
    state: Mutex<(Wish, bool)>,
    changed: Condvar,
    wake: EventFd,
}

impl Control {
    fn state(&self) -> MutexGuard<'_, (Wish, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, wish: Wish) -> MutexGuard<'_, (Wish, bool)> {
        let mut state = self.state();
        state.0 = wish;
        self.changed.notify_all();
        // A write can only fail when the counter is full, and then the thread has been told.
        let _ = self.wake.write(1);
        state
    }

    /// Waits while the wish is to pause; false when it is to stop.
    fn may_run(&self) -> bool {
        let mut state = self.state();
        if state.0 == Wish::Pause {
            state.1 = true;
            self.changed.notify_all();
            state = self
                .changed
                .wait_while(state, |state| state.0 == Wish::Pause)
                .unwrap_or_else(PoisonError::into_inner);
            state.1 = false;
        }
        state.0 == Wish::Run
    }
}

impl IoThread {
    /// Makes a thread for devices to come. `name` is shown by the kernel, up to 15 bytes;
    /// `role` says what it may do.
    ///
    /// # Errors
    /// [`IoThreadError`] when the process is out of descriptors, memory or threads.
    pub fn spare(name: &'static str, role: Role) -> Result<SpareIoThread, IoThreadError> {
        let start_error = |source| IoThreadError::Start { name: name.to_owned(), source };
        let watch_error = |source| IoThreadError::Watch { name: name.to_owned(), source };
        let control = Arc::new(Control {
            state: Mutex::new((Wish::Run, false)),
            changed: Condvar::new(),
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(start_error)?,
        });
        let mut events = EventManager::new_with_capacity(READY_EVENTS).map_err(watch_error)?;
        watch(&mut events, Subscriber::Wake(Arc::clone(&control))).map_err(watch_error)?;
        let thread = SpareThread::new(name, STACK_SIZE).map_err(start_error)?;
        let confined = Some(thread.begin(move || jail::confine(role)).map_err(start_error)?);
        Ok(SpareIoThread { name, control, events, thread, confined })
    }

    /// Starts a thread that serves `sources`; see [`IoThread::spawn_on`].
    ///
    /// # Errors
    /// As there, and those of [`IoThread::spare`].
    pub fn spawn(name: &'static str, sources: Vec<Source>) -> Result<Self, IoThreadError> {
        Self::spawn_on(Self::spare(name, Role::Streams)?, sources)
    }

    /// Has `spare` serve `sources`.
    ///
    /// All descriptors are watched when this returns, so no kick is missed.
    ///
    /// # Errors
    /// [`IoThreadError`] when the process is out of watches, or when a descriptor is given twice.
    pub fn spawn_on(spare: SpareIoThread, sources: Vec<Source>) -> Result<Self, IoThreadError> {
        let SpareIoThread { name, control, mut events, thread, .. } = spare;
        let start_error = |source| IoThreadError::Start { name: name.to_owned(), source };
        let watch_error = |source| IoThreadError::Watch { name: name.to_owned(), source };
        for source in sources {
            watch(&mut events, Subscriber::Device(source)).map_err(watch_error)?;
        }
        let followed = Arc::clone(&control);
        let thread = thread.run(move || run(&mut events, &followed)).map_err(start_error)?;
        Ok(Self { control, thread: Some(thread) })
    }

    /// Lets the work at hand finish and starts no more until [`IoThread::resume`]. Kicks and host
    /// events that arrive meanwhile are kept.
    pub fn pause(&self) {
        let state = self.control.tell(Wish::Pause);
        drop(
            self.control
                .changed
                .wait_while(state, |state| !state.1)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Undoes [`IoThread::pause`]; a thread that was not paused is left alone.
    pub fn resume(&self) {
        if self.control.state().0 == Wish::Pause {
            drop(self.control.tell(Wish::Run));
        }
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        drop(self.control.tell(Wish::Stop));
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("an I/O thread ended with a panic");
        }
    }
}

fn run(events: &mut EventManager<Subscriber>, control: &Control) {
    while control.may_run() {
        if let Err(error) = events.run() {
            // Only a descriptor closed under the thread can bring this about.
            tracing::error!(%error, "an I/O thread cannot wait for events any more");
            break;
        }
    }
    // A thread that ended is as quiet as one that pauses.
    control.state().1 = true;
    control.changed.notify_all();
}

/// Adds a subscriber with all its events.
fn watch(
    events: &mut EventManager<Subscriber>,
    subscriber: Subscriber,
) -> Result<(), event_manager::Error> {
    let watched = subscriber.watched();
    let id = events.add_subscriber(subscriber);
    let mut ops = events.event_ops(id)?;
    for (fd, data) in watched {
        ops.add(Events::with_data_raw(fd, data, EventSet::IN))?;
    }
    Ok(())
}

enum Subscriber {
    Wake(Arc<Control>),
    Device(Source),
}

impl Subscriber {
    /// The descriptors to watch and the number that comes with each one's events.
    fn watched(&self) -> Vec<(RawFd, u32)> {
        match self {
            Self::Wake(control) => vec![(control.wake.as_raw_fd(), 0)],
            Self::Device(source) => {
                let queues = source.queue_events.iter().map(AsRawFd::as_raw_fd).zip(0..);
                let host = lock(&source.device).host_fd().map(|fd| (fd, HOST_EVENT));
                queues.chain(host).collect()
            }
        }
    }
}

impl MutEventSubscriber for Subscriber {
    /// Registration happens in [`watch`], which can report a failure.
    fn init(&mut self, _ops: &mut EventOps) {}

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        match self {
            Self::Wake(control) => {
                // The wish is looked at after this round; an empty counter was woken for before.
                let _ = control.wake.read();
            }
            Self::Device(source) if events.data() == HOST_EVENT => {
                lock(&source.device).host_event();
            }
            Self::Device(source) => {
                let Ok(index) = usize::try_from(events.data()) else { return };
                let mut device = lock(&source.device);
                // Drained under the lock, so that a quiet device has a kick either in its
                // eventfd or behind it, never in between.
                let kicked = source.queue_events.get(index).is_some_and(|e| e.read().is_ok());
                if kicked {
                    device.queue_event(index);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
