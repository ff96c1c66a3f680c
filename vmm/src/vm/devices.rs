//! Which devices a machine has and where: the one file that names concrete devices.
//!
//! The order of the virtio windows is part of what a guest sees (`vda` is the first disk): disks
//! in the order given, then vsock, entropy, balloon.

mod state;

use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coppice_image::SealedMap;
use coppice_vmm_protocol::ErrorKind;
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::spec::{self, Disk, Spec};
use super::wires::Wires;
use crate::devices::legacy::{AcpiRegisters, I8042, PvPanic, Serial, VmGenId};
use crate::devices::virtio::balloon::Balloon;
use crate::devices::virtio::blk::{Backend, Blk, DiskError, Overlay, Raw};
use crate::devices::virtio::io_thread::{IoThread, IoThreadError, Source, SpareIoThread};
use crate::devices::virtio::mmio::MmioTransport;
use crate::devices::virtio::rng::Rng;
use crate::devices::virtio::vsock::{Vsock, VsockConfig, VsockError};
use crate::devices::virtio::{Interrupt, VirtioDevice};
use crate::devices::{GuestSignals, RangeError, SharedDevice};
use crate::memory::GuestRam;
use crate::memory::layout;
use crate::sys::jail::Role;
use crate::vcpu::Buses;

/// Why a device cannot be made.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// A disk's files cannot be used.
    #[error("disk {number} cannot be used")]
    Disk {
        /// Its position.
        number: usize,
        /// What is wrong.
        #[source]
        source: DiskError,
    },
    /// The vsock device's sockets cannot be used.
    #[error("the vsock device cannot be made")]
    Vsock(#[source] VsockError),
    /// The console's descriptors cannot be used.
    #[error("the serial console cannot be made")]
    Serial(#[source] io::Error),
    /// There are more virtio devices than windows.
    #[error("the machine has more than {} virtio devices: leave some out", layout::VIRTIO_MAX)]
    TooMany,
    /// Two devices want the same addresses.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// An event cannot be made or bound to the machine.
    #[error("the {what} of device {device} cannot be made")]
    Event {
        /// Interrupt or kick.
        what: &'static str,
        /// The device.
        device: &'static str,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// A thread for the devices cannot be started.
    #[error(transparent)]
    Thread(#[from] IoThreadError),
}

impl DeviceError {
    /// The failure's class.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Disk { .. } => ErrorKind::Disk,
            Self::Vsock(_) => ErrorKind::Vsock,
            Self::TooMany => ErrorKind::BadRequest,
            Self::Serial(_) | Self::Range(_) | Self::Event { .. } | Self::Thread(_) => {
                ErrorKind::Host
            }
        }
    }
}

/// Names of the threads that serve disks and all other devices.
const DISK_THREAD: &str = "disk-io";
const THREAD: &str = "io";

/// Threads for the devices of a machine to come.
pub(super) struct SpareThreads(SpareIoThread, SpareIoThread);

impl SpareThreads {
    /// Makes them.
    ///
    /// # Errors
    /// [`DeviceError::Thread`].
    pub(super) fn new() -> Result<Self, DeviceError> {
        let disks = IoThread::spare(DISK_THREAD, Role::Disk)?;
        Ok(Self(disks, IoThread::spare(THREAD, Role::Streams)?))
    }

    /// Waits until they have taken their roles.
    ///
    /// # Errors
    /// [`DeviceError::Thread`].
    pub(super) fn make_ready(&mut self) -> Result<(), DeviceError> {
        for thread in [&mut self.0, &mut self.1] {
            thread.make_ready()?;
        }
        Ok(())
    }
}

/// The devices of a machine.
pub(super) struct Devices {
    /// Stopped first.
    threads: Vec<IoThread>,
    buses: Arc<Buses>,
    serial: Arc<Mutex<Serial>>,
    generation: VmGenId,
    /// The virtio devices in the order of their windows.
    windows: Vec<Window>,
    /// The disks in the order of the spec.
    disks: Vec<Arc<Mutex<Blk>>>,
    balloon: Option<Arc<Mutex<Balloon>>>,
    /// Events and threads that no device took; giving them back would take time now.
    _spare: (Wires, Vec<SpareIoThread>),
}

/// A virtio device as the machine handles it.
struct Window {
    transport: Arc<Mutex<MmioTransport>>,
    /// The events of its queues in index order.
    kicks: Vec<Arc<EventFd>>,
}

/// How many virtio windows a machine of this spec uses.
pub(super) fn virtio_count(spec: &Spec) -> usize {
    let optional = [spec.vsock.is_some(), spec.rng, spec.balloon.is_some()];
    spec.disks.len() + optional.into_iter().filter(|present| *present).count()
}

impl Devices {
    /// Makes the devices of `spec` and binds their interrupts and kicks to the machine.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing is left running.
    pub(super) fn build(
        mut wires: Wires,
        ram: &Arc<GuestRam>,
        spec: Spec,
        maps: Vec<Vec<SealedMap>>,
        signals: &GuestSignals,
        spare: SpareThreads,
    ) -> Result<Self, DeviceError> {
        let mut maps = maps.into_iter();
        let mut builder =
            Builder { wires: &mut wires, ram, buses: Buses::default(), windows: Vec::new() };
        let (serial, generation) =
            builder.add_legacy(spec.console_input, spec.console_output, signals)?;
        let (mut disks, mut disk_sources) = (Vec::new(), Vec::new());
        for (number, disk) in spec.disks.into_iter().enumerate() {
            let maps = disk.overlay.as_ref().and_then(|_| maps.next()).unwrap_or_default();
            let blk =
                open_disk(disk, maps).map_err(|source| DeviceError::Disk { number, source })?;
            let blk = Arc::new(Mutex::new(blk));
            disk_sources.push(builder.add_virtio(Arc::clone(&blk))?);
            disks.push(blk);
        }
        let mut others = Vec::new();
        if let Some(wanted) = spec.vsock {
            let spec::Vsock { cid, listener, directory, name } = wanted;
            let device = Vsock::new(VsockConfig { cid, listener, directory, name })
                .map_err(DeviceError::Vsock)?;
            others.push(builder.add_virtio(Arc::new(Mutex::new(device)))?);
        }
        if spec.rng {
            others.push(builder.add_virtio(Arc::new(Mutex::new(Rng::default())))?);
        }
        let mut balloon = None;
        if let Some(spec::Balloon { target_mib, free_page_reporting }) = spec.balloon {
            let device = Arc::new(Mutex::new(Balloon::new(target_mib, free_page_reporting)));
            others.push(builder.add_virtio(Arc::clone(&device))?);
            balloon = Some(device);
        }
        // A disk may stall on its host file; streams and memory must not stall with it.
        let mut threads = Vec::new();
        let SpareThreads(disk_thread, other_thread) = spare;
        let mut idle = Vec::new();
        for (thread, sources) in [(disk_thread, disk_sources), (other_thread, others)] {
            if sources.is_empty() {
                idle.push(thread);
            } else {
                threads.push(IoThread::spawn_on(thread, sources)?);
            }
        }
        let Builder { buses, windows, .. } = builder;
        let buses = Arc::new(buses);
        let spare = (wires, idle);
        Ok(Self { threads, buses, serial, generation, windows, disks, balloon, _spare: spare })
    }

    /// What the vCPUs can reach.
    pub(super) fn buses(&self) -> Arc<Buses> {
        Arc::clone(&self.buses)
    }

    /// Lets I/O at hand finish and starts no more. For when no vCPU runs.
    pub(super) fn pause(&self) {
        self.threads.iter().for_each(IoThread::pause);
    }

    /// Undoes [`Devices::pause`].
    pub(super) fn resume(&self) {
        self.threads.iter().for_each(IoThread::resume);
    }

    /// The descriptor that is readable when [`Devices::console_event`] has work.
    pub(super) fn console_fd(&self) -> RawFd {
        lock(&self.serial).host_fd()
    }

    /// The console's input has bytes, or its output takes bytes again.
    pub(super) fn console_event(&self) {
        lock(&self.serial).host_event();
    }

    /// The reason the kernel gave for a panic, if the console showed one.
    pub(super) fn panic_text(&self) -> Option<String> {
        lock(&self.serial).panic_text()
    }

    /// How many sealed layers each disk with an overlay has, in order.
    pub(super) fn disk_layers(&self) -> Vec<u32> {
        let layers = self.disks.iter().filter_map(|disk| lock(disk).layers());
        layers.map(|count| u32::try_from(count).unwrap_or(u32::MAX)).collect()
    }

    /// The balloon, if the machine has one.
    pub(super) fn balloon(&self) -> Option<MutexGuard<'_, Balloon>> {
        self.balloon.as_ref().map(|balloon| lock(balloon))
    }
}

fn lock<T: ?Sized>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open_disk(disk: Disk, maps: Vec<SealedMap>) -> Result<Blk, DiskError> {
    let backend: Box<dyn Backend> = match disk.overlay {
        Some(overlay) => {
            let (layers, maps_given) = (disk.layers.len(), maps.len());
            if layers != maps_given {
                return Err(DiskError::Layers { layers, maps: maps_given });
            }
            let layers = disk.layers.into_iter().zip(maps).collect();
            Box::new(Overlay::with_layers(disk.file, layers, overlay)?)
        }
        None => Box::new(Raw::new(disk.file)?),
    };
    Blk::new(backend, disk.read_only, &disk.serial)
}

struct Builder<'a> {
    wires: &'a mut Wires,
    ram: &'a Arc<GuestRam>,
    buses: Buses,
    windows: Vec<Window>,
}

impl Builder<'_> {
    /// Adds what every machine has; returns the console and the generation ID.
    fn add_legacy(
        &mut self,
        input: Option<std::fs::File>,
        output: Option<std::fs::File>,
        signals: &GuestSignals,
    ) -> Result<(Arc<Mutex<Serial>>, VmGenId), DeviceError> {
        let line = self.wires.line("serial", layout::SERIAL_GSI)?;
        let serial = Serial::new(line, input.map(Into::into), output.map(Into::into))
            .map_err(DeviceError::Serial)?;
        let serial = Arc::new(Mutex::new(serial));
        let ports: [(u16, u16, SharedDevice); 4] = [
            (layout::SERIAL_PORT, Serial::PORTS, serial.clone()),
            (layout::I8042_PORT, I8042::PORTS, Arc::new(Mutex::new(I8042::new(signals.clone())))),
            (layout::PVPANIC_PORT, 1, Arc::new(Mutex::new(PvPanic::new(signals.clone())))),
            (
                layout::ACPI_SLEEP_PORT,
                AcpiRegisters::PORTS,
                Arc::new(Mutex::new(AcpiRegisters::new(signals.clone()))),
            ),
        ];
        for (start, count, device) in ports {
            self.buses.port.insert(start.into(), count.into(), device)?;
        }
        let line = self.wires.line("vmgenid", layout::GED_GSI)?;
        Ok((serial, VmGenId::new(line)))
    }

    /// Puts a device behind the next free window; returns what drives it.
    fn add_virtio<D: VirtioDevice + 'static>(
        &mut self,
        device: Arc<Mutex<D>>,
    ) -> Result<Source, DeviceError> {
        let window = u32::try_from(self.windows.len())
            .ok()
            .filter(|_| self.windows.len() < layout::VIRTIO_MAX)
            .ok_or(DeviceError::TooMany)?;
        let name = lock(&device).name();
        let line = self.wires.line(name, layout::VIRTIO_GSI_BASE + window)?;
        let base = layout::virtio_window(window);
        let device: Arc<Mutex<dyn VirtioDevice>> = device;
        let transport =
            MmioTransport::new(Arc::clone(&device), Arc::clone(self.ram), Interrupt::new(line));
        let mut kicks = Vec::new();
        for (index, _) in (0u32..).zip(0..transport.queue_count()) {
            kicks.push(self.wires.kick(name, window, index)?);
        }
        let transport = Arc::new(Mutex::new(transport));
        self.buses.memory.insert(base, layout::VIRTIO_MMIO_SIZE, transport.clone())?;
        self.windows.push(Window { transport, kicks: kicks.clone() });
        Ok(Source { device, queue_events: kicks })
    }
}
