//! The part of a parameter that a shard holds: some ranges of its rows and of its columns, not necessarily equal ones, or only a
//! stretch of these. [`moves()`] says how to get from one layout to another.

mod blocks;
pub(crate) mod moves;
mod overlap;
mod rectangles;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use blocks::{MoveBlock, blocks};
pub use moves::{Move, moves};
pub use overlap::Region;
pub use rectangles::Rectangle;

/// Ranges of one dim, in order and apart from each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Range<usize>>")]
pub struct Ranges(Vec<Range<usize>>);

impl Ranges {
    pub fn new(ranges: Vec<Range<usize>>) -> Ranges {
        Ranges::try_from(ranges).unwrap_or_else(|what| panic!("{what}"))
    }

    pub fn len(&self) -> usize {
        self.0.iter().map(Range::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first index held.
    pub fn first(&self) -> Option<usize> {
        self.0.iter().find(|range| !range.is_empty()).map(|range| range.start)
    }

    /// The end of the last range.
    fn end(&self) -> usize {
        self.0.last().map_or(0, |range| range.end)
    }

    /// Each range with its place among the held indices.
    fn placed(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        self.0.iter().scan(0, |held, range| {
            let first = *held;
            *held += range.len();
            Some((first, range))
        })
    }
}

impl TryFrom<Vec<Range<usize>>> for Ranges {
    type Error = String;

    fn try_from(ranges: Vec<Range<usize>>) -> Result<Ranges, String> {
        if let Some(range) = ranges.iter().find(|range| range.start > range.end) {
            return Err(format!("the range {range:?} ends before it starts"));
        }
        if let Some(pair) = ranges.windows(2).find(|pair| pair[0].end > pair[1].start) {
            return Err(format!("the ranges {:?} and {:?} overlap or are out of order", pair[0], pair[1]));
        }
        Ok(Ranges(ranges))
    }
}

impl From<Range<usize>> for Ranges {
    fn from(range: Range<usize>) -> Ranges {
        Ranges::new(vec![range])
    }
}

/// The rows and columns of a matrix that a shard holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    pub rows: Ranges,
    pub cols: Ranges,
}

/// A rectangle of a slice: its place in the whole matrix, and among the held rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    pub held_rows: Range<usize>,
    pub held_cols: Range<usize>,
}

impl Slice {
    pub fn whole([rows, cols]: [usize; 2]) -> Slice {
        Slice { rows: (0..rows).into(), cols: (0..cols).into() }
    }

    pub fn of_rows(rows: impl Into<Ranges>, cols: usize) -> Slice {
        Slice { rows: rows.into(), cols: (0..cols).into() }
    }

    pub fn of_cols(rows: usize, cols: impl Into<Ranges>) -> Slice {
        Slice { rows: (0..rows).into(), cols: cols.into() }
    }

    /// Rows and columns held.
    pub fn dims(&self) -> [usize; 2] {
        [self.rows.len(), self.cols.len()]
    }

    /// Its rectangles that are not empty.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        let pieces = self.rows.placed().flat_map(|(held_row, rows)| {
            self.cols.placed().map(move |(held_col, cols)| Piece {
                rows: rows.clone(),
                cols: cols.clone(),
                held_rows: held_row..held_row + rows.len(),
                held_cols: held_col..held_col + cols.len(),
            })
        });
        pieces.filter(|piece| !piece.rows.is_empty() && !piece.cols.is_empty())
    }

    /// The pieces of those rows of the whole matrix that lie in `wanted`.
    pub fn pieces_within(&self, wanted: Range<usize>) -> impl Iterator<Item = Piece> {
        self.pieces().filter_map(move |piece| {
            let rows = piece.rows.start.max(wanted.start)..piece.rows.end.min(wanted.end);
            let first = piece.held_rows.start + rows.start.checked_sub(piece.rows.start)?;
            let held_rows = first..first + rows.len();
            (!rows.is_empty()).then_some(Piece { rows, held_rows, ..piece })
        })
    }
}

/// A rank's part of a parameter: some elements of a slice, which lie row by row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Held {
    pub slice: Slice,
    /// The held ones of the slice's elements; `0..rows × columns` is all of it.
    pub range: Range<usize>,
}

impl Held {
    pub fn all(slice: Slice) -> Held {
        let [rows, cols] = slice.dims();
        Held { slice, range: 0..rows * cols }
    }

    /// Elements held.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Checks that it can be a part of a matrix of this size. A value from a file must be checked before any other use: until
    /// then products of its numbers may overflow.
    pub fn check(&self, whole: [usize; 2]) -> Result<(), &'static str> {
        let [rows, cols] = whole;
        // No part has more elements than the whole, so no product of a part overflows if this one does not.
        rows.checked_mul(cols).ok_or("the parameter has more elements than can be counted")?;
        if self.slice.rows.end() > rows {
            return Err("it has rows behind the parameter's last");
        }
        if self.slice.cols.end() > cols {
            return Err("it has columns behind the parameter's last");
        }
        let [rows, cols] = self.slice.dims();
        if self.range.start > self.range.end {
            return Err("its elements end before they start");
        }
        if self.range.end > rows * cols {
            return Err("it has elements behind its slice's last");
        }
        Ok(())
    }
}

/// How a shard's gradient of a parameter is related to those of other shards that hold the same part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// No other shard holds this part.
    Alone,
    /// All shards hold it and compute the same gradient.
    Same,
    /// These shards hold it; the gradient is the sum of theirs.
    Summed(Range<usize>),
}

/// A shape as a matrix: leading ones and trailing dims fold, so that a class token or a table of positions is a plain matrix; a
/// vector is one row. `None` if the shape has no dims or no rows, or overflows.
pub fn as_matrix(shape: &[usize]) -> Option<[usize; 2]> {
    let len = shape.iter().try_fold(1usize, |len, &dim| len.checked_mul(dim))?;
    let rows = match *shape {
        [_] => 1,
        [1, rows, _] => rows,
        [rows, ..] => rows,
        [] => return None,
    };
    Some([rows, len.checked_div(rows)?])
}

/// Cuts `total` in `parts` that differ by one at most: the offsets where parts begin, and the end.
pub fn even_bounds(total: usize, parts: usize) -> Vec<usize> {
    let (size, longer) = (total / parts, total % parts);
    (0..=parts).map(|part| part * size + part.min(longer)).collect()
}
