//! The entropy device (virtio 1.2 section 5.4): random bytes from the host's kernel.

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_queue::DescriptorChain;
use vm_memory::{Address as _, Bytes as _};

use super::queue::ActiveQueue;
use super::{ActivateError, Activation, EVENT_IDX, QueuePosition, VirtioDevice};
use crate::devices::{OwnState, StateError};
use crate::memory::GuestRam;
use crate::sys::random;

const NAME: &str = "rng";
const STATE_VERSION: u16 = 1;
const QUEUE_SIZE: u16 = 16;

/// Most bytes for one request. A kernel asks for some dozens; one that wants more asks again.
const REQUEST_MAX: usize = 4096;

/// Bytes made at a time.
const CHUNK: usize = 256;

/// The entropy device.
#[derive(Debug, Default)]
pub struct Rng {
    queue: Option<ActiveQueue>,
}

/// The device has no state but its queue.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {}

impl Rng {
    fn attach(&mut self, activation: Activation) {
        let Activation { ram, queues, interrupt, .. } = activation;
        self.queue = queues.into_iter().next().map(|queue| ActiveQueue::new(queue, ram, interrupt));
    }
}

impl VirtioDevice for Rng {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.attach(activation);
        Ok(())
    }

    fn reset(&mut self) {
        self.queue = None;
    }

    fn queue_positions(&self) -> Option<Vec<QueuePosition>> {
        self.queue.as_ref().map(|queue| vec![queue.position()])
    }

    fn save(&self) -> Result<OwnState, StateError> {
        OwnState::encode(NAME, STATE_VERSION, &State {})
    }

    fn restore(
        &mut self,
        state: &OwnState,
        activation: Option<Activation>,
    ) -> Result<(), StateError> {
        let State {} = state.decode(NAME, STATE_VERSION)?;
        activation.into_iter().for_each(|activation| self.attach(activation));
        Ok(())
    }

    fn queue_event(&mut self, _index: usize) {
        if let Some(queue) = &mut self.queue {
            queue.drain(fill);
        }
    }
}

/// Fills the writable part of a chain from its start and returns how many bytes it filled.
fn fill(ram: &GuestRam, chain: DescriptorChain<&GuestRam>) -> u32 {
    let mut bytes = [0; CHUNK];
    let mut filled = 0;
    for descriptor in chain.writable() {
        let mut addr = descriptor.addr();
        let mut left = usize::try_from(descriptor.len()).unwrap_or(0).min(REQUEST_MAX - filled);
        while left > 0 {
            let now = &mut bytes[..left.min(CHUNK)];
            if let Err(error) = random::fill(now) {
                tracing::error!(%error, "the host has no random bytes to give");
                return told(filled);
            }
            let Ok(next) = ram.write_slice(now, addr).map(|()| addr.checked_add(CHUNK as u64))
            else {
                return told(filled);
            };
            filled += now.len();
            left -= now.len();
            match next {
                Some(next) => addr = next,
                None => return told(filled),
            }
        }
    }
    told(filled)
}

fn told(filled: usize) -> u32 {
    u32::try_from(filled).unwrap_or(0)
}

#[cfg(test)]
mod tests;
