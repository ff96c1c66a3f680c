//! A software MODEL of a work queue, for tests: it executes descriptors in a thread of its own,
//! and fails as its script says. It is no device, and says nothing about one's speed.
//!
//! It differs from hardware in these ways: it writes dynamic Huffman codes where hardware writes
//! those of the AECS; it sees the memory of one arena only.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use crate::abi::{
    COMPRESS_FLAGS, Completion, DECOMPRESS_FLAGS, Descriptor, FLAG_BLOCK_ON_FAULT, FLAG_READ_AECS,
    FLAG_RECORD_VALID, FLAG_REQUEST_RECORD, Opcode, Status,
};
use crate::aecs;
use crate::queue::{Credits, Queue, QueueError, Submitted};
use crate::software::{Codec, bound};
use crate::sys::arena::Arena;

mod inflate;

use inflate::InflateError;

/// What the model does with a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// Executes it.
    Work,
    /// Takes it only at the next submission.
    Full,
    /// Faults on the destination, unless it may block on faults.
    PageFault,
    /// Ends with this status byte.
    Fail(u8),
    /// Executes it, but flips a bit of the output.
    Corrupt,
    /// Executes it after the next one, or when told to.
    Later,
    /// Executes it only when told to.
    Never,
}

/// What the model does, descriptor by descriptor; after that it works.
#[derive(Debug, Clone, Default)]
pub struct Script(VecDeque<Behaviour>);

impl Script {
    /// These behaviours, one a submission.
    pub fn of(behaviours: &[Behaviour]) -> Self {
        Self(behaviours.iter().copied().collect())
    }

    /// `length` behaviours, of which about `percent` in a hundred are faults; [`Behaviour::Never`]
    /// is not among them. The same for the same seed.
    pub fn seeded(seed: u64, percent: u64, length: usize) -> Self {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state >> 16
        };
        let mut one = || {
            if random() % 100 >= percent {
                return Behaviour::Work;
            }
            match random() % 5 {
                0 => Behaviour::Full,
                1 => Behaviour::PageFault,
                2 => Behaviour::Corrupt,
                3 => Behaviour::Later,
                _ => Behaviour::Fail(u8::try_from(random() % 255).unwrap_or(0) + 1),
            }
        };
        Self((0..length).map(|_| one()).collect())
    }
}

/// What the model's thread is told.
#[derive(Debug)]
enum Message {
    Execute(Descriptor, Behaviour),
    Release(Sender<()>),
}

/// The model of a work queue. Dropping it ends its thread; what it holds back is lost then.
#[derive(Debug)]
pub struct ModelQueue {
    sender: Option<Sender<Message>>,
    script: Script,
    credits: Credits,
    thread: Option<JoinHandle<()>>,
}

/// Makes a model execute what it holds back.
#[derive(Debug)]
pub struct Release(Sender<Message>);

impl Release {
    /// Returns when all that was held back is executed, however late that is.
    pub fn run(&self) {
        let (done, wait) = channel();
        if self.0.send(Message::Release(done)).is_ok() {
            // An error means that the model is gone, and so is what it held back.
            let _ = wait.recv();
        }
    }
}

impl ModelQueue {
    /// A model with `depth` entries over an arena, whose transfers have `max_transfer` bytes at
    /// most.
    ///
    /// # Errors
    /// A thread that cannot be made.
    pub fn new(
        depth: usize,
        max_transfer: u32,
        arena: Arc<Arena>,
        script: Script,
    ) -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        let thread = thread::Builder::new().name("iaa-model".into()).spawn(move || {
            Executor::new(arena, max_transfer).run(&receiver);
        })?;
        let (sender, thread) = (Some(sender), Some(thread));
        Ok(Self { sender, script, credits: Credits::new(depth), thread })
    }

    /// A handle that makes it execute what it holds back. None once it is being dropped.
    pub fn release(&self) -> Option<Release> {
        self.sender.clone().map(Release)
    }
}

impl Queue for ModelQueue {
    fn depth(&self) -> usize {
        self.credits.depth()
    }

    fn submit(&mut self, descriptor: &Descriptor) -> Result<Submitted, QueueError> {
        if !self.credits.take() {
            return Ok(Submitted::Busy);
        }
        let behaviour = self.script.0.pop_front().unwrap_or(Behaviour::Work);
        if behaviour == Behaviour::Full {
            self.credits.give();
            return Ok(Submitted::Busy);
        }
        let sender = self.sender.as_ref().ok_or(QueueError::Gone)?;
        sender.send(Message::Execute(*descriptor, behaviour)).or(Err(QueueError::Gone))?;
        Ok(Submitted::Accepted)
    }

    fn completed(&mut self) {
        self.credits.give();
    }
}

impl Drop for ModelQueue {
    fn drop(&mut self) {
        self.sender = None;
        // With a `Release` left the thread goes on until that is dropped too.
        self.thread = None;
    }
}

/// The device's side of the model.
#[derive(Debug)]
struct Executor {
    arena: Arc<Arena>,
    max_transfer: u32,
    codec: Codec,
    held: Vec<Descriptor>,
}

/// How a descriptor ended: the uncompressed data's checksum and the output, or a status.
type Outcome = Result<(u32, Vec<u8>), Status>;

impl Executor {
    fn new(arena: Arc<Arena>, max_transfer: u32) -> Self {
        Self { arena, max_transfer, codec: Codec::new(), held: Vec::new() }
    }

    fn run(mut self, messages: &Receiver<Message>) {
        let mut later: Option<Descriptor> = None;
        loop {
            // What waits for the next one does not wait for ever.
            let message = match later.take() {
                None => messages.recv().ok(),
                Some(descriptor) => {
                    let next = messages.recv_timeout(std::time::Duration::from_millis(1));
                    if let Ok(Message::Execute(..)) = &next {
                        later = Some(descriptor);
                    } else {
                        self.execute(&descriptor, Behaviour::Work);
                    }
                    match next {
                        Ok(message) => Some(message),
                        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => continue,
                        Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => None,
                    }
                }
            };
            match message {
                None => return,
                Some(Message::Execute(descriptor, Behaviour::Never)) => self.held.push(descriptor),
                Some(Message::Execute(descriptor, Behaviour::Later)) => {
                    if let Some(earlier) = later.replace(descriptor) {
                        self.execute(&earlier, Behaviour::Work);
                    }
                }
                Some(Message::Execute(descriptor, behaviour)) => {
                    self.execute(&descriptor, behaviour);
                    if let Some(earlier) = later.take() {
                        self.execute(&earlier, Behaviour::Work);
                    }
                }
                Some(Message::Release(done)) => {
                    for descriptor in std::mem::take(&mut self.held) {
                        self.execute(&descriptor, Behaviour::Work);
                    }
                    // Whoever waited may be gone.
                    let _ = done.send(());
                }
            }
        }
    }

    fn execute(&mut self, descriptor: &Descriptor, behaviour: Behaviour) {
        let blocks = descriptor.flags() & FLAG_BLOCK_ON_FAULT != 0;
        let mut record = Completion::parse(&[0; 64]);
        let outcome = match behaviour {
            Behaviour::Fail(status) => Err(Status::from_byte(status)),
            Behaviour::PageFault if !blocks => Err(Status::PageFault),
            _ => self.outcome(descriptor),
        };
        match outcome {
            Ok((crc, mut output)) => {
                if behaviour == Behaviour::Corrupt
                    && let Some(byte) = output.first_mut()
                {
                    *byte ^= 1;
                }
                record.status = Status::Success;
                record.bytes_completed = descriptor.source().size;
                record.output_size = u32::try_from(output.len()).unwrap_or(u32::MAX);
                record.crc = crc;
                self.arena.device_write(descriptor.target().addr, &output);
            }
            Err(status) => record.status = status,
        }
        if record.status == Status::PageFault {
            record.fault_addr = descriptor.target().addr & !0xFFF;
            record.fault_was_write = true;
        } else if record.status == Status::Pending {
            // A device never completes with zero.
            record.status = Status::Unknown(0x7F);
        }
        self.arena.device_complete(descriptor.record(), &record);
    }

    /// What hardware would make of the descriptor, by the checks it makes.
    fn outcome(&mut self, descriptor: &Descriptor) -> Outcome {
        let wanted = FLAG_RECORD_VALID | FLAG_REQUEST_RECORD;
        let (source, target) = (descriptor.source(), descriptor.target());
        if descriptor.flags() & wanted != wanted {
            return Err(Status::InvalidFlags);
        }
        if !descriptor.record().is_multiple_of(64) {
            return Err(Status::RecordAlignment);
        }
        if source.size == 0 || source.size > self.max_transfer || target.size > self.max_transfer {
            return Err(Status::InvalidSize);
        }
        let bytes = self.arena.device_read(source).ok_or(Status::TranslationFailed)?;
        let room = usize::try_from(target.size).or(Err(Status::InvalidSize))?;
        match descriptor.opcode() {
            op if op == Opcode::Compress as u8 => {
                self.check_aecs(descriptor)?;
                if descriptor.codec_flags() != COMPRESS_FLAGS {
                    return Err(Status::InvalidCompressionFlag);
                }
                let mut output = vec![0; bound(bytes.len())];
                let size = self.codec.compress(&bytes, &mut output);
                output.truncate(size.or(Err(Status::OutputOverflow))?);
                if output.len() > room {
                    return Err(Status::OutputOverflow);
                }
                Ok((crc32fast::hash(&bytes), output))
            }
            op if op == Opcode::Decompress as u8 => {
                if descriptor.codec_flags() != DECOMPRESS_FLAGS {
                    return Err(Status::InvalidCompressionFlag);
                }
                let output = inflate::inflate(&bytes, room).map_err(|error| match error {
                    InflateError::Damaged => Status::AnalyticsError,
                    InflateError::NoRoom => Status::OutputOverflow,
                })?;
                Ok((crc32fast::hash(&output), output))
            }
            _ => Err(Status::BadOpcode),
        }
    }

    fn check_aecs(&self, descriptor: &Descriptor) -> Result<(), Status> {
        let region = descriptor.aecs();
        if descriptor.flags() & FLAG_READ_AECS == 0 {
            return Err(Status::InvalidFlags);
        }
        if !region.addr.is_multiple_of(32) {
            return Err(Status::AddressAlignment);
        }
        let bytes = self.arena.device_read(region).ok_or(Status::TranslationFailed)?;
        if bytes == aecs::fixed() { Ok(()) } else { Err(Status::InvalidSize) }
    }
}
