//! Tests of the transport: the order a driver keeps, and orders none would.

mod state;

use std::collections::HashSet;

use proptest::prelude::*;
use virtio_queue::QueueT as _;
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::super::{ActivateError, EVENT_IDX, QueuePosition};
use super::*;
use crate::devices::{OwnState, StateError};

const MEMORY: usize = 1 << 20;
const OFFERED: u64 = EVENT_IDX | 1 << 3;
const SIZES: [u16; 2] = [64, 256];
const ALL_BITS: u32 = 1 | 2 | 4 | 8;

/// A device that holds the transport to its promises.
#[derive(Default)]
struct Probe {
    active: bool,
    activations: usize,
    kicks: HashSet<usize>,
    positions: Option<Vec<QueuePosition>>,
    own: u32,
    refuse: bool,
}

impl VirtioDevice for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }
    fn device_id(&self) -> u32 {
        42
    }
    fn features(&self) -> u64 {
        OFFERED
    }
    fn queue_sizes(&self) -> &[u16] {
        &SIZES
    }
    fn required_queues(&self, features: u64) -> usize {
        if features & 1 << 3 != 0 { 2 } else { 1 }
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        for (byte, at) in data.iter_mut().zip(offset..) {
            *byte = u8::try_from(at & 0xFF).unwrap();
        }
    }
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        assert!(!self.active, "activated twice without a reset");
        assert_eq!(activation.features & !(OFFERED | 1 << VIRTIO_F_VERSION_1), 0);
        assert_ne!(activation.features & 1 << VIRTIO_F_VERSION_1, 0);
        assert_eq!(activation.queues.len(), self.required_queues(activation.features));
        for (queue, max) in activation.queues.iter().zip(SIZES) {
            assert!(queue.is_valid(&*activation.ram));
            assert!(queue.size().is_power_of_two() && queue.size() <= max);
            assert_eq!(queue.event_idx_enabled(), activation.features & EVENT_IDX != 0);
        }
        if self.refuse {
            return Err(ActivateError { device: "probe", reason: "refused".to_owned() });
        }
        self.positions = Some(activation.queues.iter().map(QueuePosition::from).collect());
        self.active = true;
        self.activations += 1;
        Ok(())
    }
    fn reset(&mut self) {
        self.active = false;
        self.positions = None;
        self.own = 0;
    }
    fn queue_positions(&self) -> Option<Vec<QueuePosition>> {
        self.positions.clone()
    }
    fn save(&self) -> Result<OwnState, StateError> {
        OwnState::encode("probe", 1, &self.own)
    }
    fn restore(
        &mut self,
        state: &OwnState,
        activation: Option<Activation>,
    ) -> Result<(), StateError> {
        self.own = state.decode("probe", 1)?;
        activation.map_or(Ok(()), |activation| {
            self.activate(activation)
                .map_err(|e| StateError::Unfit { device: "probe", reason: e.reason })
        })
    }
    fn queue_event(&mut self, index: usize) {
        assert!(self.active, "kicked while not active");
        assert!(index < SIZES.len());
        self.kicks.insert(index);
    }
}

struct Guest {
    transport: MmioTransport,
    device: Arc<Mutex<Probe>>,
    interrupt: Interrupt,
    line: Arc<EventFd>,
}

impl Guest {
    fn new() -> Self {
        let ram = Arc::new(GuestRam::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap());
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let interrupt = Interrupt::new(Arc::clone(&line));
        let device = Arc::new(Mutex::new(Probe::default()));
        let transport = MmioTransport::new(device.clone(), ram, interrupt.clone());
        Self { transport, device, interrupt, line }
    }

    fn read(&mut self, register: u32) -> u32 {
        let mut word = [0; 4];
        self.transport.read(u64::from(register), &mut word);
        u32::from_le_bytes(word)
    }

    fn write(&mut self, register: u32, value: u32) {
        self.transport.write(u64::from(register), &value.to_le_bytes());
    }

    fn negotiate(&mut self, features: u64) {
        self.write(reg::VIRTIO_MMIO_STATUS, 1);
        self.write(reg::VIRTIO_MMIO_STATUS, 1 | 2);
        for select in [0, 1] {
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            let word = u32::try_from(features >> (32 * select) & 0xFFFF_FFFF).unwrap();
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES, word);
        }
        self.write(reg::VIRTIO_MMIO_STATUS, 1 | 2 | 8);
    }

    fn set_up_queue(&mut self, index: u32, size: u32, base: u32) {
        self.write(reg::VIRTIO_MMIO_QUEUE_SEL, index);
        self.write(reg::VIRTIO_MMIO_QUEUE_NUM, size);
        self.write(reg::VIRTIO_MMIO_QUEUE_DESC_LOW, base);
        self.write(reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, base + 0x1000);
        self.write(reg::VIRTIO_MMIO_QUEUE_USED_LOW, base + 0x2000);
        self.write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
    }

    fn start(&mut self) {
        self.negotiate(OFFERED | 1 << VIRTIO_F_VERSION_1);
        self.set_up_queue(0, 64, 0x1000);
        self.set_up_queue(1, 128, 0x8000);
        self.write(reg::VIRTIO_MMIO_STATUS, ALL_BITS);
    }

    fn active(&self) -> bool {
        self.device.lock().unwrap().active
    }
}

#[test]
fn a_driver_can_bring_the_device_up() {
    let mut guest = Guest::new();
    assert_eq!(guest.read(reg::VIRTIO_MMIO_MAGIC_VALUE), 0x7472_6976);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_VERSION), 2);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_DEVICE_ID), 42);
    guest.start();
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), ALL_BITS);
    assert!(guest.active());
}

#[test]
fn version_1_is_offered_and_must_be_accepted() {
    let mut guest = Guest::new();
    guest.write(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_DEVICE_FEATURES), 1);
    guest.negotiate(OFFERED);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 1 | 2);
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let mut guest = Guest::new();
    guest.negotiate(1 << 7 | 1 << VIRTIO_F_VERSION_1);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 1 | 2);
}

#[test]
fn a_queue_outside_guest_memory_does_not_become_ready() {
    let mut guest = Guest::new();
    guest.negotiate(1 << VIRTIO_F_VERSION_1);
    guest.set_up_queue(0, 64, 0x10_0000 - 0x2000);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_QUEUE_READY), 0);
}

#[test]
fn a_queue_size_must_be_a_power_of_two_within_the_limit() {
    for size in [0, 3, 96, 128, 0x1_0040] {
        let mut guest = Guest::new();
        guest.negotiate(1 << VIRTIO_F_VERSION_1);
        guest.set_up_queue(0, size, 0x1000);
        assert_eq!(guest.read(reg::VIRTIO_MMIO_QUEUE_READY), 0, "size {size}");
    }
}

#[test]
fn a_missing_queue_makes_the_device_need_a_reset() {
    let mut guest = Guest::new();
    guest.negotiate(OFFERED | 1 << VIRTIO_F_VERSION_1);
    guest.set_up_queue(0, 64, 0x1000);
    guest.write(reg::VIRTIO_MMIO_STATUS, ALL_BITS);
    assert!(!guest.active());
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), ALL_BITS | 64);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 2);
}

#[test]
fn a_queue_that_the_features_do_not_need_may_be_missing() {
    let mut guest = Guest::new();
    guest.negotiate(1 << VIRTIO_F_VERSION_1);
    guest.set_up_queue(0, 64, 0x1000);
    guest.write(reg::VIRTIO_MMIO_STATUS, ALL_BITS);
    assert!(guest.active());
}

#[test]
fn a_device_that_refuses_shows_it() {
    let mut guest = Guest::new();
    guest.device.lock().unwrap().refuse = true;
    guest.start();
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), ALL_BITS | 64);
}

#[test]
fn reset_clears_everything_and_the_device_can_start_again() {
    let mut guest = Guest::new();
    guest.start();
    guest.interrupt.signal_needs_reset();
    guest.write(reg::VIRTIO_MMIO_STATUS, 0);
    assert!(!guest.active());
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 0);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_QUEUE_READY), 0);
    guest.start();
    assert_eq!(guest.device.lock().unwrap().activations, 2);
}

#[test]
fn failed_stops_all_but_a_reset() {
    let mut guest = Guest::new();
    guest.negotiate(OFFERED | 1 << VIRTIO_F_VERSION_1);
    guest.write(reg::VIRTIO_MMIO_STATUS, 1 | 2 | 8 | 128);
    guest.write(reg::VIRTIO_MMIO_STATUS, ALL_BITS | 128);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 1 | 2 | 8 | 128);
    guest.write(reg::VIRTIO_MMIO_STATUS, 0);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS), 0);
}

#[test]
fn stopping_a_running_queue_stops_the_device() {
    let mut guest = Guest::new();
    guest.start();
    guest.write(reg::VIRTIO_MMIO_QUEUE_SEL, 1);
    guest.write(reg::VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_QUEUE_READY), 0);
    assert!(!guest.active());
    assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS) & 64, 64);
}

#[test]
fn a_kick_that_misses_its_ioeventfd_is_not_lost() {
    let mut guest = Guest::new();
    guest.start();
    guest.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 1);
    assert!(guest.device.lock().unwrap().kicks.contains(&1));
}

#[test]
fn acknowledged_bits_go_out() {
    let mut guest = Guest::new();
    guest.interrupt.signal_config();
    guest.interrupt.signal_used_ring();
    assert_eq!(guest.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 3);
    guest.write(reg::VIRTIO_MMIO_INTERRUPT_ACK, 1);
    assert_eq!(guest.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 2);
}

#[test]
fn a_config_change_changes_the_generation() {
    let mut guest = Guest::new();
    let before = guest.read(reg::VIRTIO_MMIO_CONFIG_GENERATION);
    guest.interrupt.signal_config();
    assert_ne!(guest.read(reg::VIRTIO_MMIO_CONFIG_GENERATION), before);
}

#[test]
fn shared_memory_reads_as_absent() {
    let mut guest = Guest::new();
    guest.write(reg::VIRTIO_MMIO_SHM_SEL, 0);
    for register in [
        reg::VIRTIO_MMIO_SHM_LEN_LOW,
        reg::VIRTIO_MMIO_SHM_LEN_HIGH,
        reg::VIRTIO_MMIO_SHM_BASE_LOW,
        reg::VIRTIO_MMIO_SHM_BASE_HIGH,
    ] {
        assert_eq!(guest.read(register), u32::MAX);
    }
}

#[test]
fn config_space_has_any_width_and_registers_have_one() {
    let mut guest = Guest::new();
    for width in [1, 2, 4, 8] {
        let mut data = vec![0xEE; width];
        guest.transport.read(CONFIG + 3, &mut data);
        let expected: Vec<u8> = (3..).take(width).collect();
        assert_eq!(data, expected);
    }
    for width in [1, 2, 8] {
        let mut data = vec![0xEE; width];
        guest.transport.read(0, &mut data);
        assert_eq!(data, vec![0; width]);
    }
}

/// Register accesses that mostly make sense, so that random sequences get far.
fn access() -> impl Strategy<Value = (u64, Vec<u8>, bool)> {
    let register = prop_oneof![
        4 => Just(reg::VIRTIO_MMIO_STATUS),
        1 => (0u32..0x120).prop_map(|offset| offset & !3),
        1 => 0u32..0x1000,
        2 => Just(reg::VIRTIO_MMIO_QUEUE_READY),
        6 => prop::sample::select(vec![
            reg::VIRTIO_MMIO_DRIVER_FEATURES, reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL,
            reg::VIRTIO_MMIO_QUEUE_SEL, reg::VIRTIO_MMIO_QUEUE_NUM, reg::VIRTIO_MMIO_QUEUE_NOTIFY,
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW, reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW,
            reg::VIRTIO_MMIO_QUEUE_USED_LOW, reg::VIRTIO_MMIO_QUEUE_USED_HIGH,
        ]),
    ];
    let value = prop_oneof![
        4 => 0u32..4,
        4 => prop::sample::select(vec![1u32, 3, 8, 11, 15, 64, 128, 1 << 29, 1 << 3]),
        2 => (0u32..0x120).prop_map(|page| page << 12),
        1 => any::<u32>(),
    ];
    let data = prop_oneof![
        8 => value.prop_map(|value| value.to_le_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 1..=8),
    ];
    (register.prop_map(u64::from), data, any::<bool>())
}

proptest! {
    /// The probe asserts the promises of an activation; here no access may panic and the device
    /// must never run while the status register says it does not.
    #[test]
    fn random_accesses_never_break_the_promises(
        up in any::<bool>(),
        accesses in prop::collection::vec(access(), 1..200),
    ) {
        let mut guest = Guest::new();
        if up {
            guest.start();
        }
        for (offset, mut data, write) in accesses {
            if write {
                guest.transport.write(offset, &data);
            } else {
                guest.transport.read(offset, &mut data);
            }
            if guest.active() {
                let status = guest.read(reg::VIRTIO_MMIO_STATUS);
                prop_assert_eq!(status & ALL_BITS, ALL_BITS);
            }
            let accepted = guest.transport.registers.accepted();
            prop_assert_eq!(accepted & !(OFFERED | 1 << VIRTIO_F_VERSION_1), 0);
        }
    }
}
