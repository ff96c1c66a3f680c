//! A driver for virtio devices that a test plays through [`Interpreter`]: it writes the guest's
//! queues and the devices' registers (virtio 1.2 sections 2.7 and 4.2).

use coppice_micro::Interpreter;

/// The first window of virtio-mmio, and how far they are apart.
const WINDOWS: u32 = 0xC000_0000;
const WINDOW: u32 = 0x1000;
/// Room for a queue of eight: descriptors, then the two rings.
const ROOM: u32 = 0x1000;
const AVAILABLE: u32 = 0x400;
const USED: u32 = 0x800;
const SIZE: u32 = 8;

/// Flags of a descriptor.
const NEXT: u32 = 1;
const WRITABLE: u32 = 2;

/// A piece of a request: address, length, and whether the device writes it.
pub(crate) type Piece = (u32, u32, bool);

/// A device and its queues, which lie one behind the other in memory.
pub(crate) struct Driver {
    registers: u32,
    queues: u32,
    given: Vec<u32>,
}

impl Driver {
    /// Sets up the device in a window with these features (the low half) and so many queues.
    pub(crate) fn start(
        guest: &mut Interpreter,
        window: u32,
        features: u32,
        queues: u32,
        memory: u32,
    ) -> Self {
        let registers = WINDOWS + window * WINDOW;
        let mut set = |register: u32, value: u32| guest.write(registers + register, value);
        for (register, value) in
            [(0x70, 0), (0x70, 1), (0x70, 3), (0x24, 1), (0x20, 1), (0x24, 0), (0x20, features)]
        {
            set(register, value);
        }
        set(0x70, 11);
        for queue in 0..queues {
            let at = memory + queue * ROOM;
            for (register, value) in [
                (0x30, queue),
                (0x38, SIZE),
                (0x80, at),
                (0x90, at + AVAILABLE),
                (0xA0, at + USED),
                (0x44, 1),
            ] {
                set(register, value);
            }
        }
        set(0x70, 15);
        let given = vec![0; usize::try_from(queues).unwrap()];
        Self { registers, queues: memory, given }
    }

    /// Gives a queue a request, and does not wait for it.
    pub(crate) fn give(&mut self, guest: &mut Interpreter, queue: u32, pieces: &[Piece]) {
        let at = self.queues + queue * ROOM;
        let last = pieces.len() - 1;
        for (number, (address, length, writable)) in pieces.iter().enumerate() {
            let place = at + 16 * u32::try_from(number).unwrap();
            let next = u32::try_from(number + 1).unwrap();
            let mut flags = if *writable { WRITABLE } else { 0 };
            if number < last {
                flags |= NEXT | next << 16;
            }
            guest.write(place, *address);
            guest.write(place + 8, *length);
            guest.write(place + 12, flags);
        }
        // Every place in the ring names the first descriptor.
        let given = &mut self.given[usize::try_from(queue).unwrap()];
        *given += 1;
        guest.write(at + AVAILABLE, *given << 16);
        guest.write(self.registers + 0x50, queue);
    }

    /// Waits until the device is done with everything in a queue.
    pub(crate) fn wait(&self, guest: &mut Interpreter, queue: u32) {
        let at = self.queues + queue * ROOM;
        let given = self.given[usize::try_from(queue).unwrap()];
        while guest.read(at + USED) >> 16 != given {
            std::thread::yield_now();
        }
    }

    /// Gives a queue a request and waits for it.
    pub(crate) fn ask(&mut self, guest: &mut Interpreter, queue: u32, pieces: &[Piece]) {
        self.give(guest, queue, pieces);
        self.wait(guest, queue);
    }
}

/// Writes 32-bit words one behind the other.
pub(crate) fn put(guest: &mut Interpreter, address: u32, words: &[u32]) {
    for (at, word) in (address..).step_by(4).zip(words) {
        guest.write(at, *word);
    }
}
