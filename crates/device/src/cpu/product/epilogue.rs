//! The steps after the sums: bias, activation, rounding, or addition to the output.

use super::super::activation::activate;
use super::super::matrix::{Element, Matrix, matrix};
use super::super::rows::{each_vector, load, store};
use super::super::simd::{Simd, Vectorised, vectorise};
use crate::kernel::{Activation, Product};

/// The output of a product and the steps between sum and output.
#[derive(Clone, Copy)]
pub(super) struct Epilogue<O> {
    pub out: Matrix<O>,
    scale: f32,
    accumulate: bool,
    bias: Option<Matrix<f32>>,
    activation: Option<Activation>,
    preactivation: Option<Matrix<O>>,
}

impl<O: Element> Epilogue<O> {
    pub fn new(product: &Product) -> Epilogue<O> {
        Epilogue {
            out: matrix(&product.out),
            scale: product.scale,
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

    /// The two common cases have their own loops: choosing per vector took as long as the arithmetic of a tile.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Epilogue { scale, accumulate, bias, activation, preactivation, .. } = self.epilogue;
        if scale != 1.0 || bias.is_some() || activation.is_some() || preactivation.is_some() {
            self.each::<S, EVERYTHING>(s);
        } else if accumulate {
            self.each::<S, ADD>(s);
        } else {
            self.each::<S, STORE>(s);
        }
    }
}

/// The step for a vector of sums. Numbers, since a closure might not be compiled for the vector level.
const STORE: u8 = 0;
const ADD: u8 = 1;
const EVERYTHING: u8 = 2;

impl<O: Element> Finish<O> {
    #[inline(always)]
    fn each<S: Simd, const WHAT: u8>(&self, s: S) {
        let (row, col) = self.at;
        for i in 0..self.rows {
            // SAFETY: row i of the sums, which `finish`'s caller made readable.
            let sums = unsafe { self.sums.add(i * self.stride) };
            each_vector!(0..self.cols, |j, count| {
                // SAFETY: `count` columns from `j` on are inside the block.
                unsafe { self.epilogue.vector::<S, WHAT>(s, load(s, sums.add(j), count), row + i, col + j, count) };
            });
        }
    }
}

impl<O: Element> Epilogue<O> {
    /// # Safety
    /// `count` elements from (row, col) on are inside the output.
    #[inline(always)]
    unsafe fn vector<S: Simd, const WHAT: u8>(&self, s: S, sums: S::Vector, row: usize, col: usize, count: usize) {
        let mut x = sums;
        let out = self.out.at(row, col);
        // SAFETY: every operand has `count` elements from this column on: `Product::check` compared their shapes.
        unsafe {
            if WHAT == EVERYTHING {
                x = s.mul(x, s.splat(self.scale));
            }
            if WHAT == ADD || (WHAT == EVERYTHING && self.accumulate) {
                x = s.add(load(s, out, count), x);
            }
            if WHAT == EVERYTHING {
                if let Some(bias) = &self.bias {
                    x = s.add(x, load(s, bias.at(0, col), count));
                }
                if let Some(preactivation) = &self.preactivation {
                    store(s, preactivation.at(row, col), x, count);
                }
                if let Some(activation) = self.activation {
                    x = activate(activation, s, x);
                }
            }
            store(s, out, x, count);
        }
    }
}
