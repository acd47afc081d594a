//! The boxes of one lane.

use evenkeel_step::Lane;
use evenkeel_step::trace::Span;

use super::look::Kind;

/// A span, the waiting or the transfer of an exchange, or several narrow ones.
pub(super) struct Piece<'a> {
    pub kind: Kind,
    pub first: &'a Span,
    pub start_s: f64,
    pub end_s: f64,
    /// Number of merged pieces.
    pub count: usize,
    /// `None` if different parts were merged.
    pub part: Option<usize>,
}

/// A lane's pieces in order. Neighbours of the same kind are merged if each is shorter than `narrow_s`.
pub(super) fn pieces(spans: &[Span], lane: Lane, narrow_s: f64) -> Vec<Piece<'_>> {
    let mut merged: Vec<Piece> = Vec::new();
    let mut last_is_narrow = false;
    for piece in spans.iter().filter(|span| span.lane == lane).flat_map(cut) {
        let is_narrow = piece.end_s - piece.start_s < narrow_s;
        match merged.last_mut() {
            Some(last) if last_is_narrow && is_narrow && last.is_neighbour(&piece, narrow_s) => last.take(&piece),
            _ => merged.push(piece),
        }
        last_is_narrow = is_narrow;
    }
    merged
}

/// An exchange that waited is two pieces.
fn cut(span: &Span) -> impl Iterator<Item = Piece<'_>> {
    let piece = |kind, start_s, end_s| {
        let part = Some(span.micro.part);
        Piece { kind, first: span, start_s, end_s, count: 1, part }
    };
    let waited = span.lane.exchanges() && span.came_s > span.start_s;
    let waiting = waited.then(|| piece(Kind::Waiting, span.start_s, span.came_s));
    let start_s = if waited { span.came_s } else { span.start_s };
    waiting.into_iter().chain([piece(Kind::of(span.work), start_s, span.end_s)])
}

impl Piece<'_> {
    fn is_neighbour(&self, next: &Piece, narrow_s: f64) -> bool {
        self.kind == next.kind && (next.start_s - self.end_s).abs() < narrow_s
    }

    fn take(&mut self, next: &Piece) {
        self.end_s = self.end_s.max(next.end_s);
        self.count += 1;
        self.part = self.part.filter(|&part| next.part == Some(part));
    }
}
