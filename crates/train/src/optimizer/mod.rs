//! How weights follow gradients: one optimizer, by any [`Rule`].

mod adafactor;
mod muon;
mod peers;
mod rule;

use std::ops::Range;

use evenkeel_device::kernel::{self, ClipFactor, ColumnSum, Fill, MOST_NORMS, SquaredNorm, SquaredNorms};
use evenkeel_device::{DType, Queue, Tensor, View};
use evenkeel_model::{Gradients, Held, Model, ParamId, Parameters, PrunedMask, Stretch};

use crate::relocation::Keeping;
use crate::state_kind::StateKind;
use adafactor::Variances;
use muon::Round;
pub(crate) use peers::Peers;
pub use rule::{AdamW, MuonScale, OptimizerOptions, Rule};

/// The numbers that change from one update to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    pub lr: f32,
    /// From 1.
    pub step: u32,
}

/// An optimizer and its state.
pub struct Optimizer {
    options: OptimizerOptions,
    /// By parameter.
    rules: Vec<Rule>,
    moments: Vec<Moments>,
    /// Present if variances are factored.
    variances: Option<Variances>,
    /// Rounds in which ranks make matrices orthogonal for one another.
    rounds: Vec<Round>,
    /// By parameter: the squared norm of its gradient. f32 [parameters, 1]
    squares: Tensor,
    /// f32 [1, 1] each.
    squared_norm: Tensor,
    clip_factor: Tensor,
}

/// One f32 for each element of the masters kept here.
struct Moments {
    kind: StateKind,
    /// By bucket, [1, n]; `None` if no parameter of the bucket has this kind.
    flats: Vec<Option<Tensor>>,
}

impl Optimizer {
    /// For the parameters of a model, or of a shard of one.
    pub fn new(options: OptimizerOptions, model: &Model, parameters: &Parameters, queue: &Queue) -> Optimizer {
        let rules: Vec<Rule> = parameters.ids().map(|id| options.rule.of(model, id)).collect();
        let kinds = [StateKind::Mean, StateKind::Variance, StateKind::Momentum].into_iter();
        let kinds = kinds.filter(|&kind| parameters.ids().any(|id| keeps(&rules, parameters, kind, id)));
        let scalar = || queue.zeros(1, 1, DType::F32);
        Optimizer {
            options,
            moments: kinds.map(|kind| Moments { kind, flats: flats(&rules, parameters, kind, queue) }).collect(),
            variances: (options.rule == Rule::Adafactor).then(|| Variances::new(&parameters.specs, queue)),
            rounds: Vec::new(),
            squares: queue.zeros(model.specs.len(), 1, DType::F32),
            squared_norm: scalar(),
            clip_factor: scalar(),
            rules,
        }
    }

    /// The same for one of several ranks; `keeping` says what each of them keeps.
    pub(crate) fn among(mut self, model: &Model, keeping: impl FnOnce() -> Vec<Keeping>, rank: usize) -> Optimizer {
        let is_made = |id: &ParamId| model.specs[id.0].is_trained && matches!(self.rules[id.0], Rule::Muon { .. });
        let made: Vec<ParamId> = (0..self.rules.len()).map(ParamId).filter(is_made).collect();
        let keeping = if made.is_empty() { Vec::new() } else { keeping() };
        self.rounds = if keeping.len() > 1 { Round::all(&model.specs, made, &keeping, rank) } else { Vec::new() };
        self
    }

    /// The last measured squares, f32 [parameters, 1], to be summed over ranks before they are added up.
    pub(crate) fn squares(&self) -> &Tensor {
        &self.squares
    }

    pub(crate) fn rule(&self) -> Rule {
        self.options.rule
    }

    /// Measures the squares of the counted parameters' gradients that are kept here, one by one: so the norm has the same bits
    /// wherever a chain is cut in stages.
    pub fn measure_squares(
        &self,
        queue: &Queue,
        parameters: &Parameters,
        gradients: &Gradients,
        is_counted: impl Fn(ParamId) -> bool,
    ) {
        queue.launch(Fill { out: self.squares.view(), value: 0.0 });
        let norm = |id: ParamId| {
            let place = parameters.own_stretch(id)?.place;
            let x = gradients.own(queue, parameters.bucket_of(id)).col_range(place).view();
            Some(SquaredNorm { x, out: self.squares.row_range(id.0..id.0 + 1).view(), accumulate: false })
        };
        let norms: Vec<SquaredNorm> = parameters.trained().filter(|&id| is_counted(id)).filter_map(norm).collect();
        norms.chunks(MOST_NORMS).for_each(|norms| queue.launch(SquaredNorms(norms.to_vec())));
    }

    /// Adds up the measured squares to the squared norm, f32 [1, 1]. [`Optimizer::update`] clips by the tensor's value at that time.
    pub fn add_up_squares(&self, queue: &Queue) -> &Tensor {
        let out = self.squared_norm.view();
        queue.launch(Fill { out, value: 0.0 });
        queue.launch(ColumnSum { x: self.squares.view(), out });
        &self.squared_norm
    }

    /// Updates every master kept here and its copy, except pruned elements: they and their moments stay as they are, bit for bit.
    /// The whole model must be kept here. Gradients are spent: some rules overwrite them.
    pub fn update(
        &self,
        queue: &Queue,
        parameters: &Parameters,
        gradients: &Gradients,
        update: Update,
        pruned: Option<&PrunedMask>,
    ) {
        self.update_among(None, queue, parameters, gradients, update, pruned);
    }

    /// The same, if other ranks keep some of the model.
    pub(crate) fn update_among(
        &self,
        peers: Option<&Peers>,
        queue: &Queue,
        parameters: &Parameters,
        gradients: &Gradients,
        update: Update,
        pruned: Option<&PrunedMask>,
    ) {
        let rule = self.options.rule;
        assert!(pruned.is_none() || rule.is_elementwise(), "{} moves elements together", rule.name());
        let grad_factor = self.options.clip_norm.map(|limit| {
            let (squared_norm, out) = (self.squared_norm.view(), self.clip_factor.view());
            queue.launch(ClipFactor { squared_norm, limit, out });
            out
        });
        let changing = Changing { queue, parameters, gradients, update, grad_factor };
        match rule {
            Rule::Adafactor => return self.update_factored(&changing, peers),
            Rule::Muon { momentum, nesterov, .. } => self.make_orthogonal(&changing, momentum, nesterov, peers),
            Rule::AdamW(_) | Rule::Sgd { .. } | Rule::Lion { .. } => (),
        }
        let stretches = parameters.trained().filter_map(|id| {
            let Stretch { place, .. } = parameters.own_stretch(id)?;
            let (rule, spec) = (self.rules[id.0], &parameters.specs[id.0]);
            let weight_decay = self.decay_of(parameters, id);
            let scale = if let Rule::Muon { scale, .. } = rule { scale.of(spec.whole) } else { 1.0 };
            // A pruned parameter has its own mask, so it is not joined with others.
            let pruned = pruned.filter(|pruned| pruned.of(id).is_some()).map(|_| id);
            Some((place, parameters.bucket_of(id), Alike { rule, weight_decay, scale, pruned }))
        });
        for Together { bucket, place, like } in together(stretches) {
            let pruned = like.pruned.and_then(|id| Some(pruned?.of(id)?.view()));
            self.change(&changing, bucket, place, like, pruned);
        }
    }

    /// Changes elements that are treated alike.
    fn change(&self, changing: &Changing, bucket: usize, place: Range<usize>, alike: Alike, pruned: Option<View>) {
        let Changing { queue, parameters, gradients, update: Update { lr, step }, grad_factor } = *changing;
        let Alike { rule, weight_decay, scale, .. } = alike;
        let of = |flat: &Tensor| flat.col_range(place.clone()).view();
        let moment = |kind: StateKind| of(self.flat(kind, bucket).expect("a rule's state is there"));
        let weight = of(parameters.masters(bucket));
        let grad = of(&gradients.own(queue, bucket));
        let copy = parameters.copies(bucket).as_ref().map(of);
        match rule {
            Rule::AdamW(AdamW { beta1, beta2, epsilon }) => {
                let (mean, variance) = (moment(StateKind::Mean), moment(StateKind::Variance));
                queue.launch(kernel::AdamW {
                    weight,
                    grad,
                    mean,
                    variance,
                    copy,
                    lr,
                    beta1,
                    beta2,
                    epsilon,
                    weight_decay,
                    step,
                    grad_factor,
                    frozen: pruned,
                });
            }
            Rule::Sgd { momentum: beta, nesterov } => {
                let momentum = (beta != 0.0).then(|| moment(StateKind::Momentum));
                queue.launch(kernel::Sgd {
                    weight,
                    grad,
                    momentum,
                    copy,
                    lr,
                    beta,
                    nesterov,
                    weight_decay,
                    grad_factor,
                    frozen: pruned,
                });
            }
            Rule::Lion { beta1, beta2 } => {
                let mean = moment(StateKind::Mean);
                queue.launch(kernel::Lion {
                    weight,
                    grad,
                    mean,
                    copy,
                    lr,
                    beta1,
                    beta2,
                    weight_decay,
                    grad_factor,
                    frozen: pruned,
                });
            }
            // The gradient already holds the direction; the decay follows the rate without the scale.
            Rule::Muon { .. } => queue.launch(kernel::Sgd {
                weight,
                grad,
                momentum: None,
                copy,
                lr: lr * scale,
                beta: 0.0,
                nesterov: false,
                weight_decay: weight_decay / scale,
                grad_factor: None,
                frozen: pruned,
            }),
            Rule::Adafactor => unreachable!("it moves elements together"),
        }
    }

    fn decay_of(&self, parameters: &Parameters, id: ParamId) -> f32 {
        let decays = self.options.decay_vectors || !parameters.specs[id.0].is_vector();
        if decays { self.options.weight_decay } else { 0.0 }
    }

    /// The same optimizer with its state in the layout of `parameters`: `move_flats` gets a test for the parameters that have a
    /// kind of state, and that kind's flats before and after. Kinds move one after another, so at most one exists twice at a
    /// time.
    pub(crate) fn moved(
        mut self,
        parameters: &Parameters,
        queue: &Queue,
        move_flats: impl Fn(&dyn Fn(ParamId) -> bool, &[Option<Tensor>], &[Option<Tensor>]),
    ) -> Optimizer {
        for Moments { kind, flats: before } in &mut self.moments {
            let after = flats(&self.rules, parameters, *kind, queue);
            move_flats(&|id| keeps(&self.rules, parameters, *kind, id), before, &after);
            *before = after;
        }
        self
    }

    /// The elements of a parameter's state beside its weight that are kept here, and where they lie, f32 [1, n].
    pub(crate) fn kept(&self, kind: StateKind, id: ParamId, parameters: &Parameters) -> Option<(Held, Tensor)> {
        let spec = &parameters.specs[id.0];
        if kind.is_kept_by_all() {
            let held = Held::all(kind.extent(spec.whole));
            return Some((held, self.variances.as_ref()?.of(kind, id)?));
        }
        if !keeps(&self.rules, parameters, kind, id) {
            return None;
        }
        let Stretch { elements, place } = parameters.own_stretch(id)?;
        let flat = self.flat(kind, parameters.bucket_of(id))?;
        Some((Held { slice: spec.slice.clone(), range: elements }, flat.col_range(place)))
    }

    /// One kind of state of the bucket's masters that are kept here.
    fn flat(&self, kind: StateKind, bucket: usize) -> Option<&Tensor> {
        self.moments.iter().find(|moments| moments.kind == kind)?.flats[bucket].as_ref()
    }
}

/// The inputs of an update, the same for every element.
#[derive(Clone, Copy)]
struct Changing<'a> {
    queue: &'a Queue,
    parameters: &'a Parameters,
    gradients: &'a Gradients,
    update: Update,
    grad_factor: Option<View>,
}

/// How elements are treated.
#[derive(Clone, Copy, PartialEq)]
struct Alike {
    rule: Rule,
    weight_decay: f32,
    /// Factor of the learning rate.
    scale: f32,
    pruned: Option<ParamId>,
}

/// Whether this kind of state is kept for a parameter.
fn keeps(rules: &[Rule], parameters: &Parameters, kind: StateKind, id: ParamId) -> bool {
    let spec = &parameters.specs[id.0];
    spec.is_trained && rules[id.0].kinds(spec).contains(&kind)
}

/// Zeros for a kind of state, by bucket.
fn flats(rules: &[Rule], parameters: &Parameters, kind: StateKind, queue: &Queue) -> Vec<Option<Tensor>> {
    let flat = |bucket: usize| {
        let is_used = parameters.buckets[bucket].members.iter().any(|&(id, _)| keeps(rules, parameters, kind, id));
        is_used.then(|| queue.zeros(1, parameters.masters(bucket).len(), DType::F32))
    };
    (0..parameters.buckets.len()).map(flat).collect()
}

/// Parameters that lie side by side in a bucket and are treated alike.
struct Together<T> {
    bucket: usize,
    place: Range<usize>,
    like: T,
}

/// Joins stretches of a bucket if one begins at the end of another: a launch for each parameter costs a small model on a GPU more
/// than the work. Gaps between parameters belong to none and end a stretch.
fn together<T: Copy + PartialEq>(stretches: impl Iterator<Item = (Range<usize>, usize, T)>) -> Vec<Together<T>> {
    let mut alike: Vec<(usize, T, Vec<Range<usize>>)> = Vec::new();
    for (place, bucket, like) in stretches {
        match alike.iter_mut().rev().find(|other| (other.0, other.1) == (bucket, like)) {
            Some((.., places)) => places.push(place),
            None => alike.push((bucket, like, vec![place])),
        }
    }
    let mut found: Vec<Together<T>> = Vec::new();
    for (bucket, like, mut places) in alike {
        places.sort_unstable_by_key(|place| place.start);
        for run in places.chunk_by(|before, after| before.end == after.start) {
            found.push(Together { bucket, place: run[0].start..run[run.len() - 1].end, like });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_that_are_treated_alike_are_joined_in_their_bucket_only() {
        let stretches = [
            (0..32, 0, 'a'),
            (0..64, 1, 'a'),
            (32..64, 0, 'a'),
            (64..96, 0, 'b'),
            (128..160, 1, 'a'),
            (64..100, 1, 'a'),
            (96..128, 0, 'a'),
        ];
        let found: Vec<_> = together(stretches.into_iter()).into_iter().map(|t| (t.place, t.bucket, t.like)).collect();
        let expected = [(0..64, 0, 'a'), (96..128, 0, 'a'), (0..100, 1, 'a'), (128..160, 1, 'a'), (64..96, 0, 'b')];
        assert_eq!(found, expected);
    }
}
