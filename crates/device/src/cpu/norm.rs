//! RMS and layer norms with the residual sum fused in, and their gradients.

use std::ops::Range;

use super::matrix::{Element, Matrix, matrix, with_element};
use super::rows::{PARTS, column_sums, each_vector, load, rows_per_task, store, total};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::kernel::{Norm, NormBackward, NormKind};

impl Run for Norm {
    fn run(&self, team: &mut Team) {
        with_element!(self.x.dtype, E => {
            let rows = NormRows {
                kernel: self,
                x: matrix::<E>(&self.x),
                add: self.add.zip(self.sum).map(|(add, sum)| (matrix(&add), matrix(&sum))),
                weight: matrix(&self.weight),
                bias: self.bias.map(|bias| matrix(&bias)),
                out: matrix(&self.out),
                stats: matrix(&self.stats),
                rows: 0..0,
            };
            team.blocks(self.x.rows, rows_per_task(self.x.cols), |block, _| {
                vectorise(NormRows { rows: block, ..rows.clone() });
            });
        });
    }
}

#[derive(Clone)]
struct NormRows<'a, E> {
    kernel: &'a Norm,
    x: Matrix<E>,
    /// What is added, and where the sum goes.
    add: Option<(Matrix<E>, Matrix<E>)>,
    weight: Matrix<f32>,
    bias: Option<Matrix<f32>>,
    out: Matrix<E>,
    stats: Matrix<f32>,
    rows: Range<usize>,
}

impl<E: Element> Vectorised for NormRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows.clone() {
            let (total, squares) = self.sums(s, row);
            let size = self.x.cols as f32;
            let (mean, variance) = match self.kernel.kind {
                NormKind::Rms => (0.0, squares / size),
                NormKind::Layer => {
                    let mean = total / size;
                    (mean, self.squared_deviations(s, row, mean) / size)
                }
            };
            let scale = 1.0 / (variance + self.kernel.epsilon).sqrt();
            // SAFETY: the row's statistics are this task's alone.
            unsafe {
                self.stats.at(row, 0).write(mean);
                self.stats.at(row, 1).write(scale);
            }
            self.normalise(s, row, mean, scale);
        }
    }
}

impl<E: Element> NormRows<'_, E> {
    /// What is normalised.
    #[inline(always)]
    fn input(&self) -> Matrix<E> {
        self.add.map_or(self.x, |(_, sum)| sum)
    }

    /// Writes the sum with what is added, and returns the total of the row and that of its squares.
    #[inline(always)]
    fn sums<S: Simd>(&self, s: S, row: usize) -> (f32, f32) {
        let (mut sum, mut squares) = ([s.splat(0.0); PARTS], [s.splat(0.0); PARTS]);
        each_vector!(0..self.x.cols, |col, count, part| {
            // SAFETY: rows are this task's alone.
            let x = unsafe {
                let x = load(s, self.x.at(row, col), count);
                match self.add {
                    // Read back as it was rounded: backward sees only the stored sum.
                    Some((add, sum)) => {
                        store(s, sum.at(row, col), s.add(x, load(s, add.at(row, col), count)), count);
                        load(s, sum.at(row, col), count)
                    }
                    None => x,
                }
            };
            sum[part] = s.add(sum[part], x);
            squares[part] = s.mul_add(x, x, squares[part]);
        });
        (total(s, sum), total(s, squares))
    }

    #[inline(always)]
    fn squared_deviations<S: Simd>(&self, s: S, row: usize, mean: f32) -> f32 {
        let (input, means) = (self.input(), [mean; LANES]);
        let mut squares = [s.splat(0.0); PARTS];
        each_vector!(0..self.x.cols, |col, count, part| {
            // The mean is loaded like the row, so that lanes past the row's end do not deviate.
            // SAFETY: rows are this task's alone; `means` has LANES elements.
            let deviation = unsafe { s.sub(load(s, input.at(row, col), count), load(s, means.as_ptr(), count)) };
            squares[part] = s.mul_add(deviation, deviation, squares[part]);
        });
        total(s, squares)
    }

    #[inline(always)]
    fn normalise<S: Simd>(&self, s: S, row: usize, mean: f32, scale: f32) {
        let (input, offset) = (self.input(), s.splat(self.kernel.weight_offset));
        let (mean, scale) = (s.splat(mean), s.splat(scale));
        each_vector!(0..self.x.cols, |col, count| {
            // SAFETY: rows are this task's alone; nobody writes weight or bias.
            unsafe {
                let x = load(s, input.at(row, col), count);
                let weight = s.add(offset, load(s, self.weight.at(0, col), count));
                let mut out = s.mul(s.mul(s.sub(x, mean), scale), weight);
                if let Some(bias) = self.bias {
                    out = s.add(out, load(s, bias.at(0, col), count));
                }
                store(s, self.out.at(row, col), out, count);
            }
        });
    }
}

impl Run for NormBackward {
    fn run(&self, team: &mut Team) {
        with_element!(self.x.dtype, E => {
            let rows = BackwardRows {
                kernel: self,
                x: matrix::<E>(&self.x),
                weight: matrix(&self.weight),
                stats: matrix(&self.stats),
                dout: matrix(&self.dout),
                residual: self.residual.map(|residual| matrix(&residual)),
                dx: matrix(&self.dx),
                sums: matrix(&self.dweight),
                rows: 0..0,
            };
            let outs = [Some(matrix(&self.dweight)), self.dbias.map(|dbias| matrix(&dbias))];
            column_sums(team, self.x.rows, self.x.cols, &outs, |block, sums| {
                vectorise(BackwardRows { rows: block, sums, ..rows.clone() });
            });
        });
    }
}

#[derive(Clone)]
struct BackwardRows<'a, E> {
    kernel: &'a NormBackward,
    x: Matrix<E>,
    weight: Matrix<f32>,
    stats: Matrix<f32>,
    dout: Matrix<E>,
    residual: Option<Matrix<E>>,
    dx: Matrix<E>,
    /// f32 [2, H]: this block's share of `dweight` and `dbias`.
    sums: Matrix<f32>,
    rows: Range<usize>,
}

/// Rows that share one visit of the column sums, which would otherwise be moved as often as the rows.
const GROUP: usize = 4;

/// What the gradient of a row needs to know of the whole row. With x̂ the normalised row and g = dout·weight,
/// dx = scale · (g - mean(g) - x̂·mean(g·x̂)); an RMS norm subtracts no mean, so it has none here.
#[derive(Clone, Copy)]
struct RowFacts<V> {
    mean: V,
    scale: V,
    mean_g: V,
    mean_gx: V,
}

impl<E: Element> Vectorised for BackwardRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut row = self.rows.start;
        while row + GROUP <= self.rows.end {
            self.group::<S, GROUP>(s, row);
            row += GROUP;
        }
        (row..self.rows.end).for_each(|row| self.group::<S, 1>(s, row));
    }
}

impl<E: Element> BackwardRows<'_, E> {
    #[inline(always)]
    fn group<S: Simd, const ROWS: usize>(&self, s: S, first: usize) {
        let zero = s.splat(0.0);
        let mut facts = [RowFacts { mean: zero, scale: zero, mean_g: zero, mean_gx: zero }; ROWS];
        for (i, facts) in facts.iter_mut().enumerate() {
            *facts = self.facts(s, first + i);
        }
        self.gradients(s, first, facts);
    }

    /// `weight_offset + weight`
    /// # Safety
    /// As [`load`]'s; nobody writes the weight.
    #[inline(always)]
    unsafe fn weight<S: Simd>(&self, s: S, col: usize, count: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        s.add(s.splat(self.kernel.weight_offset), unsafe { load(s, self.weight.at(0, col), count) })
    }

    #[inline(always)]
    fn facts<S: Simd>(&self, s: S, row: usize) -> RowFacts<S::Vector> {
        // SAFETY: nobody writes the statistics.
        let (mean, scale) = unsafe { (self.stats.at(row, 0).read(), self.stats.at(row, 1).read()) };
        let (mean, scale) = (s.splat(mean), s.splat(scale));
        let (mut sum_g, mut sum_gx) = (s.splat(0.0), s.splat(0.0));
        each_vector!(0..self.x.cols, |col, count| {
            // SAFETY: rows are this task's alone.
            let (x, dout) = unsafe { (load(s, self.x.at(row, col), count), load(s, self.dout.at(row, col), count)) };
            // SAFETY: nobody writes the weight.
            let g = s.mul(dout, unsafe { self.weight(s, col, count) });
            sum_g = s.add(sum_g, g);
            sum_gx = s.mul_add(g, s.sub(x, mean), sum_gx);
        });
        let size = s.splat(self.x.cols as f32);
        let mean_gx = s.div(s.mul(s.splat(s.sum(sum_gx)), scale), size);
        let mean_g = match self.kernel.kind {
            NormKind::Rms => s.splat(0.0),
            NormKind::Layer => s.div(s.splat(s.sum(sum_g)), size),
        };
        RowFacts { mean, scale, mean_g, mean_gx }
    }

    #[inline(always)]
    fn gradients<S: Simd, const ROWS: usize>(&self, s: S, first: usize, facts: [RowFacts<S::Vector>; ROWS]) {
        let biased = self.kernel.dbias.is_some();
        each_vector!(0..self.x.cols, |col, count| {
            // SAFETY: rows and sums are this task's alone, and each element is read before it is written; nobody writes
            // the weight.
            unsafe {
                let weight = self.weight(s, col, count);
                let (dweight_at, dbias_at) = (self.sums.at(0, col), self.sums.at(1, col));
                let (mut dweight, mut dbias) = (load(s, dweight_at, count), s.splat(0.0));
                for (i, facts) in facts.iter().enumerate() {
                    let row = first + i;
                    let x = load(s, self.x.at(row, col), count);
                    let dout = load(s, self.dout.at(row, col), count);
                    let normal = s.mul(s.sub(x, facts.mean), facts.scale);
                    dweight = s.mul_add(dout, normal, dweight);
                    dbias = s.add(dbias, dout);
                    let centred = s.sub(s.mul(dout, weight), facts.mean_g);
                    let inner = s.sub(centred, s.mul(normal, facts.mean_gx));
                    let dx = match self.residual {
                        Some(residual) => s.mul_add(facts.scale, inner, load(s, residual.at(row, col), count)),
                        None => s.mul(facts.scale, inner),
                    };
                    store(s, self.dx.at(row, col), dx, count);
                }
                store(s, dweight_at, dweight, count);
                if biased {
                    store(s, dbias_at, s.add(load(s, dbias_at, count), dbias), count);
                }
            }
        });
    }
}
