//! Operations on some of a batch's samples: the strips of attention that a shard shares with others.

use std::ops::Range;

use evenkeel_device::kernel::Fill;

use crate::chain::batch::Batch;
use crate::chain::body::{Context, Slot, Slots};
use crate::chain::op::Op;
use crate::parameters::Gradients;
use crate::sharding::strip::Strip;

/// Operations that read and write only a strip's rows of a body's slots.
#[derive(Clone, Debug)]
pub(crate) struct OnRows {
    pub strip: Strip,
    /// Slots of all rows. [T, H] each
    pub input: Slot,
    pub output: Slot,
    /// The strip's rows of them, in place: the last operation adds to the sums of other strips.
    pub x: Slot,
    pub out: Slot,
    pub ops: Vec<Op>,
}

impl OnRows {
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let Some((rows, batch)) = self.part(context) else { return };
        let (x, out) = (values.get(self.input), values.get(self.output));
        let (x, out) = (x.row_range(rows.clone()), out.row_range(rows));
        values.set(self.x, x);
        values.set(self.out, out);
        let context = Context { batch: &batch, ..*context };
        self.ops.iter().for_each(|op| op.forward(&context, values));
    }

    pub fn backward_input(&self, context: &Context, gradients: &Gradients, values: &mut Slots, slots: &mut Slots) {
        let doutput = slots.get(self.output).clone();
        // The first strip writes zeros to the rows of the others, even if it has no rows itself.
        if slots.find(self.input).is_none() {
            let dinput = context.queue.tensor(doutput.rows, doutput.cols, doutput.dtype);
            context.queue.launch(Fill { out: dinput.view(), value: 0.0 });
            slots.set(self.input, dinput);
        }
        let Some((rows, batch)) = self.part(context) else { return };
        slots.set(self.x, slots.get(self.input).row_range(rows.clone()));
        slots.set(self.out, doutput.row_range(rows));
        let context = Context { batch: &batch, ..*context };
        self.ops.iter().rev().for_each(|op| op.backward_input(&context, gradients, values, slots));
    }

    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        let Some((_, batch)) = self.part(context) else { return };
        let context = Context { batch: &batch, ..*context };
        self.ops.iter().rev().for_each(|op| op.backward_weight(&context, gradients, values, slots));
    }

    /// The strip's rows of the batch, if it has any, and the batch for them.
    fn part(&self, context: &Context) -> Option<(Range<usize>, Batch)> {
        let rows = self.strip.rows(&context.batch.segments);
        (!rows.is_empty()).then(|| (rows.clone(), context.batch.attended(rows)))
    }
}
