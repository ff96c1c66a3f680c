//! The guest's physical address map and interrupt lines. One place, so that boot tables, devices
//! and memory slots cannot disagree.

/// First byte of the hole below 4 GiB that holds device registers and the interrupt controllers.
pub const HOLE_START: u64 = 0xC000_0000;
/// First byte above the hole; RAM that did not fit below continues here.
pub const HOLE_END: u64 = 0x1_0000_0000;

/// Boot parameters (the "zero page") of the 64-bit boot protocol.
pub const ZERO_PAGE: u64 = 0x7000;
/// PVH start info; its memory map and module list follow in the same page.
pub const PVH_START_INFO: u64 = 0x6000;
/// Global descriptor table used at entry.
pub const GDT: u64 = 0x500;
/// Top-level page table used at entry; two more levels follow.
pub const PAGE_TABLES: u64 = 0x9000;
/// Kernel command line.
pub const CMDLINE: u64 = 0x2_0000;
/// Longest kernel command line, terminating zero included (x86 COMMAND_LINE_SIZE).
pub const CMDLINE_MAX: usize = 2048;
/// ACPI tables, the RSDP first: inside the area that firmware-less kernels scan.
pub const ACPI_TABLES: u64 = 0xE_0000;
/// Room for ACPI tables.
pub const ACPI_TABLES_SIZE: u64 = 0x1_0000;
/// The page that holds the VM generation ID, above the tables, reserved in the memory map.
pub const VMGENID_PAGE: u64 = 0xF_0000;
/// Where real-mode code jumps for a reset, as kernels do that take this for a PC with a BIOS.
pub const RESET_VECTOR: u64 = 0xF_FFF0;
/// Kernels are loaded from here on.
pub const KERNEL_START: u64 = 0x10_0000;

/// First virtio-mmio window; window N starts N times [`VIRTIO_MMIO_SIZE`] later.
pub const VIRTIO_MMIO_BASE: u64 = HOLE_START;
/// Size of one virtio-mmio window.
pub const VIRTIO_MMIO_SIZE: u64 = 0x1000;
/// Most virtio devices of a machine.
pub const VIRTIO_MAX: usize = 12;
/// Interrupt line of virtio-mmio window 0; window N has the N-th line after it.
pub const VIRTIO_GSI_BASE: u32 = 10;

/// I/O APIC registers (where KVM's in-kernel one answers).
pub const IOAPIC: u32 = 0xFEC0_0000;
/// Local APIC registers.
pub const LOCAL_APIC: u32 = 0xFEE0_0000;
/// Three pages that KVM needs on Intel hosts without unrestricted guest, inside the hole.
pub const KVM_TSS: usize = 0xFFFB_D000;
/// One page for the identity map that KVM needs on Intel hosts.
pub const KVM_IDENTITY_MAP: u64 = 0xFFFB_C000;

/// Where the window of virtio device `number` starts.
pub fn virtio_window(number: u32) -> u64 {
    VIRTIO_MMIO_BASE + u64::from(number) * VIRTIO_MMIO_SIZE
}

/// First port of the 16550 UART (COM1).
pub const SERIAL_PORT: u16 = 0x3F8;
/// Interrupt line of the UART.
pub const SERIAL_GSI: u32 = 4;
/// Port of the keyboard controller's command register; only its reset pulse works.
pub const I8042_PORT: u16 = 0x60;
/// pvpanic port.
pub const PVPANIC_PORT: u16 = 0x505;
/// ACPI sleep control register; the status register is the next port, reset the one after.
pub const ACPI_SLEEP_PORT: u16 = 0x600;
/// ACPI sleep status register.
pub const ACPI_SLEEP_STATUS_PORT: u16 = ACPI_SLEEP_PORT + 1;
/// ACPI reset register; writing [`ACPI_RESET_VALUE`] resets.
pub const ACPI_RESET_PORT: u16 = ACPI_SLEEP_PORT + 2;
/// The value that resets.
pub const ACPI_RESET_VALUE: u8 = 1;
/// The sleep type that stands for power-off (S5), 0 to 7.
pub const ACPI_S5_TYPE: u8 = 5;
/// Interrupt line of the ACPI generic event device, which announces VM generation changes.
pub const GED_GSI: u32 = 9;
