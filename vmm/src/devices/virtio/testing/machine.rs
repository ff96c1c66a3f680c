//! A device behind its transport, with memory and a driver: what a checkpoint is taken of. With
//! it, what has to hold for the saved state of every device.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use serde_json::Value;
use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Driver, MEMORY, interrupt, memory};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::mmio::MmioTransport;
use crate::devices::{BusDevice as _, Saved};
use crate::memory::GuestRam;

/// Where the rings start, 64 KiB for each queue; buffers are below and above.
const RINGS: u64 = 0x10_0000;

/// See the module's documentation.
pub(in super::super) struct Machine<D> {
    pub(in super::super) ram: Arc<GuestRam>,
    pub(in super::super) device: Arc<Mutex<D>>,
    pub(in super::super) drivers: Vec<Driver>,
    transport: MmioTransport,
    kicks: Vec<Arc<EventFd>>,
}

/// All that a checkpoint keeps.
struct Snapshot {
    saved: Saved,
    memory: Vec<u8>,
    drivers: Vec<Driver>,
}

fn content(ram: &GuestRam) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(MEMORY).unwrap()];
    ram.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    bytes
}

impl<D: VirtioDevice + 'static> Machine<D> {
    /// A machine whose driver was not loaded.
    fn new(device: D) -> Self {
        let ram = memory();
        let (interrupt, _) = interrupt();
        let device = Arc::new(Mutex::new(device));
        let transport = MmioTransport::new(device.clone(), Arc::clone(&ram), interrupt);
        let count = transport.queue_count();
        let kicks = (0..count).map(|_| Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())).collect();
        Self { ram, device, drivers: Vec::new(), transport, kicks }
    }

    /// Loads the driver, which accepts all that it is offered.
    pub(in super::super) fn start(&mut self) {
        for status in [0, 1, 3] {
            self.set(reg::VIRTIO_MMIO_STATUS, status);
        }
        for select in [0, 1] {
            self.set(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            let offered = self.get(reg::VIRTIO_MMIO_DEVICE_FEATURES);
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES, offered);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, 11);
        let sizes = self.device.lock().unwrap().queue_sizes().to_vec();
        for (index, size) in (0u32..).zip(sizes) {
            let base = RINGS + 0x1_0000 * u64::from(index);
            let driver = Driver::new(&self.ram, base, size);
            let low = |address: u64| u32::try_from(address).unwrap();
            self.set(reg::VIRTIO_MMIO_QUEUE_SEL, index);
            self.set(reg::VIRTIO_MMIO_QUEUE_NUM, size.into());
            self.set(reg::VIRTIO_MMIO_QUEUE_DESC_LOW, low(base));
            self.set(reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, low(driver.available_ring()));
            self.set(reg::VIRTIO_MMIO_QUEUE_USED_LOW, low(driver.used_ring()));
            self.set(reg::VIRTIO_MMIO_QUEUE_READY, 1);
            self.drivers.push(driver);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, 15);
        assert_eq!(self.get(reg::VIRTIO_MMIO_STATUS), 15);
    }

    fn set(&mut self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    fn get(&mut self, register: u32) -> u32 {
        let mut word = [0; 4];
        self.transport.read(register.into(), &mut word);
        u32::from_le_bytes(word)
    }

    /// The 8 bytes at the start of the configuration space.
    pub(in super::super) fn config(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.transport.read(reg::VIRTIO_MMIO_CONFIG.into(), &mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Kicks a queue and has the device serve it.
    pub(in super::super) fn kick(&mut self, queue: usize) {
        self.device.lock().unwrap().queue_event(queue);
    }

    fn snapshot(&self) -> Snapshot {
        let saved = self.transport.save().unwrap();
        Snapshot { saved, memory: content(&self.ram), drivers: self.drivers.clone() }
    }

    /// Brings the machine to a snapshot, and has the device do what it is kicked for by that.
    fn restore(&mut self, snapshot: &Snapshot) {
        self.transport.restore(&snapshot.saved).unwrap();
        self.ram.write_slice(&snapshot.memory, GuestAddress(0)).unwrap();
        self.drivers.clone_from(&snapshot.drivers);
        self.drivers.iter_mut().for_each(|driver| driver.ram = Arc::clone(&self.ram));
        assert_eq!(self.transport.save().unwrap(), snapshot.saved);
        self.revive();
    }

    fn revive(&mut self) {
        self.transport.revive(&self.kicks);
        for index in 0..self.kicks.len() {
            if self.kicks[index].read().is_ok() {
                self.kick(index);
            }
        }
    }
}

/// After `before` a snapshot is taken. What `after` tells must then be the same for that machine,
/// for a new one that is brought to the snapshot, and for one that went further and is brought
/// back, twice.
pub(in super::super) fn check_restore<D: VirtioDevice + 'static, T: PartialEq + Debug>(
    make: impl Fn() -> D,
    before: impl Fn(&mut Machine<D>),
    after: impl Fn(&mut Machine<D>) -> T,
) {
    let mut original = Machine::new(make());
    original.start();
    before(&mut original);
    let snapshot = original.snapshot();
    let wanted = {
        // The original goes on; it is kicked for all it has not seen.
        original.revive();
        after(&mut original)
    };

    let mut clone = Machine::new(make());
    clone.restore(&snapshot);
    assert_eq!(after(&mut clone), wanted, "a new machine");
    for _ in 0..2 {
        before(&mut original);
        original.restore(&snapshot);
        assert_eq!(after(&mut original), wanted, "a machine that was rolled back");
    }
}

/// A change of saved state.
#[derive(Debug, Clone)]
pub(in super::super) enum Edit {
    /// Another value for one of the values.
    Value(prop::sample::Index, Value),
    /// Another byte.
    Byte(prop::sample::Index, u8),
}

/// A few changes, or one.
pub(in super::super) fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let numbers = [0u64, 1, 2, 15, 255, 256, 0xFFFF, 0x1_0000, 1 << 20, 1 << 32, u64::MAX];
    let value = prop_oneof![
        4 => prop::sample::select(numbers.map(Value::from).to_vec()),
        2 => any::<u64>().prop_map(Value::from),
        2 => any::<bool>().prop_map(Value::from),
        1 => prop::sample::select(vec![
            Value::Null, Value::from(-1), Value::from("text"), Value::from(0.5),
            Value::Array(vec![]), Value::Object(serde_json::Map::new()),
        ]),
    ];
    let edit = prop_oneof![
        6 => (any::<prop::sample::Index>(), value).prop_map(|(at, value)| Edit::Value(at, value)),
        1 => (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| Edit::Byte(at, byte)),
    ];
    prop::collection::vec(edit, 1..4)
}

impl Edit {
    pub(in super::super) fn apply(&self, saved: &mut Saved) {
        match self {
            Self::Byte(at, byte) => {
                if !saved.data.is_empty() {
                    let at = at.index(saved.data.len());
                    saved.data[at] = *byte;
                }
            }
            Self::Value(at, value) => {
                let Ok(mut root) = serde_json::from_slice(&saved.data) else { return };
                let mut places = Vec::new();
                collect(&mut root, &mut places);
                let at = at.index(places.len());
                *places.swap_remove(at) = value.clone();
                saved.data = serde_json::to_vec(&root).unwrap();
            }
        }
    }
}

/// All values that hold no others.
fn collect<'a>(value: &'a mut Value, places: &mut Vec<&'a mut Value>) {
    let is_leaf = match value {
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => true,
    };
    if is_leaf {
        places.push(value);
    } else if let Value::Object(map) = value {
        map.values_mut().for_each(|inner| collect(inner, places));
    } else if let Value::Array(list) = value {
        list.iter_mut().for_each(|inner| collect(inner, places));
    }
}

/// Changed state is refused, and then the device is reset, or taken; whatever it says, the device
/// survives what follows.
pub(in super::super) fn check_hostile<D: VirtioDevice + 'static>(
    device: D,
    before: impl Fn(&mut Machine<D>),
    edits: &[Edit],
) {
    let mut machine = Machine::new(device);
    machine.start();
    before(&mut machine);
    let mut saved = machine.transport.save().unwrap();
    edits.iter().for_each(|edit| edit.apply(&mut saved));
    let memory = content(&machine.ram);
    let refused = machine.transport.restore(&saved).is_err();
    assert!(memory == content(&machine.ram), "a restore changed guest memory");
    if refused {
        assert_eq!(machine.get(reg::VIRTIO_MMIO_STATUS), 0);
        assert_eq!(machine.device.lock().unwrap().queue_positions(), None);
    }
    machine.revive();
    (0..machine.kicks.len()).for_each(|queue| machine.kick(queue));
    machine.device.lock().unwrap().host_event();
}
