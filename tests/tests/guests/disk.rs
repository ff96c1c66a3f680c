//! Block devices under concurrent load, with checksums on both sides.

use std::io::{Read as _, Seek as _, Write as _};

use coppice_vmm_protocol::ExitReason;

use crate::common::{block_on, coppice, on_lane, shell_machine, stdout, tiny};
use crate::streams::sha256_hex;

#[test]
fn concurrent_writers_read_back_what_they_wrote() {
    on_lane!({
        // Each worker writes its own file, syncs it, drops caches and compares; the page cache
        // is dropped again before the last look at all of them.
        let script = r#"
            cd /root && mkdir data && cd data || exit 1
            worker() {
                dd if=/dev/urandom of=f$1 bs=64k count=24 2>/dev/null && sync &&
                sha256sum f$1 > s$1 && echo 3 > /proc/sys/vm/drop_caches && sha256sum -c s$1
            }
            for i in 1 2 3 4 5 6; do worker $i > log$i 2>&1 || touch failed & done
            wait
            echo 3 > /proc/sys/vm/drop_caches
            for i in 1 2 3 4 5 6; do sha256sum -c s$i || touch failed; done
            test ! -e failed
        "#;
        let out = stdout(&mut tiny(&["--cpus", "2", "--user", "root"], &["sh", "-c", script]));
        assert_eq!(out.lines().filter(|line| line.ends_with(": OK")).count(), 6, "{out}");
    });
}

#[test]
fn what_a_guest_syncs_is_in_the_backing_file() {
    on_lane!({
        let mut disk = tempfile::tempfile().unwrap();
        let mut data: Vec<u8> =
            (0..1u32 << 20).map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
        disk.write_all(&data).unwrap();
        let copy = disk.try_clone().unwrap();
        block_on(async {
            let (vmm, mut terminal) = shell_machine(vec![copy]).await;
            // The second half is copied over the first, inside the guest.
            terminal.type_line("mount -t devtmpfs dev /dev");
            terminal.type_line(
                "dd if=/dev/vdb of=/dev/vdb bs=4096 count=128 skip=128 conv=notrunc,fsync; \
                 poweroff -f",
            );
            assert_eq!(vmm.ended().await.reason, Some(ExitReason::PowerOff));
        });
        let (first, second) = data.split_at_mut(512 << 10);
        first.copy_from_slice(second);
        let mut after = Vec::new();
        disk.rewind().unwrap();
        disk.read_to_end(&mut after).unwrap();
        assert_eq!(sha256_hex(&after), sha256_hex(&data));
    });
}

#[test]
fn a_debian_file_system_is_clean_after_heavy_use() {
    on_lane!({
        let script = "cd ~ && for i in $(seq 60); do head -c 100000 /dev/urandom > f$i; done && \
                      rm f1? && tar cf all.tar f* && sync && tar tf all.tar | wc -l";
        let mut command = coppice(&["run", "--cpus", "2", "--", "bash", "-c", script]);
        assert_eq!(stdout(&mut command), "50\n");
    });
}
