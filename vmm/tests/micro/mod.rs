//! Micro-guests: a few hand-written instructions in a real ELF kernel file, run by the real
//! `coppice-vmm` over a real control socket on whatever /dev/kvm opens.

#![allow(dead_code, reason = "each test program uses its own part of this module")]

pub(crate) mod code;

use std::fs::File;
use std::io::{PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};

use coppice_vmm_protocol::{
    ConsoleSpec, ControlSocket, ErrorBody, Event, EventBody, ExitReason, Incoming, MachineSpec, Op,
    Request, ResultBody, SocketError, VmStatus,
};

pub(crate) use code::Code;

/// The program under test.
pub(crate) const VMM: &str = env!("CARGO_BIN_EXE_coppice-vmm");

/// Whether micro-guests can run here; says so when not, since a test that did not run must not
/// look like one that passed.
pub(crate) fn kvm() -> bool {
    let opens = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    if !opens {
        // Straight to the terminal: the test harness hides what passing tests print.
        let _ = writeln!(std::io::stderr(), "skipped: no /dev/kvm");
    }
    opens
}

/// A machine with one vCPU, the least memory and nothing else.
pub(crate) fn plain_spec() -> MachineSpec {
    MachineSpec {
        vcpus: 1,
        memory_mib: 64,
        kernel: 0,
        initrd: None,
        cmdline: String::new(),
        disks: Vec::new(),
        vsock: None,
        console: Some(ConsoleSpec { input: None, output: Some(1) }),
        rng: false,
        balloon: None,
    }
}

/// A `coppice-vmm` process and the manager's end of its control socket.
pub(crate) struct Vmm {
    pub(crate) child: Child,
    pub(crate) socket: ControlSocket,
    next_id: u64,
    /// Events that came while a reply was awaited.
    events: Vec<EventBody>,
}

/// A command that runs `program` with `socket` as descriptor 3.
pub(crate) fn command_with_socket(program: &str, socket: OwnedFd) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec {program} 3<&0 0</dev/null")]).stdin(socket);
    command
}

impl Vmm {
    /// Starts a process without a machine.
    pub(crate) fn start() -> Self {
        let (ours, theirs) = ControlSocket::pair().unwrap();
        let program = format!("'{VMM}' --control-fd 3");
        Self::with(command_with_socket(&program, theirs.into_fd()).spawn().unwrap(), ours)
    }

    /// Takes over a process that serves the other end of `socket`.
    pub(crate) fn with(child: Child, socket: ControlSocket) -> Self {
        Self { child, socket, next_id: 1, events: Vec::new() }
    }

    /// Starts a process and a machine that runs `code`; returns its console output too.
    pub(crate) fn boot(code: &Code, change: impl FnOnce(&mut MachineSpec)) -> (Self, Console) {
        let mut vmm = Self::start();
        let console = vmm.create(code, change);
        vmm.done(Op::Start {});
        (vmm, console)
    }

    /// Creates a machine that will run `code`.
    pub(crate) fn create(&mut self, code: &Code, change: impl FnOnce(&mut MachineSpec)) -> Console {
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
    pub(crate) fn request_with(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> ResultBody {
        self.send(op, fds).unwrap();
        self.answer().unwrap()
    }

    /// Sends a request.
    pub(crate) fn send(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        let id = self.next_id;
        self.next_id += 1;
        self.socket.send(&Request { id, op }, fds)
    }

    /// Waits for the answer to the request sent last.
    pub(crate) fn answer(&mut self) -> Result<ResultBody, SocketError> {
        loop {
            match self.socket.receive::<Incoming>()?.0 {
                Incoming::Reply(reply) => {
                    assert_eq!(reply.id, self.next_id - 1);
                    return Ok(reply.result);
                }
                Incoming::Event(Event { event }) => self.events.push(event),
            }
        }
    }

    /// A request without descriptors that must succeed.
    #[track_caller]
    pub(crate) fn done(&mut self, op: Op) {
        assert_eq!(self.request_with(op, &[]), ResultBody::Done);
    }

    /// A request that must fail.
    #[track_caller]
    pub(crate) fn refused(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> ErrorBody {
        match self.request_with(op, fds) {
            ResultBody::Error(error) => error,
            other => panic!("not refused: {other:?}"),
        }
    }

    /// The machine's state and counters.
    pub(crate) fn status(&mut self) -> VmStatus {
        match self.request_with(Op::Status {}, &[]) {
            ResultBody::Status(status) => status,
            other => panic!("no status: {other:?}"),
        }
    }

    /// Reads events to the end of the connection, then waits for the process.
    pub(crate) fn end(mut self) -> End {
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
pub(crate) struct End {
    pub(crate) events: Vec<EventBody>,
    pub(crate) status: ExitStatus,
}

impl End {
    /// The reason in the last event.
    #[track_caller]
    pub(crate) fn reason(&self) -> ExitReason {
        match self.events.last() {
            Some(EventBody::Exited { reason }) => reason.clone(),
            other => panic!("the last event is {other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn expect(&self, reason: &ExitReason, code: i32) {
        assert_eq!((&self.reason(), self.status.code()), (reason, Some(code)));
    }
}

/// What the guest writes to its serial console.
pub(crate) struct Console {
    pub(crate) reader: PipeReader,
}

impl Console {
    /// Waits for the next byte.
    pub(crate) fn byte(&mut self) -> u8 {
        let mut byte = [0];
        self.reader.read_exact(&mut byte).unwrap();
        byte[0]
    }

    /// Reads until each of `wanted` has been seen at least once since this call.
    pub(crate) fn wait_for_all(&mut self, wanted: &[u8]) {
        let mut missing = wanted.to_vec();
        while !missing.is_empty() {
            let byte = self.byte();
            missing.retain(|b| *b != byte);
        }
    }

    /// Everything up to the end of the machine.
    pub(crate) fn rest(mut self) -> String {
        let mut text = String::new();
        self.reader.read_to_string(&mut text).unwrap();
        text
    }
}

/// A descriptor that is none of what a machine is made of.
pub(crate) fn null() -> File {
    File::options().read(true).write(true).open("/dev/null").unwrap()
}

/// Runs the program with arguments and gives what it printed.
pub(crate) fn run(args: &[&str]) -> (ExitStatus, String, String) {
    let output = Command::new(VMM).args(args).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status, text(output.stdout), text(output.stderr))
}
