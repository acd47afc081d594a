//! The norms that DoRA's magnitudes stand over: of the rows of `W + s·B·A`, of which there is one for each output.
//!
//! They are measured whenever A and B have changed, from the values that layers compute with. A dense `B·A` exists for a few rows at a
//! time, in f32. It takes the operations of `W·Aᵀ`, which the expanded square would need, and nothing cancels.

use std::ops::Range;

use evenkeel_device::kernel::{Copy, Fill, Order, Product, SquareSums};
use evenkeel_device::{DType, Queue, Tensor, bf16};
use evenkeel_store::RawTensor;

use crate::chain::adapted::AdaptedWeight;
use crate::chain::model::Model;
use crate::parameters::Parameters;

/// The most elements of `W + s·B·A` at a time: 32 MiB.
const DENSE_ELEMENTS: usize = 1 << 23;

impl Model {
    /// Whether layers divide by the norms of rows, which must be measured after each change of adapters.
    pub fn measures_rows(&self) -> bool {
        self.specs.iter().any(|spec| spec.is_derived)
    }

    /// Computes the squared norms of the rows of adapted weights. If a layer's inputs are cut, these are summands, which must
    /// still be summed over the shards.
    pub fn measure_rows(&self, parameters: &Parameters, queue: &Queue) {
        if !self.measures_rows() {
            return;
        }
        assert!(
            !parameters.split.splits_values(),
            "norms of rows are measured where whole rows are, not with stage 3 of ZeRO"
        );
        let adapted = self.adapted_weights();
        adapted.iter().for_each(|adapted| adapted.measure_rows(parameters, queue));
    }
}

impl AdaptedWeight {
    fn measure_rows(&self, parameters: &Parameters, queue: &Queue) {
        let Some(magnitude) = self.magnitude else { return };
        let [weight, a, b, squares] =
            [self.weight, self.a, self.b, magnitude.squares].map(|id| parameters.kept_value(id));
        queue.launch(Fill { out: squares.view(), value: 0.0 });
        let [rows, cols] = weight.shape();
        if weight.is_empty() {
            return;
        }
        let transposed_b = self.transposed.then(|| transposed(queue, &b));
        // Sums along the other dim, which nothing reads.
        let others = queue.zeros(1, cols, DType::F32);
        let step = (DENSE_ELEMENTS / cols).max(1);
        for first in (0..rows).step_by(step) {
            let block = first..rows.min(first + step);
            let dense = queue.tensor(block.len(), cols, DType::F32);
            queue.launch(Copy { x: weight.row_range(block.clone()).view(), out: dense.view() });
            let product = match &transposed_b {
                Some(b) => Product::new(Order::TN, &a.col_range(block.clone()), b, &dense),
                None => Product::new(Order::NN, &b.row_range(block.clone()), &a, &dense),
            };
            queue.launch(Product { scale: self.scale, ..product.accumulating() });
            let (along_rows, along_cols) = match self.transposed {
                true => (None, &squares),
                false => (Some(squares.col_range(block).view()), &others),
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

    /// Reads the norms of the base's rows for these outputs, rounded to `dtype` as layers compute with them: the magnitudes of a
    /// new adapter. `shape` is the stored weight's.
    pub fn read_norms(
        &self,
        weight: &RawTensor,
        [rows, cols]: [usize; 2],
        dtype: DType,
        outputs: Range<usize>,
        norms: &mut [f32],
    ) -> Result<(), evenkeel_store::Error> {
        let square = |value: f32| {
            let value = if dtype == DType::Bf16 { bf16::from_f32(value).to_f32() } else { value };
            f64::from(value).powi(2)
        };
        if self.transposed {
            let mut squares = vec![0.0; outputs.len()];
            let mut values = vec![0.0; outputs.len()];
            for row in 0..rows {
                weight.read(row * cols + outputs.start..row * cols + outputs.end, &mut values)?;
                squares.iter_mut().zip(&values).for_each(|(sum, value)| *sum += square(*value));
            }
            norms.iter_mut().zip(&squares).for_each(|(norm, square): (_, &f64)| *norm = square.sqrt() as f32);
        } else {
            let mut values = vec![0.0; cols];
            for (output, norm) in outputs.zip(norms) {
                weight.read(output * cols..(output + 1) * cols, &mut values)?;
                *norm = values.iter().map(|value| square(*value)).sum::<f64>().sqrt() as f32;
            }
        }
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
