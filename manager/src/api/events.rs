//! Events as they happen: those of before first, each once, in order, one line of JSON each.
//!
//! The follower reads from the registry after the last event it was given, and waits for word of
//! new ones when there are none. So it holds one batch at most, however slowly it is read; and one
//! that is so slow that events were dropped meanwhile is told how many.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::fleet::Fleet;
use crate::registry::{self, Event, Wanted};

/// Events read at a time.
const BATCH: usize = 128;

/// One line of the stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Line {
    /// Something that happened.
    Event(Event),
    /// So many events, of all sandboxes, were dropped before they could be sent.
    Lost {
        /// How many.
        lost: i64,
    },
}

/// Somebody who follows.
struct Follower {
    fleet: Arc<Fleet>,
    changes: watch::Receiver<()>,
    ending: watch::Receiver<bool>,
    wanted: Wanted,
    batch: VecDeque<Line>,
    /// Whether anything was read: before that nothing can be lost.
    begun: bool,
}

/// Events that are wanted, from those of before on, until the daemon ends.
pub(super) fn follow(
    fleet: Arc<Fleet>,
    ending: watch::Receiver<bool>,
    wanted: Wanted,
) -> impl IntoResponse {
    let changes = fleet.registry().changes();
    let follower =
        Follower { fleet, changes, ending, wanted, batch: VecDeque::new(), begun: false };
    let lines = stream::unfold(follower, |mut follower| async move {
        let line = follower.next().await?;
        let mut text = serde_json::to_vec(&line).ok()?;
        text.push(b'\n');
        Some((Ok::<_, Infallible>(Bytes::from(text)), follower))
    });
    let kind = [(CONTENT_TYPE, "application/x-ndjson")];
    (kind, Body::from_stream(lines)).into_response() as Response
}

impl Follower {
    async fn next(&mut self) -> Option<Line> {
        loop {
            if let Some(line) = self.batch.pop_front() {
                return Some(line);
            }
            // Asked before reading: what comes in between wakes the wait below.
            self.changes.mark_unchanged();
            match self.read() {
                Ok(()) if !self.batch.is_empty() => continue,
                Ok(()) => {}
                Err(error) => {
                    tracing::error!(%error, "events cannot be read");
                    return None;
                }
            }
            tokio::select! {
                changed = self.changes.changed() => changed.ok()?,
                _ = self.ending.wait_for(|ending| *ending) => return None,
            }
        }
    }

    fn read(&mut self) -> Result<(), registry::Error> {
        let after = self.wanted.after;
        let page = self.fleet.registry().events(&self.wanted, BATCH)?;
        if page.dropped > 0 && (self.begun || after > 0) {
            self.batch.push_back(Line::Lost { lost: page.dropped });
        }
        self.begun = true;
        self.wanted.after = page.read_to;
        self.batch.extend(page.events.into_iter().map(Line::Event));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;
    use crate::fleet::stub;
    use crate::registry::{Registry, Row};

    fn row() -> Row {
        stub::row(&stub::tenant("team"))
    }

    /// Numbers of events in the first bytes of a stream, until there are `count`.
    async fn numbers(body: &mut Body, count: usize) -> Vec<i64> {
        let (mut text, mut found) = (Vec::new(), Vec::new());
        while found.len() < count {
            let frame = body.frame().await.unwrap().unwrap();
            text.extend_from_slice(frame.data_ref().unwrap());
            while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = text.drain(..=end).collect();
                match serde_json::from_slice(&line).unwrap() {
                    Line::Event(event) => found.push(event.number),
                    Line::Lost { lost } => found.push(-lost),
                }
            }
        }
        found
    }

    fn body(fleet: &Arc<Fleet>, ending: &watch::Receiver<bool>, wanted: Wanted) -> Body {
        follow(Arc::clone(fleet), ending.clone(), wanted).into_response().into_body()
    }

    #[tokio::test]
    async fn each_event_comes_once_whenever_it_happens() {
        const ALL: i64 = 2 * 128 + 50;
        let (_dir, fleet) = stub::fleet(1);
        let (_end, ending) = watch::channel(false);
        let row = row();
        for _ in 0..2 * BATCH {
            fleet.registry().note(&row, "before", "").unwrap();
        }
        let mut body = body(&fleet, &ending, Wanted::default());
        let writer = tokio::task::spawn_blocking(move || {
            for _ in 2 * 128..ALL {
                fleet.registry().note(&row, "after", "").unwrap();
            }
        });
        let found = numbers(&mut body, usize::try_from(ALL).unwrap()).await;
        writer.await.unwrap();
        assert_eq!(found, (1..=ALL).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn who_reads_too_slowly_is_told_what_was_dropped() {
        let (dir, fleet) = stub::fleet(1);
        let (_end, ending) = watch::channel(false);
        let row = row();
        fleet.registry().note(&row, "first", "").unwrap();
        let mut body = body(&fleet, &ending, Wanted::default());
        assert_eq!(numbers(&mut body, 1).await, [1]);
        for _ in 0..3 {
            fleet.registry().note(&row, "more", "").unwrap();
        }
        // What keeping only the last of many does.
        let file = rusqlite::Connection::open(dir.path().join("manager.db")).unwrap();
        file.execute("DELETE FROM events WHERE number < 4", []).unwrap();
        assert_eq!(numbers(&mut body, 2).await, [-2, 4]);
    }

    #[tokio::test]
    async fn only_what_is_wanted_comes_and_nothing_seems_lost() {
        let (_dir, fleet) = stub::fleet(1);
        let (_end, ending) = watch::channel(false);
        let (own, other) = (row(), row());
        for row in [&own, &other, &other, &own] {
            fleet.registry().note(row, "some", "").unwrap();
        }
        let wanted = Wanted { sandbox: Some(own.id.to_string()), ..Wanted::default() };
        let mut body = body(&fleet, &ending, wanted);
        assert_eq!(numbers(&mut body, 2).await, [1, 4]);
        fleet.registry().note(&other, "some", "").unwrap();
        fleet.registry().note(&own, "some", "").unwrap();
        assert_eq!(numbers(&mut body, 1).await, [6]);
    }

    #[tokio::test]
    async fn it_ends_with_the_daemon() {
        let (_dir, fleet) = stub::fleet(1);
        let (end, ending) = watch::channel(false);
        let mut body = body(&fleet, &ending, Wanted::default());
        end.send_replace(true);
        assert!(body.frame().await.is_none());
    }

    #[tokio::test]
    async fn events_read_again_from_a_later_program() {
        let (dir, fleet) = stub::fleet(1);
        fleet.registry().note(&row(), "some", "text").unwrap();
        let registry = Registry::existing(dir.path()).unwrap().unwrap();
        assert_eq!(registry.events(&Wanted::default(), 9).unwrap().events.len(), 1);
        let empty = tempfile::tempdir().unwrap();
        assert!(Registry::existing(empty.path()).unwrap().is_none());
        assert!(!empty.path().join("manager.db").exists());
    }
}
