//! What a machine needs of KVM, made before or while it is known what the machine is.
//!
//! Registering memory slots and making vCPUs takes most of the time of building a machine and
//! depends on its shape alone. A shell that waits with all that lets a clone skip it.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use coppice_image::CpuIdentity;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::bitmap::AtomicBitmap;

use super::board::Irqchip;
use super::devices::SpareThreads;
use super::error::VmError;
use super::host::{self, Host, KvmError};
use super::machine::ForkError;
use super::machine::saved::SavedError;
use super::wires::Wires;
use crate::boot::cpu::CpuTemplate;
use crate::checkpoint::Depth;
use crate::memory::{self, GuestRam, layout};
use crate::sys::kvm::VmWithRam;
use crate::sys::pagemap::Pagemap;
use crate::sys::thread::SpareThread;
use crate::sys::{process, random};
use crate::vcpu::state::{MsrList, TscShift, VcpuState};
use crate::vcpu::{SpareVcpu, Vcpu};

/// Name of the thread that fills memory.
const LOADER: &str = "loader";
/// Its stack; it is the size of an I/O thread's, which then gets the
/// same memory.
const LOADER_STACK: usize = 256 * 1024;

/// How long making the virtual machine has the processors to itself: filling memory begins when
/// it is done, or after this time, by which it has come to its wait. Without it a thread at work
/// would, on a busy host, keep KVM's new thread from beginning to wait.
const HEAD_START: Duration = Duration::from_micros(500);

/// A virtual machine with memory and vCPUs that nothing runs in yet.
pub(super) struct Shell {
    pub(super) vm: Arc<VmWithRam<AtomicBitmap>>,
    pub(super) vcpus: Vec<VcpuFd>,
    pub(super) identity: CpuIdentity,
    pub(super) msrs: MsrList,
    pub(super) pagemap: Arc<Pagemap>,
    pub(super) memory_mib: u32,
    /// One for each vCPU.
    pub(super) vcpu_threads: Vec<SpareVcpu>,
    pub(super) device_threads: SpareThreads,
    /// Fills memory beside this thread, in a shell that waits for a machine.
    pub(super) loader: Option<SpareThread>,
    pub(super) wires: Wires,
}

impl Shell {
    /// Makes a shell for `vcpus` vCPUs and `memory_mib` MiB of RAM.
    ///
    /// # Errors
    /// [`VmError`]; nothing is left behind.
    pub(super) fn new(host: &Host, vcpus: u8, memory_mib: u32) -> Result<Self, VmError> {
        Self::with(host, vcpus, memory_mib, |_, _| Ok(())).map(|(shell, ())| shell)
    }

    /// As [`Shell::new`], and fills memory by `fill` meanwhile, which is told how far there is
    /// time to bring in what the guest will use.
    ///
    /// # Errors
    /// [`VmError`], also that of `fill`; nothing is left behind.
    pub(super) fn with<T: Send>(
        host: &Host,
        vcpus: u8,
        memory_mib: u32,
        fill: impl FnOnce(&Arc<GuestRam>, Depth) -> Result<T, VmError> + Send,
    ) -> Result<(Self, T), VmError> {
        let kvm = host.kvm.as_ref().map_err(KvmError::clone)?;
        let pagemap = host.pagemap.clone().map_err(VmError::Pagemap)?;
        host::check_capabilities(kvm)?;
        let ram = Arc::new(memory::map(memory_mib)?);
        let (vm, filled) = create_while(kvm, |depth| fill(&ram, depth))?;
        let vm = VmWithRam::new(vm, ram)
            .map_err(|source| VmError::Step { step: "take the guest's memory", source })?;
        vm.keep_dirty_log().map_err(|source| VmError::Step { step: "keep dirty logs", source })?;
        let template =
            CpuTemplate::new(kvm, vcpus).map_err(|source| VmError::Cpu { index: 0, source })?;
        let fds = (0..vcpus)
            .map(|index| create_vcpu(&template, vm.vm(), index))
            .collect::<Result<_, _>>()?;
        let vm = Arc::new(vm);
        let shell = Self {
            wires: Wires::new(Arc::clone(&vm)),
            vm,
            vcpus: fds,
            identity: template.identity(),
            msrs: MsrList::new(kvm)?,
            pagemap,
            memory_mib,
            vcpu_threads: (0..vcpus).map(Vcpu::spare).collect::<Result<_, _>>()?,
            device_threads: SpareThreads::new()?,
            loader: None,
        };
        Ok((shell, filled))
    }

    /// Does ahead of time what only the first machine of a process has to wait for: its code comes
    /// into memory, what depends on the processor is chosen, KVM says which registers it has, and
    /// events are bound to the machine.
    ///
    /// # Errors
    /// [`VmError`]: KVM does not give or take a vCPU's state.
    pub(super) fn rehearse(&mut self) -> Result<(), VmError> {
        process::load_code();
        coppice_image::make_ready();
        // The first random bytes cost more than all later ones, and a clone must have new ones.
        random::fill(&mut [0; 16]).map_err(ForkError::Random)?;
        self.wires.make_ready()?;
        self.device_threads.make_ready()?;
        self.vcpu_threads.iter_mut().try_for_each(SpareVcpu::make_ready)?;
        self.loader = Some(SpareThread::new(LOADER, LOADER_STACK).map_err(VmError::Loader)?);
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            let failed = |source| SavedError::Vcpu { index, source };
            let state = VcpuState::save(vcpu, &mut self.msrs).map_err(failed)?;
            let bytes = state.encode().map_err(failed)?;
            let state = VcpuState::decode(&bytes).map_err(failed)?;
            state.begin_restore(vcpu).map_err(failed)?;
            state.finish_restore(vcpu, TscShift(0)).map_err(failed)?;
        }
        let irqchip = Irqchip::save(self.vm.vm()).map_err(SavedError::from)?;
        irqchip.restore(self.vm.vm()).map_err(SavedError::from)?;
        Ok(())
    }

    /// Whether a machine of this shape can be made in it.
    ///
    /// # Errors
    /// [`VmError::Shape`].
    pub(super) fn check(&self, vcpus: u8, memory_mib: u32) -> Result<(), VmError> {
        if self.vcpus.len() == usize::from(vcpus) && self.memory_mib == memory_mib {
            return Ok(());
        }
        Err(VmError::Shape { vcpus: self.vcpus.len(), memory_mib: self.memory_mib })
    }
}

/// Makes the virtual machine and, while that waits, does `meanwhile`.
///
/// For a new virtual machine KVM moves a thread of its own into our control groups, which, on
/// kernels such as 6.1, waits for an RCU grace period of the host: some milliseconds of nothing, in
/// which a kernel is read or page tables are filled. Where KVM does not wait, filling page tables
/// costs a guest more time than it saves.
fn create_while<T: Send>(
    kvm: &Kvm,
    meanwhile: impl FnOnce(Depth) -> Result<T, VmError> + Send,
) -> Result<(VmFd, T), VmError> {
    let (tell, made) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let fill = move || {
            // Whether it was made or the head start is over, now is the time.
            let waits = made.recv_timeout(HEAD_START) == Err(RecvTimeoutError::Timeout);
            meanwhile(if waits { Depth::PageTables } else { Depth::PageCache })
        };
        let loader = thread::Builder::new()
            .name(LOADER.into())
            .stack_size(LOADER_STACK)
            .spawn_scoped(scope, fill)
            .map_err(VmError::Loader)?;
        // On this thread, the process's main one: KVM names a machine's statistics after it.
        let vm = create_vm(kvm);
        drop(tell);
        let done = loader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((vm?, done))
    })
}

/// Makes the virtual machine with its interrupt controllers.
///
/// There is no 8254 timer: kernels that know KVM's clock and the local APIC's timer need none,
/// and each tick of one would cost exits.
fn create_vm(kvm: &Kvm) -> Result<VmFd, VmError> {
    let vm = kvm.create_vm().map_err(VmError::step("create a virtual machine"))?;
    vm.set_tss_address(layout::KVM_TSS).map_err(VmError::step("place its task state"))?;
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(VmError::step("place its identity map"))?;
    vm.create_irq_chip().map_err(VmError::step("create interrupt controllers"))?;
    Ok(vm)
}

/// Makes vCPU `index` as it is before it starts.
fn create_vcpu(template: &CpuTemplate, vm: &VmFd, index: u8) -> Result<VcpuFd, VmError> {
    let fd = vm.create_vcpu(index.into()).map_err(VmError::step("create a vCPU"))?;
    template.configure(&fd, index).map_err(|source| VmError::Cpu { index, source })?;
    Ok(fd)
}
