//! Lives of sandboxes while others wait in line.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::timeout;

use super::stub::{fleet, tenant};
use super::{Error, Fleet};
use crate::registry::Tenant;

/// Every start that may be under way.
fn all_starts(fleet: &Fleet, tenant: &Tenant) -> Vec<super::queue::Start> {
    let start = || fleet.queue.start(tenant).now_or_never().map(Result::unwrap);
    std::iter::from_fn(start).collect()
}

#[tokio::test]
async fn a_paused_sandbox_is_removed_while_its_resume_waits() {
    let (_dir, fleet) = fleet(10);
    let tenant = tenant("one");
    fleet.add_paused(&tenant, 1);
    let member = fleet.members().values().next().cloned().unwrap();
    let starts = all_starts(&fleet, &tenant);
    let (waking, woken) = (Arc::clone(&fleet), Arc::clone(&member));
    let resume = tokio::spawn(async move { waking.wake_or_extend(&woken, 1000).await });
    while member.turn.try_lock().is_ok() {
        tokio::task::yield_now().await;
    }
    timeout(Duration::from_secs(10), fleet.kill(&member)).await.unwrap().unwrap();
    assert!(fleet.member(member.id().as_str()).is_none());
    let resumed = timeout(Duration::from_secs(10), resume).await.unwrap().unwrap();
    assert!(matches!(resumed, Err(Error::NotFound { .. })), "{resumed:?}");
    drop(starts);
}
