//! Adapters merged into the weights that they stand beside.

use std::collections::HashMap;
use std::ops::Range;

use evenkeel_store::Folder;

use crate::chain::adapted::AdaptedWeight;
use crate::chain::model::Model;
use crate::error::Error;
use crate::parameters::ParamId;

/// Reads a model's weights with its adapters' products added, in f32.
pub struct Merger<'a> {
    base: &'a Folder,
    model: &'a Model,
    /// The folder's name for each parameter.
    names: Vec<Option<String>>,
    adapted: HashMap<ParamId, Factors>,
}

struct Factors {
    weight: AdaptedWeight,
    /// [rank, inputs]
    a: Vec<f32>,
    /// [outputs, rank]
    b: Vec<f32>,
}

impl<'a> Merger<'a> {
    /// Compares the folder's tensors with the model; no adapter is merged yet.
    pub fn new(model: &'a Model, base: &'a Folder) -> Result<Merger<'a>, Error> {
        Ok(Merger { base, model, names: model.names_in(base)?, adapted: HashMap::new() })
    }

    /// `read` returns a whole parameter of the adapters.
    pub fn with_adapters<E>(mut self, read: impl Fn(ParamId) -> Result<Vec<f32>, E>) -> Result<Merger<'a>, E> {
        for weight in self.model.adapted_weights() {
            let (a, b) = (read(weight.a)?, read(weight.b)?);
            self.adapted.insert(weight.weight, Factors { weight, a, b });
        }
        Ok(self)
    }

    /// Some rows of a parameter of the base.
    pub fn read_rows(&self, id: ParamId, rows: Range<usize>) -> Result<Vec<f32>, evenkeel_store::Error> {
        let cols = self.model.specs[id.0].whole[1];
        let name = self.names[id.0].as_ref().expect("a parameter of the base");
        let mut values = vec![0.0; rows.len() * cols];
        let tensor = self.base.tensor(name).expect("matched before");
        tensor.read(rows.start * cols..rows.end * cols, &mut values)?;
        if let Some(factors) = self.adapted.get(&id) {
            factors.add_to(&mut values, rows, cols);
        }
        Ok(values)
    }
}

impl Factors {
    /// Adds `scale·B·A`, transposed if the weight is stored so. The product is summed in f32 before it is scaled and added.
    fn add_to(&self, values: &mut [f32], rows: Range<usize>, cols: usize) {
        let AdaptedWeight { scale, transposed, rank, .. } = self.weight;
        let inputs = self.a.len() / rank;
        let mut sums = vec![0.0; cols];
        for (row, values) in rows.zip(values.chunks_exact_mut(cols.max(1))) {
            sums.fill(0.0);
            for r in 0..rank {
                if transposed {
                    let a = self.a[r * inputs + row];
                    let b = self.b[r..].iter().step_by(rank);
                    sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
                } else {
                    let b = self.b[row * rank + r];
                    let a = &self.a[r * inputs..][..inputs];
                    sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
                }
            }
            values.iter_mut().zip(&sums).for_each(|(value, sum)| *value += scale * sum);
        }
    }
}
