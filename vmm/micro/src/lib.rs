//! Micro-guests: a few hand-written instructions in a real ELF kernel file, run by the real
//! `coppice-vmm` over a real control socket on whatever /dev/kvm opens.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "helpers of tests and benches, which have nothing better to do with a failure"
)]

pub mod code;
pub mod tree;

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};

use coppice_vmm_protocol::{
    BootSpec, ConsoleSpec, ControlSocket, ErrorBody, Event, EventBody, ExitReason, Incoming,
    MachineSpec, Op, Request, ResultBody, SocketError, Start, VmStatus,
};

use rustix::process::{Pid, Resource, Rlimit};

pub use code::Code;

/// The program under test: what `COPPICE_VMM` names, else `coppice-vmm` next to this program or,
/// for a test program, in the directory above.
pub fn vmm() -> String {
    if let Ok(path) = std::env::var("COPPICE_VMM") {
        return path;
    }
    let own = std::env::current_exe().unwrap();
    let beside = own.with_file_name("coppice-vmm");
    let above = own.parent().and_then(std::path::Path::parent).map(|dir| dir.join("coppice-vmm"));
    let found = [Some(beside), above].into_iter().flatten().find(|path| path.is_file());
    found.expect("coppice-vmm is not built").into_os_string().into_string().unwrap()
}

/// Whether micro-guests can run here; says so when not, since a test that did not run must not
/// look like one that passed.
pub fn kvm() -> bool {
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    if !opens {
        // Straight to the terminal: the test harness hides what passing tests print.
        let _ = writeln!(std::io::stderr(), "skipped: no /dev/kvm");
    }
    opens
}

/// A machine with one vCPU, the least memory and nothing else.
pub fn plain_spec() -> MachineSpec {
    MachineSpec {
        vcpus: 1,
        memory_mib: 64,
        start: Start::Boot(BootSpec { kernel: 0, initrd: None, cmdline: String::new() }),
        disks: Vec::new(),
        vsock: None,
        console: Some(ConsoleSpec { input: None, output: Some(1) }),
        rng: false,
        balloon: None,
    }
}

/// A `coppice-vmm` process and the manager's end of its control socket.
pub struct Vmm {
    pub child: Child,
    pub socket: ControlSocket,
    next_id: u64,
    /// The request whose answer comes next; several may be under way.
    next_answer: u64,
    /// Events that came while a reply was awaited.
    events: Vec<EventBody>,
}

/// A command that runs `program` with `socket` as descriptor 3.
pub fn command_with_socket(program: &str, socket: OwnedFd) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec {program} 3<&0 0</dev/null")]).stdin(socket);
    command
}

impl Vmm {
    /// Starts a process without a machine.
    pub fn start() -> Self {
        let (ours, theirs) = ControlSocket::pair().unwrap();
        let program = format!("'{}' --control-fd 3", vmm());
        Self::with(command_with_socket(&program, theirs.into_fd()).spawn().unwrap(), ours)
    }

    /// Takes over a process that serves the other end of `socket`.
    pub fn with(child: Child, socket: ControlSocket) -> Self {
        Self { child, socket, next_id: 1, next_answer: 1, events: Vec::new() }
    }

    /// Starts a process and a machine that runs `code`; returns its console output too.
    pub fn boot(code: &Code, change: impl FnOnce(&mut MachineSpec)) -> (Self, Console) {
        let mut vmm = Self::start();
        let console = vmm.create(code, change);
        vmm.done(Op::Start {});
        (vmm, console)
    }

    /// Creates a machine that will run `code`.
    pub fn create(&mut self, code: &Code, change: impl FnOnce(&mut MachineSpec)) -> Console {
        let (reader, writer) = std::io::pipe().unwrap();
        let kernel = code.kernel();
        let mut spec = plain_spec();
        change(&mut spec);
        let result =
            self.request_with(Op::Create(Box::new(spec)), &[kernel.as_fd(), writer.as_fd()]);
        assert_eq!(result, ResultBody::Done);
        Console { reader }
    }

    /// Sends a request and waits for its answer.
    pub fn request_with(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> ResultBody {
        self.send(op, fds).unwrap();
        self.answer().unwrap()
    }

    /// Sends a request.
    pub fn send(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        let id = self.next_id;
        self.next_id += 1;
        self.socket.send(&Request { id, op }, fds)
    }

    /// Waits for the next answer, whichever request it belongs to.
    pub fn answer_any(&mut self) -> Result<ResultBody, SocketError> {
        loop {
            match self.socket.receive::<Incoming>()?.0 {
                Incoming::Reply(reply) => {
                    self.next_answer += 1;
                    return Ok(reply.result);
                }
                Incoming::Event(Event { event }) => self.events.push(event),
            }
        }
    }

    /// Limits how long files may become that the process writes.
    pub fn limit_files(&self, bytes: Option<u64>) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).unwrap();
        let limit = Rlimit { current: bytes, maximum: None };
        rustix::process::prlimit(Some(pid), Resource::Fsize, limit).unwrap();
    }

    /// Waits for the answer to the first request that has none yet.
    pub fn answer(&mut self) -> Result<ResultBody, SocketError> {
        loop {
            match self.socket.receive::<Incoming>()?.0 {
                Incoming::Reply(reply) => {
                    assert_eq!(reply.id, self.next_answer);
                    self.next_answer += 1;
                    return Ok(reply.result);
                }
                Incoming::Event(Event { event }) => self.events.push(event),
            }
        }
    }

    /// A request without descriptors that must succeed.
    #[track_caller]
    pub fn done(&mut self, op: Op) {
        assert_eq!(self.request_with(op, &[]), ResultBody::Done);
    }

    /// A request that must fail.
    #[track_caller]
    pub fn refused(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> ErrorBody {
        match self.request_with(op, fds) {
            ResultBody::Error(error) => error,
            other => panic!("not refused: {other:?}"),
        }
    }

    /// The machine's state and counters.
    pub fn status(&mut self) -> VmStatus {
        match self.request_with(Op::Status {}, &[]) {
            ResultBody::Status(status) => status,
            other => panic!("no status: {other:?}"),
        }
    }

    /// Kills the process and waits until nothing of it is left.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Reads events to the end of the connection, then waits for the process.
    pub fn end(mut self) -> End {
        loop {
            match self.socket.receive::<Incoming>() {
                Ok((Incoming::Event(Event { event }), _)) => self.events.push(event),
                Ok((Incoming::Reply(_), _)) => {}
                Err(SocketError::Closed) => break,
                Err(error) => panic!("{error:?}"),
            }
        }
        End { events: self.events, status: self.child.wait().unwrap() }
    }
}

/// How a process ended.
pub struct End {
    pub events: Vec<EventBody>,
    pub status: ExitStatus,
}

impl End {
    /// The reason in the last event.
    #[track_caller]
    pub fn reason(&self) -> ExitReason {
        match self.events.last() {
            Some(EventBody::Exited { reason }) => reason.clone(),
            other => panic!("the last event is {other:?}"),
        }
    }

    #[track_caller]
    pub fn expect(&self, reason: &ExitReason, code: i32) {
        assert_eq!((&self.reason(), self.status.code()), (reason, Some(code)));
    }
}

/// What the guest writes to its serial console.
pub struct Console {
    pub reader: PipeReader,
}

impl Console {
    /// Waits for the next byte.
    pub fn byte(&mut self) -> u8 {
        let mut byte = [0];
        self.reader.read_exact(&mut byte).unwrap();
        byte[0]
    }

    /// Reads until each of `wanted` has been seen at least once since this call.
    pub fn wait_for_all(&mut self, wanted: &[u8]) {
        let mut missing = wanted.to_vec();
        while !missing.is_empty() {
            let byte = self.byte();
            missing.retain(|b| *b != byte);
        }
    }

    /// Everything up to the end of the machine.
    pub fn rest(mut self) -> String {
        let mut text = String::new();
        self.reader.read_to_string(&mut text).unwrap();
        text
    }
}

/// The host's side of [`Code::interpreter`]: a guest that does what it is told over its console.
pub struct Interpreter {
    input: PipeWriter,
    output: PipeReader,
}

impl Interpreter {
    /// The console's two ends, for this side and for the guest.
    pub fn pipes() -> (Self, PipeReader, PipeWriter) {
        let (theirs_in, input) = std::io::pipe().unwrap();
        let (output, theirs_out) = std::io::pipe().unwrap();
        (Self { input, output }, theirs_in, theirs_out)
    }

    fn tell(&mut self, command: u8, operands: &[u32]) {
        let mut bytes = vec![command];
        operands.iter().for_each(|operand| bytes.extend(operand.to_le_bytes()));
        self.input.write_all(&bytes).unwrap();
    }

    /// [`Interpreter::sum`] of several places.
    pub fn sums(&mut self, places: &[(u32, u32)]) -> Vec<u32> {
        for (address, count) in places {
            self.tell(b's', &[*address, *count]);
        }
        places.iter().map(|_| self.answer()).collect()
    }

    fn done(&mut self) {
        assert_eq!(self.byte(), b'k');
    }

    fn answer(&mut self) -> u32 {
        let mut answer = [0; 4];
        self.output.read_exact(&mut answer).unwrap();
        u32::from_le_bytes(answer)
    }

    /// Has the guest write one byte after the other, for ever, and waits for the first.
    pub fn print_for_ever(&mut self) {
        self.tell(b'p', &[]);
        assert_eq!(self.byte(), b'p');
    }

    /// Waits for one byte of output.
    pub fn byte(&mut self) -> u8 {
        let mut byte = [0];
        self.output.read_exact(&mut byte).unwrap();
        byte[0]
    }

    /// Writes 32 bits.
    pub fn write(&mut self, address: u32, value: u32) {
        self.tell(b'w', &[address, value]);
        self.done();
    }

    /// Writes 32 bits at the start of each of `count` pages.
    pub fn fill(&mut self, address: u32, value: u32, count: u32) {
        self.tell(b'f', &[address, value, count]);
        self.done();
    }

    /// [`Interpreter::fill`] at several addresses, one after the other.
    pub fn fill_each(&mut self, addresses: &[u32], value: u32, count: u32) {
        for address in addresses {
            self.tell(b'f', &[*address, value, count]);
        }
        addresses.iter().for_each(|_| self.done());
    }

    /// Turns paging on, with the four-level page tables at this address.
    pub fn page(&mut self, tables: u32) {
        self.tell(b'g', &[tables]);
        self.done();
    }

    /// Has the processor forget the translation of an address.
    pub fn forget(&mut self, address: u32) {
        self.tell(b'i', &[address]);
        self.done();
    }

    /// Says where the places of [`Interpreter::sums_of_table`] are.
    pub fn put_table(&mut self, table: u32, places: &[(u32, u32)]) {
        for (at, (address, count)) in (table..).step_by(8).zip(places) {
            self.write(at, *address);
            self.write(at + 4, *count);
        }
    }

    /// [`Interpreter::sum`] of each of so many places of a table, in one command.
    pub fn sums_of_table(&mut self, table: u32, count: usize) -> Vec<u32> {
        self.tell(b't', &[table, u32::try_from(count).unwrap()]);
        (0..count).map(|_| self.answer()).collect()
    }

    /// Sets up the first virtio device, which must be a disk (virtio 1.2 section 3.1.1).
    pub fn start_disk(&mut self) {
        use code::{AVAILABLE, DEVICE, HEADER, QUEUE, STATUS, USED};
        const WRITABLE: u32 = 2;
        // Header and status; what is between them differs from request to request.
        let memory = [
            (QUEUE, HEADER),
            (QUEUE + 8, 16),
            (QUEUE + 12, 1 << 16 | 1),
            (QUEUE + 32, STATUS),
            (QUEUE + 40, 1),
            (QUEUE + 44, WRITABLE),
        ];
        // Acknowledge, driver; version 1; flush; features; the queue; driver ready.
        let registers = [
            (0x70, 0),
            (0x70, 1),
            (0x70, 3),
            (0x24, 1),
            (0x20, 1),
            (0x24, 0),
            (0x20, 1 << 9),
            (0x70, 11),
            (0x30, 0),
            (0x38, 8),
            (0x80, QUEUE),
            (0x90, AVAILABLE),
            (0xA0, USED),
            (0x44, 1),
            (0x70, 15),
        ];
        memory.iter().for_each(|(address, value)| self.write(*address, *value));
        registers.iter().for_each(|(register, value)| self.write(DEVICE + register, *value));
        assert_eq!(self.read(DEVICE + 0x70), 15);
    }

    /// Reads from the disk: `length` bytes from `sector` on to `address`.
    pub fn read_disk(&mut self, sector: u32, address: u32, length: u32) {
        self.tell(b'd', &[0, sector, address, length]);
        assert_eq!(self.answer(), 0);
    }

    /// Writes to the disk: `length` bytes from `address` on to `sector`.
    pub fn write_disk(&mut self, sector: u32, address: u32, length: u32) {
        self.tell(b'd', &[1, sector, address, length]);
        assert_eq!(self.answer(), 0);
    }

    /// Reads 32 bits.
    pub fn read(&mut self, address: u32) -> u32 {
        self.tell(b'r', &[address]);
        self.answer()
    }

    /// Adds up 32 bits at the start of each of `count` pages.
    pub fn sum(&mut self, address: u32, count: u32) -> u32 {
        self.tell(b's', &[address, count]);
        self.answer()
    }
}

/// A descriptor that is none of what a machine is made of.
pub fn null() -> File {
    File::options().read(true).write(true).open("/dev/null").unwrap()
}

/// Runs the program with arguments and gives what it printed.
pub fn run(args: &[&str]) -> (ExitStatus, String, String) {
    let output = Command::new(vmm()).args(args).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status, text(output.stdout), text(output.stderr))
}
