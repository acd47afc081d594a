//! A norm with its parameters, as entries and heads use it.

use evenkeel_device::kernel::{Norm, NormBackward, NormKind};
use evenkeel_device::{DType, Queue, Tensor, View};

use crate::parameters::{Gradients, ParamId, Parameters};

#[derive(Clone, Copy, Debug)]
pub(crate) struct NormSpec {
    pub kind: NormKind,
    /// Without it nothing is multiplied behind the norm.
    pub weight: Option<ParamId>,
    pub bias: Option<ParamId>,
    pub weight_offset: f32,
    pub epsilon: f32,
}

/// The input of a norm.
#[derive(Clone, Copy)]
pub(crate) enum Input {
    Value(View),
    /// `into = x + add`, formed on the way.
    Sum {
        x: View,
        add: View,
        into: View,
    },
}

impl NormSpec {
    pub fn parameters(&self) -> impl Iterator<Item = ParamId> + use<> {
        self.weight.into_iter().chain(self.bias)
    }

    /// Returns the rows' statistics, for backward.
    pub fn forward(&self, queue: &Queue, parameters: &Parameters, input: Input, out: View) -> Tensor {
        let stats = queue.tensor(out.rows, 2, DType::F32);
        let (x, add, sum) = match input {
            Input::Value(x) => (x, None, None),
            Input::Sum { x, add, into } => (x, Some(add), Some(into)),
        };
        queue.launch(Norm {
            kind: self.kind,
            x,
            add,
            sum,
            weight: self.weight.map(|weight| parameters.value(weight).view()),
            weight_offset: self.weight_offset,
            bias: self.bias.map(|bias| parameters.value(bias).view()),
            epsilon: self.epsilon,
            out,
            stats: stats.view(),
        });
        stats
    }

    /// `dx = residual + …`, and the gradients of weight and bias as far as they are trained.
    pub fn backward(
        &self,
        queue: &Queue,
        parameters: &Parameters,
        gradients: &Gradients,
        x: View,
        stats: &Tensor,
        dout: View,
        residual: Option<View>,
        dx: View,
    ) {
        let gradient = |id: Option<ParamId>| Some(gradients.sum_of_trained(queue, id?)?.view());
        queue.launch(NormBackward {
            kind: self.kind,
            x,
            weight: self.weight.map(|weight| parameters.value(weight).view()),
            weight_offset: self.weight_offset,
            stats: stats.view(),
            dout,
            residual,
            dx,
            dweight: gradient(self.weight),
            dbias: gradient(self.bias),
        });
    }
}
