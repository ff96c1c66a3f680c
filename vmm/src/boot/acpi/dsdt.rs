//! The devices in AML.
//!
//! Names and identifiers are those that drivers look for: `LNRO0005` (Linux `virtio_mmio`),
//! `PNP0501` (16550 UART), `VM_Gen_Counter` and `VMGENCTR` (Microsoft's VM generation ID),
//! `ACPI0013` (generic event device, ACPI 6.5 section 5.6.9), `QEMU0001` (pvpanic).

use acpi_tables::Aml;
use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Method, Name, Notify, Package, Path,
    ResourceTemplate, Scope, ZERO,
};

use crate::memory::layout::{
    ACPI_S5_TYPE, GED_GSI, PVPANIC_PORT, SERIAL_GSI, SERIAL_PORT, VIRTIO_GSI_BASE, VIRTIO_MAX,
    VIRTIO_MMIO_BASE, VIRTIO_MMIO_SIZE, VMGENID_PAGE,
};

/// The UART's ports.
const SERIAL_PORTS: u8 = 8;
/// What tells the VM generation ID driver that the ID changed.
const GENERATION_CHANGED: u8 = 0x80;

/// The body of the DSDT, after its header.
pub(super) fn body(virtio_devices: usize) -> Vec<u8> {
    let mut devices = Vec::new();
    serial(&mut devices);
    pvpanic(&mut devices);
    generation_id(&mut devices);
    event_device(&mut devices);
    let windows = (VIRTIO_MMIO_BASE..).step_by(window());
    for (index, base) in (0u32..).zip(windows).take(virtio_devices.min(VIRTIO_MAX)) {
        virtio(index, u32::try_from(base).unwrap_or(u32::MAX), &mut devices);
    }
    let mut body = Vec::new();
    Name::new(Path::new("_S5_"), &Package::new(vec![&ACPI_S5_TYPE])).to_aml_bytes(&mut body);
    body.extend(Scope::raw(Path::new("\\_SB_"), devices));
    body
}

fn window() -> usize {
    usize::try_from(VIRTIO_MMIO_SIZE).unwrap_or(usize::MAX)
}

/// An edge-triggered, active-high line of its own: what an irqfd pulses.
fn line(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}

fn name(path: &str, value: &dyn Aml) -> Name {
    Name::new(Path::new(path), value)
}

fn serial(out: &mut Vec<u8>) {
    let ports = IO::new(SERIAL_PORT, SERIAL_PORT, 1, SERIAL_PORTS);
    Device::new(
        Path::new("COM1"),
        vec![
            &name("_HID", &EISAName::new("PNP0501")),
            &name("_UID", &ZERO),
            &name("_CRS", &ResourceTemplate::new(vec![&ports, &line(SERIAL_GSI)])),
        ],
    )
    .to_aml_bytes(out);
}

fn pvpanic(out: &mut Vec<u8>) {
    let port = IO::new(PVPANIC_PORT, PVPANIC_PORT, 1, 1);
    Device::new(
        Path::new("PEVT"),
        vec![&name("_HID", &"QEMU0001"), &name("_CRS", &ResourceTemplate::new(vec![&port]))],
    )
    .to_aml_bytes(out);
}

fn generation_id(out: &mut Vec<u8>) {
    // The address as two halves, low first.
    let low = VMGENID_PAGE & u64::from(u32::MAX);
    let high = VMGENID_PAGE >> 32;
    Device::new(
        Path::new("VGEN"),
        vec![
            // The hardware ID is of the form the specification asks for; drivers bind to the
            // compatible IDs, of which kernels know one or both.
            &name("_HID", &"COPI0001"),
            &name("_CID", &Package::new(vec![&"VM_Gen_Counter", &"VMGENCTR"])),
            &name("_DDN", &"VM_Gen_Counter"),
            &name("ADDR", &Package::new(vec![&low, &high])),
        ],
    )
    .to_aml_bytes(out);
}

fn event_device(out: &mut Vec<u8>) {
    let generation = Path::new("\\_SB_.VGEN");
    let notify = Notify::new(&generation, &GENERATION_CHANGED);
    Device::new(
        Path::new("GED_"),
        vec![
            &name("_HID", &"ACPI0013"),
            &name("_UID", &ZERO),
            &name("_CRS", &ResourceTemplate::new(vec![&line(GED_GSI)])),
            // Its only line is the generation's, so the argument, the line, need not be looked at.
            &Method::new(Path::new("_EVT"), 1, true, vec![&notify]),
        ],
    )
    .to_aml_bytes(out);
}

fn virtio(index: u32, base: u32, out: &mut Vec<u8>) {
    let size = u32::try_from(VIRTIO_MMIO_SIZE).unwrap_or(u32::MAX);
    let registers = Memory32Fixed::new(true, base, size);
    let line = line(VIRTIO_GSI_BASE + index);
    let resources = ResourceTemplate::new(vec![&registers, &line]);
    Device::new(
        Path::new(&format!("V{index:03}")),
        vec![&name("_HID", &"LNRO0005"), &name("_UID", &index), &name("_CRS", &resources)],
    )
    .to_aml_bytes(out);
}
