//! Pages that are write-protected until a background copy has read them.
//!
//! A thread of its own answers writers: it puts the page aside and lets the writer go on, so a
//! guest waits for one copied page and never for the disk. The copy takes its pages from RAM or,
//! where a writer was faster, from what was put aside.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use coppice_image::PageSet;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::memory::GuestRam;
use crate::memory::pages::{self, PAGE};
use crate::sys::jail::{self, Role};
use crate::sys::mem;
use crate::sys::uffd::Userfaultfd;

const STACK_SIZE: usize = 64 << 10;

type Page = [u8; PAGE];

/// Write-protected pages; dropping it ends all protection.
#[derive(Debug)]
pub(super) struct Protected {
    shared: Arc<Shared>,
    /// The pages last fetched, and their content.
    fetched: Vec<(Range<u64>, Vec<u8>)>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    ram: Arc<GuestRam>,
    registered: Registered,
    /// All pages that were protected at first.
    pages: PageSet,
    state: Mutex<State>,
    stop: EventFd,
}

/// Memory whose writers may be made to wait. When it is dropped nobody waits any more.
#[derive(Debug)]
struct Registered {
    uffd: Arc<Userfaultfd>,
    /// Address ranges in ascending order, with the page each one starts with.
    ranges: Vec<(Range<usize>, u64)>,
}

impl Registered {
    fn release_all(&self) {
        for (range, _) in &self.ranges {
            // It fails only for memory that is gone, and then nobody waits for it.
            let _ = self.uffd.unregister(range);
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.release_all();
    }
}

#[derive(Debug)]
struct State {
    /// Pages that were protected and whose content nobody needs from RAM any more.
    taken: PageSet,
    /// Pages that a writer wanted before the copy had them.
    aside: HashMap<u64, Box<Page>>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The page at an address.
    fn page_at(&self, address: usize) -> Option<u64> {
        let ranges = &self.registered.ranges;
        let at = ranges.partition_point(|(range, _)| range.end <= address);
        let (range, first) = ranges.get(at).filter(|(r, _)| r.contains(&address))?;
        Some(first + u64::try_from((address - range.start) / PAGE).ok()?)
    }

    /// Lets one who writes to `address` go on.
    fn answer(&self, address: usize) -> io::Result<()> {
        let start = address - address % PAGE;
        let mut state = self.state();
        if let Some(page) = self.page_at(address)
            && !state.taken.contains(page)
        {
            let mut content = Box::new([0; PAGE]);
            pages::copy_out(&self.ram, page..page + 1, content.as_mut_slice());
            state.aside.insert(page, content);
            state.taken.insert(page);
        }
        self.registered.uffd.release(&(start..start + PAGE))
    }

    /// Answers writers until told to stop.
    fn serve(&self) -> io::Result<()> {
        let epoll = Epoll::new()?;
        let uffd = &self.registered.uffd;
        for (fd, token) in [(uffd.as_raw_fd(), 0), (self.stop.as_raw_fd(), 1)] {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, token))?;
        }
        let mut events = [EpollEvent::default(); 2];
        loop {
            let count = match epoll.wait(-1, &mut events) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if events.iter().take(count).any(|event| event.data() == 1) {
                return Ok(());
            }
            while let Some(address) = uffd.fault()? {
                self.answer(address)?;
            }
        }
    }
}

impl Protected {
    /// Protects `runs` of pages (in ascending order), which must lie in anonymous memory.
    ///
    /// # Errors
    /// When the host does not allow it; nothing is protected then.
    pub(super) fn new(
        ram: Arc<GuestRam>,
        runs: Vec<Range<u64>>,
        uffd: Arc<Userfaultfd>,
    ) -> io::Result<Self> {
        let limit = pages::count(&ram);
        let mut protected = PageSet::new(limit);
        let mut registered = Registered { uffd, ranges: Vec::new() };
        for run in runs {
            protected.insert_run(run.start, run.end - run.start);
            let mut first = run.start;
            for piece in pages::pieces(&ram, run) {
                let addresses = piece.addresses();
                let uffd = &registered.uffd;
                uffd.register(&addresses)?;
                registered.ranges.push((addresses.clone(), first));
                if uffd.protects_only_present() {
                    mem::populate(piece.region, piece.offset, piece.len)?;
                }
                uffd.protect(&addresses)?;
                first += u64::try_from(piece.len / PAGE).map_err(io::Error::other)?;
            }
        }
        registered.ranges.sort_unstable_by_key(|(range, _)| range.start);
        let state = Mutex::new(State { taken: PageSet::new(limit), aside: HashMap::new() });
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let shared = Arc::new(Shared { ram, registered, pages: protected, state, stop });
        let served = Arc::clone(&shared);
        let thread =
            Builder::new().name("write-faults".into()).stack_size(STACK_SIZE).spawn(move || {
                jail::confine(Role::Worker);
                if let Err(error) = served.serve() {
                    tracing::error!(%error, "writers to protected pages cannot be answered");
                    // Whoever waits must go on: without the copy rather than never.
                    served.registered.release_all();
                }
            })?;
        Ok(Self { shared, fetched: Vec::new(), thread: Some(thread) })
    }

    /// Brings the protected pages among `pages` to where [`Protected::find`] sees them, and lets
    /// writers to them go on.
    ///
    /// # Errors
    /// Those of ending protection.
    pub(super) fn fetch(&mut self, pages: &Range<u64>) -> io::Result<()> {
        self.fetched.clear();
        let mut state = self.shared.state();
        let mut page = pages.start;
        while page < pages.end {
            if let Some(content) = state.aside.remove(&page) {
                self.fetched.push((page..page + 1, content.to_vec()));
                page += 1;
                continue;
            }
            let waits = |page: u64| self.shared.pages.contains(page) && !state.taken.contains(page);
            let end = (page..pages.end).find(|page| !waits(*page)).unwrap_or(pages.end);
            if end == page {
                page += 1;
                continue;
            }
            let run = page..end;
            let len = usize::try_from(end - page).map_err(io::Error::other)? * PAGE;
            let mut content = vec![0; len];
            pages::copy_out(&self.shared.ram, run.clone(), &mut content);
            self.fetched.push((run.clone(), content));
            state.taken.insert_run(page, end - page);
            for piece in pages::pieces(&self.shared.ram, run) {
                self.shared.registered.uffd.release(&piece.addresses())?;
            }
            page = end;
        }
        Ok(())
    }

    /// The content of the pages at the start of `pages` that were fetched, and how many.
    pub(super) fn find(&self, pages: &Range<u64>) -> Option<(&[u8], u64)> {
        let (run, content) = self.fetched.iter().find(|(run, _)| run.contains(&pages.start))?;
        let count = run.end.min(pages.end) - pages.start;
        let start = usize::try_from(pages.start - run.start).ok()? * PAGE;
        let len = usize::try_from(count).ok()? * PAGE;
        Some((content.get(start..start + len)?, count))
    }
}

impl Drop for Protected {
    fn drop(&mut self) {
        let _ = self.shared.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing more to tell.
            let _ = thread.join();
        }
    }
}
