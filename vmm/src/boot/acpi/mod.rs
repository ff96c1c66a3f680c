//! The ACPI tables: how the guest finds its processors, its devices, and the way to power off.
//!
//! The platform is hardware-reduced (ACPI 6.5, section 4.1): no PM timer, no SCI, no legacy
//! interrupt controllers or timers. Linux then leaves the 8259 and the 8254 alone, which spares
//! their slow probing. All tables are small and are written in one piece at
//! [`ACPI_TABLES`], the RSDP first; its address is also handed to the kernel.

mod dsdt;
#[cfg(test)]
mod tests;

use acpi_tables::Aml;
use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;

use super::error::BootError;
use super::params;
use crate::memory::GuestRam;
use crate::memory::layout::{
    ACPI_RESET_PORT, ACPI_RESET_VALUE, ACPI_SLEEP_PORT, ACPI_SLEEP_STATUS_PORT, ACPI_TABLES,
    ACPI_TABLES_SIZE, IOAPIC, LOCAL_APIC,
};

/// Who made the tables.
const OEM: [u8; 6] = *b"COPICE";
/// Which machine they describe.
const OEM_TABLE: [u8; 8] = *b"COPPICE ";
/// Version of the description.
const OEM_REVISION: u32 = 1;
/// Length of the header that all tables but the RSDP share.
const SDT_HEADER: u32 = 36;
/// Revision of the DSDT whose integers have 64 bits.
const DSDT_REVISION: u8 = 2;
/// Tables start at multiples of this.
const ALIGNMENT: usize = 16;

/// `IAPC_BOOT_ARCH` bits (ACPI 6.5, table 5.11). Those not set say that there are no legacy
/// devices and no keyboard controller.
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_CLOCK: u16 = 1 << 5;

/// Writes the tables of a machine to guest memory.
pub(super) fn write(ram: &GuestRam, vcpus: u8, virtio_devices: usize) -> Result<(), BootError> {
    let tables = build(vcpus, virtio_devices);
    if !u64::try_from(tables.len()).is_ok_and(|len| len <= ACPI_TABLES_SIZE) {
        return Err(BootError::AcpiTooLarge { len: tables.len(), limit: ACPI_TABLES_SIZE });
    }
    params::write(ram, ACPI_TABLES, &tables, "the ACPI tables")
}

/// The tables as they lie in memory from [`ACPI_TABLES`] on.
fn build(vcpus: u8, virtio_devices: usize) -> Vec<u8> {
    let mut area = Area { bytes: vec![0; Rsdp::len()] };
    let dsdt = area.append(&bytes_of(&dsdt(virtio_devices)));
    let fadt = area.append(&bytes_of(&fadt(dsdt)));
    let madt = area.append(&bytes_of(&madt(vcpus)));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = area.append(&bytes_of(&xsdt));
    let rsdp = bytes_of(&Rsdp::new(OEM, xsdt));
    area.bytes.splice(..rsdp.len(), rsdp);
    area.bytes
}

/// Tables one after the other.
struct Area {
    bytes: Vec<u8>,
}

impl Area {
    /// Appends a table; gives its guest-physical address.
    fn append(&mut self, table: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
        let offset = u64::try_from(self.bytes.len()).unwrap_or(u64::MAX);
        self.bytes.extend_from_slice(table);
        ACPI_TABLES.saturating_add(offset)
    }
}

fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// A register of one byte on a port.
fn port(address: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(address))
}

/// Fixed description: where the machine is powered off and reset, and what it lacks.
fn fadt(dsdt: u64) -> FADT {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless);
    fadt.iapc_boot_arch = (NO_VGA | NO_CMOS_CLOCK).into();
    fadt.reset_reg = port(ACPI_RESET_PORT);
    fadt.reset_value = ACPI_RESET_VALUE;
    fadt.sleep_control_reg = port(ACPI_SLEEP_PORT);
    fadt.sleep_status_reg = port(ACPI_SLEEP_STATUS_PORT);
    fadt.finalize()
}

/// Interrupt controllers: one local APIC per vCPU, whose ID is its number, and one I/O APIC.
/// Interrupts need no overrides, since each device's line is described with the device.
fn madt(vcpus: u8) -> MADT {
    let mut madt =
        MADT::new(OEM, OEM_TABLE, OEM_REVISION, LocalInterruptController::Address(LOCAL_APIC));
    for id in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IOAPIC, 0));
    madt
}

/// Differentiated description: the devices.
fn dsdt(virtio_devices: usize) -> SdtTable {
    let mut table = Sdt::new(*b"DSDT", SDT_HEADER, DSDT_REVISION, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&dsdt::body(virtio_devices));
    SdtTable(table)
}

/// A table of the generic kind, to be written like the others.
struct SdtTable(Sdt);

impl Aml for SdtTable {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(self.0.as_slice());
    }
}
