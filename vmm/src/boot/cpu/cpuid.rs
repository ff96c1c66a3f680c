//! What CPUID tells the guest: what KVM supports on this host, with the machine's own topology
//! and without what a guest of ours cannot use.
//!
//! Left out: nested virtualization and SGX (their state cannot be saved), performance counters,
//! branch and processor trace (tied to the host's model), machine checks (none is ever passed on,
//! and setting up their 32 banks costs a hundred exits), and the newer topology leaves (0x1F,
//! 0x80000026), which would have to repeat leaf 0xB.
//!
//! Time needs no frequency leaf: guests take the TSC frequency from kvm-clock, and a TSC deadline
//! timer needs no calibration.

use std::ops::RangeInclusive;

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// Leaves by number.
const VENDOR: u32 = 0;
const FEATURES: u32 = 1;
const CACHES: u32 = 4;
const EXTENDED_FEATURES: u32 = 7;
const PERFORMANCE: u32 = 0xA;
const TOPOLOGY: u32 = 0xB;
const SGX: u32 = 0x12;
const TRACE: u32 = 0x14;
const TOPOLOGY_V2: u32 = 0x1F;
const AMD_FEATURES: u32 = 0x8000_0001;
const BRAND: RangeInclusive<u32> = 0x8000_0002..=0x8000_0004;
const AMD_POWER: u32 = 0x8000_0007;
const AMD_SIZES: u32 = 0x8000_0008;
const AMD_SVM: u32 = 0x8000_000A;
const AMD_SAMPLING: u32 = 0x8000_001B;
const AMD_CACHES: u32 = 0x8000_001D;
const AMD_TOPOLOGY: u32 = 0x8000_001E;
const AMD_PERFORMANCE: u32 = 0x8000_0022;
const AMD_TOPOLOGY_V2: u32 = 0x8000_0026;

/// Leaves that are answered with zeroes.
const EMPTY: [u32; 6] = [PERFORMANCE, SGX, TRACE, AMD_SVM, AMD_SAMPLING, AMD_PERFORMANCE];
/// Leaves that are taken out: they come back, ours, or not at all.
const REMOVED: [u32; 3] = [TOPOLOGY, TOPOLOGY_V2, AMD_TOPOLOGY_V2];

/// Bits of [`FEATURES`], ECX.
const DEBUG_STORE_64: u32 = 1 << 2;
const MONITOR: u32 = 1 << 3;
const VMX: u32 = 1 << 5;
const PERFORMANCE_CAPABILITIES: u32 = 1 << 15;
const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// Bits of [`FEATURES`], EDX.
const MACHINE_CHECK: u32 = (1 << 7) | (1 << 14);
const DEBUG_STORE: u32 = 1 << 21;
const MANY_PROCESSORS: u32 = 1 << 28;
/// Bits of [`EXTENDED_FEATURES`], EBX and ECX.
const SGX_FEATURE: u32 = 1 << 2;
const TRACE_FEATURE: u32 = 1 << 25;
const SGX_LAUNCH: u32 = 1 << 30;
/// Bits of [`AMD_FEATURES`], ECX.
const LEGACY_MULTICORE: u32 = 1 << 1;
const SVM: u32 = 1 << 2;
const AMD_SAMPLING_FEATURE: u32 = 1 << 10;
const AMD_COUNTERS: u32 = (1 << 23) | (1 << 24) | (1 << 27) | (1 << 28);

/// Level types of [`TOPOLOGY`], ECX bits 15 to 8.
const LEVEL_THREAD: u32 = 1 << 8;
const LEVEL_CORE: u32 = 2 << 8;
/// The last-level cache, which all cores share, in EAX bits 7 to 5 of the cache leaves.
const LAST_CACHE_LEVEL: u32 = 3;

/// The entries for a machine of `count` cores, complete but for the APIC IDs.
pub(super) fn template(
    supported: &[kvm_cpuid_entry2],
    count: u8,
    tsc_deadline: bool,
) -> Vec<kvm_cpuid_entry2> {
    let kept = supported.iter().filter(|entry| !REMOVED.contains(&entry.function));
    let mut entries: Vec<_> = kept.copied().collect();
    let vendor = entries.iter().find(|entry| entry.function == VENDOR);
    let is_amd = vendor.is_some_and(is_amd);
    let has_topology = vendor.is_some_and(|vendor| vendor.eax >= TOPOLOGY);
    for entry in &mut entries {
        match entry.function {
            leaf if EMPTY.contains(&leaf) => clear(entry),
            FEATURES => features(entry, count, tsc_deadline),
            EXTENDED_FEATURES if entry.index == 0 => {
                entry.ebx &= !(SGX_FEATURE | TRACE_FEATURE);
                entry.ecx &= !SGX_LAUNCH;
            }
            // An empty entry marks the end of the list.
            CACHES if entry.eax & 0x1F != 0 => {
                share_cache(entry, count);
                set_bits(&mut entry.eax, 26, 6, addressable(count) - 1);
            }
            AMD_CACHES if entry.eax & 0x1F != 0 => share_cache(entry, count),
            AMD_FEATURES => {
                entry.ecx &= !(SVM | AMD_SAMPLING_FEATURE | AMD_COUNTERS | LEGACY_MULTICORE);
                if is_amd && count > 1 {
                    entry.ecx |= LEGACY_MULTICORE;
                }
            }
            // What AMD adds to machine checks; the rest of the leaf is about the clock.
            AMD_POWER => entry.ebx = 0,
            AMD_SIZES if is_amd => {
                set_bits(&mut entry.ecx, 0, 8, u32::from(count) - 1);
                set_bits(&mut entry.ecx, 12, 4, id_bits(count));
            }
            // One thread per core, one node.
            AMD_TOPOLOGY => clear(entry),
            _ => {}
        }
    }
    if has_topology {
        entries.extend(topology(count));
    }
    entries
}

/// Puts the APIC ID of a processor, which is its number, where CPUID tells it.
pub(super) fn set_apic_id(entries: &mut [kvm_cpuid_entry2], id: u8) {
    let id = u32::from(id);
    for entry in entries {
        match entry.function {
            FEATURES => set_bits(&mut entry.ebx, 24, 8, id),
            TOPOLOGY => entry.edx = id,
            AMD_TOPOLOGY => {
                entry.eax = id;
                set_bits(&mut entry.ebx, 0, 8, id);
            }
            _ => {}
        }
    }
}

/// Fills in the processor's brand, for which KVM has only zeroes, from the `host`'s leaves.
pub(super) fn set_brand(entries: &mut [kvm_cpuid_entry2], host: impl Fn(u32) -> [u32; 4]) {
    for entry in entries {
        if BRAND.contains(&entry.function) && [entry.eax, entry.ebx, entry.ecx, entry.edx] == [0; 4]
        {
            [entry.eax, entry.ebx, entry.ecx, entry.edx] = host(entry.function);
        }
    }
}

/// Whether the vendor is AMD, or Hygon, whose processors are AMD's.
fn is_amd(vendor: &kvm_cpuid_entry2) -> bool {
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    let name = name.as_flattened();
    name == b"AuthenticAMD" || name == b"HygonGenuine"
}

fn features(entry: &mut kvm_cpuid_entry2, count: u8, tsc_deadline: bool) {
    entry.ecx &= !(DEBUG_STORE_64 | MONITOR | VMX | PERFORMANCE_CAPABILITIES | TSC_DEADLINE);
    entry.ecx |= HYPERVISOR;
    if tsc_deadline {
        entry.ecx |= TSC_DEADLINE;
    }
    // Its gain is cheaper interrupts between processors. Its price is that Linux, on seeing it,
    // saves and restores all lines of the I/O APIC, about 190 exits: a fifth of those up to init.
    if count == 1 {
        entry.ecx &= !X2APIC;
    }
    entry.edx &= !(MACHINE_CHECK | DEBUG_STORE | MANY_PROCESSORS);
    if count > 1 {
        entry.edx |= MANY_PROCESSORS;
    }
    set_bits(&mut entry.ebx, 16, 8, addressable(count));
}

/// Tells how many processors share a cache: all share the last level, none the others.
fn share_cache(entry: &mut kvm_cpuid_entry2, count: u8) {
    let level = (entry.eax >> 5) & 0b111;
    let sharing = if level >= LAST_CACHE_LEVEL { addressable(count) } else { 1 };
    set_bits(&mut entry.eax, 14, 12, sharing - 1);
}

/// The extended topology leaf: threads, then cores, then the end of the list.
fn topology(count: u8) -> [kvm_cpuid_entry2; 3] {
    let level = |index, eax, ebx, kind| kvm_cpuid_entry2 {
        function: TOPOLOGY,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax,
        ebx,
        ecx: index | kind,
        ..Default::default()
    };
    [
        level(0, 0, 1, LEVEL_THREAD),
        level(1, id_bits(count), u32::from(count), LEVEL_CORE),
        level(2, 0, 0, 0),
    ]
}

/// Number of APIC IDs set aside for `count` processors: a power of two.
fn addressable(count: u8) -> u32 {
    u32::from(count).next_power_of_two()
}

/// Bits of an APIC ID that tell cores apart.
fn id_bits(count: u8) -> u32 {
    addressable(count).trailing_zeros()
}

fn clear(entry: &mut kvm_cpuid_entry2) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
}

/// Puts `value` in the `len` bits from `shift` on.
fn set_bits(register: &mut u32, shift: u32, len: u32, value: u32) {
    let mask = ((1u32 << len) - 1) << shift;
    *register = (*register & !mask) | ((value << shift) & mask);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn leaf(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn vendor(name: &[u8; 12], max: u32) -> kvm_cpuid_entry2 {
        let word = |at: usize| u32::from_le_bytes(name[at..at + 4].try_into().unwrap());
        leaf(VENDOR, 0, [max, word(0), word(8), word(4)])
    }

    fn intel() -> Vec<kvm_cpuid_entry2> {
        vec![
            vendor(b"GenuineIntel", 0x1F),
            leaf(FEATURES, 0, [0x806F8, 0xAB12_0800, !HYPERVISOR, u32::MAX]),
            leaf(CACHES, 0, [0xFC1F_C121, 0, 0, 0]),
            leaf(CACHES, 3, [0xFC1F_C163, 0, 0, 0]),
            leaf(CACHES, 4, [0, 0, 0, 0]),
            leaf(EXTENDED_FEATURES, 0, [2, u32::MAX, u32::MAX, u32::MAX]),
            leaf(PERFORMANCE, 0, [0x830_0805, 1, 2, 3]),
            leaf(TOPOLOGY, 0, [1, 2, 0x100, 0xAB]),
            leaf(TOPOLOGY_V2, 0, [1, 2, 0x100, 0xAB]),
        ]
    }

    fn amd() -> Vec<kvm_cpuid_entry2> {
        vec![
            vendor(b"AuthenticAMD", 0xD),
            leaf(FEATURES, 0, [0x800F12, 0xAB12_0800, 0, u32::MAX]),
            leaf(AMD_FEATURES, 0, [0, 0, u32::MAX, u32::MAX]),
            leaf(AMD_SIZES, 0, [0x3030, 0, 0x703F, 0]),
            leaf(AMD_CACHES, 0, [0x0000_4121, 0, 0, 0]),
            leaf(AMD_CACHES, 3, [0x0001_C163, 0, 0, 0]),
            leaf(AMD_TOPOLOGY, 0, [0x2F, 0x0117, 0x0103, 0]),
        ]
    }

    fn get(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *entries.iter().find(|e| e.function == function && e.index == index).unwrap()
    }

    #[test]
    fn a_guest_cannot_see_what_it_cannot_use() {
        let entries = template(&intel(), 2, true);
        assert_eq!(get(&entries, FEATURES, 0).ecx & (VMX | MONITOR | DEBUG_STORE_64), 0);
        assert_eq!(get(&entries, FEATURES, 0).edx & (MACHINE_CHECK | DEBUG_STORE), 0);
        assert_eq!(get(&entries, EXTENDED_FEATURES, 0).ebx & (SGX_FEATURE | TRACE_FEATURE), 0);
        assert_eq!(get(&entries, PERFORMANCE, 0).eax, 0);
        assert!(!entries.iter().any(|entry| entry.function == TOPOLOGY_V2));
        assert_eq!(get(&template(&amd(), 2, true), AMD_FEATURES, 0).ecx & (SVM | AMD_COUNTERS), 0);
    }

    #[test]
    fn a_guest_can_see_that_it_is_one() {
        assert_ne!(get(&template(&intel(), 1, true), FEATURES, 0).ecx & HYPERVISOR, 0);
    }

    #[test]
    fn the_deadline_timer_is_there_only_when_kvm_has_it() {
        let bit = |has| get(&template(&intel(), 1, has), FEATURES, 0).ecx & TSC_DEADLINE;
        assert_eq!((bit(false), bit(true)), (0, TSC_DEADLINE));
    }

    #[test]
    fn only_several_processors_get_the_x2apic() {
        let x2apic = |count| get(&template(&intel(), count, true), FEATURES, 0).ecx & X2APIC;
        assert_eq!((x2apic(1), x2apic(2)), (0, X2APIC));
    }

    #[test]
    fn one_processor_is_not_called_many() {
        let many = |count| get(&template(&amd(), count, true), FEATURES, 0).edx & MANY_PROCESSORS;
        assert_eq!((many(1), many(2)), (0, MANY_PROCESSORS));
    }

    #[test]
    fn amd_cores_are_counted_in_its_own_leaves() {
        let mut entries = template(&amd(), 4, true);
        set_apic_id(&mut entries, 3);
        assert_eq!(get(&entries, AMD_SIZES, 0).ecx, 0x2003);
        assert_eq!(get(&entries, AMD_TOPOLOGY, 0).eax, 3);
        assert_eq!(get(&entries, AMD_TOPOLOGY, 0).ebx, 3);
        assert_eq!(get(&entries, AMD_CACHES, 0).eax, 0x0000_0121);
        assert_eq!(get(&entries, AMD_CACHES, 3).eax, 0x0000_C163);
    }

    #[test]
    fn the_hosts_brand_fills_what_kvm_leaves_empty() {
        let mut entries = [leaf(0x8000_0002, 0, [0; 4]), leaf(0x8000_0003, 0, [9, 0, 0, 0])];
        set_brand(&mut entries, |leaf| [leaf, 1, 2, 3]);
        assert_eq!(entries[0], leaf(0x8000_0002, 0, [0x8000_0002, 1, 2, 3]));
        assert_eq!(entries[1].eax, 9);
    }

    #[test]
    fn an_old_processor_gets_no_topology_leaf() {
        let mut old = amd();
        old[0] = vendor(b"AuthenticAMD", 7);
        assert!(!template(&old, 2, true).iter().any(|entry| entry.function == TOPOLOGY));
    }

    proptest! {
        /// What a kernel computes from each leaf must be the same machine.
        #[test]
        fn all_leaves_tell_of_the_same_topology(count in 1..=8u8, id in 0..8u8) {
            prop_assume!(id < count);
            let mut entries = template(&intel(), count, true);
            set_apic_id(&mut entries, id);
            let features = get(&entries, FEATURES, 0);
            let (threads, cores) = (get(&entries, TOPOLOGY, 0), get(&entries, TOPOLOGY, 1));
            let end = get(&entries, TOPOLOGY, 2);
            let last_cache = get(&entries, CACHES, 3).eax;
            prop_assert_eq!(features.ebx >> 24, u32::from(id));
            prop_assert_eq!((threads.edx, cores.edx), (u32::from(id), u32::from(id)));
            prop_assert_eq!((threads.eax, threads.ebx), (0, 1));
            prop_assert_eq!(cores.ebx, u32::from(count));
            prop_assert!(u32::from(id) >> cores.eax == 0, "one socket");
            prop_assert_eq!(end.ebx, 0);
            prop_assert_eq!((last_cache >> 26) + 1, 1 << cores.eax);
            prop_assert_eq!(((last_cache >> 14) & 0xFFF) + 1, 1 << cores.eax);
            prop_assert_eq!((features.ebx >> 16) & 0xFF, 1 << cores.eax);
        }

        #[test]
        fn any_host_is_survived(
            leaves in proptest::collection::vec((any::<u32>(), 0..4u32, any::<[u32; 4]>()), 0..80),
            count in 1..=8u8,
        ) {
            let supported: Vec<_> = leaves.iter().map(|(f, i, r)| leaf(*f, *i, *r)).collect();
            let mut entries = template(&supported, count, true);
            set_apic_id(&mut entries, count - 1);
            prop_assert!(entries.len() <= supported.len() + 3);
        }
    }
}
