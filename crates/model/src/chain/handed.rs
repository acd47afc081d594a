//! Values that layers hand to later ones of a batch beside the stream: keys and values, and numbers for each token and layer.
//!
//! Forward puts a value once, and later layers take it. Their backward leaves gradients, which the backward of the layer that put it
//! collects. A layer that is computed again may put its value again, and leaves the gradients.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use evenkeel_device::kernel::{Add, Copy};
use evenkeel_device::{Queue, Tensor};

use crate::chain::body::{Context, Slot, Slots};

/// What is handed on; layers by the number of the one that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Handed {
    Keys(usize),
    Values(usize),
    TokenInputs,
}

/// The values of a batch that are on their way, and their gradients.
#[derive(Default)]
pub(crate) struct HandedValues(Mutex<BTreeMap<Handed, HandedValue>>);

struct HandedValue {
    value: Tensor,
    gradient: Option<Tensor>,
}

/// Puts a slot's value for later layers.
#[derive(Clone, Debug)]
pub(crate) struct HandOn {
    pub what: Handed,
    pub x: Slot,
}

/// Takes a value from an earlier layer, or some of its columns that no other layer takes.
#[derive(Clone, Debug)]
pub(crate) struct TakeHanded {
    pub what: Handed,
    pub columns: Option<Range<usize>>,
    pub out: Slot,
}

impl HandedValues {
    fn with<R>(&self, what: Handed, run: impl FnOnce(&mut HandedValue) -> R) -> R {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        run(values.get_mut(&what).expect("layers come in order"))
    }
}

impl HandOn {
    pub fn forward(&self, context: &Context, values: &Slots) {
        let value = values.get(self.x).clone();
        let mut handed = context.batch.handed.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that later layers have left, if this one is computed again.
        let gradient = handed.remove(&self.what).and_then(|before| before.gradient);
        handed.insert(self.what, HandedValue { value, gradient });
    }

    /// Adds the gradients of later layers to that of the slot.
    pub fn backward(&self, context: &Context, slots: &mut Slots) {
        let mut handed = context.batch.handed.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(gradient) = handed.remove(&self.what).and_then(|value| value.gradient) else { return };
        match slots.find(self.x) {
            Some(own) => add(context.queue, &gradient, own),
            None => slots.set(self.x, gradient),
        }
    }
}

impl TakeHanded {
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let value = context.batch.handed.with(self.what, |handed| handed.value.clone());
        values.set(self.out, self.part_of(value));
    }

    pub fn backward(&self, context: &Context, slots: &mut Slots) {
        let (queue, dout) = (context.queue, slots.take(self.out));
        context.batch.handed.with(self.what, |handed| match (&handed.gradient, &self.columns) {
            (None, None) => handed.gradient = Some(dout),
            (Some(begun), None) => add(queue, &dout, begun),
            (_, Some(_)) => {
                let value = &handed.value;
                let like_value = || queue.tensor(value.rows, value.cols, value.dtype);
                let gradient = handed.gradient.get_or_insert_with(like_value);
                let own = self.part_of(gradient.clone());
                queue.launch(Copy { x: dout.view(), out: own.view() });
            }
        });
    }

    fn part_of(&self, whole: Tensor) -> Tensor {
        self.columns.as_ref().map_or(whole.clone(), |columns| whole.col_range(columns.clone()))
    }
}

fn add(queue: &Queue, gradient: &Tensor, to: &Tensor) {
    queue.launch(Add { a: to.view(), b: gradient.view(), out: to.view() });
}
