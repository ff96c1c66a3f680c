//! A tiny assembler for 32-bit protected mode, and the ELF file around its output.
//!
//! The kernel file has the PVH note, so guests start in flat 32-bit mode without paging
//! (Xen's `docs/misc/pvh.pandoc`).

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;

/// Where the code is loaded and entered.
pub const LOAD_ADDRESS: u32 = 0x10_0000;
/// Where application processors start, in real mode; a start-up interrupt names it by its page.
pub const AP_ADDRESS: u32 = 0x8000;
/// A counter that application processors raise when they run.
pub const AP_COUNTER: u16 = 0x8800;

/// Where the interpreter puts the sums of several places.
const SUMS: u32 = 0x6_1000;
/// The queue of the first virtio device, a disk, and one request: three descriptors, the rings, the
/// header and the status. All entries of the available ring stay zero, the first descriptor.
pub(crate) const QUEUE: u32 = 0x6_0000;
pub(crate) const AVAILABLE: u32 = QUEUE + 0x400;
pub(crate) const USED: u32 = QUEUE + 0x800;
pub(crate) const HEADER: u32 = QUEUE + 0xC00;
pub(crate) const STATUS: u32 = QUEUE + 0xC80;
/// Registers of the first virtio device.
pub(crate) const DEVICE: u32 = 0xC000_0000;
/// The one that says that a queue has something new.
const NOTIFY: u32 = DEVICE + 0x50;

const SERIAL: u16 = 0x3F8;
const LOCAL_APIC_ICR: u32 = 0xFEE0_0300;

/// Machine code under construction.
#[derive(Debug, Clone, Default)]
pub struct Code {
    bytes: Vec<u8>,
}

impl Code {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn with(self, opcode: &[u8], operand: u32) -> Self {
        self.raw(opcode).raw(&operand.to_le_bytes())
    }

    /// `mov dx, port; mov al, value; out dx, al`
    pub fn out(self, port: u16, value: u8) -> Self {
        self.raw(&[0x66, 0xBA]).raw(&port.to_le_bytes()).raw(&[0xB0, value, 0xEE])
    }

    /// Writes text to the serial port, one byte per instruction.
    pub fn print(self, text: &str) -> Self {
        text.bytes().fold(self, |code, byte| code.out(SERIAL, byte))
    }

    /// Writes text to the serial port with one repeated string instruction.
    pub fn print_string(self, text: &str) -> Self {
        // The text stands in the code, jumped over.
        let len = u8::try_from(text.len()).unwrap();
        let code = self.raw(&[0xEB, len]);
        let at = LOAD_ADDRESS + u32::try_from(code.bytes.len()).unwrap();
        code.raw(text.as_bytes())
            .with(&[0xBE], at)
            .with(&[0xB9], u32::from(len))
            .raw(&[0x66, 0xBA])
            .raw(&SERIAL.to_le_bytes())
            .raw(&[0xFC, 0xF3, 0x6E])
    }

    /// Prints `Y` if the 32 bits at `address` are `value`, else `N`.
    pub fn print_if_equal(self, address: u32, value: u32) -> Self {
        self.with(&[0xA1], address)
            .with(&[0x3D], value)
            // mov al, 'Y'; je +2; mov al, 'N'
            .raw(&[0xB0, b'Y', 0x74, 0x02, 0xB0, b'N'])
            .raw(&[0x66, 0xBA])
            .raw(&SERIAL.to_le_bytes())
            .raw(&[0xEE])
    }

    /// `mov dword [address], value`
    pub fn store(self, address: u32, value: u32) -> Self {
        self.raw(&[0xC7, 0x05]).raw(&address.to_le_bytes()).raw(&value.to_le_bytes())
    }

    /// Powers off through the ACPI sleep control register.
    pub fn power_off(self) -> Self {
        self.out(0x600, 0x20 | 5 << 2).spin()
    }

    /// Loads an interrupt table without entries and divides by zero.
    pub fn triple_fault(self) -> Self {
        // lidt [0x8FF0] (zeroes); xor ecx, ecx; div ecx
        self.with(&[0x0F, 0x01, 0x1D], 0x8FF0).raw(&[0x31, 0xC9, 0xF7, 0xF1])
    }

    /// Loops for ever without an exit.
    pub fn spin(self) -> Self {
        self.raw(&[0xEB, 0xFE])
    }

    /// Halts for ever with interrupts off.
    pub fn halt(self) -> Self {
        self.raw(&[0xFA, 0xF4, 0xEB, 0xFD])
    }

    /// Writes one byte to the serial port for ever.
    pub fn print_for_ever(self, byte: u8) -> Self {
        self.raw(&[0x66, 0xBA])
            .raw(&SERIAL.to_le_bytes())
            // mov al, byte; out dx, al; jmp to the out
            .raw(&[0xB0, byte, 0xEE, 0xEB, 0xFD])
    }

    /// An interpreter of commands on the serial port, each answered when it is done:
    ///
    /// | command | does | answers |
    /// |---|---|---|
    /// | `w` address value | writes 32 bits | `k` |
    /// | `f` address value count | writes 32 bits at the start of each of `count` pages | `k` |
    /// | `r` address | reads 32 bits | the bits |
    /// | `s` address count | adds up 32 bits at the start of each of `count` pages | the sum |
    /// | `t` table count | does that for each address and count in a table | the sums |
    /// | `d` type sector address length | has the disk serve a request | its status |
    /// | `g` address | turns paging on, with the four-level page tables there | `k` |
    /// | `i` address | has the processor forget the translation of an address | `k` |
    /// | `p` | nothing any more | `p` for ever |
    ///
    /// All operands are 32 bits, little-endian. [`crate::Interpreter`] speaks it.
    pub fn interpreter(self) -> Self {
        let mut asm = Assembler::default();
        let [low, high] = SERIAL.to_le_bytes();
        // The stack is used by calls only. mov esp, 0x90000
        asm.code(&[0xBC, 0x00, 0x00, 0x09, 0x00]);
        // The UART takes input only from one who wants interrupts; they stay masked here.
        // mov dx, interrupt enable; mov al, 1; out dx, al
        asm.code(&[0x66, 0xBA, low + 1, high, 0xB0, 1, 0xEE]).label("main").call("byte");
        let commands = [
            (b'w', "write"),
            (b'f', "fill"),
            (b'r', "read"),
            (b's', "sum"),
            (b't', "table"),
            (b'd', "disk"),
            (b'g', "page"),
            (b'i', "forget"),
            (b'p', "print"),
        ];
        for (command, label) in commands {
            asm.code(&[0x3C, command]).jump_if_equal(label);
        }
        asm.jump("main");
        // mov edi, ebx
        asm.label("write").call("word").code(&[0x89, 0xDF]).call("word");
        // mov [edi], ebx
        asm.code(&[0x89, 0x1F]).jump("done");
        // mov edi, ebx; mov ebp, ebx
        asm.label("fill").call("word").code(&[0x89, 0xDF]).call("word").code(&[0x89, 0xDD]);
        // mov ecx, ebx; test ecx, ecx
        asm.call("word").code(&[0x89, 0xD9]).label("fill next").code(&[0x85, 0xC9]);
        asm.jump_if_equal("done");
        // mov [edi], ebp; add edi, 4096; dec ecx
        asm.code(&[0x89, 0x2F, 0x81, 0xC7, 0x00, 0x10, 0x00, 0x00, 0x49]).jump("fill next");
        // mov ebx, [ebx]
        asm.label("read").call("word").code(&[0x8B, 0x1B]).jump("answer");
        // mov edi, ebx; mov ecx, ebx; xor ebx, ebx
        asm.label("sum").call("word").code(&[0x89, 0xDF]).call("word");
        asm.code(&[0x89, 0xD9, 0x31, 0xDB]).label("sum next").code(&[0x85, 0xC9]);
        asm.jump_if_equal("answer");
        // add ebx, [edi]; add edi, 4096; dec ecx
        asm.code(&[0x03, 0x1F, 0x81, 0xC7, 0x00, 0x10, 0x00, 0x00, 0x49]).jump("sum next");
        table_command(&mut asm);
        disk_command(&mut asm);
        // mov cr3, ebx; mov eax, cr4; or al, physical address extension; mov cr4, eax
        asm.label("page").call("word").code(&[0x0F, 0x22, 0xDB]);
        asm.code(&[0x0F, 0x20, 0xE0, 0x0C, 1 << 5, 0x0F, 0x22, 0xE0]);
        // mov ecx, EFER; rdmsr; or eax, long mode; wrmsr. The code segment stays a 32-bit one.
        asm.code(&[0xB9, 0x80, 0, 0, 0xC0, 0x0F, 0x32, 0x0D, 0, 1, 0, 0, 0x0F, 0x30]);
        // mov eax, cr0; or eax, paging; mov cr0, eax
        asm.code(&[0x0F, 0x20, 0xC0, 0x0D, 0, 0, 0, 0x80, 0x0F, 0x22, 0xC0]).jump("done");
        // invlpg [ebx]
        asm.label("forget").call("word").code(&[0x0F, 0x01, 0x3B]).jump("done");
        // mov dx, serial; mov al, 'p'; then out dx, al
        asm.label("print").code(&[0x66, 0xBA, low, high, 0xB0, b'p']).label("print next");
        asm.code(&[0xEE]).jump("print next");
        // mov dx, serial; mov al, 'k'; out dx, al
        asm.label("done").code(&[0x66, 0xBA, low, high, 0xB0, b'k', 0xEE]).jump("main");
        // mov ecx, 4; mov dx, serial; then mov al, bl; out dx, al; ror ebx, 8; dec ecx
        asm.label("answer").code(&[0xB9, 4, 0, 0, 0, 0x66, 0xBA, low, high]);
        asm.label("answer next").code(&[0x88, 0xD8, 0xEE, 0xC1, 0xCB, 8, 0x49]);
        asm.jump_if_not_equal("answer next").jump("main");
        // The next byte in al: mov dx, line status; in al, dx; test al, 1
        asm.label("byte").code(&[0x66, 0xBA, low + 5, high]).label("poll");
        asm.code(&[0xEC, 0xA8, 1]).jump_if_equal("poll");
        // mov dx, serial; in al, dx; ret
        asm.code(&[0x66, 0xBA, low, high, 0xEC, 0xC3]);
        // The next word in ebx: mov esi, 4; then mov bl, al; ror ebx, 8; dec esi; ret
        asm.label("word").code(&[0xBE, 4, 0, 0, 0]).label("word next").call("byte");
        asm.code(&[0x88, 0xC3, 0xC1, 0xCB, 8, 0x4E]).jump_if_not_equal("word next").code(&[0xC3]);
        self.raw(&asm.link())
    }

    /// Starts `count` application processors: the n-th to arrive prints the n-th letter for
    /// ever. Continues on the boot processor.
    pub fn start_processors(self) -> Self {
        let program = ap_program();
        let len = u8::try_from(program.len()).unwrap();
        let code = self.raw(&[0xEB, len]);
        let at = LOAD_ADDRESS + u32::try_from(code.bytes.len()).unwrap();
        code.raw(&program)
            // Copy the program to where a start-up interrupt can name it.
            .with(&[0xBE], at)
            .with(&[0xBF], AP_ADDRESS)
            .with(&[0xB9], u32::from(len))
            .raw(&[0xFC, 0xF3, 0xA4])
            // To all but self: INIT, then start-up at the program's page.
            .store(LOCAL_APIC_ICR, 0x000C_4500)
            .store(LOCAL_APIC_ICR, 0x000C_4600 | AP_ADDRESS >> 12)
    }

    /// The kernel file: an ELF header, one loaded segment, and the PVH note.
    pub fn kernel(&self) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&self.elf()).unwrap();
        file
    }

    /// The bytes of [`Code::kernel`].
    pub fn elf(&self) -> Vec<u8> {
        const HEADER: u64 = 64;
        const SEGMENT: u64 = 56;
        const NOTE: u64 = 20;
        let note_at = HEADER + 2 * SEGMENT;
        let code_at = note_at + NOTE;
        let entry = u64::from(LOAD_ADDRESS);
        let len = u64::try_from(self.bytes.len()).unwrap();

        let mut elf = vec![0x7F, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        elf.extend(2u16.to_le_bytes()); // executable
        elf.extend(62u16.to_le_bytes()); // x86-64
        elf.extend(1u32.to_le_bytes());
        for value in [entry, HEADER, 0] {
            elf.extend(value.to_le_bytes());
        }
        elf.extend(0u32.to_le_bytes());
        for value in [64u16, 56, 2, 64, 0, 0] {
            elf.extend(value.to_le_bytes());
        }
        let mut segment = |kind: u32, offset: u64, address: u64, size: u64, align: u64| {
            elf.extend(kind.to_le_bytes());
            elf.extend(7u32.to_le_bytes());
            for value in [offset, address, address, size, size, align] {
                elf.extend(value.to_le_bytes());
            }
        };
        segment(1, code_at, entry, len, 1);
        segment(4, note_at, 0, NOTE, 4);
        for value in [4u32, 4, 18] {
            elf.extend(value.to_le_bytes());
        }
        elf.extend(b"Xen\0");
        elf.extend(LOAD_ADDRESS.to_le_bytes());
        elf.extend(&self.bytes);
        elf
    }
}

/// Code with labels: all jumps and calls have 32-bit displacements.
#[derive(Debug, Default)]
struct Assembler {
    bytes: Vec<u8>,
    labels: HashMap<&'static str, usize>,
    /// Where a displacement belongs, and to which label.
    uses: Vec<(usize, &'static str)>,
}

impl Assembler {
    fn code(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn with(&mut self, opcode: &[u8], operand: u32) -> &mut Self {
        self.code(opcode).code(&operand.to_le_bytes())
    }

    fn label(&mut self, name: &'static str) -> &mut Self {
        self.labels.insert(name, self.bytes.len());
        self
    }

    fn to(&mut self, opcode: &[u8], label: &'static str) -> &mut Self {
        self.code(opcode);
        self.uses.push((self.bytes.len(), label));
        self.code(&[0; 4])
    }

    fn call(&mut self, label: &'static str) -> &mut Self {
        self.to(&[0xE8], label)
    }

    fn jump(&mut self, label: &'static str) -> &mut Self {
        self.to(&[0xE9], label)
    }

    fn jump_if_equal(&mut self, label: &'static str) -> &mut Self {
        self.to(&[0x0F, 0x84], label)
    }

    fn jump_if_not_equal(&mut self, label: &'static str) -> &mut Self {
        self.to(&[0x0F, 0x85], label)
    }

    fn link(mut self) -> Vec<u8> {
        for (at, label) in self.uses {
            let target = i32::try_from(self.labels[label]).unwrap();
            let next = i32::try_from(at + 4).unwrap();
            self.bytes[at..at + 4].copy_from_slice(&(target - next).to_le_bytes());
        }
        self.bytes
    }
}

/// The interpreter's sums of several places.
fn table_command(asm: &mut Assembler) {
    let [low, high] = SERIAL.to_le_bytes();
    // mov edi, ebx; then mov ecx, ebx; mov ebp, ebx
    asm.label("table").call("word").code(&[0x89, 0xDF]).call("word");
    asm.code(&[0x89, 0xD9, 0x89, 0xDD]);
    // mov esi, sums; then test ecx, ecx
    asm.with(&[0xBE], SUMS).label("table next").code(&[0x85, 0xC9]).jump_if_equal("table done");
    // push ecx; mov eax, [edi]; mov ecx, [edi + 4]; xor ebx, ebx; then test ecx, ecx
    asm.code(&[0x51, 0x8B, 0x07, 0x8B, 0x4F, 4, 0x31, 0xDB]).label("table sum");
    asm.code(&[0x85, 0xC9]).jump_if_equal("table put");
    // add ebx, [eax]; add eax, 4096; dec ecx
    asm.code(&[0x03, 0x18]).with(&[0x05], 4096).code(&[0x49]).jump("table sum");
    // mov [esi], ebx; add esi, 4; add edi, 8; pop ecx; dec ecx
    asm.label("table put").code(&[0x89, 0x1E, 0x83, 0xC6, 4, 0x83, 0xC7, 8, 0x59, 0x49]);
    // mov esi, sums; mov ecx, ebp; shl ecx, 2; mov dx, serial; cld; rep outsb
    asm.jump("table next").label("table done").with(&[0xBE], SUMS);
    asm.code(&[0x89, 0xE9, 0xC1, 0xE1, 2, 0x66, 0xBA, low, high, 0xFC, 0xF3, 0x6E]).jump("main");
}

/// The interpreter's disk request (virtio 1.2 sections 2.7 and 5.2.6).
fn disk_command(asm: &mut Assembler) {
    let data = QUEUE + 16;
    // mov [header], ebx (type); mov [header + 8], ebx (sector)
    asm.label("disk").call("word").with(&[0x89, 0x1D], HEADER);
    asm.call("word").with(&[0x89, 0x1D], HEADER + 8);
    // mov [descriptor], ebx; mov [descriptor + 8], ebx
    asm.call("word").with(&[0x89, 0x1D], data);
    asm.call("word").with(&[0x89, 0x1D], data + 8);
    // The next descriptor is 2 and there is one; the device writes this one for type 0, a read.
    // mov eax, [header]; add eax, eax; neg eax; add eax, ...; mov [descriptor + 12], eax
    asm.with(&[0xA1], HEADER).code(&[0x01, 0xC0, 0xF7, 0xD8]).with(&[0x05], 0x2_0003);
    asm.with(&[0xA3], data + 12);
    // mov byte [status], 0xFF; mov ax, [available index]; inc ax; mov [available index], ax
    asm.with(&[0xC6, 0x05], STATUS).code(&[0xFF]).with(&[0x66, 0xA1], AVAILABLE + 2);
    asm.code(&[0x66, 0x40]).with(&[0x66, 0xA3], AVAILABLE + 2);
    // mov dword [notify], 0; then cmp [used index], ax
    asm.with(&[0xC7, 0x05], NOTIFY).code(&[0; 4]).label("disk wait");
    asm.with(&[0x66, 0x39, 0x05], USED + 2).jump_if_not_equal("disk wait");
    // movzx ebx, byte [status]
    asm.with(&[0x0F, 0xB6, 0x1D], STATUS).jump("answer");
}

/// Real-mode code: take a number from the counter, then print the letter that belongs to it.
fn ap_program() -> Vec<u8> {
    let counter = AP_COUNTER.to_le_bytes();
    let serial = SERIAL.to_le_bytes();
    let mut code = vec![0x31, 0xC0, 0x8E, 0xD8]; // xor ax, ax; mov ds, ax
    code.extend([0xB0, 1, 0xF0, 0x0F, 0xC0, 0x06, counter[0], counter[1]]); // lock xadd [], al
    code.extend([0x04, b'b']); // add al, 'b'
    code.extend([0xBA, serial[0], serial[1]]); // mov dx, serial
    code.extend([0xEE, 0xEB, 0xFD]); // out dx, al; jmp to the out
    code
}
