//! The held part of a matrix, in rectangles of the whole.

use std::ops::Range;

use super::Held;
use super::moves::rectangles;

/// A rectangle of the whole matrix, and the places of its rows among the held elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rectangle {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    /// Its first element, among those that are held.
    pub start: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

impl Held {
    /// Rectangles of all held elements; each element lies in one of them.
    pub fn rectangles(&self) -> Vec<Rectangle> {
        let stride = self.slice.dims()[1];
        let held = rectangles(&self.range, stride).into_iter();
        let in_pieces = held.flat_map(|(rows, cols)| {
            self.slice.pieces().filter_map(move |piece| {
                let (rows, whole_rows) = common(&rows, &piece.held_rows, piece.rows.start)?;
                let (cols, whole_cols) = common(&cols, &piece.held_cols, piece.cols.start)?;
                let start = rows.start * stride + cols.start - self.range.start;
                Some(Rectangle { rows: whole_rows, cols: whole_cols, start, stride })
            })
        });
        in_pieces.collect()
    }
}

/// Intersects two held ranges. Returns the intersection in held coordinates and in those of the whole matrix, where `b` starts at
/// `whole`.
fn common(a: &Range<usize>, b: &Range<usize>, whole: usize) -> Option<(Range<usize>, Range<usize>)> {
    let held = a.start.max(b.start)..a.end.min(b.end);
    let first = whole + held.start.checked_sub(b.start)?;
    (!held.is_empty()).then(|| (held.clone(), first..first + held.len()))
}

#[cfg(test)]
mod tests {
    use super::super::{Ranges, Slice};
    use super::*;

    #[test]
    fn rectangles_hold_every_element_once_at_its_place() {
        let [rows, cols] = [7, 11];
        let two = |a: Range<usize>, b: Range<usize>| Ranges::new(vec![a, b]);
        let slices = [
            Slice::whole([rows, cols]),
            Slice::of_cols(rows, 3..8),
            Slice { rows: two(1..2, 4..7), cols: two(0..3, 5..6) },
        ];
        for slice in slices {
            let [held_rows, held_cols] = slice.dims();
            let all = held_rows * held_cols;
            let places: Vec<usize> = slice
                .rows
                .placed()
                .flat_map(|(_, range)| range.clone())
                .flat_map(|row| slice.cols.placed().flat_map(|(_, r)| r.clone()).map(move |col| row * cols + col))
                .collect();
            for range in [0..all, 0..1, 2..all - 1, held_cols..2 * held_cols, 1..held_cols + 2, 3..3] {
                let held = Held { slice: slice.clone(), range: range.clone() };
                let mut found = vec![None; range.len()];
                for Rectangle { rows, cols: of, start, stride } in held.rectangles() {
                    for (i, row) in rows.enumerate() {
                        for (j, col) in of.clone().enumerate() {
                            let before = found[start + i * stride + j].replace(row * cols + col);
                            assert_eq!(before, None, "{slice:?} {range:?}: an element twice");
                        }
                    }
                }
                let expected: Vec<Option<usize>> = places[range.clone()].iter().copied().map(Some).collect();
                assert_eq!(found, expected, "{slice:?} {range:?}");
            }
        }
    }
}
