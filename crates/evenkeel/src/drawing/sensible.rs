//! The part of a timeline that can be drawn.

use evenkeel_step::trace::{Span, Timeline};

/// Thirty years: no step is further from its beginning, and sums of such times stay finite.
const FURTHEST_S: f64 = 1e9;

/// A timeline without the spans whose times are not finite, too far away or out of order.
pub(super) fn sensible(timeline: &Timeline) -> Timeline {
    let spans = |spans: &Vec<Span>| spans.iter().filter(|span| is_sensible(span)).cloned().collect();
    Timeline { ranks: timeline.ranks.iter().map(spans).collect() }
}

fn is_sensible(span: &Span) -> bool {
    let is_ordered = span.start_s <= span.came_s && span.came_s <= span.end_s;
    is_ordered && span.start_s >= -FURTHEST_S && span.end_s <= FURTHEST_S
}
