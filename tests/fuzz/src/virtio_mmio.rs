//! Register accesses, memory writes and kicks against every virtio device.

use std::fs::File;
use std::sync::{Arc, Mutex};

use coppice_micro::tree::memory_file;
use coppice_vmm::devices::BusDevice as _;
use coppice_vmm::devices::virtio::VirtioDevice;
use coppice_vmm::devices::virtio::balloon::Balloon;
use coppice_vmm::devices::virtio::blk::{Blk, Overlay, Raw};
use coppice_vmm::devices::virtio::mmio::MmioTransport;
use coppice_vmm::devices::virtio::rng::Rng;
use coppice_vmm::memory::GuestRam;
use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes as _, GuestAddress};

use crate::guest::{self, AVAILABLE, RINGS, USED};
use crate::input::Input;

const SECTORS: u8 = 40;
const QUEUE_SIZE: u16 = 16;

/// A device behind its transport, and memory.
pub(crate) struct Machine {
    ram: Arc<GuestRam>,
    pub(crate) transport: MmioTransport,
    device: Arc<Mutex<dyn VirtioDevice>>,
    /// The device's disk, whose size must not change.
    disk: Option<File>,
}

impl Machine {
    pub(crate) fn new(kind: u8) -> Self {
        let mut disk = None;
        let mut image = || disk.insert(guest::disk_image(SECTORS)).try_clone().unwrap();
        let device: Arc<Mutex<dyn VirtioDevice>> = match kind % 5 {
            0 => {
                let raw = Box::new(Raw::new(image()).unwrap());
                Arc::new(Mutex::new(Blk::new(raw, false, "raw").unwrap()))
            }
            1 => {
                let raw = Box::new(Raw::new(image()).unwrap());
                Arc::new(Mutex::new(Blk::new(raw, true, "read-only").unwrap()))
            }
            2 => {
                let top = memory_file();
                let overlay = Box::new(Overlay::new(image(), top).unwrap());
                Arc::new(Mutex::new(Blk::new(overlay, false, "overlay").unwrap()))
            }
            3 => Arc::new(Mutex::new(Rng::default())),
            _ => Arc::new(Mutex::new(Balloon::new(1, true))),
        };
        Self { disk, ..Self::with_device(device) }
    }

    pub(crate) fn with_device(device: Arc<Mutex<dyn VirtioDevice>>) -> Self {
        let ram = guest::memory();
        let transport =
            MmioTransport::new(Arc::clone(&device), Arc::clone(&ram), guest::interrupt());
        Self { ram, transport, device, disk: None }
    }

    fn set(&mut self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    pub(crate) fn get(&mut self, register: u32) -> u32 {
        let mut word = [0; 4];
        self.transport.read(register.into(), &mut word);
        u32::from_le_bytes(word)
    }

    /// What a good driver does, so that the fuzzer need not find out.
    pub(crate) fn bring_up(&mut self, unwanted: u32) {
        for status in [0, 1, 3] {
            self.set(reg::VIRTIO_MMIO_STATUS, status);
        }
        for select in [0, 1] {
            self.set(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            let offered = self.get(reg::VIRTIO_MMIO_DEVICE_FEATURES);
            let wanted = if select == 0 { offered & !unwanted } else { offered };
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES, wanted);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, 11);
        for index in 0..u32::try_from(self.transport.queue_count()).unwrap() {
            let rings = u32::try_from(rings(index)).unwrap();
            self.set(reg::VIRTIO_MMIO_QUEUE_SEL, index);
            self.set(reg::VIRTIO_MMIO_QUEUE_NUM, QUEUE_SIZE.into());
            self.set(reg::VIRTIO_MMIO_QUEUE_DESC_LOW, rings);
            self.set(reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, rings + AVAILABLE as u32);
            self.set(reg::VIRTIO_MMIO_QUEUE_USED_LOW, rings + USED as u32);
            self.set(reg::VIRTIO_MMIO_QUEUE_READY, 1);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, 15);
    }

    pub(crate) fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 8 {
            0 => {
                let (offset, value) = (input.u16() % 0x200, input.u32());
                self.transport.write(offset.into(), &value.to_le_bytes());
            }
            1 => {
                let (offset, width) = (input.u16() % 0x200, 1 + input.u8() % 8);
                let mut data = [0; 8];
                self.transport.read(offset.into(), &mut data[..width.into()]);
            }
            2 => {
                let (offset, width) = (input.u16() % 0x200, 1 + input.u8() % 8);
                let mut data = [0; 8];
                let bytes = input.bytes(width.into());
                data[..bytes.len()].copy_from_slice(bytes);
                self.transport.write(offset.into(), &data[..width.into()]);
            }
            3 => {
                let (addr, count) = (guest::address(input), input.u8());
                let _ = self.ram.write_slice(input.bytes(count.into()), GuestAddress(addr));
            }
            4 => {
                let (queue, index) = (u32::from(input.u8() % 4), input.u16() % QUEUE_SIZE);
                let addr = guest::address(input);
                let descriptor =
                    (addr, input.u32() >> (input.u8() % 32), input.u16() % 8, input.u16() % 20);
                guest::describe(&self.ram, rings(queue), index, descriptor);
            }
            5 => {
                let (queue, head) = (u32::from(input.u8() % 4), input.u16() % 20);
                guest::publish(&self.ram, rings(queue), QUEUE_SIZE, head);
                self.device.lock().unwrap().queue_event(usize::try_from(queue).unwrap());
            }
            6 => self.device.lock().unwrap().queue_event(usize::from(input.u8())),
            _ => self.bring_up(input.u32()),
        }
    }
}

fn rings(queue: u32) -> u64 {
    RINGS * (1 + u64::from(queue))
}

/// One device, and whatever the bytes say a guest does to it.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut machine = Machine::new(input.u8());
    if input.u8() % 4 != 0 {
        machine.bring_up(0);
    }
    while !input.is_empty() {
        machine.step(&mut input);
    }
    assert_eq!(machine.get(reg::VIRTIO_MMIO_MAGIC_VALUE), 0x7472_6976);
    if let Some(disk) = machine.disk {
        assert_eq!(disk.metadata().unwrap().len(), u64::from(SECTORS) * 512);
    }
}
