//! What guest RAM looks like through a stack of layers: for each page the file that holds it.
//!
//! A view starts as zeroes; layers are pushed from the root on, and a later one hides what it
//! holds of the earlier ones. It keeps sorted spans, so that a lookup is a binary search and a
//! push one merge.

use std::ops::Range;

use thiserror::Error;

use crate::index::{Extent, PageIndex};

/// Where a run's content lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Nowhere: it is zeroes.
    Zero,
    /// In a layer's file.
    Layer {
        /// The number the layer was pushed with.
        layer: u16,
        /// The page of the file with the run's first page.
        page: u64,
    },
}

impl Source {
    /// The source of the page `pages` further on.
    fn skip(self, pages: u64) -> Self {
        match self {
            Self::Zero => Self::Zero,
            Self::Layer { layer, page } => Self::Layer { layer, page: page.saturating_add(pages) },
        }
    }
}

/// Consecutive pages of guest RAM whose content lies consecutively in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first page of guest RAM.
    pub first: u64,
    /// Number of pages, from 1.
    pub count: u64,
    /// Where their content lies.
    pub source: Source,
}

impl Run {
    /// The page behind the last one.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.count)
    }

    /// The part of the run from `from` to before `to`, if there is any.
    fn part(&self, from: u64, to: u64) -> Option<Self> {
        let (first, end) = (self.first.max(from), self.end().min(to));
        let source = self.source.skip(first.saturating_sub(self.first));
        (first < end).then(|| Self { first, count: end - first, source })
    }
}

/// A layer that cannot be pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ViewError {
    /// The layer holds pages that the view does not have.
    #[error("the layer has page {page}, but guest RAM has {ram_pages} pages only")]
    OutsideRam {
        /// The layer's last page.
        page: u64,
        /// Pages of the view.
        ram_pages: u64,
    },
}

/// Contents of guest RAM over layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// Ascending, not overlapping, coalesced; what lies between is zeroes.
    spans: Vec<Run>,
    ram_pages: u64,
}

impl View {
    /// RAM of `ram_pages` zero pages.
    #[must_use]
    pub fn empty(ram_pages: u64) -> Self {
        Self { spans: Vec::new(), ram_pages }
    }

    /// Number of pages.
    #[must_use]
    pub fn ram_pages(&self) -> u64 {
        self.ram_pages
    }

    /// Number of runs that are not zeroes.
    #[must_use]
    pub fn span_count(&self) -> usize {
        self.spans.len()
    }

    /// Puts a layer on top; `layer` is the number that runs name it by. Takes time for the sum of
    /// both sides' extents.
    ///
    /// # Errors
    ///
    /// [`ViewError::OutsideRam`] if the layer belongs to a larger machine; the view is as before.
    pub fn push(&mut self, layer: u16, index: &PageIndex) -> Result<(), ViewError> {
        let extents = index.extents();
        if let Some(last) = extents.last()
            && last.end() > self.ram_pages
        {
            let page = last.end().saturating_sub(1);
            return Err(ViewError::OutsideRam { page, ram_pages: self.ram_pages });
        }
        let mut merged = Spans(Vec::with_capacity(self.spans.len() + extents.len()));
        let mut below = self.spans.iter().copied().peekable();
        for extent in extents {
            // What lies below and before the extent stays, what it covers goes.
            while let Some(span) = below.next_if(|span| span.end() <= extent.first) {
                merged.add(span);
            }
            if let Some(head) = below.peek().and_then(|span| span.part(0, extent.first)) {
                merged.add(head);
            }
            while below.next_if(|span| span.end() <= extent.end()).is_some() {}
            if let Some(span) = below.peek_mut()
                && let Some(rest) = span.part(extent.end(), u64::MAX)
            {
                *span = rest;
            }
            merged.add_extent(layer, extent);
        }
        below.for_each(|span| merged.add(span));
        self.spans = merged.0;
        Ok(())
    }

    /// The runs that cover `range` without a gap, in ascending order; each as long as it can be.
    /// Pages that the view does not have are left out.
    #[must_use]
    pub fn runs(&self, range: Range<u64>) -> ViewRuns<'_> {
        let end = range.end.min(self.ram_pages);
        let start = self.spans.partition_point(|span| span.end() <= range.start);
        ViewRuns { spans: self.spans.get(start..).unwrap_or_default(), at: range.start, end }
    }
}

/// Spans under construction.
struct Spans(Vec<Run>);

impl Spans {
    /// Adds a span behind the others, or to the last one if it continues it.
    fn add(&mut self, span: Run) {
        if let Some(last) = self.0.last_mut()
            && last.end() == span.first
            && last.source.skip(last.count) == span.source
        {
            last.count += span.count;
            return;
        }
        self.0.push(span);
    }

    fn add_extent(&mut self, layer: u16, extent: &Extent) {
        if let Some(page) = extent.data {
            let source = Source::Layer { layer, page };
            self.add(Run { first: extent.first, count: extent.count, source });
        }
    }
}

/// Iterator over the runs of a [`View`].
#[derive(Debug, Clone)]
pub struct ViewRuns<'a> {
    /// Spans that end behind `at`.
    spans: &'a [Run],
    at: u64,
    end: u64,
}

impl Iterator for ViewRuns<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.at >= self.end {
            return None;
        }
        let run = match self.spans.split_first() {
            Some((span, later)) if span.first <= self.at => {
                self.spans = later;
                span.part(self.at, self.end)?
            }
            next => {
                let end = next.map_or(self.end, |(span, _)| span.first.min(self.end));
                Run { first: self.at, count: end - self.at, source: Source::Zero }
            }
        };
        self.at = run.end();
        Some(run)
    }
}

#[cfg(test)]
mod tests;
