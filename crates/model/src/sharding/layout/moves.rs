//! Moves that fill one holder's part of a parameter from the parts of others.
//!
//! Rows are taken in bands in which no holder's columns change, so columns are compared once for a band and not once for
//! a row: 1024 ranks that hold a column each cost no more than the moves that come out.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Held, Ranges};

/// Elements that lie one after another in both places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The source, by its place in the list.
    pub from: usize,
    /// The first element among those that this source holds; 0 is the first of its range.
    pub from_start: usize,
    /// The first element among those that the target holds.
    pub to_start: usize,
    pub len: usize,
}

/// The moves that fill `to`: every element comes from exactly one source, the first in order that has it. Moves are in the order
/// of the target's elements, and none could be joined with the next. Err with the first element (row, column) that no source has.
/// `cols` are the whole matrix's.
///
/// Parts that come from a file must have passed [`Held::check`].
pub fn moves(from: &[Held], to: &Held, cols: usize) -> Result<Vec<Move>, (usize, usize)> {
    let target = Holder::new(to, cols);
    let sources: Vec<Holder> = from.iter().map(|held| Holder::new(held, cols)).collect();
    let mut coming: Vec<(usize, &MoveBlock)> = sources
        .iter()
        .enumerate()
        .flat_map(|(source, holder)| holder.blocks.iter().map(move |b| (source, b)))
        .collect();
    coming.sort_unstable_by_key(|(source, block)| (block.rows.start, *source));
    let mut edges: Vec<usize> = coming.iter().flat_map(|(_, block)| [block.rows.start, block.rows.end]).collect();
    edges.sort_unstable();
    let (mut coming, mut edges) = (coming.into_iter().peekable(), edges.into_iter().peekable());

    let mut present: BTreeMap<usize, &MoveBlock> = BTreeMap::new();
    let mut moves = Vec::new();
    for block in &target.blocks {
        let mut row = block.rows.start;
        while row < block.rows.end {
            while let Some((source, block)) = coming.next_if(|(_, block)| block.rows.start <= row) {
                present.insert(source, block);
            }
            present.retain(|_, block| block.rows.end > row);
            while edges.next_if(|&edge| edge <= row).is_some() {}
            let rows = row..edges.peek().map_or(block.rows.end, |&edge| edge.min(block.rows.end));
            row = rows.end;
            let held = present.iter().map(|(&source, &block)| (source, &sources[source], block));
            let parts = share_out(target.columns_of(block), held).map_err(|col| (rows.start, col))?;
            add_rows(&mut moves, rows, &parts, (&target, block));
        }
    }
    Ok(moves)
}

/// Rows or columns that lie one after another, both in the whole matrix and among those held.
#[derive(Clone, Debug)]
struct Run {
    whole: Range<usize>,
    held: usize,
}

impl Run {
    /// The part inside `wanted`, which must overlap it.
    fn within(&self, wanted: &Range<usize>) -> Run {
        let whole = self.whole.start.max(wanted.start)..self.whole.end.min(wanted.end);
        Run { held: self.held + whole.start - self.whole.start, whole }
    }

    fn held(&self) -> Range<usize> {
        self.held..self.held + self.whole.len()
    }
}

/// Rows of the whole matrix of which the same columns are held.
struct MoveBlock {
    rows: Range<usize>,
    /// The first of `rows` among the rows of the slice.
    held_row: usize,
    /// The held ones of the slice's columns.
    held_cols: Range<usize>,
}

struct Holder {
    /// The slice's columns.
    columns: Vec<Run>,
    width: usize,
    /// The first element that is held, among those of the slice.
    start: usize,
    /// In the order of rows.
    blocks: Vec<MoveBlock>,
}

impl Holder {
    fn new(held: &Held, cols: usize) -> Holder {
        assert!(held.slice.cols.end() <= cols, "{:?} of {cols} columns", held.slice.cols);
        let rows = runs(&held.slice.rows);
        let width = held.slice.cols.len();
        let blocks = rectangles(&held.range, width).into_iter().flat_map(|(held_rows, held_cols)| {
            let first = rows.partition_point(|run| run.held().end <= held_rows.start);
            let overlapping = rows[first..].iter().take_while(|run| run.held < held_rows.end).map(|run| {
                let start = run.held.max(held_rows.start);
                let end = run.held().end.min(held_rows.end);
                let first = run.whole.start + start - run.held;
                MoveBlock { rows: first..first + end - start, held_row: start, held_cols: held_cols.clone() }
            });
            overlapping.collect::<Vec<_>>()
        });
        Holder { blocks: blocks.collect(), columns: runs(&held.slice.cols), width, start: held.range.start }
    }

    fn columns_of(&self, block: &MoveBlock) -> impl Iterator<Item = Run> {
        let Range { start, end } = block.held_cols;
        let first = self.columns.partition_point(|run| run.held().end <= start);
        self.columns[first..].iter().take_while(move |run| run.held < end).map(move |run| {
            let (skipped, over) = (start.saturating_sub(run.held), run.held().end.saturating_sub(end));
            Run { whole: run.whole.start + skipped..run.whole.end - over, held: run.held + skipped }
        })
    }

    /// The place of an element among those that are held.
    fn place(&self, block: &MoveBlock, row: usize, held_col: usize) -> usize {
        (block.held_row + row - block.rows.start) * self.width + held_col - self.start
    }
}

fn runs(ranges: &Ranges) -> Vec<Run> {
    let filled = ranges.placed().filter(|(_, range)| !range.is_empty());
    filled.map(|(held, range)| Run { whole: range.clone(), held }).collect()
}

/// The rows and columns of a stretch of a matrix's elements: the rest of the row where it begins, whole rows, and the beginning
/// of the row where it ends.
pub(crate) fn rectangles(range: &Range<usize>, width: usize) -> Vec<(Range<usize>, Range<usize>)> {
    if range.is_empty() {
        return Vec::new();
    }
    let (first, skipped) = (range.start / width, range.start % width);
    let (last, over) = (range.end / width, range.end % width);
    if first == last {
        return vec![(first..first + 1, skipped..over)];
    }
    let whole = first + usize::from(skipped > 0)..last;
    let all = [(first..whole.start, skipped..width), (whole, 0..width), (last..last + usize::from(over > 0), 0..over)];
    all.into_iter().filter(|(rows, _)| !rows.is_empty()).collect()
}

/// Columns that a target takes from one source.
struct Part<'a> {
    from: usize,
    source: &'a Holder,
    block: &'a MoveBlock,
    /// The first column among those of the source's slice.
    from_col: usize,
    /// The first column among those of the target's slice.
    to_col: usize,
    len: usize,
}

/// The sources of the wanted columns, in their order. Err with the first column that no source has.
fn share_out<'a>(
    wanted: impl Iterator<Item = Run>,
    sources: impl Iterator<Item = (usize, &'a Holder, &'a MoveBlock)>,
) -> Result<Vec<Part<'a>>, usize> {
    let mut missing: Vec<Run> = wanted.collect();
    let mut parts = Vec::new();
    for (from, source, block) in sources {
        if missing.is_empty() {
            break;
        }
        let mut columns = source.columns_of(block).peekable();
        let mut left = Vec::new();
        for mut wanted in missing {
            loop {
                while columns.next_if(|run| run.whole.end <= wanted.whole.start).is_some() {}
                let Some(run) = columns.peek().filter(|run| run.whole.start < wanted.whole.end) else {
                    left.push(wanted);
                    break;
                };
                let taken = run.within(&wanted.whole);
                let Run { held: to_col, .. } = wanted.within(&taken.whole);
                let len = taken.whole.len();
                parts.push(Part { from, source, block, from_col: taken.held, to_col, len });
                if wanted.whole.start < taken.whole.start {
                    left.push(wanted.within(&(0..taken.whole.start)));
                }
                if taken.whole.end == wanted.whole.end {
                    break;
                }
                wanted = wanted.within(&(taken.whole.end..usize::MAX));
            }
        }
        missing = left;
    }
    if let Some(run) = missing.first() {
        return Err(run.whole.start);
    }
    parts.sort_unstable_by_key(|part| part.to_col);
    Ok(parts)
}

fn add_rows(moves: &mut Vec<Move>, rows: Range<usize>, parts: &[Part], (target, block): (&Holder, &MoveBlock)) {
    let move_of = |part: &Part, row: usize, len: usize| Move {
        from: part.from,
        from_start: part.source.place(part.block, row, part.from_col),
        to_start: target.place(block, row, part.to_col),
        len,
    };
    // A single part is all that the target holds of a row; if it is all that the source holds, too, rows follow one another.
    if let [part] = parts
        && part.len == part.source.width
    {
        return add(moves, move_of(part, rows.start, rows.len() * part.len));
    }
    for row in rows {
        for part in parts {
            add(moves, move_of(part, row, part.len));
        }
    }
}

fn add(moves: &mut Vec<Move>, next: Move) {
    match moves.last_mut() {
        Some(last) if last.from == next.from && last.from_start + last.len == next.from_start => last.len += next.len,
        _ => moves.push(next),
    }
}
