//! Instructions beyond the baseline, behind CPUID: ENQCMD, MOVDIR64B, UMONITOR and UMWAIT.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _mm_pause, _mm_sfence, _rdtsc};
use std::sync::atomic::AtomicU8;

use crate::abi::{Descriptor, is_complete};

/// Turns of the time stamp counter that one UMWAIT lasts at most: some tens of microseconds.
const WAIT_TURNS: u64 = 100_000;

/// Instructions this processor has (CPUID leaf 7, subleaf 0, ECX).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// WAITPKG: UMONITOR, UMWAIT (bit 5).
    pub waitpkg: bool,
    /// MOVDIR64B (bit 28).
    pub movdir64b: bool,
    /// ENQCMD (bit 29).
    pub enqcmd: bool,
}

/// Asks the processor what it has.
pub fn features() -> Features {
    let ecx = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).ecx } else { 0 };
    let bit = |number: u32| ecx >> number & 1 == 1;
    Features { waitpkg: bit(5), movdir64b: bit(28), enqcmd: bit(29) }
}

/// Makes earlier writes visible before work is handed over.
pub(crate) fn store_fence() {
    // SAFETY: every x86-64 processor has the instruction, and it touches no memory.
    unsafe { _mm_sfence() };
}

/// A proof that the processor has ENQCMD.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Enqcmd(());

impl Enqcmd {
    pub(crate) fn new(features: Features) -> Option<Self> {
        features.enqcmd.then_some(Self(()))
    }

    /// Hands over a descriptor; false when the queue did not take it.
    ///
    /// # Safety
    /// `portal` is 64-aligned inside a mapped portal of a shared work queue, and all memory that
    /// the descriptor names stays valid until its record is complete.
    pub(crate) unsafe fn submit(self, portal: *mut u8, descriptor: &Descriptor) -> bool {
        let refused: u8;
        // SAFETY: the processor has the instruction; it reads 64 bytes of the descriptor and
        // writes them to the portal, which the caller answers for.
        unsafe {
            // enqcmd portal, [descriptor]
            asm!(
                ".byte 0xF2, 0x0F, 0x38, 0xF8, 0x02",
                "setz {refused}",
                refused = out(reg_byte) refused,
                in("rax") portal,
                in("rdx") std::ptr::from_ref(descriptor),
                options(nostack),
            );
        }
        refused == 0
    }
}

/// A proof that the processor has MOVDIR64B.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Movdir64b(());

impl Movdir64b {
    pub(crate) fn new(features: Features) -> Option<Self> {
        features.movdir64b.then_some(Self(()))
    }

    /// Copies 64 bytes at once to `to`.
    ///
    /// # Safety
    /// `to` is 64-aligned and writable; if it is a portal, what the descriptor names stays valid
    /// until its record is complete.
    pub(crate) unsafe fn submit(self, to: *mut u8, descriptor: &Descriptor) {
        // SAFETY: the processor has the instruction; it reads 64 bytes of the descriptor and
        // writes them to `to`, which the caller answers for.
        unsafe {
            // movdir64b to, [descriptor]
            asm!(
                ".byte 0x66, 0x0F, 0x38, 0xF8, 0x02",
                in("rax") to,
                in("rdx") std::ptr::from_ref(descriptor),
                options(nostack, preserves_flags),
            );
        }
    }
}

/// How to wait for a record.
#[derive(Debug, Clone, Copy)]
pub struct Waiter {
    umwait: bool,
    pauses: u32,
}

impl Waiter {
    /// Waits by UMWAIT where the processor has it.
    pub fn new(features: Features) -> Self {
        Self { umwait: features.waitpkg, pauses: 0 }
    }

    /// Something moved: look more often again.
    pub fn reset(&mut self) {
        self.pauses = 0;
    }

    /// Waits a little, less when the record completes.
    pub fn wait(&mut self, status: &AtomicU8) {
        self.pauses = self.pauses.saturating_add(1);
        if self.umwait && self.pauses > 16 {
            monitor_wait(status);
        } else if self.pauses > 64 {
            // The processor may be needed elsewhere.
            std::thread::yield_now();
        } else {
            _mm_pause();
        }
    }
}

fn monitor_wait(status: &AtomicU8) {
    // SAFETY: the processor has WAITPKG; monitoring an address changes nothing.
    unsafe {
        // umonitor rax
        asm!(".byte 0xF3, 0x0F, 0xAE, 0xF0", in("rax") status.as_ptr(), options(nostack));
    }
    if is_complete(status) {
        return;
    }
    // SAFETY: every x86-64 processor has the instruction, and it touches only registers.
    let until = unsafe { _rdtsc() }.wrapping_add(WAIT_TURNS);
    let low = until & u64::from(u32::MAX);
    // SAFETY: the processor has WAITPKG; the instruction waits until that time at most.
    unsafe {
        // umwait ecx, with 1 in ECX for the lighter sleep
        asm!(
            ".byte 0xF2, 0x0F, 0xAE, 0xF1",
            in("ecx") 1_u32,
            in("eax") low,
            in("edx") until >> 32,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Region;

    #[repr(align(64))]
    struct Line([u8; 64]);

    #[test]
    fn movdir64b_writes_the_bytes_of_the_descriptor() {
        let Some(movdir64b) = Movdir64b::new(features()) else {
            eprintln!("skipped: this processor has no MOVDIR64B");
            return;
        };
        let region = Region { addr: 0x1234_5678, size: 9 };
        let descriptor = Descriptor::decompress(region, region, 0x40);
        let mut line = Line([0; 64]);
        // SAFETY: the line is 64-aligned and ours.
        unsafe { movdir64b.submit(line.0.as_mut_ptr(), &descriptor) };
        store_fence();
        assert_eq!(line.0, descriptor.to_bytes());
    }

    #[test]
    fn waiting_ends_though_nothing_completes() {
        let mut waiter = Waiter::new(features());
        let status = AtomicU8::new(0);
        (0..200).for_each(|_| waiter.wait(&status));
        assert!(!is_complete(&status));
    }
}
