//! The tables as a guest would walk them, and their AML as Intel's compiler reads it.

use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::memory::layout::{GED_GSI, SERIAL_GSI, VIRTIO_MAX, VMGENID_PAGE};

/// A table by its place in the area.
fn table(area: &[u8], address: u64) -> &[u8] {
    let at = usize::try_from(address - ACPI_TABLES).unwrap();
    let len = u32::from_le_bytes(area[at + 4..at + 8].try_into().unwrap());
    &area[at..at + usize::try_from(len).unwrap()]
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// XSDT, then the tables it lists, then the DSDT.
fn tables(area: &[u8]) -> Vec<&[u8]> {
    let xsdt = table(area, word(area, 24));
    let mut tables = vec![xsdt];
    tables.extend(xsdt[36..].chunks(8).map(|entry| table(area, word(entry, 0))));
    let fadt = find(&tables, b"FACP");
    tables.push(table(area, word(fadt, 140)));
    tables
}

fn find<'a>(tables: &[&'a [u8]], signature: &[u8; 4]) -> &'a [u8] {
    tables.iter().find(|table| table.starts_with(signature)).unwrap()
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn count(haystack: &[u8], needle: &[u8]) -> usize {
    haystack.windows(needle.len()).filter(|window| *window == needle).count()
}

#[test]
fn the_fadt_says_what_there_is_and_what_there_is_not() {
    let area = build(1, 0);
    let all = tables(&area);
    let fadt = find(&all, b"FACP");
    let flags = u32::from_le_bytes(fadt[112..116].try_into().unwrap());
    assert_ne!(flags & (1 << 20), 0, "hardware-reduced");
    assert_ne!(flags & (1 << 10), 0, "reset register");
    assert_eq!(fadt[109..111], [0b10_0100, 0], "no keyboard controller, VGA or CMOS clock");
    let port = |at: usize| (fadt[at], word(fadt, at + 4));
    assert_eq!(port(116), (1, u64::from(ACPI_RESET_PORT)));
    assert_eq!(fadt[128], ACPI_RESET_VALUE);
    assert_eq!(port(244), (1, u64::from(ACPI_SLEEP_PORT)));
    assert_eq!(port(256), (1, u64::from(ACPI_SLEEP_STATUS_PORT)));
}

#[test]
fn the_madt_lists_each_processor_once() {
    let area = build(4, 0);
    let all = tables(&area);
    let madt = find(&all, b"APIC");
    let mut ids = Vec::new();
    let mut rest = &madt[44..];
    while let [kind, len, ..] = rest {
        if *kind == 0 {
            assert_eq!(rest[4], 1, "enabled");
            ids.push(rest[3]);
        }
        rest = &rest[usize::from(*len)..];
    }
    assert_eq!(ids, [0, 1, 2, 3]);
}

#[test]
fn the_dsdt_lists_the_devices() {
    let area = build(1, 3);
    let all = tables(&area);
    let dsdt = find(&all, b"DSDT");
    assert_eq!(count(dsdt, b"LNRO0005"), 3);
    for id in [&b"VM_Gen_Counter"[..], b"QEMU0001", b"ACPI0013", b"_S5_", b"COM1"] {
        assert_ne!(count(dsdt, id), 0, "{}", String::from_utf8_lossy(id));
    }
}

/// Decompiles and recompiles the DSDT with `iasl`, where the machine has it.
#[test]
fn the_compiler_accepts_the_dsdt() {
    let directory = tempfile::tempdir().unwrap();
    let area = build(2, VIRTIO_MAX);
    let all = tables(&area);
    std::fs::write(directory.path().join("dsdt.aml"), find(&all, b"DSDT")).unwrap();
    let iasl = |argument: &str, input: &str| {
        Command::new("iasl").args([argument, input]).current_dir(directory.path()).output()
    };
    let Ok(decompiled) = iasl("-d", "dsdt.aml") else {
        eprintln!("no iasl here (Debian package acpica-tools): the AML was not compiled again");
        return;
    };
    assert!(decompiled.status.success(), "{decompiled:?}");
    let source = std::fs::read_to_string(directory.path().join("dsdt.dsl")).unwrap();
    let compiled = iasl("-we", "dsdt.dsl").unwrap();
    assert!(compiled.status.success(), "{compiled:?}\n{source}");
    assert!(source.contains(&format!("0x{VMGENID_PAGE:08X}")), "{source}");
    for gsi in [SERIAL_GSI, GED_GSI] {
        assert!(source.contains(&format!("0x{gsi:08X},")), "{source}");
    }
}

proptest! {
    #[test]
    fn every_table_has_its_checksum_and_place(vcpus in 1..=8u8, virtio in 0..=VIRTIO_MAX) {
        let area = build(vcpus, virtio);
        prop_assert!(u64::try_from(area.len()).unwrap() <= ACPI_TABLES_SIZE);
        prop_assert_eq!(&area[..8], b"RSD PTR ");
        prop_assert_eq!((sum(&area[..20]), sum(&area[..36])), (0, 0));
        let tables = tables(&area);
        prop_assert_eq!(tables.len(), 4);
        for table in tables {
            prop_assert_eq!(sum(table), 0, "{}", String::from_utf8_lossy(&table[..4]));
        }
    }
}
