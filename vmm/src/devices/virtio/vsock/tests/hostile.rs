//! A guest that keeps to no rule.

use proptest::prelude::*;
use tempfile::TempDir;

use crate::devices::virtio::vsock::fuzz::play;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_guest_makes_the_device_panic_hang_or_grow(
        program in proptest::collection::vec(any::<u8>(), 0..1500),
    ) {
        let directory = TempDir::new().unwrap();
        play(&program, directory.path());
    }
}
