//! The registers at the kernel's first instruction, for both protocols.

use kvm_bindings::{kvm_fpu, kvm_regs, kvm_segment, kvm_sregs};

use crate::boot::params::{CODE_INDEX, DATA_INDEX, GDT_LEN, TASK_INDEX};
use crate::boot::{BootEntry, Protocol};
use crate::memory::layout::{GDT, PAGE_TABLES, PVH_START_INFO, ZERO_PAGE};

/// Control register bits (Intel SDM volume 3, section 2.5).
const CR0_PROTECTED: u64 = 1 << 0;
const CR0_EXTENSION: u64 = 1 << 4;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PHYSICAL_EXTENSION: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = (1 << 8) | (1 << 10);
/// The bit of the flags register that is always set; interrupts are off.
const FLAGS: u64 = 1 << 1;

/// Segment types: code that can be read, data that can be written, busy task state; all accessed.
const CODE: u8 = 0b1011;
const DATA: u8 = 0b0011;
const TASK: u8 = 0b1011;
/// Last byte of a task state segment.
const TASK_LIMIT: u32 = 0x67;

/// Control word and SSE control after `FNINIT` and at reset: all exceptions masked.
const FPU_CONTROL: u16 = 0x37F;
const SSE_CONTROL: u32 = 0x1F80;

/// The descriptors that [`set_system_registers`] loads, for a kernel that reloads them.
pub(in crate::boot) fn gdt(protocol: Protocol) -> [u64; GDT_LEN] {
    [0, 0, descriptor(&code(protocol)), descriptor(&data()), descriptor(&task())]
}

/// Sets segments, control registers and descriptor tables.
pub(super) fn set_system_registers(sregs: &mut kvm_sregs, protocol: Protocol) {
    sregs.cs = code(protocol);
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *segment = data();
    }
    sregs.tr = task();
    sregs.gdt.base = GDT;
    sregs.gdt.limit = u16::try_from(GDT_LEN * size_of::<u64>()).unwrap_or(0).saturating_sub(1);
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr0 = CR0_PROTECTED | CR0_EXTENSION;
    sregs.cr4 = 0;
    sregs.efer = 0;
    if protocol == Protocol::Linux64 {
        sregs.cr0 |= CR0_PAGING;
        sregs.cr3 = PAGE_TABLES;
        sregs.cr4 = CR4_PHYSICAL_EXTENSION;
        sregs.efer = EFER_LONG_MODE;
    }
}

/// The general registers.
pub(super) fn registers(entry: &BootEntry) -> kvm_regs {
    let mut regs = kvm_regs { rip: entry.address, rflags: FLAGS, ..Default::default() };
    match entry.protocol {
        Protocol::Linux64 => regs.rsi = ZERO_PAGE,
        Protocol::Pvh => regs.rbx = PVH_START_INFO,
    }
    regs
}

/// The floating-point state.
pub(super) fn fpu() -> kvm_fpu {
    kvm_fpu { fcw: FPU_CONTROL, mxcsr: SSE_CONTROL, ..Default::default() }
}

fn code(protocol: Protocol) -> kvm_segment {
    let long = protocol == Protocol::Linux64;
    kvm_segment { l: u8::from(long), db: u8::from(!long), ..flat(CODE, CODE_INDEX) }
}

fn data() -> kvm_segment {
    kvm_segment { db: 1, ..flat(DATA, DATA_INDEX) }
}

fn task() -> kvm_segment {
    kvm_segment { limit: TASK_LIMIT, s: 0, g: 0, ..flat(TASK, TASK_INDEX) }
}

/// A segment over all 4 GiB.
fn flat(type_: u8, index: u16) -> kvm_segment {
    kvm_segment {
        limit: u32::MAX,
        selector: index * 8,
        type_,
        present: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

/// The descriptor of a segment with base 0 (Intel SDM volume 3, section 3.4.5).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 { segment.limit >> 12 } else { segment.limit });
    let bits = [
        (segment.type_, 40),
        (segment.s, 44),
        (segment.dpl, 45),
        (segment.present, 47),
        (segment.avl, 52),
        (segment.l, 53),
        (segment.db, 54),
        (segment.g, 55),
    ];
    let flags = bits.iter().fold(0, |flags, (value, shift)| flags | (u64::from(*value) << shift));
    (limit & 0xFFFF) | ((limit & 0xF_0000) << 32) | flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_those_of_the_manual() {
        assert_eq!(
            gdt(Protocol::Linux64),
            [0, 0, 0x00AF_9B00_0000_FFFF, 0x00CF_9300_0000_FFFF, 0x0000_8B00_0000_0067]
        );
        assert_eq!(gdt(Protocol::Pvh)[2], 0x00CF_9B00_0000_FFFF);
    }

    #[test]
    fn the_64_bit_protocol_starts_in_long_mode_with_the_zero_page() {
        let mut sregs = kvm_sregs::default();
        set_system_registers(&mut sregs, Protocol::Linux64);
        let regs = registers(&BootEntry { protocol: Protocol::Linux64, address: 0x100_0000 });
        assert_eq!((sregs.cs.selector, sregs.ds.selector), (0x10, 0x18));
        assert_eq!((sregs.cs.l, sregs.cs.db), (1, 0));
        assert_eq!((sregs.cr0 >> 31, sregs.cr3, sregs.efer), (1, PAGE_TABLES, 0x500));
        assert_eq!((regs.rip, regs.rsi, regs.rflags), (0x100_0000, ZERO_PAGE, 2));
    }

    #[test]
    fn pvh_starts_in_protected_mode_with_the_start_info() {
        let mut sregs = kvm_sregs { efer: 1, cr4: 1, ..Default::default() };
        set_system_registers(&mut sregs, Protocol::Pvh);
        let regs = registers(&BootEntry { protocol: Protocol::Pvh, address: 0x100_0000 });
        assert_eq!((sregs.cs.l, sregs.cs.db), (0, 1));
        assert_eq!((sregs.cr0, sregs.cr4, sregs.efer), (0x11, 0, 0));
        assert_eq!((regs.rbx, regs.rsi), (PVH_START_INFO, 0));
    }
}
