//! The bare system calls under a clone and under a copy of dirty pages, in this process: what the
//! VMM's figures are held against.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use kvm_bindings::{
    CpuId, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KVM_MAX_CPUID_ENTRIES, Msrs, kvm_clock_data, kvm_debugregs, kvm_irqchip, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::{MEMORY_MIB, RUN, Samples, micros_since, runs};
use crate::sys::{self, Mapping};

const PAGE: usize = 4096;
const BYTES: usize = (MEMORY_MIB as usize) << 20;
/// Where the guest's code is, for real mode: writes one byte to the serial port for ever.
const CODE_AT: u16 = 0x1000;
const CODE: [u8; 8] = [0xBA, 0xF8, 0x03, 0xB0, b'p', 0xEE, 0xEB, 0xFD];

/// What is needed for all samples.
pub(super) struct Floor {
    kvm: Kvm,
    cpuid: CpuId,
    state: State,
    image: File,
    ram: Mapping,
    buffer: Vec<u8>,
}

/// A virtual machine with memory in a slot and one vCPU. The order of the fields is that of
/// their end.
struct Vm {
    vcpu: VcpuFd,
    vm: VmFd,
    ram: Mapping,
}

/// Everything that a restored machine is given.
struct State {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debug_regs: kvm_debugregs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    msrs: Msrs,
    chips: [kvm_irqchip; 3],
    clock: u64,
}

impl Floor {
    pub(super) fn new() -> anyhow::Result<Self> {
        let kvm = Kvm::new().context("/dev/kvm cannot be opened")?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        let vm = Vm::new(&kvm, &cpuid)?;
        let state = State::of(&kvm, &vm)?;
        let mut ram = Mapping::new(BYTES)?;
        ram.use_huge_pages()?;
        let mut buffer = vec![0; pattern_bytes()];
        buffer.fill(1);
        Ok(Self { kvm, cpuid, state, image: image()?, ram, buffer })
    }

    /// Virtual machine, memory slot, vCPU and state.
    pub(super) fn create(&self, samples: &mut Samples) -> anyhow::Result<()> {
        let started = Instant::now();
        let vm = Vm::new(&self.kvm, &self.cpuid)?;
        self.state.set(&vm)?;
        samples.add("floor_create", micros_since(started));
        Ok(())
    }

    /// Image, state and first exit on what was made before.
    pub(super) fn assign(&self, samples: &mut Samples) -> anyhow::Result<()> {
        let mut vm = Vm::new(&self.kvm, &self.cpuid)?;
        let started = Instant::now();
        vm.ram.map_file_over(self.image.as_fd())?;
        self.state.set(&vm)?;
        match vm.vcpu.run()? {
            VcpuExit::IoOut(0x3F8, [b'p']) => {}
            other => bail!("the guest did something else: {other:?}"),
        }
        samples.add("floor_assign", micros_since(started));
        Ok(())
    }

    /// The pattern's pages, just written to, into memory that is there already.
    pub(super) fn copy(&mut self, samples: &mut Samples) {
        let Self { ram, buffer, .. } = self;
        let ram = ram.bytes_mut();
        for page in runs().flat_map(|first| first..first + RUN) {
            if let Some(byte) = ram.get_mut(page as usize * PAGE) {
                *byte = byte.wrapping_add(1);
            }
        }
        let started = Instant::now();
        for (first, to) in runs().zip(buffer.chunks_exact_mut(RUN as usize * PAGE)) {
            let start = first as usize * PAGE;
            if let Some(from) = ram.get(start..start + to.len()) {
                to.copy_from_slice(from);
            }
        }
        samples.add("floor_copy_7mib", micros_since(started));
        std::hint::black_box(buffer);
    }
}

fn pattern_bytes() -> usize {
    runs().count() * RUN as usize * PAGE
}

/// Guest RAM as a file, with content in the pattern's pages.
fn image() -> anyhow::Result<File> {
    let image = tempfile::tempfile().context("no temporary file")?;
    image.set_len(BYTES as u64)?;
    image.write_all_at(&CODE, CODE_AT.into())?;
    for first in runs() {
        image.write_all_at(&vec![1; RUN as usize * PAGE], u64::from(first) * PAGE as u64)?;
    }
    Ok(image)
}

impl Vm {
    fn new(kvm: &Kvm, cpuid: &CpuId) -> anyhow::Result<Self> {
        let vm = kvm.create_vm()?;
        vm.set_tss_address(0xFFFB_D000)?;
        vm.set_identity_map_address(0xFFFB_C000)?;
        vm.create_irq_chip()?;
        let ram = Mapping::new(BYTES)?;
        sys::register(&vm, &ram)?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid2(cpuid)?;
        Ok(Self { vcpu, vm, ram })
    }
}

impl State {
    /// That of a machine about to run the code.
    fn of(kvm: &Kvm, vm: &Vm) -> anyhow::Result<Self> {
        let vcpu = &vm.vcpu;
        let mut sregs = vcpu.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs)?;
        vcpu.set_regs(&kvm_regs { rip: CODE_AT.into(), rflags: 2, ..Default::default() })?;
        let mut chips = [kvm_irqchip::default(); 3];
        let ids = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];
        for (chip, id) in chips.iter_mut().zip(ids) {
            chip.chip_id = id;
            vm.vm.get_irqchip(chip)?;
        }
        Ok(Self {
            mp_state: vcpu.get_mp_state()?,
            regs: vcpu.get_regs()?,
            sregs: vcpu.get_sregs()?,
            xsave: vcpu.get_xsave()?,
            xcrs: vcpu.get_xcrs()?,
            debug_regs: vcpu.get_debug_regs()?,
            lapic: vcpu.get_lapic()?,
            events: vcpu.get_vcpu_events()?,
            msrs: msrs(kvm, vcpu)?,
            chips,
            clock: vm.vm.get_clock()?.clock,
        })
    }

    fn set(&self, vm: &Vm) -> anyhow::Result<()> {
        let vcpu = &vm.vcpu;
        vcpu.set_mp_state(self.mp_state)?;
        vcpu.set_regs(&self.regs)?;
        vcpu.set_sregs(&self.sregs)?;
        sys::set_xsave(vcpu, &self.xsave)?;
        vcpu.set_xcrs(&self.xcrs)?;
        vcpu.set_debug_regs(&self.debug_regs)?;
        vcpu.set_lapic(&self.lapic)?;
        let taken = vcpu.set_msrs(&self.msrs)?;
        ensure!(taken == self.msrs.as_slice().len(), "KVM took {taken} registers only");
        vcpu.set_vcpu_events(&self.events)?;
        for chip in &self.chips {
            vm.vm.set_irqchip(chip)?;
        }
        vm.vm.set_clock(&kvm_clock_data { clock: self.clock, ..Default::default() })?;
        Ok(())
    }
}

/// All model-specific registers that the vCPU has and takes back.
fn msrs(kvm: &Kvm, vcpu: &VcpuFd) -> anyhow::Result<Msrs> {
    let mut kept = Vec::new();
    for &index in kvm.get_msr_index_list()?.as_slice() {
        let mut one = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }])?;
        if vcpu.get_msrs(&mut one)? == 1 && vcpu.set_msrs(&one)? == 1 {
            kept.extend_from_slice(one.as_slice());
        }
    }
    Ok(Msrs::from_entries(&kept)?)
}
