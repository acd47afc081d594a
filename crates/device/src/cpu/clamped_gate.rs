//! The clamped gate of neighbouring columns. With gate g, the rest u and σ = sigmoid(1.702·g), both clamped,
//! `out = (u + 1)·g·σ`; `dg = dout·(u + 1)·σ·(1 + 1.702·g·(1 - σ))` and `du = dout·g·σ`, 0 where they were clamped.

use super::experts::counted_rows;
use super::math::sigmoid;
use super::matrix::{Element, Matrix, matrix, with_element};
use super::rows::{Tile, each_vector, load, store, tiles};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::kernel::{CLAMPED_GATE_SLOPE, ClampedGate, ClampedGateBackward};

impl Run for ClampedGate {
    fn run(&self, team: &mut Team) {
        let limit = self.limit;
        with_element!(self.out.dtype, E => {
            let (x, out) = (matrix::<E>(&self.x), matrix(&self.out));
            tiles(team, counted_rows(&self.count, self.out).shape(), |tile| vectorise(Forward { x, limit, out, tile }));
        });
    }
}

impl Run for ClampedGateBackward {
    fn run(&self, team: &mut Team) {
        let limit = self.limit;
        with_element!(self.dout.dtype, E => {
            let (x, dout, dx) = (matrix::<E>(&self.x), matrix(&self.dout), matrix(&self.dx));
            tiles(team, counted_rows(&self.count, self.dout).shape(), |tile| vectorise(Backward { x, limit, dout, dx, tile }));
        });
    }
}

/// The gate and the rest, clamped, and the gate's sigmoid.
struct Gate<V> {
    gate: V,
    up: V,
    sigma: V,
}

impl<V: Copy> Gate<V> {
    #[inline(always)]
    fn of<S: Simd<Vector = V>>(s: S, [gate, up]: [V; 2], limit: f32) -> Gate<V> {
        let (highest, lowest) = (s.splat(limit), s.splat(-limit));
        // Where an operand is NaN the second is taken, so NaN stays.
        let gate = s.min(highest, gate);
        let up = s.max(lowest, s.min(highest, up));
        Gate { gate, up, sigma: sigmoid(s, s.mul(gate, s.splat(CLAMPED_GATE_SLOPE))) }
    }
}

struct Forward<E> {
    x: Matrix<E>,
    limit: f32,
    out: Matrix<E>,
    tile: Tile,
}

impl<E: Element> Vectorised for Forward<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.tile.rows {
            each_vector!(self.tile.cols.clone(), |col, count| {
                // SAFETY: `x` has two columns for each of `out`, and this part of `out` is this task's alone.
                unsafe {
                    let pairs = load_pairs(s, self.x.at(row, 2 * col), count);
                    let Gate { gate, up, sigma } = Gate::of(s, pairs, self.limit);
                    let product = s.mul(s.mul(s.add(up, s.splat(1.0)), gate), sigma);
                    store(s, self.out.at(row, col), product, count);
                }
            });
        }
    }
}

struct Backward<E> {
    x: Matrix<E>,
    limit: f32,
    dout: Matrix<E>,
    dx: Matrix<E>,
    tile: Tile,
}

impl<E: Element> Vectorised for Backward<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (zero, one, slope) = (s.splat(0.0), s.splat(1.0), s.splat(CLAMPED_GATE_SLOPE));
        let limit = s.splat(self.limit);
        for row in self.tile.rows {
            each_vector!(self.tile.cols.clone(), |col, count| {
                // SAFETY: as above; a vector is read before it is overwritten.
                unsafe {
                    let pairs = load_pairs(s, self.x.at(row, 2 * col), count);
                    let dout = load(s, self.dout.at(row, col), count);
                    let Gate { gate, up, sigma } = Gate::of(s, pairs, self.limit);
                    let outer = s.mul(s.mul(dout, s.add(up, one)), sigma);
                    let inner = s.mul_add(s.mul(slope, gate), s.sub(one, sigma), one);
                    let dgate = s.select_less(limit, pairs[0], zero, s.mul(outer, inner));
                    let dup = s.select_less(limit, s.abs(pairs[1]), zero, s.mul(dout, s.mul(gate, sigma)));
                    store_pairs(s, self.dx.at(row, 2 * col), [dgate, dup], count);
                }
            });
        }
    }
}

/// The even and the odd ones of `2 · count` elements.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn load_pairs<E: Element, S: Simd>(s: S, from: *const E, count: usize) -> [S::Vector; 2] {
    let mut flat = [0.0; 2 * LANES];
    let [first, second] = halves(count);
    // SAFETY: the caller's promise, and arrays of as many numbers.
    unsafe {
        s.store(flat.as_mut_ptr(), load(s, from, first));
        if second > 0 {
            s.store(flat.as_mut_ptr().add(LANES), load(s, from.add(LANES), second));
        }
        let [even, odd] = [0, 1].map(|place| -> [f32; LANES] { std::array::from_fn(|i| flat[2 * i + place]) });
        [s.load(even.as_ptr()), s.load(odd.as_ptr())]
    }
}

/// # Safety
/// `2 · count` elements are writable.
#[inline(always)]
unsafe fn store_pairs<E: Element, S: Simd>(s: S, to: *mut E, [even, odd]: [S::Vector; 2], count: usize) {
    let mut apart = [[0.0; LANES]; 2];
    let [first, second] = halves(count);
    // SAFETY: the caller's promise, and arrays of as many numbers.
    unsafe {
        s.store(apart[0].as_mut_ptr(), even);
        s.store(apart[1].as_mut_ptr(), odd);
        let flat: [f32; 2 * LANES] = std::array::from_fn(|i| apart[i % 2][i / 2]);
        store(s, to, s.load(flat.as_ptr()), first);
        if second > 0 {
            store(s, to.add(LANES), s.load(flat.as_ptr().add(LANES)), second);
        }
    }
}

/// The elements of `count` pairs in the first vector and in the second.
#[inline(always)]
fn halves(count: usize) -> [usize; 2] {
    let first = LANES.min(2 * count);
    [first, 2 * count - first]
}
