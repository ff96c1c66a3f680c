//! The order in which starts are made.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use tokio::time::timeout;

use super::*;

fn tenant(name: &str) -> Tenant {
    Tenant::new(name).unwrap()
}

/// A start that waits, in a task of its own, as far as it gets without anything happening.
async fn waiting(queue: &Arc<Queue>, name: &str) -> tokio::task::JoinHandle<Start> {
    let (queue, tenant) = (Arc::clone(queue), tenant(name));
    let task = tokio::spawn(async move { queue.start(&tenant).await.unwrap() });
    tokio::task::yield_now().await;
    task
}

/// What a task has got, if it gets it.
async fn got(task: tokio::task::JoinHandle<Start>) -> Start {
    timeout(Duration::from_secs(10), task).await.unwrap().unwrap()
}

#[tokio::test]
async fn tenants_take_turns_however_many_one_asks_for() {
    let queue = Queue::new(1);
    let first = got(waiting(&queue, "greedy").await).await;
    let mut greedy = Vec::new();
    for _ in 0..500 {
        greedy.push(waiting(&queue, "greedy").await);
    }
    let modest = waiting(&queue, "modest").await;
    drop(first);
    let second = got(greedy.remove(0)).await;
    assert!(!modest.is_finished());
    drop(second);
    drop(got(modest).await);
    drop(got(greedy.remove(0)).await);
}

#[tokio::test]
async fn who_goes_away_gives_up_its_place() {
    let queue = Queue::new(1);
    let first = got(waiting(&queue, "a").await).await;
    let gone = waiting(&queue, "a").await;
    let stays = waiting(&queue, "a").await;
    gone.abort();
    gone.await.unwrap_err();
    assert_eq!(queue.now().waiters.len(), 1);
    drop(first);
    drop(got(stays).await);
    assert_eq!(queue.now().line.free, 1);
}

/// It was called and does not know it yet.
#[tokio::test]
async fn who_goes_away_when_it_is_called_hands_it_on() {
    let queue = Queue::new(1);
    let first = got(waiting(&queue, "a").await).await;
    let gone = waiting(&queue, "a").await;
    let stays = waiting(&queue, "b").await;
    drop(first);
    gone.abort();
    drop(got(stays).await);
    assert_eq!(queue.now().line.free, 1);
}

#[tokio::test]
async fn what_can_wait_waits_until_nobody_else_does() {
    let queue = Queue::new(1);
    let first = got(waiting(&queue, "a").await).await;
    let other = Arc::clone(&queue);
    let idle = tokio::spawn(async move { other.idle().await.unwrap() });
    tokio::task::yield_now().await;
    let second = waiting(&queue, "a").await;
    drop(first);
    let second = got(second).await;
    assert!(!idle.is_finished());
    drop(second);
    drop(got(idle).await);
}

#[tokio::test]
async fn a_line_has_an_end_for_one_and_for_all() {
    let queue = Queue::new(0);
    let mut line = Line::new(0);
    for _ in 0..MAX_OWN {
        line.join(Some(tenant("a"))).unwrap();
    }
    queue.now().line = line;
    let refused = queue.start(&tenant("a")).await;
    assert!(matches!(refused, Err(Error::Queue { .. })), "{refused:?}");
    for other in 0..MAX_ALL - MAX_OWN {
        queue.now().line.join(Some(tenant(&format!("b{other}")))).unwrap();
    }
    let refused = queue.start(&tenant("c")).await;
    assert!(matches!(refused, Err(Error::Busy)), "{refused:?}");
}

#[derive(Debug, Clone)]
enum Step {
    Join(u8),
    JoinIdle,
    Leave(prop::sample::Index),
    Done,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..5u8).prop_map(Step::Join),
        1 => Just(Step::JoinIdle),
        1 => any::<prop::sample::Index>().prop_map(Step::Leave),
        4 => Just(Step::Done),
    ]
}

proptest! {
    /// No more than may be are under way and no place is free while somebody waits; one's own come
    /// in order; and while somebody waits, nobody else is called twice.
    #[test]
    fn turns_are_fair(free in 1..4usize, steps in prop::collection::vec(step(), 0..300)) {
        let mut line = Line::new(free);
        let mut waiting: Vec<(Option<u8>, u64)> = Vec::new();
        let mut under_way = 0;
        // How often others were called while one has waited for its next turn.
        let mut passed_by: BTreeMap<(u8, u8), u32> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Join(who) => {
                    if !waiting.iter().any(|(other, _)| *other == Some(who)) {
                        passed_by.retain(|(waits, _), _| *waits != who);
                    }
                    waiting.push((Some(who), line.join(Some(who)).unwrap()));
                }
                Step::JoinIdle => waiting.push((None, line.join(None).unwrap())),
                Step::Leave(which) if !waiting.is_empty() => {
                    let (_, ticket) = waiting.remove(which.index(waiting.len()));
                    line.leave(ticket);
                }
                Step::Done if under_way > 0 => {
                    under_way -= 1;
                    line.done();
                }
                Step::Leave(_) | Step::Done => {}
            }
            while let Some(ticket) = line.call() {
                let at = waiting.iter().position(|(_, other)| *other == ticket).unwrap();
                let (who, _) = waiting.remove(at);
                under_way += 1;
                let earlier = waiting.iter().any(|(other, t)| *other == who && *t < ticket);
                prop_assert!(!earlier, "{who:?} was passed by its own");
                let Some(who) = who else {
                    prop_assert!(waiting.iter().all(|(other, _)| other.is_none()));
                    continue;
                };
                passed_by.retain(|(waits, _), _| *waits != who);
                for waits in 0..5 {
                    if waits != who && waiting.iter().any(|(other, _)| *other == Some(waits)) {
                        let times = passed_by.entry((waits, who)).or_default();
                        *times += 1;
                        prop_assert!(*times <= 1, "{who} was called twice while {waits} waited");
                    }
                }
            }
            prop_assert!(under_way <= free);
            prop_assert!(waiting.is_empty() || under_way == free);
        }
    }
}
