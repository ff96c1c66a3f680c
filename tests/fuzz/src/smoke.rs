//! Runs every body over seeds and over random bytes that are the same in every run.

/// Random bytes by xorshift: quick, and a failure comes back with its number.
fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    std::iter::repeat_with(step).take(len).collect()
}

fn smoke(body: fn(&[u8]), rounds: u64, longest: usize) {
    body(&[]);
    for round in 0..rounds {
        let len = usize::try_from(round).unwrap() * 37 % longest;
        body(&random(round, len));
    }
}

/// Seeds with one byte after the other changed, and cut off everywhere.
fn mutate(body: fn(&[u8]), seed: &[u8]) {
    body(seed);
    for place in 0..seed.len() {
        body(&seed[..place]);
        let mut changed = seed.to_vec();
        for value in [0, 0xFF, changed[place] ^ 0x80, changed[place].wrapping_add(1)] {
            changed[place] = value;
            body(&changed);
        }
    }
}

#[test]
fn virtio_mmio() {
    smoke(super::virtio_mmio::run, 2000, 3000);
}

#[test]
fn device_state() {
    smoke(super::device_state::run, 3000, 600);
}

#[test]
fn blk_request() {
    smoke(super::blk_request::run, 500, 2000);
}

#[test]
fn vsock_packet() {
    smoke(super::vsock_packet::run, 500, 3000);
}

#[test]
fn kernel_loader() {
    smoke(super::kernel_loader::run, 100, 4000);
    mutate(super::kernel_loader::run, &kernel_seed());
}

#[test]
fn image() {
    smoke(super::image::run, 4000, 700);
    // Every byte of a file that a version wrote, but for the unused room before its page data
    // and the page data itself.
    let golden = include_bytes!("../../../vmm/image/tests/golden/format-1.ckpt");
    let behind_pages = golden.len() - 600;
    for place in (0..200).chain(behind_pages..golden.len()) {
        super::image::run(&golden[..place]);
        let mut changed = golden.to_vec();
        changed[place] ^= 0x80;
        super::image::run(&changed);
    }
}

#[test]
fn control_message() {
    smoke(super::control_message::run, 1000, 500);
    for seed in [
        r#"{"id":1,"op":{"create":{"vcpus":2,"memory_mib":128,"kernel":0,"cmdline":"quiet","disks":[{"fd":1,"read_only":false,"overlay":2,"serial":"a"}],"vsock":{"cid":3,"listener":3,"directory":4,"name":"v"},"balloon":{"target_mib":0,"free_page_reporting":true}}}}"#,
        r#"{"id":2,"op":{"set_balloon":{"target_mib":7}}}"#,
        r#"{"id":3,"result":{"error":{"kind":"kernel","message":"no"}}}"#,
        r#"{"event":{"exited":{"reason":{"failed":{"message":"m"}}}}}"#,
    ] {
        mutate(super::control_message::run, seed.as_bytes());
    }
}

/// The bytes of [`super::kernel_loader::run`] with a tiny ELF kernel: one segment at 1 MiB.
fn kernel_seed() -> Vec<u8> {
    let mut seed = vec![0, 0, 0, 0];
    seed.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    seed.extend(2u16.to_le_bytes());
    seed.extend(62u16.to_le_bytes());
    seed.extend(1u32.to_le_bytes());
    seed.extend(0x10_0000u64.to_le_bytes());
    seed.extend(64u64.to_le_bytes());
    seed.extend([0; 12]);
    seed.extend([64u16, 56, 1, 0, 0, 0].map(u16::to_le_bytes).concat());
    seed.extend([1u32, 5].map(u32::to_le_bytes).concat());
    seed.extend([120u64, 0x10_0000, 0x10_0000, 16, 16, 0x1000].map(u64::to_le_bytes).concat());
    seed.extend([0xF4; 16]);
    seed
}
