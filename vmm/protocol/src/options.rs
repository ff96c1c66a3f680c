//! Kernel options that suit this machine, for whoever writes a guest's command line.

/// Options that spare a Linux guest work a microVM has no use for, separated by spaces. The VMM
/// itself adds nothing to a command line; a manager puts these first, so that a user's own
/// options, which come later, win.
///
/// | option | what it spares |
/// |---|---|
/// | `loglevel=3` | an exit to the VMM for every byte of the boot log; panics still show |
/// | `8250.nr_uarts=1` | probing three serial ports that are not there, register by register |
/// | `pci=off` | looking for a PCI bus through ports 0xCF8 and 0xCFC |
/// | `tsc=reliable` | the periodic check of the TSC against another clock |
/// | `noreplace-smp` | with one vCPU, rewriting every locked instruction of the kernel |
/// | `random.trust_cpu=on` | waiting for entropy: the CPU's generator seeds the kernel's |
/// | `cryptomgr.notests` | self-tests of the kernel's cryptography |
/// | `swiotlb=noforce` | 64 MiB of bounce buffers in guests with RAM above 4 GiB |
/// | `percpu_alloc=page` | taking 2 MiB for each vCPU's variables, zeroing and giving back most |
///
/// Not among them, on purpose: `i8042.*` and `no_timer_check`, since the ACPI tables say that
/// there is no keyboard controller and no legacy timer; `mitigations=off`, which is a choice for
/// the user; and how a panic ends (`panic=-1`), which is the manager's.
pub const FAST_BOOT_OPTIONS: &str = "loglevel=3 8250.nr_uarts=1 pci=off tsc=reliable noreplace-smp \
                                     random.trust_cpu=on cryptomgr.notests swiotlb=noforce \
                                     percpu_alloc=page";

#[cfg(test)]
mod tests {
    use super::FAST_BOOT_OPTIONS;

    #[test]
    fn the_options_are_words_with_one_space_between() {
        assert!(FAST_BOOT_OPTIONS.split(' ').all(|option| !option.is_empty()));
    }
}
