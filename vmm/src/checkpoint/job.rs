//! The thread that writes a checkpoint's file while the machine runs on.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use coppice_image::{HeaderInfo, Image, Kind, PageSet, ReadError, Summary, WriteError, Writer};
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::capture::Capture;
use crate::sys::jail::{self, Role};

const STACK_SIZE: usize = 256 << 10;

/// Why a checkpoint was not written. The machine it was taken of runs on.
#[derive(Debug, Error)]
pub enum JobError {
    /// The file cannot be written.
    #[error("the checkpoint was not written")]
    Write(#[source] WriteError),
    /// A sealed disk layer cannot be made durable.
    #[error("the checkpoint's disk layer {0} was not made durable")]
    Disk(usize, #[source] io::Error),
    /// The file that was just written cannot be read.
    #[error("the checkpoint that was written cannot be read back")]
    Read(#[source] ReadError),
    /// The thread cannot be started.
    #[error("the thread that writes the checkpoint cannot be started")]
    Thread(#[source] io::Error),
    /// The machine ended meanwhile.
    #[error("the machine ended before the checkpoint was written")]
    Cancelled,
    /// The thread ended without a result.
    #[error("the thread that writes the checkpoint failed")]
    Panic,
}

/// One section of the file.
#[derive(Debug)]
pub struct Part {
    /// What it is.
    pub kind: Kind,
    /// Which one of its kind.
    pub instance: u32,
    /// Version of its content.
    pub version: u16,
    /// The content.
    pub data: Vec<u8>,
}

/// What is to be written.
#[derive(Debug)]
pub struct Order {
    /// The empty file, open for reading and writing.
    pub file: File,
    /// Its header.
    pub info: HeaderInfo,
    /// Sections.
    pub parts: Vec<Part>,
    /// Pages.
    pub capture: Capture,
    /// Disk layers that have to be durable before the checkpoint is.
    pub disks: Vec<File>,
}

/// A checkpoint that is complete and durable.
#[derive(Debug)]
pub struct Finished {
    /// The file, open.
    pub image: Image,
    /// Sizes.
    pub summary: Summary,
}

/// A checkpoint being written.
#[derive(Debug)]
pub struct Job {
    done: Arc<EventFd>,
    result: Arc<Mutex<Option<Result<Finished, JobError>>>>,
    thread: Option<JoinHandle<()>>,
    cancelled: Arc<AtomicBool>,
    pages: PageSet,
}

impl Job {
    /// Starts writing.
    ///
    /// # Errors
    /// When the host has no room for a thread; nothing was written.
    pub fn start(order: Order) -> Result<Self, JobError> {
        let done = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(JobError::Thread)?);
        let result = Arc::new(Mutex::new(None));
        let pages = order.capture.selection().pages().clone();
        let (tell, put) = (Arc::clone(&done), Arc::clone(&result));
        let cancelled = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&cancelled);
        let thread = Builder::new()
            .name("checkpoint".into())
            .stack_size(STACK_SIZE)
            .spawn(move || {
                jail::confine(Role::Worker);
                let outcome = write(order, &told);
                *put.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
                // A full counter is readable as well.
                let _ = tell.write(1);
            })
            .map_err(JobError::Thread)?;
        Ok(Self { done, result, thread: Some(thread), cancelled, pages })
    }

    /// The pages it writes: if it fails, the next checkpoint must have them.
    pub fn pages(&self) -> &PageSet {
        &self.pages
    }

    /// Waits for the end; returns at once when the job's descriptor is readable.
    ///
    /// # Errors
    /// Why there is no checkpoint.
    pub fn finish(mut self) -> Result<Finished, JobError> {
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| JobError::Panic)?;
        }
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        result.unwrap_or(Err(JobError::Panic))
    }
}

impl AsRawFd for Job {
    /// Readable when the job is done.
    fn as_raw_fd(&self) -> RawFd {
        self.done.as_raw_fd()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.cancelled.store(true, Ordering::Relaxed);
            // Guest memory must outlive it.
            let _ = thread.join();
        }
    }
}

fn write(order: Order, cancelled: &AtomicBool) -> Result<Finished, JobError> {
    let Order { file, info, parts, mut capture, disks } = order;
    let readable = file.try_clone().map_err(|e| JobError::Write(WriteError::Io(e)))?;
    let mut writer = Writer::new(file, info).map_err(JobError::Write)?;
    for part in parts {
        writer
            .section(part.kind, part.instance, part.version, true, &part.data)
            .map_err(JobError::Write)?;
    }
    let complete = capture.write(&mut writer, cancelled).map_err(JobError::Write)?;
    drop(capture);
    if !complete {
        return Err(JobError::Cancelled);
    }
    for (number, disk) in disks.iter().enumerate() {
        disk.sync_all().map_err(|source| JobError::Disk(number, source))?;
    }
    let summary = writer.finish().map_err(JobError::Write)?;
    let image = Image::open(readable).map_err(JobError::Read)?;
    Ok(Finished { image, summary })
}
