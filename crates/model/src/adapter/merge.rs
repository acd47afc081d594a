//! Adapters merged into the weights that they stand beside.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use evenkeel_store::Folder;

use crate::chain::adapted::AdaptedWeight;
use crate::chain::model::Model;
use crate::error::Error;
use crate::nf4::packed::OwnedWeight;
use crate::parameters::ParamId;
use crate::parameters::load::with_packed;
use crate::parameters::mxfp4::SavedNumbers;

/// Reads a model's weights with its adapters' products added and, with DoRA, rows brought to their magnitudes, in f32.
pub struct Merger<'a> {
    base: &'a Folder,
    model: &'a Model,
    /// The folder's names for each parameter.
    names: Vec<Vec<String>>,
    adapted: HashMap<ParamId, Factors>,
    /// The weight in 4 bits that was read last.
    packed: RefCell<Option<(ParamId, OwnedWeight)>>,
}

struct Factors {
    weight: AdaptedWeight,
    /// [rank, inputs], of each expert one below the other.
    a: Vec<f32>,
    /// [outputs, rank], likewise.
    b: Vec<f32>,
    scaling: RowScaling,
}

/// How the rows of a merged weight are scaled, one for each output.
enum RowScaling {
    None,
    /// To these norms.
    Magnitudes(Vec<f32>),
    /// By these factors: the weight is stored [in, out], so a few stored rows do not tell the norms.
    Factors(Vec<f32>),
}

/// Elements of a weight that are read at a time.
const READ_ELEMENTS: usize = 1 << 20;

impl<'a> Merger<'a> {
    /// Compares the folder's tensors with the model; no adapter is merged yet.
    pub fn new(model: &'a Model, base: &'a Folder) -> Result<Merger<'a>, Error> {
        Ok(Merger { base, model, names: model.names_in(base)?, adapted: HashMap::new(), packed: RefCell::default() })
    }

    /// `read` returns a whole parameter of the adapters.
    pub fn with_adapters<E: From<Error>>(
        mut self,
        read: impl Fn(ParamId) -> Result<Vec<f32>, E>,
    ) -> Result<Merger<'a>, E> {
        for weight in self.model.adapted_weights() {
            let (a, b) = (read(weight.a)?, read(weight.b)?);
            self.adapted.insert(weight.weight, Factors { weight, a, b, scaling: RowScaling::None });
            if let Some(magnitude) = weight.magnitude {
                let magnitudes = read(magnitude.magnitudes)?;
                let scaling = match weight.transposed {
                    true => RowScaling::Factors(self.factors_of_columns(weight.weight, magnitudes)?),
                    false => RowScaling::Magnitudes(magnitudes),
                };
                self.adapted.get_mut(&weight.weight).expect("just added").scaling = scaling;
            }
        }
        Ok(self)
    }

    /// The magnitudes divided by the norms of the merged weight's columns.
    fn factors_of_columns(&self, id: ParamId, magnitudes: Vec<f32>) -> Result<Vec<f32>, Error> {
        let [rows, cols] = self.model.specs[id.0].whole;
        let mut squares = vec![0.0f64; cols];
        let step = (READ_ELEMENTS / cols.max(1)).max(1);
        for first in (0..rows).step_by(step) {
            for row in self.read_rows(id, first..rows.min(first + step))?.chunks_exact(cols.max(1)) {
                squares.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value).powi(2));
            }
        }
        Ok(magnitudes.iter().zip(&squares).map(|(magnitude, square)| factor(*magnitude, *square)).collect())
    }

    /// Some rows of a parameter of the base. A weight in 4 bits is expanded, for that is what the adapter was trained with.
    pub fn read_rows(&self, id: ParamId, rows: Range<usize>) -> Result<Vec<f32>, Error> {
        let spec = &self.model.specs[id.0];
        let cols = spec.whole[1];
        let names = &self.names[id.0];
        let elements = rows.start * cols..rows.end * cols;
        let mut values = if spec.is_packed {
            self.expanded(id, names.first().expect("a parameter of the base"), elements)?
        } else {
            let mut values = vec![0.0; elements.len()];
            let saved = SavedNumbers::open(self.base, spec, names, self.model.has_mxfp4())?;
            saved.read(spec, elements, &mut values)?;
            values
        };
        if let Some(factors) = self.adapted.get(&id) {
            factors.add_to(&mut values, rows.clone(), cols);
            factors.scale(&mut values, rows, cols);
        }
        Ok(values)
    }

    fn expanded(&self, id: ParamId, name: &str, elements: Range<usize>) -> Result<Vec<f32>, Error> {
        let mut packed = self.packed.borrow_mut();
        if packed.as_ref().is_none_or(|(last, _)| *last != id) {
            let spec = &self.model.specs[id.0];
            let len = spec.whole.iter().product();
            let weight = with_packed(self.base, name, spec, |weight| OwnedWeight::of(weight, len))?;
            *packed = Some((id, weight));
        }
        let (_, weight) = packed.as_ref().expect("it was read");
        Ok(weight.expanded(elements))
    }
}

impl Factors {
    /// Adds `scale·B·A`, transposed if the weight is stored so. The product is summed in f32 before it is scaled and added.
    fn add_to(&self, values: &mut [f32], rows: Range<usize>, cols: usize) {
        let AdaptedWeight { scale, transposed, rank, experts, .. } = self.weight;
        let [inputs, outputs] = [&self.a, &self.b].map(|factor| factor.len() / (rank * experts));
        let rows_of_expert = if transposed { inputs } else { outputs };
        let mut sums = vec![0.0; cols];
        for (row, values) in rows.zip(values.chunks_exact_mut(cols.max(1))) {
            let (expert, row) = (row / rows_of_expert, row % rows_of_expert);
            let a = &self.a[expert * rank * inputs..][..rank * inputs];
            let b = &self.b[expert * outputs * rank..][..outputs * rank];
            sums.fill(0.0);
            for r in 0..rank {
                if transposed {
                    let a = a[r * inputs + row];
                    let b = b[r..].iter().step_by(rank);
                    sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
                } else {
                    let b = b[row * rank + r];
                    let a = &a[r * inputs..][..inputs];
                    sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
                }
            }
            values.iter_mut().zip(&sums).for_each(|(value, sum)| *value += scale * sum);
        }
    }

    fn scale(&self, values: &mut [f32], rows: Range<usize>, cols: usize) {
        for (row, values) in rows.zip(values.chunks_exact_mut(cols.max(1))) {
            match &self.scaling {
                RowScaling::None => return,
                RowScaling::Magnitudes(magnitudes) => {
                    let square = values.iter().map(|value| f64::from(*value).powi(2)).sum();
                    let factor = factor(magnitudes[row], square);
                    values.iter_mut().for_each(|value| *value *= factor);
                }
                RowScaling::Factors(factors) => {
                    values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
                }
            }
        }
    }
}

/// The factor that brings a row to its magnitude. A row of zeros stays one.
fn factor(magnitude: f32, square: f64) -> f32 {
    if square == 0.0 { 0.0 } else { (f64::from(magnitude) / square.sqrt()) as f32 }
}
