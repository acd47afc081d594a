//! A model's parameters on a device: f32 masters, copies in the compute dtype, and gradients.

use std::cell::Cell;
use std::ops::Range;

use evenkeel_device::kernel::{Copy, Fill, Placement, RandomNormal};
use evenkeel_device::{DType, Queue, Tensor};

use crate::layout::{Sharing, Slice};

/// A parameter's number in the model's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// What a parameter is, and which part of it a shard holds.
#[derive(Clone, Debug)]
pub struct ParamSpec {
    /// Its Hugging Face name.
    pub name: String,
    /// Its shape in Hugging Face files.
    pub shape: Vec<usize>,
    /// The whole as a matrix: the first dim, and all others as one; a vector is one row.
    pub whole: [usize; 2],
    /// What is held of that matrix.
    pub slice: Slice,
    /// Rows and columns held: the shape it is computed with.
    pub matrix: [usize; 2],
    pub sharing: Sharing,
    pub init: Init,
}

impl ParamSpec {
    /// Elements held.
    pub fn len(&self) -> usize {
        self.matrix[0] * self.matrix[1]
    }

    /// Whether shard `index` speaks for what it holds where others hold the same.
    pub fn is_counted_by(&self, index: usize) -> bool {
        match &self.sharing {
            Sharing::Alone => true,
            Sharing::Same => index == 0,
            Sharing::Summed(holders) => index == holders.start,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Norm weights and biases: kept and used in f32 whatever the compute dtype is.
    pub fn is_vector(&self) -> bool {
        self.shape.len() == 1
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Normal { deviation: f32 },
    Constant(f32),
}

/// The values of all parameters.
pub struct Parameters {
    pub specs: Vec<ParamSpec>,
    dtype: DType,
    masters: Vec<Tensor>,
    /// The copies in the compute dtype; the master itself where that is f32.
    values: Vec<Tensor>,
}

impl Parameters {
    /// Room for the parameters, contents undefined.
    pub fn allocate(specs: &[ParamSpec], dtype: DType, queue: &Queue) -> Parameters {
        let allocate = |spec: &ParamSpec, dtype| queue.tensor(spec.matrix[0], spec.matrix[1], dtype);
        let masters: Vec<Tensor> = specs.iter().map(|spec| allocate(spec, DType::F32)).collect();
        let values = specs.iter().zip(&masters).map(|(spec, master)| {
            if dtype == DType::F32 || spec.is_vector() { master.clone() } else { allocate(spec, dtype) }
        });
        Parameters { specs: specs.to_vec(), dtype, values: values.collect(), masters }
    }

    /// Random parameters. Each number depends on the seed, the parameter's name and its place in the whole parameter.
    pub fn random(specs: &[ParamSpec], dtype: DType, seed: u64, queue: &Queue) -> Parameters {
        let parameters = Parameters::allocate(specs, dtype, queue);
        for (spec, master) in specs.iter().zip(&parameters.masters) {
            match spec.init {
                Init::Constant(value) => queue.launch(Fill { out: master.view(), value }),
                Init::Normal { deviation } => spec.slice.pieces().for_each(|piece| {
                    let (first_row, first_col) = (piece.rows.start as u64, piece.cols.start as u64);
                    queue.launch(RandomNormal {
                        out: master.view().row_range(piece.held_rows).col_range(piece.held_cols),
                        mean: 0.0,
                        deviation,
                        seed: seed ^ hash_name(&spec.name),
                        placement: Placement { first_row, first_col, cols: spec.whole[1] as u64 },
                    });
                }),
            }
        }
        parameters.refresh_copies(queue);
        parameters
    }

    /// The dtype of activations and matrices.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What units compute with: matrices in the compute dtype, vectors in f32.
    pub fn value(&self, id: ParamId) -> &Tensor {
        &self.values[id.0]
    }

    pub fn master(&self, id: ParamId) -> &Tensor {
        &self.masters[id.0]
    }

    /// The copy that an optimizer must keep equal to the master, where it is not the master itself.
    pub fn copy(&self, id: ParamId) -> Option<&Tensor> {
        let (value, master) = (self.value(id), self.master(id));
        (value.dtype != master.dtype).then_some(value)
    }

    pub fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        (0..self.specs.len()).map(ParamId)
    }

    /// Rounds the masters to the compute dtype, after they were written other than by the optimizer.
    pub fn refresh_copies(&self, queue: &Queue) {
        for id in self.ids() {
            if let Some(copy) = self.copy(id) {
                queue.launch(Copy { x: self.master(id).view(), out: copy.view() });
            }
        }
    }
}

/// FNV-1a: enough to give each parameter its own stream of random numbers.
fn hash_name(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3))
}

/// The gradients of all parameters, f32, summed until they are cleared.
///
/// Clearing touches no memory: the first to add to a gradient overwrites it. Gradients that are summed over the same
/// shards lie side by side, so that one reduction sums them all.
pub struct Gradients {
    tensors: Vec<Tensor>,
    cleared: Vec<Cell<bool>>,
    buckets: Vec<Bucket>,
}

/// Gradients that are summed over the same shards, f32 [1, n].
pub struct Bucket {
    pub holders: Range<usize>,
    pub flat: Tensor,
    members: Vec<ParamId>,
}

impl Gradients {
    pub fn new(specs: &[ParamSpec], queue: &Queue) -> Gradients {
        let mut tensors: Vec<Option<Tensor>> = vec![None; specs.len()];
        let mut buckets = Vec::new();
        for (holders, members) in summed(specs) {
            let flat = queue.tensor(1, members.iter().map(|id| specs[id.0].len()).sum(), DType::F32);
            let mut end = 0;
            for &id in &members {
                let [rows, cols] = specs[id.0].matrix;
                end += rows * cols;
                tensors[id.0] = Some(flat.col_range(end - rows * cols..end).reshaped(rows, cols));
            }
            buckets.push(Bucket { holders, flat, members });
        }
        let of_its_own = |spec: &ParamSpec| queue.tensor(spec.matrix[0], spec.matrix[1], DType::F32);
        let tensors = tensors.into_iter().zip(specs).map(|(tensor, spec)| tensor.unwrap_or_else(|| of_its_own(spec)));
        Gradients { tensors: tensors.collect(), cleared: vec![Cell::new(true); specs.len()], buckets }
    }

    /// What must be summed over shards once all micro-batches have been added.
    pub fn buckets(&self, queue: &Queue) -> &[Bucket] {
        for id in self.buckets.iter().flat_map(|bucket| &bucket.members) {
            self.sum(queue, *id);
        }
        &self.buckets
    }

    pub fn clear(&self) {
        self.cleared.iter().for_each(|cleared| cleared.set(true));
    }

    /// The gradient, and whether there is something in it to add to.
    pub fn overwrite_or_add(&self, id: ParamId) -> (&Tensor, bool) {
        (&self.tensors[id.0], !self.cleared[id.0].replace(false))
    }

    /// The gradient, filled with zeros if nothing has been added to it.
    pub fn sum(&self, queue: &Queue, id: ParamId) -> &Tensor {
        let tensor = &self.tensors[id.0];
        if self.cleared[id.0].replace(false) {
            queue.launch(Fill { out: tensor.view(), value: 0.0 });
        }
        tensor
    }
}

/// The parameters whose gradients are summed over shards, by the shards that hold them.
pub fn summed(specs: &[ParamSpec]) -> Vec<(Range<usize>, Vec<ParamId>)> {
    let mut groups: Vec<(Range<usize>, Vec<ParamId>)> = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        let Sharing::Summed(holders) = &spec.sharing else { continue };
        match groups.iter_mut().find(|(group, _)| group == holders) {
            Some((_, members)) => members.push(ParamId(index)),
            None => groups.push((holders.clone(), vec![ParamId(index)])),
        }
    }
    groups
}
