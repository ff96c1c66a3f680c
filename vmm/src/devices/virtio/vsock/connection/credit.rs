//! Credit: how much each side may send before the other says that it has room
//! (virtio 1.2 section 5.10.6.3).

use super::super::packet::Header;

/// Bytes one connection may have waiting for its host reader, and so the credit the guest starts
/// with.
pub(crate) const BUFFER_SIZE: u32 = 64 * 1024;
/// The guest hears of new room once its credit has sunk to this many bytes.
const LOW_CREDIT: u32 = BUFFER_SIZE / 2;
/// Less new room than this is not worth a packet while more is to come.
const WORTH_TELLING: u32 = BUFFER_SIZE / 4;

/// The counters of one connection. All of them wrap.
#[derive(Debug, Default)]
pub(crate) struct Credit {
    /// Bytes received from the guest.
    received: u32,
    /// Those of them that left for the host or were thrown away.
    forwarded: u32,
    /// What `forwarded` was when the guest last heard of it.
    told: u32,
    /// Bytes sent to the guest.
    sent: u32,
    /// Those of them that the guest says it has taken out of its buffer.
    peer_forwarded: u32,
    /// Size of the guest's buffer.
    peer_buffer: u32,
}

impl Credit {
    /// Takes the guest's counters from a packet.
    ///
    /// `fwd_cnt` only moves forward, up to what was sent. One that does not is out of date (two
    /// threads of a guest may swap their packets) or a lie, and is left aside.
    pub(crate) fn update(&mut self, header: &Header) {
        self.peer_buffer = header.buf_alloc;
        if self.sent.wrapping_sub(header.fwd_cnt) <= self.in_flight() {
            self.peer_forwarded = header.fwd_cnt;
        }
    }

    fn in_flight(&self) -> u32 {
        self.sent.wrapping_sub(self.peer_forwarded)
    }

    /// Bytes the guest has room for.
    pub(crate) fn window(&self) -> u32 {
        self.peer_buffer.saturating_sub(self.in_flight())
    }

    /// `count` bytes went to the guest.
    pub(crate) fn sent(&mut self, count: u32) {
        self.sent = self.sent.wrapping_add(count);
    }

    /// Whether the guest may send `count` bytes now.
    pub(crate) fn allows(&self, count: u32) -> bool {
        let waiting = self.received.wrapping_sub(self.forwarded);
        waiting.checked_add(count).is_some_and(|total| total <= BUFFER_SIZE)
    }

    /// `count` bytes came from the guest.
    pub(crate) fn received(&mut self, count: u32) {
        self.received = self.received.wrapping_add(count);
    }

    /// `count` bytes of those received need no more room.
    pub(crate) fn forwarded(&mut self, count: u32) {
        self.forwarded = self.forwarded.wrapping_add(count);
    }

    /// Whether the guest should hear of new room: it runs low, and there is something to say.
    pub(crate) fn is_update_due(&self) -> bool {
        let spent = self.received.wrapping_sub(self.told);
        let news = self.forwarded.wrapping_sub(self.told);
        let all_gone = self.forwarded == self.received;
        spent >= BUFFER_SIZE - LOW_CREDIT && news > 0 && (all_gone || news >= WORTH_TELLING)
    }

    /// Writes our counters into a packet; the guest knows them then.
    pub(crate) fn stamp(&mut self, header: &mut Header) {
        header.buf_alloc = BUFFER_SIZE;
        header.fwd_cnt = self.forwarded;
        self.told = self.forwarded;
    }
}
