//! Attention's interface to a CPU level: packing of operands, and its three products.
//!
//! Packed numbers lie in words of 32 bits: an f32, or two bf16 that are neighbours along the summed dim. A left operand is
//! [rows, summands], a right one [summands, columns].

use super::super::matrix::Element;
use super::super::simd::{Simd, Vectorised};
use super::Shape;
use super::pack::Rows;

/// # Safety
/// For all methods: the operands have the sizes stated, `begin` has been called on this thread, and the vectors are those of
/// `vectorise`.
pub(super) trait Level<E: Element> {
    /// Numbers of a word.
    const WORD: usize;
    /// Keys come in multiples of this.
    const KEYS: usize;
    /// The numbers of a head come in multiples of this.
    const WIDTH: usize;
    /// Whether packed rows of keys serve as columns too.
    const ROWS_ARE_COLUMNS: bool;
    /// The number of products begun before a product's result is read: 0, or 1 if reading it back is slow.
    const DELAY: usize;
    /// The logarithm of e to the base of [`Level::power`].
    const LOG_E: f32;

    /// Runs a loop with the vectors that the level is used with.
    fn vectorise<W: Vectorised>(work: W) -> W::Output;

    /// A power of the level's own base, as exact as its weights are stored.
    fn power<S: Simd>(s: S, x: S::Vector) -> S::Vector;

    unsafe fn begin() {}

    /// Called after `begin` when the task is done.
    unsafe fn end() {}

    /// Sixteen words along a row, the `vector`-th sixteen of them.
    unsafe fn along<S: Simd>(s: S, rows: &Rows<E>, row: usize, vector: usize) -> S::Vector;

    /// Words that run down the rows, the `word`-th of each of sixteen columns from `col` on.
    unsafe fn down<S: Simd>(s: S, rows: &Rows<E>, word: usize, col: usize) -> S::Vector;

    /// Rows as the left operand of [`Level::add_columns`], [W, count].
    unsafe fn pack_columns<S: Simd>(s: S, rows: &Rows<E>, count: usize, width: usize, to: *mut f32);

    /// Two rows of weights, the first of them `row`, into a left operand [keys, TILE].
    unsafe fn store_left<S: Simd>(s: S, rows: [[S::Vector; 2]; 2], row: usize, to: *mut f32);

    /// Two rows of weights, the first of them `row`, into a right operand [keys, TILE].
    unsafe fn store_right<S: Simd>(s: S, rows: [[S::Vector; 2]; 2], row: usize, to: *mut f32);

    /// Both of the above.
    unsafe fn store_both<S: Simd>(s: S, rows: [[S::Vector; 2]; 2], row: usize, left: *mut f32, right: *mut f32);

    /// `out[keys, TILE] = rows[keys, W] · queries[W, TILE]`. The operands `next` come next.
    unsafe fn scores<S: Simd>(s: S, shape: &Shape, now: Scored, next: Scored, keys: usize, out: *mut f32);

    /// `out[W, TILE] += columns[W, keys] · weights[keys, TILE]`
    unsafe fn add_columns<S: Simd>(
        s: S,
        shape: &Shape,
        columns: *const f32,
        weights: *const f32,
        keys: usize,
        out: *mut f32,
    );

    /// `out[keys, W] += Σ weights[keys, TILE] · rows[TILE, W]` over tiles whose operands lie `tiles.step` words apart.
    unsafe fn add_rows<S: Simd>(
        s: S,
        shape: &Shape,
        weights: *const f32,
        rows: *const f32,
        tiles: TileRun,
        keys: usize,
        out: *mut f32,
    );
}

/// The operands of scores.
#[derive(Clone, Copy)]
pub(super) struct Scored {
    pub rows: *const f32,
    pub queries: *const f32,
}

/// Tiles that follow one another.
#[derive(Clone, Copy)]
pub(super) struct TileRun {
    pub count: usize,
    pub step: usize,
}
