//! vsock between host and guest under load: many streams, half-closed ones, slow readers.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use coppice_manager::sandbox::Sandbox;
use sha2::{Digest as _, Sha256};

use crate::common::{block_on, config, on_lane, tiny};

/// SHA-256 in lower-case hex, as `sha256sum` prints it.
pub(crate) fn sha256_hex(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes that differ from stream to stream.
fn pattern(stream: u32, len: u32) -> Vec<u8> {
    let mut state = stream.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[0]
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn a_hundred_streams_at_once_carry_their_own_bytes() {
    on_lane!({
        block_on(async {
            let runtime = tempfile::tempdir().unwrap();
            let (sandbox, _) = Sandbox::start(&config(runtime.path())).await.unwrap();
            let mut tasks = Vec::new();
            for stream in 0..100u32 {
                let agent = Arc::clone(sandbox.agent());
                tasks.push(async move {
                    let path = format!("/tmp/stream-{stream}");
                    let data = pattern(stream, 40_000 + stream * 311);
                    agent.upload(&path, None, std::io::Cursor::new(data.clone())).await.unwrap();
                    let mut download = agent.download(&path, None).await.unwrap();
                    let mut back = Vec::new();
                    while let Some(piece) = download.next().await.unwrap() {
                        back.extend_from_slice(&piece);
                    }
                    assert_eq!(sha256_hex(&back), sha256_hex(&data), "stream {stream}");
                });
            }
            let local = tokio::task::LocalSet::new();
            let handles: Vec<_> = tasks.into_iter().map(|task| local.spawn_local(task)).collect();
            local
                .run_until(async {
                    for handle in handles {
                        handle.await.unwrap();
                    }
                })
                .await;
            sandbox.shutdown(Duration::from_secs(5)).await;
        });
    });
}

#[test]
fn a_half_closed_stream_still_gets_its_answer() {
    on_lane!({
        block_on(async {
            let runtime = tempfile::tempdir().unwrap();
            let (sandbox, _) = Sandbox::start(&config(runtime.path())).await.unwrap();
            let socket = sandbox.directory().join("vsock");
            let exchange = tokio::task::spawn_blocking(move || {
                let mut stream = UnixStream::connect(socket).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                stream.write_all(b"CONNECT 49983\n").unwrap();
                let mut byte = [0u8];
                while byte != *b"\n" {
                    stream.read_exact(&mut byte).unwrap();
                }
                let request = "GET /files?path=/etc/passwd HTTP/1.1\r\nhost: x\r\n\
                               connection: close\r\n\r\n";
                stream.write_all(request.as_bytes()).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).unwrap();
                answer
            });
            let answer = exchange.await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            assert!(answer.contains("root:"), "{answer}");
            sandbox.stop().await;
        });
    });
}

/// Resident memory of a process without the guest's RAM, in KiB.
fn own_memory_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    anonymous.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap()
}

#[test]
fn endless_output_with_a_slow_reader_grows_no_memory() {
    on_lane!({
        let mut child =
            tiny(&[], &["yes", "0123456789abcdef"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        let mut piece = vec![0u8; 64 * 1024];
        // Fill every buffer on the way, then read a little at a time.
        output.read_exact(&mut piece).unwrap();
        let before = own_memory_kib(child.id());
        for _ in 0..64 {
            output.read_exact(&mut piece).unwrap();
        }
        let after = own_memory_kib(child.id());
        let machine = crate::cycles::vmm_processes()[0];
        let use_of_vmm = coppice_manager_memory(machine);
        drop(output);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(after <= before + 1024, "the manager grew from {before} to {after} KiB");
        assert!(use_of_vmm <= 6 * 1024, "the VMM takes {use_of_vmm} KiB besides guest RAM");
    });
}

/// Pss of a VMM process without guest RAM, in KiB: mappings of at least half the guest's memory
/// are its RAM.
fn coppice_manager_memory(pid: u32) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut size = 0u64;
    let mut pss = 0u64;
    for line in smaps.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let Some(kib) = value.trim().strip_suffix(" kB") else { continue };
        let kib: u64 = kib.trim().parse().unwrap();
        match name {
            "Size" => size = kib,
            "Pss" if size < 32 * 1024 => pss += kib,
            _ => {}
        }
    }
    pss
}
