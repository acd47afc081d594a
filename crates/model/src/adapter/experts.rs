//! The adapters of experts in files. PEFT calls them by `target_parameters`; the factors of all experts are one tensor.
//!
//! | | here | in files | in files of PEFT before 0.19 |
//! | --- | --- | --- | --- |
//! | A | `[E·rank, I]`, expert by expert | the same | `lora_B`, `[I, rank·E]`, rank by rank |
//! | B | `[E·O, rank]`, expert by expert | `lora_B`, `[O, rank·E]`, rank by rank | `lora_A`, `[E·rank, O]` |
//!
//! Those took the outputs of matrices `[E, O, I]` for their inputs. Shapes tell which it is, unless an expert has as many inputs as
//! outputs.

use evenkeel_store::RawTensor;

use super::AdapterFolder;
use crate::chain::model::Model;
use crate::error::Error;
use crate::parameters::ParamSpec;

/// One of the two factors of experts' adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertFactor {
    pub experts: usize,
    pub rank: usize,
    /// Inputs and outputs of one expert.
    pub input: usize,
    pub output: usize,
    /// Whether it is B.
    pub is_b: bool,
    /// Whether the base's matrices are stored [in, out]. Every PEFT has these alike.
    pub is_transposed: bool,
}

/// The meaning of inputs and outputs in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertFile {
    Plain,
    /// Each is the other.
    Swapped,
}

/// An order of the numbers of one factor, as (expert, rank, column) of A or (expert, rank, row) of B.
#[derive(Clone, Copy)]
enum Order {
    /// [E, rank, width]
    ExpertMajor,
    /// [E, width, rank]
    Transposed,
    /// [width, rank, E]
    RankMajor,
}

impl ExpertFactor {
    /// Inputs of A or outputs of B.
    fn width(&self) -> usize {
        if self.is_b { self.output } else { self.input }
    }

    /// The name and the shape of its tensor in a file, where the usual name is this.
    fn in_file(&self, name: &str, file: ExpertFile) -> (String, Vec<usize>) {
        let ranks = self.experts * self.rank;
        let is_b = self.is_b == (file == ExpertFile::Plain);
        match (file, self.is_b) {
            (ExpertFile::Plain, _) => (name.to_owned(), self.shape(is_b, ranks)),
            (ExpertFile::Swapped, true) => (name.replace(".lora_B.", ".lora_A."), self.shape(is_b, ranks)),
            (ExpertFile::Swapped, false) => (name.replace(".lora_A.", ".lora_B."), self.shape(is_b, ranks)),
        }
    }

    fn shape(&self, is_lora_b: bool, ranks: usize) -> Vec<usize> {
        if is_lora_b { vec![self.width(), ranks] } else { vec![ranks, self.width()] }
    }

    fn read(&self, tensor: &RawTensor, file: ExpertFile) -> Result<Vec<f32>, Error> {
        let mut values = vec![0.0; self.experts * self.rank * self.width()];
        tensor.read(0..values.len(), &mut values)?;
        Ok(match (file, self.is_b) {
            (ExpertFile::Plain, false) => values,
            (ExpertFile::Plain, true) => self.reordered(&values, Order::RankMajor, Order::Transposed),
            (ExpertFile::Swapped, false) => self.reordered(&values, Order::RankMajor, Order::ExpertMajor),
            (ExpertFile::Swapped, true) => self.reordered(&values, Order::ExpertMajor, Order::Transposed),
        })
    }

    /// The numbers of the whole factor as a file has them.
    fn to_file(self, values: Vec<f32>) -> Vec<f32> {
        if self.is_b { self.reordered(&values, Order::Transposed, Order::RankMajor) } else { values }
    }

    fn reordered(&self, values: &[f32], from: Order, to: Order) -> Vec<f32> {
        let mut out = vec![0.0; values.len()];
        for expert in 0..self.experts {
            for rank in 0..self.rank {
                for at in 0..self.width() {
                    out[self.place(to, expert, rank, at)] = values[self.place(from, expert, rank, at)];
                }
            }
        }
        out
    }

    fn place(&self, order: Order, expert: usize, rank: usize, at: usize) -> usize {
        match order {
            Order::ExpertMajor => (expert * self.rank + rank) * self.width() + at,
            Order::Transposed => (expert * self.width() + at) * self.rank + rank,
            Order::RankMajor => (at * self.rank + rank) * self.experts + expert,
        }
    }
}

impl ParamSpec {
    /// Its shape in an adapter's file.
    pub fn shape_in_adapter_file(&self) -> Vec<usize> {
        match (self.expert_factor, self.experts) {
            (Some(factor), _) => factor.in_file("", ExpertFile::Plain).1,
            (None, Some(experts)) => [&[experts, self.shape[0] / experts], &self.shape[1..]].concat(),
            (None, None) => self.shape.clone(),
        }
    }

    /// Whether its tensor in an adapter's file may have this shape. Experts trained whole were once written as one matrix.
    pub(super) fn fits_adapter_file(&self, shape: &[usize]) -> bool {
        shape == self.shape_in_adapter_file() || (self.experts.is_some() && shape == self.shape)
    }

    /// The numbers of the whole parameter as an adapter's file has them.
    pub fn in_adapter_file(&self, values: Vec<f32>) -> Vec<f32> {
        match self.expert_factor {
            Some(factor) => factor.to_file(values),
            None => values,
        }
    }
}

impl Model {
    /// The numbers of a whole factor of experts in a saved adapter that fits.
    pub(super) fn read_expert_factor(
        &self,
        folder: &AdapterFolder,
        spec: &ParamSpec,
        factor: ExpertFactor,
    ) -> Result<Vec<f32>, Error> {
        let file = self.expert_file(folder)?;
        let (name, _) = factor.in_file(&self.peft_name(spec), file);
        factor.read(&folder.weights.tensor(&name).expect("names were compared"), file)
    }

    /// Which way round a saved adapter has the experts' inputs and outputs.
    pub(super) fn expert_file(&self, folder: &AdapterFolder) -> Result<ExpertFile, Error> {
        let factors = || self.specs.iter().filter_map(|spec| Some((spec, spec.expert_factor?)));
        let fits = |file: ExpertFile| {
            factors().all(|(spec, factor)| {
                let (name, shape) = factor.in_file(&self.peft_name(spec), file);
                folder.weights.tensor(&name).is_none_or(|tensor| tensor.shape() == shape)
            })
        };
        let may_be_swapped = factors().any(|(_, factor)| !factor.is_transposed) && fits(ExpertFile::Swapped);
        match (fits(ExpertFile::Plain), may_be_swapped) {
            (_, false) => Ok(ExpertFile::Plain),
            (false, true) => Ok(ExpertFile::Swapped),
            (true, true) => folder.peft_version.as_deref().and_then(order_of_version).ok_or_else(|| {
                let (spec, _) = factors().next().expect("some fit");
                let what = format!(
                    "`{}` has as many inputs as outputs, which PEFT before 0.19 had the other way round, \
                     and `peft_version` of adapter_config.json does not tell which PEFT saved it",
                    self.peft_name(spec)
                );
                Error::BadAdapter { what }
            }),
        }
    }
}

/// Versions in development between the two do not tell.
fn order_of_version(version: &str) -> Option<ExpertFile> {
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
    let is_new = (numbers.next()??, numbers.next()??) >= (0, 19);
    match is_new {
        true => Some(ExpertFile::Plain),
        false if version.contains("dev") => None,
        false => Some(ExpertFile::Swapped),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_b_lie_rank_by_rank_in_files() {
        let b = ExpertFactor { experts: 2, rank: 3, input: 5, output: 2, is_b: true, is_transposed: false };
        // Tens: the expert; ones: row and rank.
        let here = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
        let file = b.to_file(here.to_vec());
        assert_eq!(file, [0.0, 10.0, 1.0, 11.0, 2.0, 12.0, 3.0, 13.0, 4.0, 14.0, 5.0, 15.0]);
        assert_eq!(b.reordered(&file, Order::RankMajor, Order::Transposed), here);
        assert_eq!(b.in_file("x.lora_B.weight", ExpertFile::Plain), ("x.lora_B.weight".to_owned(), vec![2, 6]));
        assert_eq!(b.in_file("x.lora_B.weight", ExpertFile::Swapped), ("x.lora_A.weight".to_owned(), vec![6, 2]));
    }

    #[test]
    fn the_version_tells_the_order_but_for_those_in_development() {
        assert_eq!(order_of_version("0.21.2"), Some(ExpertFile::Plain));
        assert_eq!(order_of_version("0.19.2.dev0"), Some(ExpertFile::Plain));
        assert_eq!(order_of_version("1.0"), Some(ExpertFile::Plain));
        assert_eq!(order_of_version("0.18.1"), Some(ExpertFile::Swapped));
        assert_eq!(order_of_version("0.18.2.dev0@x"), None);
        assert_eq!(order_of_version("new"), None);
    }
}
