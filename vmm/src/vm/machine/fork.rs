//! What a guest's kernel must not share with other machines of the same checkpoint: the key of
//! its random number generator and, for a machine of its own, the ID of its boot.
//!
//! Both are written to guest memory before any vCPU runs, so that even a program that draws
//! random numbers in a loop across a clone never draws the same ones as another clone. The
//! generation ID, which tells the kernel itself, comes on top and stands in for it where these
//! addresses are not known.

use std::io;

use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryError};

use crate::boot::KernelState;
use crate::memory::GuestRam;
use crate::sys::random;

/// Length of the generator's key in bytes.
const KEY: usize = 32;

/// Why a guest's kernel cannot be told apart.
#[derive(Debug, Error)]
pub enum ForkError {
    /// The host's random number generator failed.
    #[error("the host gives no random bytes for the guest's generator")]
    Random(#[source] io::Error),
    /// The addresses are not in guest memory.
    #[error("the guest's random number generator is not where its kernel had it")]
    Memory(#[source] GuestMemoryError),
}

/// Gives the guest's kernel a new key for its random numbers; the generation that goes up with it
/// makes every processor take it at its next draw.
///
/// # Errors
/// [`ForkError`]; the machine must not run then.
pub(super) fn reseed(ram: &GuestRam, kernel: &KernelState) -> Result<(), ForkError> {
    let mut key = [0; KEY];
    random::fill(&mut key).map_err(ForkError::Random)?;
    let at = |address: u64| GuestAddress(address);
    let generation_at = at(kernel.rng_generation);
    let generation: u64 = ram.read_obj(generation_at).map_err(ForkError::Memory)?;
    // The kernel keeps the highest number for processors that never drew.
    let next = generation.checked_add(1).filter(|next| *next != u64::MAX).unwrap_or_default();
    ram.write_slice(&key, at(kernel.rng_key)).map_err(ForkError::Memory)?;
    ram.write_obj(next, generation_at).map_err(ForkError::Memory)?;
    if let Some(vdso) = kernel.vdso_rng {
        ram.write_obj(next.wrapping_add(1), at(vdso)).map_err(ForkError::Memory)?;
    }
    Ok(())
}

/// Has the guest's kernel make a new boot ID at the next look at it.
///
/// # Errors
/// [`ForkError::Memory`].
pub(super) fn forget_boot_id(ram: &GuestRam, kernel: &KernelState) -> Result<(), ForkError> {
    match kernel.boot_id {
        Some(boot_id) => {
            ram.write_slice(&[0; 16], GuestAddress(boot_id)).map_err(ForkError::Memory)
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::map;

    const KERNEL: KernelState = KernelState {
        rng_key: 0x1000,
        rng_generation: 0x1020,
        boot_id: Some(0x2000),
        vdso_rng: Some(0x3000),
    };

    #[test]
    fn two_machines_of_one_checkpoint_get_different_keys_and_a_new_generation() {
        let keys = [(); 2].map(|()| {
            let ram = map(64).unwrap();
            ram.write_obj(6u64, GuestAddress(0x1020)).unwrap();
            reseed(&ram, &KERNEL).unwrap();
            let word = |at| ram.read_obj::<u64>(GuestAddress(at)).unwrap();
            assert_eq!((word(0x1020), word(0x3000)), (7, 8));
            let mut key = [0; KEY];
            ram.read_slice(&mut key, GuestAddress(0x1000)).unwrap();
            key
        });
        assert_ne!(keys[0], keys[1]);
    }

    #[test]
    fn the_generation_never_becomes_the_one_that_means_never() {
        let ram = map(64).unwrap();
        ram.write_obj(u64::MAX - 1, GuestAddress(0x1020)).unwrap();
        reseed(&ram, &KERNEL).unwrap();
        assert_eq!(ram.read_obj::<u64>(GuestAddress(0x1020)).unwrap(), 0);
    }

    #[test]
    fn addresses_outside_memory_are_an_error() {
        let ram = map(64).unwrap();
        let kernel = KernelState { rng_key: u64::MAX - 8, ..KERNEL };
        reseed(&ram, &kernel).unwrap_err();
    }
}
