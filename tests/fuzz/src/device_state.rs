//! Saved state of every device and maps of disk layers, spoilt, and what a guest does after it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};

use coppice_image::SealedMap;
use coppice_micro::tree::memory_file;
use coppice_vmm::devices::legacy::Serial;
use coppice_vmm::devices::virtio::blk::{Backend as _, Overlay};
use coppice_vmm::devices::virtio::vsock::{Vsock, VsockConfig};
use coppice_vmm::devices::{BusDevice as _, Saved};
use serde_json::Value;
use virtio_bindings::virtio_mmio as reg;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::guest;
use crate::input::Input;
use crate::virtio_mmio::Machine;

/// Sectors of a disk with layers; not whole clusters.
const SECTORS: u8 = 43;

/// One device, the state it is in after some use, and that state changed as the bytes say.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 8 {
        kind @ 0..5 => virtio(&mut Machine::new(kind), &mut input),
        5 => vsock(&mut input),
        6 => serial(&mut input),
        _ => layers(&mut input),
    }
}

fn virtio(machine: &mut Machine, input: &mut Input<'_>) {
    if !input.u8().is_multiple_of(4) {
        machine.bring_up(0);
    }
    for _ in 0..input.u8() % 8 {
        machine.step(input);
    }
    let saved = spoil(machine.transport.save().unwrap(), input);
    let kicks: Vec<_> = (0..machine.transport.queue_count())
        .map(|_| Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()))
        .collect();
    if machine.transport.restore(&saved).is_err() {
        assert_eq!(machine.get(reg::VIRTIO_MMIO_STATUS), 0, "a refused state left something");
    }
    machine.transport.revive(&kicks);
    for queue in 0..machine.transport.queue_count() {
        let queue = u32::try_from(queue).unwrap();
        machine.transport.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY.into(), &queue.to_le_bytes());
    }
    while !input.is_empty() {
        machine.step(input);
    }
    // What was taken can be saved and taken again.
    let again = machine.transport.save().unwrap();
    machine.transport.restore(&again).unwrap();
    assert_eq!(machine.transport.save().unwrap(), again);
}

fn vsock(input: &mut Input<'_>) {
    let directory = tempfile::tempdir().unwrap();
    let config = VsockConfig {
        cid: 3,
        listener: UnixListener::bind(directory.path().join("vsock")).unwrap(),
        directory: OwnedFd::from(std::fs::File::open(directory.path()).unwrap()),
        name: "vsock".to_owned(),
    };
    let device = Arc::new(Mutex::new(Vsock::new(config).unwrap()));
    virtio(&mut Machine::with_device(device), input);
}

fn serial(input: &mut Input<'_>) {
    let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let mut serial = Serial::new(line, None, None).unwrap();
    let saved = spoil(serial.save().unwrap(), input);
    let _ = serial.restore(&saved);
    serial.revive();
    while !input.is_empty() {
        let (write, offset, value) = (input.u8().is_multiple_of(2), input.u8() % 8, input.u8());
        if write {
            serial.write(offset.into(), &[value]);
        } else {
            serial.read(offset.into(), &mut [value]);
        }
    }
    let again = serial.save().unwrap();
    serial.restore(&again).unwrap();
    assert_eq!(serial.save().unwrap(), again);
}

/// Layers with any maps; the disk they make can be sealed, and its map survives its encoding.
fn layers(input: &mut Input<'_>) {
    let mut layers = Vec::new();
    for _ in 0..input.u8() % 4 {
        let mut bytes = Vec::new();
        bytes.extend(if input.u8() < 8 { input.u64() } else { 6 }.to_le_bytes());
        for _ in 0..input.u8() % 6 {
            let number = if input.u8() < 8 { input.u64() } else { u64::from(input.u8() % 8) };
            bytes.extend(number.to_le_bytes());
        }
        bytes.truncate(bytes.len() - usize::from(input.u8() < 8));
        let Ok(map) = SealedMap::decode(&bytes) else { return };
        assert_eq!(map.encode(), bytes);
        layers.push((guest::disk_image(SECTORS), map));
    }
    let top = || memory_file();
    let Ok(mut disk) = Overlay::with_layers(guest::disk_image(SECTORS), layers, top()) else {
        return;
    };
    while !input.is_empty() {
        let first = u64::from(input.u8() % SECTORS);
        let count = u64::from(input.u8()) % (u64::from(SECTORS) - first);
        disk.write_zeroes(first * 512, count * 512, true).unwrap();
    }
    let map = disk.seal(top()).unwrap().map;
    assert_eq!(SealedMap::decode(&map.encode()).as_ref(), Ok(&map));
}

/// Changes a few values or bytes, or takes quite another state.
fn spoil(mut saved: Saved, input: &mut Input<'_>) -> Saved {
    if input.u8() < 8 {
        let count = input.u8();
        saved.data = input.bytes(count.into()).to_vec();
        return saved;
    }
    for _ in 0..input.u8() % 4 {
        let place = usize::from(input.u16());
        if input.u8() < 32 {
            let place = place % saved.data.len();
            saved.data[place] = input.u8();
        } else if let Ok(mut root) = serde_json::from_slice(&saved.data) {
            let mut places = Vec::new();
            collect(&mut root, &mut places);
            let place = place % places.len();
            *places.swap_remove(place) = value(input);
            saved.data = serde_json::to_vec(&root).unwrap();
        }
    }
    saved
}

fn value(input: &mut Input<'_>) -> Value {
    match input.u8() % 16 {
        0 => Value::Null,
        1 => Value::from(-1),
        2 => Value::from("text"),
        3 => Value::from(0.5),
        4 => Value::Array(Vec::new()),
        5 => Value::Bool(true),
        6 => Value::Bool(false),
        7 => Value::from(input.u64()),
        8 => Value::from(input.u32()),
        9 => Value::from(1u64 << (input.u8() % 64)),
        10 | 11 => Value::from(input.u16()),
        _ => Value::from(input.u8()),
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
