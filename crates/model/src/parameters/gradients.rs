//! Gradients of the trained parameters, by bucket.

use std::cell::{Cell, RefCell};

use evenkeel_device::kernel::Fill;
use evenkeel_device::{DType, Queue, Tensor};

use crate::parameters::bucket::Bucket;
use crate::parameters::{ParamId, Parameters, ZeroSharding, place_of};
use crate::sharding::layout::Region;

/// The gradients of all trained parameters, f32, summed until they are cleared.
///
/// Clearing touches no memory: the first addition to a gradient overwrites it. If gradients are split, a bucket's are here whole
/// from the first addition until they are reduced; then only this part's stay.
pub struct Gradients {
    /// By parameter: rows and columns, if it is trained.
    specs: Vec<Option<[usize; 2]>>,
    buckets: Vec<Bucket>,
    split: ZeroSharding,
    places: Vec<Option<(usize, usize)>>,
    /// By parameter: whether nothing has been added to its whole gradient.
    cleared: Vec<Cell<bool>>,
    whole: RefCell<Vec<Option<Tensor>>>,
    /// By bucket, if gradients are split: this part's sums, and whether there are any.
    own: Vec<Option<(Tensor, Cell<bool>)>>,
    /// By parameter: the gradient to add to while it is migrated.
    work: RefCell<Vec<Option<WorkGradient>>>,
}

/// The gradient of the part that a migrated parameter is computed with.
struct WorkGradient {
    matrix: [usize; 2],
    /// Allocated at the first addition, unless it is in place.
    tensor: Option<Tensor>,
    is_cleared: bool,
}

impl Gradients {
    pub fn new(parameters: &Parameters, queue: &Queue) -> Gradients {
        let (buckets, split) = (parameters.buckets.clone(), parameters.split);
        let is_split = |bucket: &Bucket| split.splits_gradients_of(bucket);
        let is_whole = |bucket: &Bucket| bucket.is_trained && !is_split(bucket);
        let whole = |bucket: &Bucket| is_whole(bucket).then(|| queue.tensor(1, bucket.len, DType::F32));
        let own = |bucket: &Bucket| {
            is_split(bucket).then(|| (queue.tensor(1, split.own(bucket).len(), DType::F32), Cell::new(false)))
        };
        Gradients {
            specs: parameters.specs.iter().map(|spec| spec.is_trained.then_some(spec.matrix)).collect(),
            whole: RefCell::new(buckets.iter().map(whole).collect()),
            own: buckets.iter().map(own).collect(),
            places: parameters.places.clone(),
            cleared: vec![Cell::new(true); parameters.specs.len()],
            work: RefCell::new(parameters.specs.iter().map(|_| None).collect()),
            buckets,
            split,
        }
    }

    /// No gradients, for passes without them.
    pub fn none() -> Gradients {
        let (specs, buckets, places, cleared, own) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (whole, work) = (RefCell::default(), RefCell::default());
        Gradients { specs, buckets, split: ZeroSharding::NONE, places, cleared, whole, own, work }
    }

    pub fn clear(&self) {
        self.cleared.iter().for_each(|cleared| cleared.set(true));
        self.own.iter().flatten().for_each(|(_, has_sums)| has_sums.set(false));
    }

    /// The gradient, and whether to add to it rather than overwrite it.
    pub fn overwrite_or_add(&self, queue: &Queue, id: ParamId) -> (Tensor, bool) {
        (self.tensor(queue, id), !self.begin(id))
    }

    /// The same for several matrices as one, if all are trained, lie one directly below the other, and are all cleared or all not.
    pub fn overwrite_or_add_stacked(&self, queue: &Queue, ids: &[ParamId]) -> Option<(Tensor, bool)> {
        let (bucket, start) = place_of(&self.places, *ids.first()?);
        let (cols, is_cleared) = (self.specs[ids[0].0]?[1], self.cleared[ids[0].0].get());
        let mut end = start;
        for &id in ids {
            let is_next = place_of(&self.places, id) == (bucket, end) && self.work.borrow()[id.0].is_none();
            let [rows, _] = self.specs[id.0].filter(|matrix| matrix[1] == cols)?;
            if !is_next || self.cleared[id.0].get() != is_cleared {
                return None;
            }
            end += rows * cols;
        }
        ids.iter().for_each(|id| self.cleared[id.0].set(false));
        Some((self.flat(queue, bucket).col_range(start..end).reshaped((end - start) / cols, cols), !is_cleared))
    }

    /// The gradient, filled with zeros if nothing has been added to it.
    pub fn sum(&self, queue: &Queue, id: ParamId) -> Tensor {
        let tensor = self.tensor(queue, id);
        if self.begin(id) {
            queue.launch(Fill { out: tensor.view(), value: 0.0 });
        }
        tensor
    }

    /// The same; `None` if the parameter is not trained.
    pub fn sum_of_trained(&self, queue: &Queue, id: ParamId) -> Option<Tensor> {
        self.specs[id.0].map(|_| self.sum(queue, id))
    }

    /// Whether nothing was added so far. Notes that something is now.
    fn begin(&self, id: ParamId) -> bool {
        match &mut self.work.borrow_mut()[id.0] {
            Some(work) => std::mem::take(&mut work.is_cleared),
            None => self.cleared[id.0].replace(false),
        }
    }

    fn tensor(&self, queue: &Queue, id: ParamId) -> Tensor {
        if let Some(WorkGradient { matrix: [rows, cols], tensor, .. }) = &mut self.work.borrow_mut()[id.0] {
            return tensor.get_or_insert_with(|| queue.tensor(*rows, *cols, DType::F32)).clone();
        }
        self.kept(queue, id)
    }

    /// The gradient of the part that is kept here.
    fn kept(&self, queue: &Queue, id: ParamId) -> Tensor {
        let (bucket, start) = place_of(&self.places, id);
        let [rows, cols] = self.specs[id.0].unwrap_or_else(|| panic!("parameter {} is not trained", id.0));
        self.flat(queue, bucket).col_range(start..start + rows * cols).reshaped(rows, cols)
    }

    /// All of a bucket's gradients, some of them undefined.
    fn flat(&self, queue: &Queue, bucket: usize) -> Tensor {
        let len = self.buckets[bucket].len;
        self.whole.borrow_mut()[bucket].get_or_insert_with(|| queue.tensor(1, len, DType::F32)).clone()
    }

    /// Adds up gradients of a part of these dims until [`Gradients::return_work`]: beside those of the kept part or, `in_place`,
    /// as a region of them.
    pub fn work_on(&self, queue: &Queue, id: ParamId, matrix: [usize; 2], in_place: Option<&Region>) {
        assert!(!self.split.splits_gradients(), "gradients that are split cannot be computed elsewhere");
        let tensor = in_place.map(|region| region.of(&self.kept(queue, id)));
        let is_cleared = in_place.is_none() || self.cleared[id.0].get();
        let before = self.work.borrow_mut()[id.0].replace(WorkGradient { matrix, tensor, is_cleared });
        assert!(before.is_none(), "parameter {} is migrated twice", id.0);
    }

    /// Takes the gradient of a migrated part, to which something was added. Also returns the gradient of the kept part, for the
    /// caller to add to, and whether that has sums already.
    pub fn return_work(&self, queue: &Queue, id: ParamId) -> (Tensor, Tensor, bool) {
        let work = self.work.borrow_mut()[id.0].take();
        let given = work.filter(|work| !work.is_cleared).and_then(|work| work.tensor);
        let given = given.unwrap_or_else(|| panic!("nothing was added to migrated parameter {}", id.0));
        (given, self.kept(queue, id), !self.cleared[id.0].replace(false))
    }

    /// All of a bucket's gradients, f32 [1, n]; those that nothing was added to are zero.
    pub fn whole(&self, queue: &Queue, bucket: usize) -> Tensor {
        let is_migrated = |(id, _): &(ParamId, usize)| self.work.borrow()[id.0].is_some();
        assert!(!self.buckets[bucket].members.iter().any(is_migrated), "bucket {bucket} waits for migrated gradients");
        self.buckets[bucket].members.iter().for_each(|&(id, _)| drop(self.sum(queue, id)));
        self.flat(queue, bucket)
    }

    /// Takes a bucket's gradients to be reduced, if they are split: the next addition begins anew. Also returns room for this
    /// part's sums, and whether that has sums already, to which others are to be added.
    pub fn take(&self, queue: &Queue, bucket: usize) -> Option<(Tensor, Tensor, bool)> {
        let (own, has_sums) = self.own[bucket].as_ref()?;
        let whole = self.whole(queue, bucket);
        self.whole.borrow_mut()[bucket] = None;
        self.buckets[bucket].members.iter().for_each(|&(id, _)| self.cleared[id.0].set(true));
        Some((whole, own.clone(), has_sums.replace(true)))
    }

    /// The reduced gradients of a bucket's elements whose masters are kept here, f32 [1, n].
    pub fn own(&self, queue: &Queue, bucket: usize) -> Tensor {
        match &self.own[bucket] {
            Some((own, has_sums)) => {
                if !has_sums.replace(true) {
                    queue.launch(Fill { out: own.view(), value: 0.0 });
                }
                own.clone()
            }
            None => self.whole(queue, bucket).col_range(self.split.own_state(&self.buckets[bucket])),
        }
    }
}
