//! The norms that DoRA's magnitudes stand over: of the rows of `W + s·B·A`, of which there is one for each output.
//!
//! They are measured whenever A and B have changed, from the values that layers compute with. A dense `B·A` exists for a few rows at a
//! time, in f32. It takes the operations of `W·Aᵀ`, which the expanded square would need, and nothing cancels.

use std::collections::BTreeSet;
use std::ops::Range;

use evenkeel_device::kernel::{Copy, Fill, Order, Product, SquareSums};
use evenkeel_device::{DType, Queue, Tensor, bf16};

use crate::chain::adapted::AdaptedWeight;
use crate::chain::model::Model;
use crate::parameters::share::WeightPart;
use crate::parameters::{ParamId, Parameters};

/// The most elements of `W + s·B·A` at a time: 32 MiB.
const DENSE_ELEMENTS: usize = 1 << 23;
/// Elements of a weight that are read at a time.
const READ_ELEMENTS: usize = 1 << 18;

impl Model {
    /// Whether layers divide by the norms of rows, which must be measured after each change of adapters.
    pub fn measures_rows(&self) -> bool {
        self.specs.iter().any(|spec| spec.is_derived)
    }

    /// The factors of adapters that the norms of rows are measured with.
    pub fn measured_factors(&self) -> BTreeSet<ParamId> {
        let measured = self.adapted_weights().into_iter().filter(|adapted| adapted.magnitude.is_some());
        measured.flat_map(|adapted| [adapted.a, adapted.b]).collect()
    }

    /// Computes the squared norms of the rows of adapted weights. If a layer's inputs are cut, these are summands, which must
    /// still be summed over the shards. Replicas that split values each measure their share of a weight, so there they are
    /// summands, too; the factors must have been gathered.
    pub fn measure_rows(&self, parameters: &Parameters, queue: &Queue) {
        if !self.measures_rows() {
            return;
        }
        let adapted = self.adapted_weights();
        adapted.iter().for_each(|adapted| adapted.measure_rows(parameters, queue));
    }

    /// The same for parameters that were just filled. Replicas that split values measure later, together.
    pub fn measure_filled_rows(&self, parameters: &Parameters, queue: &Queue) {
        if !parameters.split.splits_values() {
            self.measure_rows(parameters, queue);
        }
    }
}

/// The tensors that the rows of one weight are measured with.
struct Measured {
    /// [rank, inputs]
    a: Tensor,
    /// [outputs, rank], or its transpose if the weight is stored [in, out].
    b: Tensor,
    /// [1, outputs]
    squares: Tensor,
    /// Sums along the other dim, which nothing reads.
    others: Tensor,
}

impl AdaptedWeight {
    fn measure_rows(&self, parameters: &Parameters, queue: &Queue) {
        let Some(magnitude) = self.magnitude else { return };
        let squares = parameters.kept_value(magnitude.squares);
        queue.launch(Fill { out: squares.view(), value: 0.0 });
        let parts = parameters.share_of_weight(queue, self.weight);
        if parts.is_empty() {
            return;
        }
        let [a, b] = [self.a, self.b].map(|id| parameters.kept_value(id));
        let b = if self.transposed { transposed(queue, &b) } else { b };
        let others = queue.zeros(1, parameters.specs[self.weight.0].matrix[1], DType::F32);
        let measured = Measured { a, b, squares, others };
        parts.iter().for_each(|part| self.measure_part(queue, part, &measured));
    }

    /// Adds the squares of a part of `W + s·B·A`.
    fn measure_part(&self, queue: &Queue, part: &WeightPart, measured: &Measured) {
        let (Measured { a, b, squares, others }, cols) = (measured, part.cols.clone());
        let step = (DENSE_ELEMENTS / cols.len()).max(1);
        for first in part.rows.clone().step_by(step) {
            let rows = first..part.rows.end.min(first + step);
            let held = rows.start - part.rows.start..rows.end - part.rows.start;
            let dense = queue.tensor(rows.len(), cols.len(), DType::F32);
            queue.launch(Copy { x: part.values.row_range(held).view(), out: dense.view() });
            let product = match self.transposed {
                true => Product::new(Order::TN, &a.col_range(rows.clone()), &b.col_range(cols.clone()), &dense),
                false => Product::new(Order::NN, &b.row_range(rows.clone()), &a.col_range(cols.clone()), &dense),
            };
            queue.launch(Product { scale: self.scale, ..product.accumulating() });
            let (along_rows, along_cols) = match self.transposed {
                true => (None, squares.col_range(cols.clone())),
                false => (Some(squares.col_range(rows).view()), others.col_range(0..cols.len())),
            };
            queue.launch(SquareSums {
                x: dense.view(),
                factor: None,
                rows: along_rows,
                cols: along_cols.view(),
                row_scale: 1.0,
                col_scale: 1.0,
            });
        }
    }

    /// Computes the norms of the base's rows for these outputs, rounded to `dtype` as layers compute with them: the magnitudes of
    /// a new adapter. `read` reads elements of the stored weight, which has this shape.
    pub fn read_norms<E>(
        &self,
        read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), E>,
        [rows, cols]: [usize; 2],
        dtype: DType,
        outputs: Range<usize>,
        norms: &mut [f32],
    ) -> Result<(), E> {
        let square = |value: &f32| {
            let value = if dtype == DType::Bf16 { bf16::from_f32(*value).to_f32() } else { *value };
            f64::from(value).powi(2)
        };
        let read_rows = if self.transposed { 0..rows } else { outputs.clone() };
        let mut squares = vec![0.0f64; outputs.len()];
        let step = (READ_ELEMENTS / cols.max(1)).max(1);
        for first in read_rows.clone().step_by(step) {
            let some = first..read_rows.end.min(first + step);
            let mut values = vec![0.0; some.len() * cols];
            read(some.start * cols..some.end * cols, &mut values)?;
            for (row, values) in some.zip(values.chunks_exact(cols.max(1))) {
                if self.transposed {
                    let values = &values[outputs.clone()];
                    squares.iter_mut().zip(values).for_each(|(sum, value)| *sum += square(value));
                } else {
                    squares[row - outputs.start] = values.iter().map(square).sum();
                }
            }
        }
        norms.iter_mut().zip(&squares).for_each(|(norm, square)| *norm = square.sqrt() as f32);
        Ok(())
    }
}

/// A small matrix transposed, by a product: there is no other kernel that does it.
fn transposed(queue: &Queue, x: &Tensor) -> Tensor {
    let width = x.cols;
    let is_diagonal = |place: usize| f32::from(u8::from(place.is_multiple_of(width + 1)));
    let ones: Vec<f32> = (0..width * width).map(is_diagonal).collect();
    let identity = queue.floats(width, width, x.dtype, &ones);
    let out = queue.tensor(width, x.rows, x.dtype);
    queue.launch(Product::new(Order::NT, &identity, x, &out));
    out
}
