//! A tiny assembler for 32-bit protected mode, and the ELF file around its output.
//!
//! The kernel file has the PVH note, so guests start in flat 32-bit mode without paging
//! (Xen's `docs/misc/pvh.pandoc`).

use std::fs::File;
use std::io::Write;

/// Where the code is loaded and entered.
pub(crate) const LOAD_ADDRESS: u32 = 0x10_0000;
/// Where application processors start, in real mode; a start-up interrupt names it by its page.
pub(crate) const AP_ADDRESS: u32 = 0x8000;
/// A counter that application processors raise when they run.
pub(crate) const AP_COUNTER: u16 = 0x8800;

const SERIAL: u16 = 0x3F8;
const LOCAL_APIC_ICR: u32 = 0xFEE0_0300;

/// Machine code under construction.
#[derive(Debug, Clone, Default)]
pub(crate) struct Code {
    bytes: Vec<u8>,
}

impl Code {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn with(self, opcode: &[u8], operand: u32) -> Self {
        self.raw(opcode).raw(&operand.to_le_bytes())
    }

    /// `mov dx, port; mov al, value; out dx, al`
    pub(crate) fn out(self, port: u16, value: u8) -> Self {
        self.raw(&[0x66, 0xBA]).raw(&port.to_le_bytes()).raw(&[0xB0, value, 0xEE])
    }

    /// Writes text to the serial port, one byte per instruction.
    pub(crate) fn print(self, text: &str) -> Self {
        text.bytes().fold(self, |code, byte| code.out(SERIAL, byte))
    }

    /// Writes text to the serial port with one repeated string instruction.
    pub(crate) fn print_string(self, text: &str) -> Self {
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
    pub(crate) fn print_if_equal(self, address: u32, value: u32) -> Self {
        self.with(&[0xA1], address)
            .with(&[0x3D], value)
            // mov al, 'Y'; je +2; mov al, 'N'
            .raw(&[0xB0, b'Y', 0x74, 0x02, 0xB0, b'N'])
            .raw(&[0x66, 0xBA])
            .raw(&SERIAL.to_le_bytes())
            .raw(&[0xEE])
    }

    /// `mov dword [address], value`
    pub(crate) fn store(self, address: u32, value: u32) -> Self {
        self.raw(&[0xC7, 0x05]).raw(&address.to_le_bytes()).raw(&value.to_le_bytes())
    }

    /// Powers off through the ACPI sleep control register.
    pub(crate) fn power_off(self) -> Self {
        self.out(0x600, 0x20 | 5 << 2).spin()
    }

    /// Loads an interrupt table without entries and divides by zero.
    pub(crate) fn triple_fault(self) -> Self {
        // lidt [0x8FF0] (zeroes); xor ecx, ecx; div ecx
        self.with(&[0x0F, 0x01, 0x1D], 0x8FF0).raw(&[0x31, 0xC9, 0xF7, 0xF1])
    }

    /// Loops for ever without an exit.
    pub(crate) fn spin(self) -> Self {
        self.raw(&[0xEB, 0xFE])
    }

    /// Halts for ever with interrupts off.
    pub(crate) fn halt(self) -> Self {
        self.raw(&[0xFA, 0xF4, 0xEB, 0xFD])
    }

    /// Writes one byte to the serial port for ever.
    pub(crate) fn print_for_ever(self, byte: u8) -> Self {
        self.raw(&[0x66, 0xBA])
            .raw(&SERIAL.to_le_bytes())
            // mov al, byte; out dx, al; jmp to the out
            .raw(&[0xB0, byte, 0xEE, 0xEB, 0xFD])
    }

    /// Starts `count` application processors: the n-th to arrive prints the n-th letter for
    /// ever. Continues on the boot processor.
    pub(crate) fn start_processors(self) -> Self {
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
    pub(crate) fn kernel(&self) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&self.elf()).unwrap();
        file
    }

    /// The bytes of [`Code::kernel`].
    pub(crate) fn elf(&self) -> Vec<u8> {
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
