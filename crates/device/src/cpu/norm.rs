//! RMS and layer norms with the residual sum fused in, and their gradients.

use std::ops::Range;

use super::matrix::{Element, Matrix, matrix, with_element};
use super::rows::{PARTS, column_sums, column_sums_floats, each_vector, load, rows_per_task, store, total};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use super::{Run, Team, WorkingMemory};
use crate::kernel::{Norm, NormBackward, NormKind};

impl Run for Norm {
    fn run(&self, team: &mut Team) {
        with_element!(self.x.dtype, E => {
            let rows = NormRows {
                kernel: self,
                x: matrix::<E>(&self.x),
                add: self.add.zip(self.sum).map(|(add, sum)| (matrix(&add), matrix(&sum))),
                weight: self.weight.map(|weight| matrix(&weight)),
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
    /// The addend and the destination of the sum.
    add: Option<(Matrix<E>, Matrix<E>)>,
    weight: Option<Matrix<f32>>,
    bias: Option<Matrix<f32>>,
    out: Matrix<E>,
    stats: Matrix<f32>,
    rows: Range<usize>,
}

impl<E: Element> Vectorised for NormRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.kernel.kind {
            NormKind::Rms => self.rows::<S, false>(s),
            NormKind::Layer => self.rows::<S, true>(s),
        }
    }
}

impl<E: Element> NormRows<'_, E> {
    #[inline(always)]
    fn rows<S: Simd, const LAYER: bool>(&self, s: S) {
        for row in self.rows.clone() {
            let mean_or_square = self.sum::<S, LAYER>(s, row) / self.x.cols as f32;
            let (mean, variance) = if LAYER {
                (mean_or_square, self.squared_deviations(s, row, mean_or_square) / self.x.cols as f32)
            } else {
                (0.0, mean_or_square)
            };
            let scale = 1.0 / (variance + self.kernel.epsilon).sqrt();
            // SAFETY: the row's statistics are this task's alone.
            unsafe {
                self.stats.at(row, 0).write(mean);
                self.stats.at(row, 1).write(scale);
            }
            self.normalise::<S, LAYER>(s, row, mean, scale);
        }
    }

    /// The matrix to normalise.
    #[inline(always)]
    fn input(&self) -> Matrix<E> {
        self.add.map_or(self.x, |(_, sum)| sum)
    }

    /// Writes the residual sum, and returns the total of the row, or of its squares for an RMS norm.
    #[inline(always)]
    fn sum<S: Simd, const LAYER: bool>(&self, s: S, row: usize) -> f32 {
        let mut sums = [s.splat(0.0); PARTS];
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
            sums[part] = if LAYER { s.add(sums[part], x) } else { s.mul_add(x, x, sums[part]) };
        });
        total(s, sums)
    }

    #[inline(always)]
    fn squared_deviations<S: Simd>(&self, s: S, row: usize, mean: f32) -> f32 {
        let input = self.input();
        let means = [mean; LANES];
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
    fn normalise<S: Simd, const LAYER: bool>(&self, s: S, row: usize, mean: f32, scale: f32) {
        let input = self.input();
        let offset = s.splat(self.kernel.weight_offset);
        let (mean, scale) = (s.splat(mean), s.splat(scale));
        each_vector!(0..self.x.cols, |col, count| {
            // SAFETY: rows are this task's alone; nobody writes weight or bias.
            unsafe {
                let x = load(s, input.at(row, col), count);
                let centred = if LAYER { s.sub(x, mean) } else { x };
                let mut out = s.mul(centred, scale);
                if let Some(weight) = self.weight {
                    out = s.mul(out, s.add(offset, load(s, weight.at(0, col), count)));
                }
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
                weight: self.weight.map(|weight| matrix(&weight)),
                stats: matrix(&self.stats),
                dout: matrix(&self.dout),
                residual: self.residual.map(|residual| matrix(&residual)),
                dx: matrix(&self.dx),
                sums: matrix(&self.stats),
                rows: 0..0,
            };
            let outs = [self.dweight, self.dbias].map(|out| out.map(|out| matrix(&out)));
            column_sums(team, self.x.rows, self.x.cols, &outs, |block, sums| {
                vectorise(BackwardRows { rows: block, sums, ..rows.clone() });
            });
        });
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_team(column_sums_floats(self.x.rows, self.x.cols, 2))
    }
}

#[derive(Clone)]
struct BackwardRows<'a, E> {
    kernel: &'a NormBackward,
    x: Matrix<E>,
    weight: Option<Matrix<f32>>,
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

/// Sums over a row that its gradient needs. With x̂ the normalised row and g = dout·weight, dx = scale · (g - mean(g) -
/// x̂·mean(g·x̂)); an RMS norm subtracts no mean, so it has none here.
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
        match self.kernel.kind {
            NormKind::Rms => self.rows::<S, false>(s),
            NormKind::Layer => self.rows::<S, true>(s),
        }
    }
}

impl<E: Element> BackwardRows<'_, E> {
    #[inline(always)]
    fn rows<S: Simd, const LAYER: bool>(&self, s: S) {
        let mut row = self.rows.start;
        while row + GROUP <= self.rows.end {
            let facts = self.facts::<S, LAYER, GROUP>(s, row);
            self.gradients::<S, LAYER, GROUP>(s, row, facts);
            row += GROUP;
        }
        while row < self.rows.end {
            let facts = self.facts::<S, LAYER, 1>(s, row);
            self.gradients::<S, LAYER, 1>(s, row, facts);
            row += 1;
        }
    }

    /// `weight_offset + weight`, or ones
    /// # Safety
    /// As [`load`]'s; nobody writes the weight.
    #[inline(always)]
    unsafe fn weight<S: Simd>(&self, s: S, col: usize, count: usize) -> S::Vector {
        match self.weight {
            // SAFETY: the caller's promise.
            Some(weight) => s.add(s.splat(self.kernel.weight_offset), unsafe { load(s, weight.at(0, col), count) }),
            None => s.splat(1.0),
        }
    }

    #[inline(always)]
    fn facts<S: Simd, const LAYER: bool, const ROWS: usize>(&self, s: S, first: usize) -> [RowFacts<S::Vector>; ROWS] {
        let zero = s.splat(0.0);
        let mut facts = [RowFacts { mean: zero, scale: zero, mean_g: zero, mean_gx: zero }; ROWS];
        for (i, facts) in facts.iter_mut().enumerate() {
            // SAFETY: nobody writes the statistics.
            let (mean, scale) = unsafe { (*self.stats.at(first + i, 0), *self.stats.at(first + i, 1)) };
            facts.mean = s.splat(mean);
            facts.scale = s.splat(scale);
        }
        each_vector!(0..self.x.cols, |col, count| {
            // SAFETY: nobody writes the weight.
            let weight = unsafe { self.weight(s, col, count) };
            for (i, facts) in facts.iter_mut().enumerate() {
                let (x, dout) = (self.x.at(first + i, col), self.dout.at(first + i, col));
                // SAFETY: rows are this task's alone.
                let (x, dout) = unsafe { (load(s, x, count), load(s, dout, count)) };
                let g = s.mul(dout, weight);
                if LAYER {
                    facts.mean_g = s.add(facts.mean_g, g);
                }
                facts.mean_gx = s.mul_add(g, if LAYER { s.sub(x, facts.mean) } else { x }, facts.mean_gx);
            }
        });
        let size = s.splat(self.x.cols as f32);
        for facts in &mut facts {
            facts.mean_g = s.div(s.splat(s.sum(facts.mean_g)), size);
            facts.mean_gx = s.div(s.mul(s.splat(s.sum(facts.mean_gx)), facts.scale), size);
        }
        facts
    }

    #[inline(always)]
    fn gradients<S: Simd, const LAYER: bool, const ROWS: usize>(
        &self,
        s: S,
        first: usize,
        facts: [RowFacts<S::Vector>; ROWS],
    ) {
        let biased = self.kernel.dbias.is_some();
        each_vector!(0..self.x.cols, |col, count| {
            // SAFETY: rows and sums are this task's alone, and each element is read before it is written; nobody writes
            // the weight.
            unsafe {
                let weight = self.weight(s, col, count);
                let (dweight_at, dbias_at) = (self.sums.at(0, col), self.sums.at(1, col));
                let mut dweight = load(s, dweight_at, count);
                let mut dbias = s.splat(0.0);
                for (i, facts) in facts.iter().enumerate() {
                    let row = first + i;
                    let x = load(s, self.x.at(row, col), count);
                    let dout = load(s, self.dout.at(row, col), count);
                    let normal = s.mul(if LAYER { s.sub(x, facts.mean) } else { x }, facts.scale);
                    dweight = s.mul_add(dout, normal, dweight);
                    dbias = s.add(dbias, dout);
                    let g = s.mul(dout, weight);
                    let centred = if LAYER { s.sub(g, facts.mean_g) } else { g };
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
