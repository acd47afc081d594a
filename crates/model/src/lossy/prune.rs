//! Pruning: linear layers that compute with some of their input columns only, so that a slow rank has less to do.
//!
//! Layers that read the same values, an [`Intake`], keep the same columns K of them. Forward is `X[:, K] · W[:, K]ᵀ + bias`, of
//! the same shape as ever. Backward computes the gradients of X and W at K and imputes them elsewhere, see [`Imputation`].
//! Gradients of biases are exact. All three products shrink alike.
//!
//! Shapes: T tokens, I inputs of a layer on this shard, O outputs, K inputs kept, P pruned.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use evenkeel_device::kernel::{Add, Copy, Fill, Order, Product, ScatterColumns};
use evenkeel_device::{DType, Queue, Tensor};

use crate::chain::body::{Context, Slot, Slots};
use crate::chain::model::Model;
use crate::lossy::intake::Intake;
use crate::lossy::selected::{column_means, gather, gathered, row_means, scatter};
use crate::parameters::{Gradients, ParamId};

/// The stand-in for gradients that are not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Imputation {
    Zero,
    /// The mean of the computed ones: of a token's in X, of an output's in W.
    Average,
    /// The gradient of the step before; zero in the first.
    Same,
}

/// What becomes of the weights of pruned columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrunedWeights {
    /// No update changes them, so their gradients are zero and enter no norm.
    Stay,
    /// Updates change them by imputed gradients. `repeats` is true for one of the ranks that hold the same parameters, have different
    /// samples and sum their gradients: it repeats those of the last step.
    Move { repeats: bool },
}

/// The columns that the linear layers of a shard keep.
pub struct Pruning {
    imputation: Imputation,
    intakes: Vec<State>,
    by_weight: HashMap<ParamId, usize>,
    weights: PrunedWeights,
    /// Steps begun since the last values were forgotten.
    steps: Cell<u32>,
}

struct State {
    intake: Intake,
    /// By weight of the intake: its outputs.
    outputs: Vec<usize>,
    /// Absent if every column is kept.
    pruned: Option<Pruned>,
    /// For [`Imputation::Same`]: the last step's gradients of the input, [T, I], in the order in which they were completed. A
    /// program repeats that order in every step.
    last: RefCell<Vec<Tensor>>,
    /// The number that this step has completed.
    completed: Cell<usize>,
}

struct Pruned {
    /// The pruned columns, on the host.
    columns: Vec<u32>,
    /// u32 [1, K]
    kept: Tensor,
    /// u32 [1, P]
    pruned: Tensor,
    /// By weight of the intake: its kept columns, [O, K] or, stored transposed, [K, O].
    weights: Vec<Tensor>,
    /// Whether those hold this step's parameters.
    are_gathered: Cell<bool>,
}

impl Pruning {
    /// Keeps every column at first.
    pub fn new(model: &Model, imputation: Imputation, weights: PrunedWeights) -> Pruning {
        let (mut intakes, mut by_weight) = (Vec::new(), HashMap::new());
        for (index, intake) in model.intakes().into_iter().enumerate() {
            by_weight.extend(intake.weights.iter().map(|&weight| (weight, index)));
            let outputs = |weight: &ParamId| model.specs[weight.0].matrix[usize::from(intake.transposed)];
            let (outputs, last, completed) =
                (intake.weights.iter().map(outputs).collect(), RefCell::default(), Cell::new(0));
            intakes.push(State { intake, outputs, pruned: None, last, completed });
        }
        Pruning { imputation, intakes, by_weight, weights, steps: Cell::new(0) }
    }

    /// As [`Model::intakes`] lists them.
    pub fn intakes(&self) -> impl ExactSizeIterator<Item = &Intake> {
        self.intakes.iter().map(|state| &state.intake)
    }

    /// Keeps these columns of an intake from here on, given in ascending order. `dtype` is that of the values of its weights.
    pub fn keep(&mut self, queue: &Queue, dtype: DType, intake: usize, kept: &[u32]) {
        let State { intake, outputs, pruned, .. } = &mut self.intakes[intake];
        let fits = kept.is_sorted_by(|a, b| a < b) && kept.last().is_none_or(|&last| (last as usize) < intake.inputs);
        assert!(fits, "columns {kept:?} of {} in ascending order", intake.inputs);
        *pruned = (kept.len() < intake.inputs).then(|| {
            let others: Vec<u32> = (0..intake.inputs as u32).filter(|col| kept.binary_search(col).is_err()).collect();
            let narrow = |&outputs: &usize| {
                let [rows, cols] = if intake.transposed { [kept.len(), outputs] } else { [outputs, kept.len()] };
                queue.tensor(rows, cols, dtype)
            };
            Pruned {
                kept: queue.indices(kept),
                pruned: queue.indices(&others),
                columns: others,
                weights: outputs.iter().map(narrow).collect(),
                are_gathered: Cell::new(false),
            }
        });
    }

    /// The columns of an intake that are pruned, in ascending order.
    pub fn pruned(&self, intake: usize) -> &[u32] {
        self.intakes[intake].pruned.as_ref().map_or(&[], |pruned| &pruned.columns)
    }

    /// The share of their inputs that layers leave out, on average.
    pub fn left_out(&self) -> f64 {
        let shares = (0..self.intakes.len())
            .map(|index| self.pruned(index).len() as f64 / self.intakes[index].intake.inputs.max(1) as f64);
        shares.sum::<f64>() / self.intakes.len().max(1) as f64
    }

    /// Call before each step: parameters may have changed since the last one, and its gradients become the last step's.
    pub fn begin_step(&self) {
        self.steps.set(self.steps.get() + 1);
        for state in &self.intakes {
            state.completed.set(0);
            state.pruned.iter().for_each(|pruned| pruned.are_gathered.set(false));
        }
    }

    /// Forgets the last step's values. Gradients that are not finite must be forgotten: repeated, they would never go away.
    pub fn forget(&self) {
        self.steps.set(0);
        self.intakes.iter().for_each(|state| state.last.borrow_mut().clear());
    }

    pub fn set_imputation(&mut self, imputation: Imputation) {
        if imputation != self.imputation {
            self.imputation = imputation;
            self.forget();
        }
    }

    fn state(&self, weight: ParamId) -> Option<&State> {
        Some(&self.intakes[*self.by_weight.get(&weight)?])
    }

    /// A layer by its weight, if it does not keep every column.
    pub(crate) fn pruned_layer(&self, weight: ParamId) -> Option<PrunedLayer<'_>> {
        let state = self.state(weight)?;
        let pruned = state.pruned.as_ref()?;
        Some(PrunedLayer { pruning: self, state, pruned, weight })
    }

    /// Call when a layer has added its gradient of slot `x`. The last of an intake's layers completes the gradient: computed at
    /// the kept columns, imputed at the others.
    pub(crate) fn complete_input(&self, queue: &Queue, weight: ParamId, x: Slot, slots: &mut Slots) {
        // Backward comes to the first layer last.
        let Some(state) = self.state(weight).filter(|state| state.intake.weights[0] == weight) else { return };
        let Some(pruned) = &state.pruned else {
            if self.imputation == Imputation::Same {
                let dx = slots.get(x);
                queue.launch(Copy { x: dx.view(), out: state.last(queue, dx.rows, dx.dtype).view() });
            }
            return;
        };
        let narrow = slots.take_narrow(x);
        let dx = queue.tensor(narrow.rows, state.intake.inputs, narrow.dtype);
        let at = |columns: &Tensor, x: &Tensor, out: &Tensor| {
            let (x, columns, out) = (x.view(), columns.view(), out.view());
            queue.launch(ScatterColumns { x, columns, out, accumulate: false });
        };
        match self.imputation {
            Imputation::Zero => {
                queue.launch(Fill { out: dx.view(), value: 0.0 });
                at(&pruned.kept, &narrow, &dx);
            }
            Imputation::Average => {
                at(&pruned.kept, &narrow, &dx);
                at(&pruned.pruned, &row_means(queue, &narrow, pruned.pruned.cols), &dx);
            }
            Imputation::Same => {
                // Pruned columns keep their values from step to step: a column keeps the last gradient that was computed for it.
                let last = state.last(queue, narrow.rows, narrow.dtype);
                at(&pruned.kept, &narrow, &last);
                queue.launch(Copy { x: last.view(), out: dx.view() });
            }
        }
        match slots.find(x) {
            Some(sum) => queue.launch(Add { a: sum.view(), b: dx.view(), out: sum.view() }),
            None => slots.set(x, dx),
        }
    }
}

impl State {
    /// The last step's counterpart of the gradient that is completed now, for the caller to update; zeros if there was none of
    /// this shape.
    fn last(&self, queue: &Queue, rows: usize, dtype: DType) -> Tensor {
        let (index, shape) = (self.completed.replace(self.completed.get() + 1), [rows, self.intake.inputs]);
        let mut last = self.last.borrow_mut();
        let zeros = || queue.zeros(shape[0], shape[1], dtype);
        match last.get_mut(index) {
            None => last.push(zeros()),
            Some(tensor) if tensor.shape() != shape => *tensor = zeros(),
            Some(_) => (),
        }
        last[index].clone()
    }
}

/// A linear layer that keeps some of its input columns.
#[derive(Clone, Copy)]
pub(crate) struct PrunedLayer<'a> {
    pruning: &'a Pruning,
    state: &'a State,
    pruned: &'a Pruned,
    weight: ParamId,
}

impl PrunedLayer<'_> {
    /// The kept columns of the weight. The first call in a step gathers those of all the intake's layers, so that nothing comes
    /// between their products, which share their packed input.
    pub fn weight(&self, context: &Context) -> Tensor {
        let (Pruned { kept, weights, are_gathered, .. }, intake) = (self.pruned, &self.state.intake);
        if !are_gathered.replace(true) {
            for (&id, narrow) in intake.weights.iter().zip(weights) {
                let whole = context.parameters.value(id);
                gather(context.queue, whole.view(), kept, intake.transposed, narrow);
            }
        }
        let place = intake.weights.iter().position(|&id| id == self.weight).expect("a layer of its intake");
        weights[place].clone()
    }

    /// The kept columns of the input, [T, K].
    pub fn input(&self, queue: &Queue, x: &Tensor) -> Tensor {
        gathered(queue, x.view(), &self.pruned.kept)
    }

    /// `dweight += aᵀ · b` at the kept columns, which one of the operands has.
    pub fn add_weight_gradient(&self, queue: &Queue, gradients: &Gradients, a: &Tensor, b: &Tensor) {
        let (Pruned { kept, pruned, .. }, transposed) = (self.pruned, self.state.intake.transposed);
        let narrow = queue.tensor(a.cols, b.cols, DType::F32);
        queue.launch(Product::new(Order::TN, a, b, &narrow));
        let (dweight, accumulate) = gradients.overwrite_or_add(queue, self.weight);
        let (moves, repeats) = match self.pruning.weights {
            PrunedWeights::Stay => (false, false),
            PrunedWeights::Move { repeats } => (true, repeats && !self.state.intake.is_summed(self.weight)),
        };
        match self.pruning.imputation {
            Imputation::Average if moves => {
                let means = if transposed {
                    column_means(queue, &narrow, pruned.cols)
                } else {
                    row_means(queue, &narrow, pruned.cols)
                };
                scatter(queue, &means, pruned, transposed, dweight.view(), accumulate);
            }
            // Clearing touches no memory, so the last step's gradient is still there.
            Imputation::Same if repeats && self.pruning.steps.get() > 1 => (),
            _ if accumulate => (),
            _ => queue.launch(Fill { out: dweight.view(), value: 0.0 }),
        }
        scatter(queue, &narrow, kept, transposed, dweight.view(), accumulate);
    }
}

#[cfg(test)]
mod tests;
