//! A model's parameters on a device: f32 masters, copies in the compute dtype, and gradients.

pub(crate) mod bucket;
mod draw;
mod gradients;
pub(crate) mod joined;
pub(crate) mod load;
pub(crate) mod mxfp4;
pub(crate) mod share;

use std::cell::RefCell;
use std::convert::Infallible;
use std::ops::Range;

use evenkeel_device::kernel::Copy;
use evenkeel_device::{DType, Queue, Tensor};
use serde::{Deserialize, Serialize};

use crate::adapter::ExpertFactor;
use crate::chain::model::Model;
use crate::error::Error;
use crate::nf4::packed::{PackedWeight, QuantizedOnLoading};
use crate::parameters::bucket::Bucket;
use crate::sharding::layout::{Sharing, Slice};
pub(crate) use draw::{draw, draw_whole};
pub use gradients::Gradients;
use joined::JoinedFactors;

/// A parameter's number in the model's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ParamId(pub usize);

/// A parameter, and the part of it that a shard holds.
#[derive(Clone, Debug)]
pub struct ParamSpec {
    /// Its Hugging Face name.
    pub name: String,
    /// Its shape in Hugging Face files.
    pub shape: Vec<usize>,
    /// The tensors of Hugging Face files whose rows it has one behind the other, if it is not a tensor of its own. All have as many.
    pub tensors: Vec<FileTensor>,
    /// The whole as a matrix: the first dim, and all others as one; a vector is one row.
    pub whole: [usize; 2],
    /// The part of that matrix that is held.
    pub slice: Slice,
    /// Rows and columns held: the shape it is computed with.
    pub matrix: [usize; 2],
    pub sharing: Sharing,
    pub init: Init,
    /// Whether training changes it. A frozen parameter has no master, moments or gradient.
    pub is_trained: bool,
    /// Whether it belongs to an adapter, and not to the model that is adapted.
    pub is_adapter: bool,
    /// What it is of the experts' adapters, if it belongs to them: files may have it in another order.
    pub expert_factor: Option<ExpertFactor>,
    /// How many experts it has one behind the other, if it is theirs and of the model.
    pub experts: Option<usize>,
    /// Whether it is computed from other parameters: it is neither drawn, loaded, trained nor saved.
    pub is_derived: bool,
    /// Whether it is a number of the model that no training changes.
    pub is_constant: bool,
    /// Whether it is frozen and held in 4 bits.
    pub is_packed: bool,
}

/// A tensor of a Hugging Face file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTensor {
    pub name: String,
    pub shape: Vec<usize>,
}

impl ParamSpec {
    /// The tensors that it is in Hugging Face files, with their rows in it.
    pub fn in_files(&self) -> impl Iterator<Item = (FileTensor, Range<usize>)> {
        let own = || vec![FileTensor { name: self.name.clone(), shape: self.shape.clone() }];
        let tensors = if self.tensors.is_empty() { own() } else { self.tensors.clone() };
        let rows = self.whole[0] / tensors.len();
        tensors.into_iter().enumerate().map(move |(place, tensor)| (tensor, place * rows..(place + 1) * rows))
    }

    /// Empties the held part, for a stage that does not use the parameter.
    pub(crate) fn hold_nothing(&mut self) {
        self.slice = Slice::of_cols(self.whole[0], 0..0);
        self.matrix = self.slice.dims();
        self.sharing = Sharing::Alone;
    }

    /// Elements held.
    pub fn len(&self) -> usize {
        self.matrix[0] * self.matrix[1]
    }

    /// Whether shard `index` is the one that counts these elements, if several shards hold them.
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

    /// Whether it is a norm weight or bias: those are kept and used in f32 whatever the compute dtype is.
    pub fn is_vector(&self) -> bool {
        self.shape.len() == 1
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Normal {
        deviation: f32,
    },
    /// Between plus and minus this.
    Uniform {
        bound: f32,
    },
    /// The logarithm of a number between these.
    LogUniform {
        least: f32,
        most: f32,
    },
    Constant(f32),
}

/// A stage of ZeRO: the state that replicas split among them instead of each keeping a copy. Each stage also splits what the
/// stages before it split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum ZeroStage {
    #[default]
    Nothing,
    /// Masters and the optimizer's state.
    State,
    Gradients,
    /// The copies that units compute with.
    Values,
}

impl ZeroStage {
    pub const ALL: [ZeroStage; 4] = [ZeroStage::Nothing, ZeroStage::State, ZeroStage::Gradients, ZeroStage::Values];

    /// Its number in ZeRO's paper.
    pub fn number(self) -> u8 {
        self as u8
    }
}

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> u8 {
        stage.number()
    }
}

impl TryFrom<u8> for ZeroStage {
    type Error = String;

    fn try_from(number: u8) -> Result<ZeroStage, String> {
        let stage = ZeroStage::ALL.get(usize::from(number)).copied();
        stage.ok_or_else(|| format!("ZeRO has no stage {number}, only 0 to 3"))
    }
}

/// The part of every bucket's state that one replica keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroSharding {
    /// [`ZeroStage::Nothing`] if there is one replica.
    stage: ZeroStage,
    replica: usize,
    replicas: usize,
}

impl ZeroSharding {
    /// Nothing is split.
    pub const NONE: ZeroSharding = ZeroSharding { stage: ZeroStage::Nothing, replica: 0, replicas: 1 };

    pub fn new(stage: ZeroStage, replica: usize, replicas: usize) -> ZeroSharding {
        let stage = if replicas > 1 { stage } else { ZeroStage::Nothing };
        ZeroSharding { stage, replica, replicas }
    }

    pub fn stage(&self) -> ZeroStage {
        self.stage
    }

    pub fn splits_state(&self) -> bool {
        self.stage >= ZeroStage::State
    }

    pub fn splits_gradients(&self) -> bool {
        self.stage >= ZeroStage::Gradients
    }

    pub fn splits_values(&self) -> bool {
        self.stage >= ZeroStage::Values
    }

    /// The elements of a bucket whose masters and moments are kept here; for frozen parameters, whose values.
    pub fn own_state(&self, bucket: &Bucket) -> Range<usize> {
        if self.splits_state_of(bucket) { self.own(bucket) } else { 0..bucket.len }
    }

    /// The elements of a bucket that are this replica's.
    pub fn own(&self, bucket: &Bucket) -> Range<usize> {
        let bounds = bucket.bounds(self.replicas);
        bounds[self.replica]..bounds[self.replica + 1]
    }

    /// The part kept here of the state of `len` elements that begin at `start` in a bucket: one stretch, or none.
    fn own_stretch(&self, bucket: &Bucket, start: usize, len: usize) -> Option<Stretch> {
        let own = self.own_state(bucket);
        let place = own.start.max(start)..own.end.min(start + len);
        (!place.is_empty()).then(|| Stretch {
            elements: place.start - start..place.end - start,
            place: place.start - own.start..place.end - own.start,
        })
    }

    /// Whether replicas keep different elements of a bucket. Frozen parameters have no state but their values.
    pub fn splits_state_of(&self, bucket: &Bucket) -> bool {
        if bucket.is_trained { self.splits_state() } else { self.splits_values_of(bucket) }
    }

    pub fn splits_values_of(&self, bucket: &Bucket) -> bool {
        self.splits_values() && bucket.is_of_one_place()
    }

    pub fn splits_gradients_of(&self, bucket: &Bucket) -> bool {
        self.splits_gradients() && bucket.is_trained && bucket.is_of_one_place()
    }
}

/// Some consecutive elements of a parameter, as they lie here.
#[derive(Clone, Debug)]
pub struct Stretch {
    /// Their places among the elements that the shard holds, row by row.
    pub elements: Range<usize>,
    /// Their places in the kept part of their bucket.
    pub place: Range<usize>,
}

/// By parameter: its bucket and where it begins there; none if no unit of this stage uses it.
fn places(model: &Model) -> Vec<Option<(usize, usize)>> {
    let mut places = vec![None; model.specs.len()];
    for (index, bucket) in model.buckets.iter().enumerate() {
        bucket.members.iter().for_each(|&(id, start)| places[id.0] = Some((index, start)));
    }
    places
}

/// By parameter: its bucket and its elements whose masters and moments are kept under this split, if any are.
pub fn own_stretches(model: &Model, split: ZeroSharding) -> Vec<Option<(usize, Stretch)>> {
    let own = |(place, spec): (Option<(usize, usize)>, &ParamSpec)| {
        let (bucket, start) = place?;
        Some((bucket, split.own_stretch(&model.buckets[bucket], start, spec.len())?))
    };
    places(model).into_iter().zip(&model.specs).map(own).collect()
}

/// The values of all parameters.
pub struct Parameters {
    pub specs: Vec<ParamSpec>,
    pub buckets: Vec<Bucket>,
    pub split: ZeroSharding,
    dtype: DType,
    /// By parameter: its bucket and where it begins there.
    places: Vec<Option<(usize, usize)>>,
    /// By bucket, [1, n]: all of it, or this part's. In f32 if they are trained; frozen parameters have no other masters than
    /// their values.
    masters: Vec<Tensor>,
    /// By bucket, [1, n]: the values to compute with, if all are here; they share memory with masters of the same dtype.
    values: RefCell<Vec<Option<Tensor>>>,
    /// By bucket, if values are split: this part's.
    own_values: Vec<Option<Tensor>>,
    /// By parameter: the values to compute with while it is migrated.
    work_values: RefCell<Vec<Option<Tensor>>>,
    /// By parameter: its values, if they do not lie in its bucket but where there is room for an adapter's factors.
    apart: Vec<Option<Tensor>>,
    /// By weight: those factors' places.
    joined_factors: Vec<Option<JoinedFactors>>,
    /// By parameter: those that are held in 4 bits. They lie in no bucket.
    packed: Vec<Option<PackedWeight>>,
}

impl Parameters {
    /// Room for the parameters, contents undefined.
    pub fn allocate(model: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        let buckets = model.buckets.clone();
        let places = places(model);
        let (mut masters, mut values, mut own_values) = (Vec::new(), Vec::new(), Vec::new());
        let mut apart = vec![None; model.specs.len()];
        let mut joined_factors = vec![None; model.specs.len()];
        let joined_weights = model.joined_weights();
        let is_joined = |id: ParamId| joined_weights.iter().find(|joined| joined.weight == id);
        for bucket in &buckets {
            let dtype = if bucket.holds_vectors { DType::F32 } else { dtype };
            let own = split.own_state(bucket);
            let is_master = dtype == DType::F32 || !bucket.is_trained;
            if split.splits_values_of(bucket) {
                let master = queue.tensor(1, own.len(), if is_master { dtype } else { DType::F32 });
                let value = if is_master { master.clone() } else { queue.tensor(1, own.len(), dtype) };
                masters.push(master);
                values.push(None);
                own_values.push(Some(value));
            } else if !bucket.is_trained && bucket.members.iter().any(|&(id, _)| is_joined(id).is_some()) {
                for &(ParamId(id), _) in &bucket.members {
                    let [rows, cols] = model.specs[id].matrix;
                    let Some(&joined) = is_joined(ParamId(id)) else {
                        apart[id] = Some(queue.tensor(rows, cols, dtype));
                        continue;
                    };
                    let (weight, factors) =
                        JoinedFactors::allocate(queue, [rows, cols], joined, &joined_weights, dtype);
                    (apart[id], joined_factors[id]) = (Some(weight), Some(factors));
                }
                masters.push(queue.tensor(1, 0, dtype));
                values.push(None);
                own_values.push(None);
            } else {
                let value = queue.tensor(1, bucket.len, dtype);
                masters.push(if is_master { value.col_range(own) } else { queue.tensor(1, own.len(), DType::F32) });
                values.push(Some(value));
                own_values.push(None);
            }
        }
        let (values, work_values) = (RefCell::new(values), RefCell::new(vec![None; model.specs.len()]));
        let packed = |spec: &ParamSpec| spec.is_packed.then(|| PackedWeight::allocate(spec, queue));
        let packed = model.specs.iter().map(packed).collect();
        Parameters {
            specs: model.specs.clone(),
            buckets,
            split,
            dtype,
            places,
            masters,
            values,
            own_values,
            work_values,
            apart,
            joined_factors,
            packed,
        }
    }

    /// No parameters, while others take their place.
    pub fn none(dtype: DType, split: ZeroSharding) -> Parameters {
        let (specs, buckets, places, masters, own_values) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (values, work_values) = (RefCell::default(), RefCell::default());
        let (apart, joined_factors, packed) = (Vec::new(), Vec::new(), Vec::new());
        Parameters {
            specs,
            buckets,
            split,
            dtype,
            places,
            masters,
            values,
            own_values,
            work_values,
            apart,
            joined_factors,
            packed,
        }
    }

    /// Random parameters.
    pub fn random(model: &Model, dtype: DType, split: ZeroSharding, seed: u64, queue: &Queue) -> Parameters {
        let parameters = Parameters::allocate(model, dtype, split, queue);
        let drawn = parameters.fill(queue, |_, spec, whole| -> Result<(), Infallible> {
            draw(queue, spec, whole, seed);
            Ok(())
        });
        drawn.expect("drawing cannot fail");
        let drawn = parameters.fill_packed(|_, spec, weight| {
            let numbers = draw_whole(queue, spec, seed);
            let read = |elements: Range<usize>, out: &mut [f32]| {
                out.copy_from_slice(&numbers[elements]);
                Ok(())
            };
            weight.fill(spec, &QuantizedOnLoading::new(spec, read)?, queue)
        });
        drawn.expect("random numbers are finite");
        model.measure_filled_rows(&parameters, queue);
        parameters
    }

    /// Calls `fill` for each weight that is held in 4 bits, unless this shard or stage holds nothing of it.
    pub(crate) fn fill_packed(
        &self,
        fill: impl Fn(ParamId, &ParamSpec, &PackedWeight) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let weights = self.ids().zip(&self.specs).zip(&self.packed).filter(|((_, spec), _)| !spec.is_empty());
        let fill = |((id, spec), weight): ((ParamId, &ParamSpec), &Option<PackedWeight>)| {
            weight.as_ref().map_or(Ok(()), |weight| fill(id, spec, weight))
        };
        weights.into_iter().try_for_each(fill)
    }

    /// Fills every parameter but those in 4 bits, values and masters: `fill` writes the shard's whole part of one, f32 [rows, columns].
    pub fn fill<E>(
        &self,
        queue: &Queue,
        mut fill: impl FnMut(ParamId, &ParamSpec, &Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        for id in self.ids().filter(|id| self.places[id.0].is_some()) {
            let (spec, value) = (&self.specs[id.0], self.resident(id));
            let [rows, cols] = spec.matrix;
            if let Some(value) = value.as_ref().filter(|value| value.dtype == DType::F32 && value.is_contiguous()) {
                fill(id, spec, value)?;
                continue;
            }
            let whole = queue.tensor(rows, cols, DType::F32);
            fill(id, spec, &whole)?;
            if let Some(value) = value {
                queue.launch(Copy { x: whole.view(), out: value.view() });
            }
            let flat = whole.reshaped(1, rows * cols);
            let Some(Stretch { elements, place }) = self.own_stretch(id) else { continue };
            let (bucket, from) = (self.bucket_of(id), flat.col_range(elements));
            let master = self.buckets[bucket].is_trained.then_some(&self.masters[bucket]);
            for to in [master, self.own_values[bucket].as_ref()].into_iter().flatten() {
                queue.launch(Copy { x: from.view(), out: to.col_range(place.clone()).view() });
            }
        }
        Ok(())
    }

    /// The dtype of activations and matrices.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The values that units compute with: matrices in the compute dtype, vectors in f32.
    pub fn value(&self, id: ParamId) -> Tensor {
        self.work_values.borrow()[id.0].clone().unwrap_or_else(|| self.kept_value(id))
    }

    /// The values of a linear layer's weight; if it is held in 4 bits, expanded to the compute dtype in a new tensor.
    pub fn weight(&self, queue: &Queue, id: ParamId) -> Tensor {
        match &self.packed[id.0] {
            Some(packed) => packed.expanded(queue, self.dtype),
            None => self.value(id),
        }
    }

    /// The values of the part that is kept here.
    pub fn kept_value(&self, id: ParamId) -> Tensor {
        self.resident(id).unwrap_or_else(|| panic!("`{}` is used before it was gathered", self.specs[id.0].name))
    }

    fn resident(&self, id: ParamId) -> Option<Tensor> {
        let (bucket, start) = self.places[id.0]?;
        if let Some(value) = &self.apart[id.0] {
            return Some(value.clone());
        }
        let [rows, cols] = self.specs[id.0].matrix;
        let values = self.values.borrow();
        Some(values[bucket].as_ref()?.col_range(start..start + rows * cols).reshaped(rows, cols))
    }

    /// The elements of a parameter that does not lie in its bucket, [1, n].
    pub fn copy_of_apart(&self, id: ParamId, queue: &Queue) -> Option<Tensor> {
        let value = self.apart[id.0].as_ref()?;
        let copy = queue.tensor(value.rows, value.cols, value.dtype);
        queue.launch(Copy { x: value.view(), out: copy.view() });
        Some(copy.reshaped(1, value.len()))
    }

    /// The places of an adapter's factors beside this weight, if there are any.
    pub(crate) fn joined_factors(&self, weight: ParamId) -> Option<&JoinedFactors> {
        self.joined_factors[weight.0].as_ref()
    }

    /// The elements of a parameter whose masters and moments are kept here: one stretch, or none.
    pub fn own_stretch(&self, id: ParamId) -> Option<Stretch> {
        let (bucket, start) = self.places[id.0]?;
        self.split.own_stretch(&self.buckets[bucket], start, self.specs[id.0].len())
    }

    /// The bucket of a parameter that this stage uses.
    pub fn bucket_of(&self, id: ParamId) -> usize {
        place_of(&self.places, id).0
    }

    /// A bucket's masters that are kept here, f32 [1, n]; for frozen parameters the values, in their own dtype.
    pub fn masters(&self, bucket: usize) -> &Tensor {
        &self.masters[bucket]
    }

    /// All masters that are kept here, by bucket; everything else is dropped.
    pub fn into_masters(self) -> Vec<Tensor> {
        self.masters
    }

    /// The copies of those masters that an optimizer must keep equal to them, if they are not the masters themselves.
    pub fn copies(&self, bucket: usize) -> Option<Tensor> {
        if !self.buckets[bucket].is_trained {
            return None;
        }
        let own = self.split.own_state(&self.buckets[bucket]);
        let whole = || self.values.borrow()[bucket].as_ref().map(|value| value.col_range(own));
        let copies = self.own_values[bucket].clone().or_else(whole).expect("values are here, whole or in part");
        (copies.dtype != DType::F32).then_some(copies)
    }

    /// A whole master, [rows, columns]; masters must not be split.
    pub fn master(&self, id: ParamId) -> Tensor {
        assert!(!self.split.splits_state(), "masters are split");
        let (bucket, start) = place_of(&self.places, id);
        let [rows, cols] = self.specs[id.0].matrix;
        self.masters[bucket].col_range(start..start + rows * cols).reshaped(rows, cols)
    }

    /// A bucket's values: this replica's part, if they are split. `values` returns the whole, if it is here.
    pub fn own_values(&self, bucket: usize) -> Option<&Tensor> {
        self.own_values[bucket].as_ref()
    }

    pub fn values(&self, bucket: usize) -> Option<Tensor> {
        self.values.borrow()[bucket].clone()
    }

    /// Sets a bucket's gathered values, or removes them.
    pub fn set_values(&self, bucket: usize, values: Option<Tensor>) {
        self.values.borrow_mut()[bucket] = values;
    }

    /// Makes units compute with this value instead of the kept one, or with the kept one again.
    pub fn set_work_value(&self, id: ParamId, value: Option<Tensor>) {
        self.work_values.borrow_mut()[id.0] = value;
    }

    pub fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        (0..self.specs.len()).map(ParamId)
    }

    /// The parameters that an optimizer changes.
    pub fn trained(&self) -> impl Iterator<Item = ParamId> {
        self.ids().filter(|id| self.specs[id.0].is_trained)
    }

    /// Rounds the masters to the compute dtype, after they were written other than by the optimizer. If masters are split and
    /// values are not, the caller must still gather those of the other replicas.
    pub fn refresh_copies(&self, queue: &Queue) {
        for (bucket, master) in self.masters.iter().enumerate() {
            if let Some(copies) = self.copies(bucket) {
                queue.launch(Copy { x: master.view(), out: copies.view() });
            }
        }
    }
}

fn place_of(places: &[Option<(usize, usize)>], id: ParamId) -> (usize, usize) {
    places[id.0].unwrap_or_else(|| panic!("no unit of this stage uses parameter {}", id.0))
}
