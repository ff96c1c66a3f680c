//! This processor: a loop whose cost per turn is known, to compare it with a virtual one, and
//! its time stamp counter.

/// Machine code of the loop for 64-bit and 32-bit modes: `1: dec ecx; jnz 1b`. The count is in
/// ECX. [`countdown`] runs the same two instructions on this processor.
pub const COUNTDOWN_CODE: [u8; 4] = [0xFF, 0xC9, 0x75, 0xFC];

/// Counts `turns` down to zero in a loop of two instructions.
pub fn countdown(turns: u32) {
    if turns == 0 {
        return;
    }
    // SAFETY: the code touches nothing but its own register and the flags.
    unsafe {
        core::arch::asm!(
            "2:",
            "dec {turns:e}",
            "jnz 2b",
            turns = inout(reg) turns => _,
            options(nomem, nostack),
        );
    }
}

/// The host's time stamp counter now.
pub fn tsc() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and it touches only registers.
    unsafe { core::arch::x86_64::_rdtsc() }
}
