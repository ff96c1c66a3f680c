//! The clock of one sample: it starts when the request is issued, and every stage has its time.

use std::time::Instant;

use crate::model::Stage;

/// Runs from its creation on.
#[derive(Debug)]
pub struct Clock {
    started: Instant,
    stages: Vec<Stage>,
}

impl Clock {
    /// Starts now.
    #[must_use]
    pub fn start() -> Self {
        Self::since(Instant::now())
    }

    /// Started at a moment that others share.
    #[must_use]
    pub fn since(started: Instant) -> Self {
        Self { started, stages: Vec::with_capacity(8) }
    }

    /// Milliseconds until now.
    #[must_use]
    pub fn ms(&self) -> f64 {
        self.started.elapsed().as_secs_f64() * 1000.0
    }

    /// Writes down that a stage is reached; gives its time in milliseconds.
    pub fn mark(&mut self, name: &str) -> f64 {
        let ms = self.ms();
        self.stages.push(Stage { name: name.to_owned(), ms });
        ms
    }

    /// The time of a stage, if it was reached.
    #[must_use]
    pub fn at(&self, name: &str) -> Option<f64> {
        self.stages.iter().find(|stage| stage.name == name).map(|stage| stage.ms)
    }

    /// All stages, in order.
    #[must_use]
    pub fn into_stages(self) -> Vec<Stage> {
        self.stages
    }
}
