//! The adapters of experts: `s·x·A_eᵀ·B_eᵀ` beside the product with each expert's matrix, for the rows of that expert.
//!
//! The factors of all experts lie one below the other, so each product is a grouped one. There is no dropout and no DoRA.
//!
//! Shapes: P pairs, E experts, I inputs and O outputs of one expert's matrix on this shard.

use evenkeel_device::kernel::{Multiply, Order};
use evenkeel_device::{DType, Tensor};

use crate::chain::body::{Context, Slot, Slots};
use crate::chain::experts::{ExpertMatrix, Experts};
use crate::parameters::ParamId;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertAdapter {
    /// [E·rank, I]
    pub a: ParamId,
    /// [E·O, rank]
    pub b: ParamId,
    pub scale: f32,
    /// The scaled product of the rows with A. [P, rank]
    pub s: Slot,
}

impl Experts {
    pub fn matrices(&self) -> impl Iterator<Item = &ExpertMatrix> {
        [&self.gate_up, &self.down].into_iter()
    }

    pub fn adapters(&self) -> impl Iterator<Item = ExpertAdapter> {
        self.matrices().filter_map(|matrix| matrix.adapter)
    }
}

impl ExpertAdapter {
    /// Adds to the experts' outputs; returns the scaled product with A.
    pub(super) fn add_outputs(
        &self,
        experts: &Experts,
        context: &Context,
        values: &Slots,
        x: &Tensor,
        out: &Tensor,
    ) -> Tensor {
        let s = self.product_with_a(experts, context, values, x);
        experts.product(context, values, Order::NT, &s, &context.parameters.value(self.b), out, true);
        s
    }

    /// Adds to the gradient of the experts' inputs; returns the gradient of the product with A.
    pub(super) fn add_inputs(
        &self,
        experts: &Experts,
        context: &Context,
        values: &Slots,
        dout: &Tensor,
        dx: &Tensor,
    ) -> Tensor {
        let b = context.parameters.value(self.b);
        let ds = self.scaled(experts, context, values, Order::NN, dout, &b, b.cols);
        experts.product(context, values, Order::NN, &ds, &context.parameters.value(self.a), dx, true);
        ds
    }

    pub(super) fn product_with_a(&self, experts: &Experts, context: &Context, values: &Slots, x: &Tensor) -> Tensor {
        let (a, b) = (context.parameters.value(self.a), context.parameters.value(self.b));
        self.scaled(experts, context, values, Order::NT, x, &a, b.cols)
    }

    /// The product times the adapter's factor, rounded once.
    fn scaled(
        &self,
        experts: &Experts,
        context: &Context,
        values: &Slots,
        order: Order,
        a: &Tensor,
        b: &Tensor,
        width: usize,
    ) -> Tensor {
        let product = context.queue.tensor(a.rows, width, DType::F32);
        experts.product(context, values, order, a, b, &product, false);
        let dtype = context.dtype();
        let out = if dtype == DType::F32 { product.clone() } else { context.queue.tensor(a.rows, width, dtype) };
        context.queue.launch(Multiply { x: product.view(), factor: self.scale, by: None, out: out.view() });
        out
    }
}
