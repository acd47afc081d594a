//! What follows the sums: bias, activation, rounding, or addition to what is there.

use super::super::activation::activate;
use super::super::matrix::{Element, Matrix, matrix};
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use crate::kernel::{Activation, Product};

/// The output of a product and what is done to each sum on its way there.
#[derive(Clone, Copy)]
pub(super) struct Epilogue<O> {
    pub out: Matrix<O>,
    accumulate: bool,
    bias: Option<Matrix<f32>>,
    activation: Option<Activation>,
    preactivation: Option<Matrix<O>>,
}

impl<O: Element> Epilogue<O> {
    pub fn new(product: &Product) -> Epilogue<O> {
        Epilogue {
            out: matrix(&product.out),
            accumulate: product.accumulate,
            bias: product.bias.as_ref().map(matrix),
            activation: product.activation,
            preactivation: product.preactivation.as_ref().map(matrix),
        }
    }

    /// Finishes the `rows` × `cols` sums that belong at (row, col) of the output. Row i of them begins at
    /// `sums + i * stride`.
    ///
    /// # Safety
    /// The sums are readable, the block lies inside the output, and no other thread touches it.
    pub unsafe fn finish(&self, sums: *const f32, stride: usize, at: (usize, usize), rows: usize, cols: usize) {
        vectorise(Finish { epilogue: *self, sums, stride, at, rows, cols });
    }
}

struct Finish<O> {
    epilogue: Epilogue<O>,
    sums: *const f32,
    stride: usize,
    at: (usize, usize),
    rows: usize,
    cols: usize,
}

impl<O: Element> Vectorised for Finish<O> {
    type Output = ();

    /// The two common cases have loops of their own: choosing per vector took as long as the arithmetic of a tile.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Epilogue { out, accumulate, bias, activation, preactivation } = self.epilogue;
        if bias.is_some() || activation.is_some() || preactivation.is_some() {
            // SAFETY: `vector` is called with places inside the block.
            self.each(s, |sums, row, col, count| unsafe { self.epilogue.vector(s, sums, row, col, count) });
        } else if accumulate {
            self.each(s, |sums, row, col, count| {
                let out = out.at(row, col);
                // SAFETY: `count` elements from here on are inside the block.
                unsafe { store(s, out, s.add(load(s, out, count), sums), count) };
            });
        } else {
            // SAFETY: as above.
            self.each(s, |sums, row, col, count| unsafe { store(s, out.at(row, col), sums, count) });
        }
    }
}

impl<O: Element> Finish<O> {
    /// Calls `work` with each vector of sums, its place in the output, and its length.
    #[inline(always)]
    fn each<S: Simd>(&self, s: S, work: impl Fn(S::Vector, usize, usize, usize)) {
        let (row, col) = self.at;
        for i in 0..self.rows {
            // SAFETY: row i of the sums, which `finish`'s caller made readable.
            let sums = unsafe { self.sums.add(i * self.stride) };
            let mut j = 0;
            while j + LANES <= self.cols {
                // SAFETY: LANES columns from `j` on are inside the row.
                work(unsafe { s.load(sums.add(j)) }, row + i, col + j, LANES);
                j += LANES;
            }
            if j < self.cols {
                let count = self.cols - j;
                // SAFETY: as many columns as are left.
                work(unsafe { s.load_partial(sums.add(j), count) }, row + i, col + j, count);
            }
        }
    }
}

impl<O: Element> Epilogue<O> {
    /// # Safety
    /// `count` elements from (row, col) on are inside the output.
    #[inline(always)]
    unsafe fn vector<S: Simd>(&self, s: S, sums: S::Vector, row: usize, col: usize, count: usize) {
        let mut x = sums;
        let out = self.out.at(row, col);
        // SAFETY: every operand has `count` elements from this column on: `Product::check` compared their shapes.
        unsafe {
            if self.accumulate {
                x = s.add(load(s, out, count), x);
            }
            if let Some(bias) = &self.bias {
                x = s.add(x, load(s, bias.at(0, col), count));
            }
            if let Some(preactivation) = &self.preactivation {
                store(s, preactivation.at(row, col), x, count);
            }
            if let Some(activation) = self.activation {
                x = activate(activation, s, x);
            }
            store(s, out, x, count);
        }
    }
}

/// # Safety
/// `from` is readable for `count <= LANES` elements.
#[inline(always)]
unsafe fn load<S: Simd, E: Element>(s: S, from: *const E, count: usize) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe { if count == LANES { E::load(s, from) } else { E::load_partial(s, from, count) } }
}

/// # Safety
/// `to` is writable for `count <= LANES` elements.
#[inline(always)]
unsafe fn store<S: Simd, E: Element>(s: S, to: *mut E, vector: S::Vector, count: usize) {
    // SAFETY: the caller's promise.
    unsafe { if count == LANES { E::store(s, to, vector) } else { E::store_partial(s, to, vector, count) } }
}
