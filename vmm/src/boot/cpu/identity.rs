//! What a guest may rely on in its processor, in the form a checkpoint's header has it.

use coppice_image::CpuIdentity;
use kvm_bindings::kvm_cpuid_entry2;

/// The processor that these entries describe.
///
/// The words never change their meaning: leaf 1 ECX and EDX, leaf 7.0 EBX, ECX and EDX, leaf 7.1
/// EAX, leaf 0x80000001 ECX and EDX.
pub(super) fn identity(entries: &[kvm_cpuid_entry2]) -> CpuIdentity {
    let leaf = |function: u32, index: u32| {
        let found = entries.iter().find(|e| e.function == function && e.index == index);
        found.copied().unwrap_or_default()
    };
    let (basic, features) = (leaf(0, 0), leaf(1, 0));
    let (structured, more, extended) = (leaf(7, 0), leaf(7, 1), leaf(0x8000_0001, 0));
    let mut vendor = [0; 12];
    let words = [basic.ebx, basic.edx, basic.ecx].map(u32::to_le_bytes);
    for (to, from) in vendor.iter_mut().zip(words.as_flattened()) {
        *to = *from;
    }
    CpuIdentity {
        vendor,
        signature: features.eax,
        features: [
            features.ecx,
            features.edx,
            structured.ebx,
            structured.ecx,
            structured.edx,
            more.eax,
            extended.ecx,
            extended.edx,
        ],
    }
}
