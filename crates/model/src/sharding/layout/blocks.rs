//! Moves that lie like the rows of a matrix, taken together.

use super::Move;

/// Moves of the same length from the same source, at a constant distance from one another in both places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveBlock {
    /// The source, by its place in the list.
    pub from: usize,
    pub from_start: usize,
    /// Elements from one row to the next; meaningless if there is one row.
    pub from_stride: usize,
    pub to_start: usize,
    pub to_stride: usize,
    pub rows: usize,
    pub cols: usize,
}

/// The same elements in as few pieces as rows of matrices allow, in the order of the first of each.
pub fn blocks(moves: &[Move]) -> Vec<MoveBlock> {
    let mut blocks: Vec<MoveBlock> = Vec::new();
    // The blocks that the next row may belong to: one for each source and length, since rows of several alternate.
    let mut open: Vec<usize> = Vec::new();
    for moved in moves {
        let fits = |&index: &usize| blocks[index].continues(moved);
        match open.iter().copied().find(fits) {
            Some(index) => blocks[index].add_row(moved),
            None => {
                open.retain(|&index| blocks[index].from != moved.from || blocks[index].cols != moved.len);
                open.push(blocks.len());
                blocks.push(MoveBlock::of(moved));
            }
        }
    }
    blocks
}

impl MoveBlock {
    /// Its place at the source: the first element, rows and columns, and the elements from one row to the next.
    pub fn from_rows(&self) -> (usize, [usize; 2], usize) {
        (self.from_start, [self.rows, self.cols], self.from_stride)
    }

    /// The same at the target.
    pub fn to_rows(&self) -> (usize, [usize; 2], usize) {
        (self.to_start, [self.rows, self.cols], self.to_stride)
    }

    fn of(&Move { from, from_start, to_start, len }: &Move) -> MoveBlock {
        MoveBlock { from, from_start, from_stride: len, to_start, to_stride: len, rows: 1, cols: len }
    }

    fn continues(&self, next: &Move) -> bool {
        let last = |start: usize, stride: usize| start + (self.rows - 1) * stride;
        let from_step = next.from_start.checked_sub(last(self.from_start, self.from_stride));
        let to_step = next.to_start.checked_sub(last(self.to_start, self.to_stride));
        let (Some(from_step), Some(to_step)) = (from_step, to_step) else { return false };
        let is_next_row = (from_step, to_step) == (self.from_stride, self.to_stride);
        let sets_strides = self.rows == 1 && from_step >= self.cols && to_step >= self.cols;
        next.from == self.from && next.len == self.cols && (is_next_row || sets_strides)
    }

    fn add_row(&mut self, next: &Move) {
        if self.rows == 1 {
            (self.from_stride, self.to_stride) = (next.from_start - self.from_start, next.to_start - self.to_start);
        }
        self.rows += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Held, Slice, moves};
    use super::*;

    #[test]
    fn columns_of_a_matrix_are_one_block_for_each_source_and_say_the_same_as_the_moves() {
        let [rows, cols] = [7, 12];
        let cuts = |bounds: &[usize]| -> Vec<Held> {
            bounds.windows(2).map(|pair| Held::all(Slice::of_cols(rows, pair[0]..pair[1]))).collect()
        };
        for (from, to, expected) in [
            (vec![0, 6, 12], 0..8, 2),
            (vec![0, 3, 6, 9, 12], 0..12, 4),
            (vec![0, 12], 2..3, 1),
            (vec![0, 6, 12], 6..12, 1),
        ] {
            let target = Held::all(Slice::of_cols(rows, to.clone()));
            let moves = moves(&cuts(&from), &target, cols).expect("all is there");
            let blocks = blocks(&moves);
            assert_eq!(blocks.len(), expected, "{from:?} to {to:?}: {blocks:?}");
            let single = |block: &MoveBlock| -> Vec<(usize, usize, usize)> {
                let row =
                    |row: usize| (block.from_start + row * block.from_stride, block.to_start + row * block.to_stride);
                let elements = |row: usize| (0..block.cols).map(move |col| (row, col));
                let places = (0..block.rows).flat_map(elements);
                places.map(|(at, col)| (block.from, row(at).0 + col, row(at).1 + col)).collect()
            };
            let mut found: Vec<_> = blocks.iter().flat_map(single).collect();
            found.sort_unstable_by_key(|&(_, _, to)| to);
            let expected = moves.iter().flat_map(|moved| {
                (0..moved.len).map(|i| (moved.from, moved.from_start + i, moved.to_start + i)).collect::<Vec<_>>()
            });
            assert_eq!(found, expected.collect::<Vec<_>>(), "{from:?} to {to:?}");
        }
    }
}
