//! Overlaps of two slices of a parameter.

use std::ops::Range;

use evenkeel_device::Tensor;

use super::{Ranges, Slice};

/// A rectangle of the elements that a slice holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

impl Region {
    pub fn len(&self) -> usize {
        self.rows.len() * self.cols.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// These rows and columns of the slice's tensor.
    pub fn of(&self, held: &Tensor) -> Tensor {
        held.row_range(self.rows.clone()).col_range(self.cols.clone())
    }

    pub fn meets(&self, other: &Region) -> bool {
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start) < a.end.min(b.end);
        meet(&self.rows, &other.rows) && meet(&self.cols, &other.cols)
    }
}

impl Slice {
    /// The rectangles that this slice and another have in common, each by its place in either.
    pub fn overlaps(&self, other: &Slice) -> Vec<[Region; 2]> {
        let rows = self.rows.overlaps(&other.rows);
        if rows.is_empty() {
            return Vec::new();
        }
        let cols = self.cols.overlaps(&other.cols);
        let region = |[rows, _]: &[Range<usize>; 2], [cols, _]: &[Range<usize>; 2]| Region {
            rows: rows.clone(),
            cols: cols.clone(),
        };
        let swapped = |[a, b]: &[Range<usize>; 2]| [b.clone(), a.clone()];
        let pair = |rows, cols| [region(rows, cols), region(&swapped(rows), &swapped(cols))];
        rows.iter().flat_map(|rows| cols.iter().map(move |cols| pair(rows, cols))).collect()
    }

    /// All of this slice as one rectangle of another that holds it.
    pub fn within(&self, other: &Slice) -> Option<Region> {
        let [rows, cols] = self.dims();
        if rows * cols == 0 {
            let [other_rows, other_cols] = other.dims();
            return (rows <= other_rows && cols <= other_cols).then_some(Region { rows: 0..rows, cols: 0..cols });
        }
        match &self.overlaps(other)[..] {
            [[own, theirs]] if own.len() == rows * cols => Some(theirs.clone()),
            _ => None,
        }
    }
}

impl Ranges {
    /// The ranges that both have, by their places in each.
    fn overlaps(&self, other: &Ranges) -> Vec<[Range<usize>; 2]> {
        let mut found = Vec::new();
        for (held, range) in self.placed() {
            for (other_held, other_range) in other.placed() {
                let (start, end) = (range.start.max(other_range.start), range.end.min(other_range.end));
                if start < end {
                    let at = |held: usize, first: usize| held + start - first..held + end - first;
                    found.push([at(held, range.start), at(other_held, other_range.start)]);
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Held, moves};
    use super::*;

    fn slice(rows: impl Into<Ranges>, cols: impl Into<Ranges>) -> Slice {
        Slice { rows: rows.into(), cols: cols.into() }
    }

    fn two(first: Range<usize>, second: Range<usize>) -> Ranges {
        Ranges::new(vec![first, second])
    }

    /// The slice's element for each element of a region, row by row.
    fn places(region: &Region, slice: &Slice) -> Vec<usize> {
        let width = slice.dims()[1];
        region.rows.clone().flat_map(|row| region.cols.clone().map(move |col| row * width + col)).collect()
    }

    #[test]
    fn overlaps_are_the_moves_from_one_slice_to_the_other() {
        let all = [
            slice(0..6, 0..9),
            slice(2..5, 0..9),
            slice(0..6, two(3..4, 5..9)),
            slice(two(1..2, 4..6), 0..4),
            slice(3..3, 0..9),
        ];
        for (from, to) in all.iter().flat_map(|from| all.iter().map(move |to| (from, to))) {
            let mut found: Vec<(usize, usize)> = from
                .overlaps(to)
                .iter()
                .flat_map(|[a, b]| places(a, from).into_iter().zip(places(b, to)).collect::<Vec<_>>())
                .collect();
            found.sort_unstable_by_key(|&(_, to)| to);
            // Elements that `from` lacks come from a holder of all.
            let sources = [Held::all(from.clone()), Held::all(all[0].clone())];
            let moves = moves(&sources, &Held::all(to.clone()), 9).unwrap();
            let expected = moves.iter().filter(|moved| moved.from == 0).flat_map(|moved| {
                (0..moved.len).map(|i| (moved.from_start + i, moved.to_start + i)).collect::<Vec<_>>()
            });
            assert_eq!(found, expected.collect::<Vec<_>>(), "{from:?} to {to:?}");
        }
    }

    #[test]
    fn a_slice_lies_within_another_where_it_is_one_rectangle_of_it() {
        let region = |rows, cols| Some(Region { rows, cols });
        for (inner, outer, expected) in [
            (slice(3..5, 0..9), slice(2..6, 0..9), region(1..3, 0..9)),
            (slice(0..6, 4..5), slice(0..6, 3..9), region(0..6, 1..2)),
            (slice(0..6, 4..6), slice(0..6, two(0..1, 4..9)), region(0..6, 1..3)),
            // Two rectangles, more than the other has, and nothing at all.
            (slice(0..6, two(0..1, 4..6)), slice(0..6, two(0..2, 4..9)), None),
            (slice(1..5, 0..9), slice(2..6, 0..9), None),
            (slice(7..7, 0..9), slice(2..6, 0..9), region(0..0, 0..9)),
        ] {
            assert_eq!(inner.within(&outer), expected, "{inner:?} in {outer:?}");
        }
    }
}
