//! The end of sandboxes whose time is over.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::{Fleet, Member};
use crate::registry::{OnTimeout, Row, State, now_ms};

/// Longest wait for a deadline: the clock it is measured by may be set meanwhile.
const LONGEST: Duration = Duration::from_secs(60);
/// How long to leave a sandbox alone that could not be ended.
const AGAIN_MS: u64 = 30_000;

impl Fleet {
    /// Ends or pauses each sandbox when its time is over; never returns.
    pub async fn expire(self: Arc<Self>) {
        loop {
            let now = now_ms();
            let (mut due, mut next) = (Vec::new(), None::<u64>);
            for member in self.members().values() {
                match member.about(|row| (row.state, row.end_ms)) {
                    (State::Running, end_ms) if end_ms <= now => due.push(Arc::clone(member)),
                    (State::Running, end_ms) => {
                        next = Some(next.map_or(end_ms, |next| next.min(end_ms)));
                    }
                    _ => {}
                }
            }
            for member in due {
                tokio::spawn(Arc::clone(&self).end_of_time(member, now));
                next = Some(now.saturating_add(AGAIN_MS).min(next.unwrap_or(u64::MAX)));
            }
            let wait = next.map_or(LONGEST, |next| Duration::from_millis(next.saturating_sub(now)));
            let _woken = timeout(wait.min(LONGEST), self.expiry.notified()).await;
        }
    }

    async fn end_of_time(self: Arc<Self>, member: Arc<Member>, now: u64) {
        // It may have got more time, or have been paused, while others had their turn.
        let over = move |row: &Row| row.state == State::Running && row.end_ms <= now;
        let ended = match member.about(|row| row.on_timeout) {
            OnTimeout::Kill => self.kill_if(&member, over, "its time was over").await,
            OnTimeout::Pause => self.pause_if(&member, over).await.map(drop),
        };
        if let Err(error) = ended {
            tracing::error!(sandbox = %member.id(), %error, "a sandbox could not be ended in time");
        }
    }
}
