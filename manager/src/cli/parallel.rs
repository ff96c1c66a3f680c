//! Several jobs at a time, with their results in the order of the jobs.

use std::collections::BTreeMap;
use std::thread::available_parallelism;

use tokio::task::JoinSet;

/// How many jobs run at a time: they wait for other processes most of the time.
fn limit() -> usize {
    available_parallelism().map_or(1, usize::from).saturating_mul(2)
}

/// Runs all jobs, and hands each result to `done` once those of all jobs before it were. `done`
/// says whether to go on: after a no, jobs that were begun are brought to their end, and no more.
pub(super) async fn in_order<T: Send + 'static>(
    jobs: impl IntoIterator<Item = impl Future<Output = T> + Send + 'static>,
    mut done: impl FnMut(T) -> bool,
) {
    let mut jobs = jobs.into_iter().enumerate();
    let mut running = JoinSet::new();
    let mut early = BTreeMap::new();
    let (mut next, mut wanted) = (0, true);
    loop {
        while wanted
            && running.len() < limit()
            && let Some((number, job)) = jobs.next()
        {
            running.spawn(async move { (number, job.await) });
        }
        let Some(joined) = running.join_next().await else { return };
        match joined {
            Ok((number, result)) => early.insert(number, result),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // Nobody cancels them.
                Err(_) => return,
            },
        };
        while let Some(result) = early.remove(&next) {
            wanted &= done(result);
            next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Barrier;

    use super::*;

    #[tokio::test]
    async fn results_come_in_order_whatever_the_order_of_the_ends() {
        let turn = Arc::new(tokio::sync::Semaphore::new(0));
        let first = Arc::clone(&turn);
        let jobs: Vec<std::pin::Pin<Box<dyn Future<Output = u32> + Send>>> = vec![
            Box::pin(async move { first.acquire().await.map_or(9, |_| 0) }),
            Box::pin(async move {
                turn.add_permits(1);
                1
            }),
        ];
        let mut seen = Vec::new();
        in_order(jobs, |number| {
            seen.push(number);
            true
        })
        .await;
        assert_eq!(seen, [0, 1]);
    }

    #[tokio::test]
    async fn as_many_run_at_a_time_as_are_allowed() {
        // Each waits for all others that are allowed beside it.
        let barrier = Arc::new(Barrier::new(limit()));
        let running = Arc::new(AtomicUsize::new(0));
        let jobs = (0..3 * limit()).map(|_| {
            let (barrier, running) = (Arc::clone(&barrier), Arc::clone(&running));
            async move {
                assert!(running.fetch_add(1, Ordering::SeqCst) < limit());
                barrier.wait().await;
                running.fetch_sub(1, Ordering::SeqCst);
            }
        });
        in_order(jobs, |()| true).await;
        assert_eq!(running.load(Ordering::SeqCst), 0);
    }

    #[tokio::test]
    async fn after_a_no_nothing_new_is_begun() {
        let begun = Arc::new(AtomicUsize::new(0));
        let jobs = (0..100 * limit()).map(|_| {
            let begun = Arc::clone(&begun);
            async move { begun.fetch_add(1, Ordering::SeqCst) }
        });
        in_order(jobs, |_| false).await;
        assert!(begun.load(Ordering::SeqCst) <= 2 * limit());
    }
}
