//! Walks matrices for row-wise kernels: tiles for the tasks of a team, vectors inside a row, sums down the columns.
//!
//! Every cut depends on the shape alone, so the bits do not depend on the number of threads.

use std::ops::Range;

use half::bf16;

use super::Team;
use super::matrix::{Element, Matrix, matrix, with_element};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use crate::kernel::IGNORE;
use crate::{DType, Extent, View};

/// Elements per task: tens of microseconds of memory traffic, and 128 tasks in [4096, 1024].
const TILE_ELEMENTS: usize = 1 << 15;

/// Column sums are gathered from at most this many blocks of rows...
const MOST_BLOCKS: usize = 64;
/// ...of at least this many rows, so that writing and reading the partial sums costs little beside the rows themselves.
const LEAST_ROWS: usize = 16;

/// The parts of a sum along a row, see [`each_vector`].
pub(crate) const PARTS: usize = 4;

/// The total of a sum in parts.
#[inline(always)]
pub(crate) fn total<S: Simd>(s: S, [a, b, c, d]: [S::Vector; PARTS]) -> f32 {
    s.sum(s.add(s.add(a, b), s.add(c, d)))
}

/// A task's part of a matrix.
pub(crate) struct Tile {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

/// Rows of `cols` elements per task, for kernels that need whole rows.
pub(crate) fn rows_per_task(cols: usize) -> usize {
    (TILE_ELEMENTS / cols.max(1)).max(1)
}

/// Cuts a matrix into tiles of about equal size, whole rows where they are not too long.
pub(crate) fn tiles(team: &mut Team, [rows, cols]: [usize; 2], work: impl Fn(Tile) + Sync) {
    let width = cols.clamp(1, TILE_ELEMENTS);
    let height = rows_per_task(width);
    let across = cols.div_ceil(width);
    team.tasks(rows.div_ceil(height) * across, |task, _| {
        let (top, left) = (task / across * height, task % across * width);
        work(Tile { rows: top..rows.min(top + height), cols: left..cols.min(left + width) });
    });
}

/// Evaluates the body for each vector of a range of columns: `count` is `LANES`, a constant, for all but the last.
///
/// With a third name, that one counts through `0..PARTS` from vector to vector: sums kept in as many parts neither wait
/// for one another nor grow as inexact.
///
/// A macro, because a closure cannot be marked `#[inline(always)]` and would be compiled without the vector level.
macro_rules! each_vector {
    ($cols:expr, |$col:ident, $count:ident| $body:expr) => {
        each_vector!($cols, 1, |$col, $count, _part| $body)
    };
    ($cols:expr, |$col:ident, $count:ident, $part:ident| $body:expr) => {
        each_vector!($cols, $crate::cpu::rows::PARTS, |$col, $count, $part| $body)
    };
    ($cols:expr, $parts:expr, |$col:ident, $count:ident, $part:ident| $body:expr) => {{
        use $crate::cpu::simd::LANES;
        let std::ops::Range { start: mut $col, end } = $cols;
        let $count = LANES;
        while $col + $parts * LANES <= end {
            for $part in 0..$parts {
                $body;
                $col += LANES;
            }
        }
        let $part = 0;
        while $parts > 1 && $col + LANES <= end {
            $body;
            $col += LANES;
        }
        if $col < end {
            let $count = end - $col;
            $body;
        }
    }};
}
pub(crate) use each_vector;

/// # Safety
/// `from` is readable for `count <= LANES` elements.
#[inline(always)]
pub(crate) unsafe fn load<E: Element, S: Simd>(s: S, from: *const E, count: usize) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe { if count == LANES { E::load(s, from) } else { E::load_partial(s, from, count) } }
}

/// # Safety
/// `to` is writable for `count <= LANES` elements.
#[inline(always)]
pub(crate) unsafe fn store<E: Element, S: Simd>(s: S, to: *mut E, vector: S::Vector, count: usize) {
    // SAFETY: the caller's promise.
    unsafe { if count == LANES { E::store(s, to, vector) } else { E::store_partial(s, to, vector, count) } }
}

/// The place of an index among `count` rows or columns, the first of which is `first`. `None` if another rank holds it, and for
/// `IGNORE`.
#[inline(always)]
pub(crate) fn place_of(index: u32, first: u32, count: usize) -> Option<usize> {
    let place = index.checked_sub(first)? as usize;
    (index != IGNORE && place < count).then_some(place)
}

/// A function of elements at the same place of several matrices.
pub(crate) trait Map<const IN: usize, const OUT: usize>: Copy + Sync {
    /// `row` and `col` are the place of the first lane.
    fn map<S: Simd>(self, s: S, row: usize, col: usize, inputs: [S::Vector; IN]) -> [S::Vector; OUT];
}

/// Applies a map to matrices of one shape and one dtype. An output may be an input.
pub(crate) fn map<const IN: usize, const OUT: usize>(
    team: &mut Team,
    map: impl Map<IN, OUT>,
    inputs: [View; IN],
    outputs: [View; OUT],
) {
    let shape = outputs[0].shape();
    with_element!(outputs[0].dtype, E => {
        let (inputs, outputs) = (inputs.map(|view| matrix::<E>(&view)), outputs.map(|view| matrix::<E>(&view)));
        tiles(team, shape, |tile| vectorise(MapTile { map, inputs, outputs, tile }));
    });
}

/// Applies a map to matrices of one shape, whatever their dtypes. An output may be an input.
pub(crate) fn map_mixed<const IN: usize, const OUT: usize>(
    team: &mut Team,
    function: impl Map<IN, OUT>,
    inputs: [View; IN],
    outputs: [View; OUT],
) {
    if inputs.iter().chain(&outputs).all(|view| view.dtype == outputs[0].dtype) {
        return map(team, function, inputs, outputs);
    }
    let shape = outputs[0].shape();
    let (inputs, outputs) = (inputs.map(Mixed::of), outputs.map(Mixed::of));
    tiles(team, shape, |tile| vectorise(MapTile { map: function, inputs, outputs, tile }));
}

/// An operand of a map.
trait Operand: Copy + Send + Sync {
    /// # Safety
    /// Nobody writes these elements meanwhile.
    unsafe fn load<S: Simd>(self, s: S, row: usize, col: usize, count: usize) -> S::Vector;
    /// # Safety
    /// Nobody else accesses these elements meanwhile.
    unsafe fn store<S: Simd>(self, s: S, row: usize, col: usize, vector: S::Vector, count: usize);
}

impl<E: Element> Operand for Matrix<E> {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, row: usize, col: usize, count: usize) -> S::Vector {
        // SAFETY: the elements lie in the matrix, and the caller's promise.
        unsafe { load(s, self.at(row, col), count) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(self, s: S, row: usize, col: usize, vector: S::Vector, count: usize) {
        // SAFETY: as above.
        unsafe { store(s, self.at(row, col), vector, count) }
    }
}

/// A matrix whose element type is looked up at each vector.
#[derive(Clone, Copy)]
enum Mixed {
    F32(Matrix<f32>),
    Bf16(Matrix<bf16>),
}

impl Mixed {
    fn of(view: View) -> Mixed {
        if view.dtype == DType::Bf16 { Mixed::Bf16(matrix(&view)) } else { Mixed::F32(matrix(&view)) }
    }
}

impl Operand for Mixed {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, row: usize, col: usize, count: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Mixed::F32(matrix) => Operand::load(matrix, s, row, col, count),
                Mixed::Bf16(matrix) => Operand::load(matrix, s, row, col, count),
            }
        }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(self, s: S, row: usize, col: usize, vector: S::Vector, count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Mixed::F32(matrix) => Operand::store(matrix, s, row, col, vector, count),
                Mixed::Bf16(matrix) => Operand::store(matrix, s, row, col, vector, count),
            }
        }
    }
}

struct MapTile<M, O, const IN: usize, const OUT: usize> {
    map: M,
    inputs: [O; IN],
    outputs: [O; OUT],
    tile: Tile,
}

impl<M: Map<IN, OUT>, O: Operand, const IN: usize, const OUT: usize> Vectorised for MapTile<M, O, IN, OUT> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.tile.rows {
            each_vector!(self.tile.cols.clone(), |col, count| {
                let mut vectors = [s.splat(0.0); IN];
                for (vector, input) in vectors.iter_mut().zip(self.inputs) {
                    // SAFETY: tiles are disjoint, so only this task writes here, and only below.
                    *vector = unsafe { input.load(s, row, col, count) };
                }
                let results = self.map.map(s, row, col, vectors);
                for (output, result) in self.outputs.into_iter().zip(results) {
                    // SAFETY: as above.
                    unsafe { output.store(s, row, col, result, count) };
                }
            });
        }
    }
}

/// Rows of a block with partial sums of its own.
fn block_height(rows: usize) -> usize {
    rows.div_ceil(MOST_BLOCKS).max(LEAST_ROWS)
}

/// Working memory for the partial sums of `outs` vectors.
pub(crate) fn column_sums_floats(rows: usize, cols: usize, outs: usize) -> usize {
    rows.div_ceil(block_height(rows)) * outs * cols.next_multiple_of(LANES)
}

/// Adds sums over rows to vectors: `outs[i][c] += Σ_rows …`.
///
/// `work` is given blocks of rows, each with a zeroed matrix [outs, cols] to add its sums to; those are then added up in
/// the order of the blocks. Sums whose vector is absent are dropped.
pub(crate) fn column_sums(
    team: &mut Team,
    rows: usize,
    cols: usize,
    outs: &[Option<Matrix<f32>>],
    work: impl Fn(Range<usize>, Matrix<f32>) + Sync,
) {
    let height = block_height(rows);
    let stride = cols.next_multiple_of(LANES);
    let mut common = team.take_common();
    let address = common.floats(column_sums_floats(rows, cols, outs.len())).as_mut_ptr() as u64;
    let all = rows.div_ceil(height) * outs.len();
    let partials = View::new(address, Extent { rows: all, cols, stride, dtype: DType::F32 });
    team.blocks(rows, height, |block, _| {
        let first = block.start / height * outs.len();
        let sums = matrix::<f32>(&partials.row_range(first..first + outs.len()));
        (0..outs.len()).for_each(|i| vectorise(Zero { row: sums.at(i, 0), len: cols }));
        work(block, sums);
    });
    let partials = matrix::<f32>(&partials);
    for (i, out) in outs.iter().enumerate() {
        let Some(out) = *out else { continue };
        team.blocks(cols, TILE_ELEMENTS / MOST_BLOCKS, |cols, _| {
            vectorise(AddRows { partials, first: i, step: outs.len(), out, cols });
        });
    }
    team.return_common(common);
}

struct Zero {
    row: *mut f32,
    len: usize,
}

impl Vectorised for Zero {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: a row of scratch memory that is this task's alone.
        each_vector!(0..self.len, |col, count| unsafe { store(s, self.row.add(col), s.splat(0.0), count) });
    }
}

/// `out += partials[first] + partials[first + step] + …`
struct AddRows {
    partials: Matrix<f32>,
    first: usize,
    step: usize,
    out: Matrix<f32>,
    cols: Range<usize>,
}

impl Vectorised for AddRows {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        each_vector!(self.cols.clone(), |col, count| {
            let mut sum = s.splat(0.0);
            for row in (self.first..self.partials.rows).step_by(self.step) {
                // SAFETY: the partial sums are complete, nobody writes them now.
                sum = s.add(sum, unsafe { load(s, self.partials.at(row, col), count) });
            }
            let out = self.out.at(0, col);
            // SAFETY: these columns are this task's alone.
            unsafe { store(s, out, s.add(load(s, out, count), sum), count) };
        });
    }
}
