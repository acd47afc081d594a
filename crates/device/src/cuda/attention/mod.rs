//! Attention on a GPU: cuDNN's fused kernels if they take the problem and it is worth a plan, else our own kernels, which take
//! everything: cuDNN is not asked where scores are changed before the softmax.
//!
//! Our own give the same bits every time. So does cuDNN's forward, but its backward adds up the queries' gradients in the order
//! in which blocks happen to finish. `EVENKEEL_CUDA_ATTENTION` limits this: with `repeatable`, our own kernels compute
//! gradients, with `own`, everything.
//!
//! Measured on an H200 (cuDNN 9.19, bf16, causal, 8 × 2048 tokens, 32 query and 8 key heads of 64): cuDNN 370 TFLOP/s
//! forward and 312 backward, ours 344 and 180, the latter with half of the GPU; those for other heads and GPUs 187 and
//! 138.

mod cudnn;
mod own;
mod parameters;
mod problem;
mod sources;

use std::sync::OnceLock;

use super::{Run, Stream};
use crate::kernel::{Attention, AttentionBackward, CachedAttention};
pub(super) use cudnn::{AttentionCall, Cudnn};
pub use cudnn::{CudnnReport, cudnn_report};
pub(crate) use sources::WIDEST_HEAD;
pub(super) use sources::sources;

use problem::Problem;

impl Run for Attention {
    fn run(&self, stream: &mut Stream) {
        let by_cudnn = choice() >= Choice::Repeatable
            && Problem::forward(self)
                .is_some_and(|problem| stream.with_cudnn(|cudnn, stream| cudnn.forward(problem, self, stream)));
        if !by_cudnn {
            own::forward(self, stream);
        }
    }
}

impl Run for AttentionBackward {
    fn run(&self, stream: &mut Stream) {
        let by_cudnn = choice() >= Choice::Fastest
            && Problem::backward(self)
                .is_some_and(|problem| stream.with_cudnn(|cudnn, stream| cudnn.backward(problem, self, stream)));
        if !by_cudnn {
            own::backward(self, stream);
        }
    }
}

impl Run for CachedAttention {
    fn run(&self, stream: &mut Stream) {
        own::cached(self, stream);
    }
}

/// Whether gradients of attention have the same bits every time.
pub fn cuda_attention_repeats() -> bool {
    choice() < Choice::Fastest
}

/// The kernels that may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Choice {
    Own,
    Repeatable,
    Fastest,
}

const CHOICES: [(&str, Choice); 3] =
    [("own", Choice::Own), ("repeatable", Choice::Repeatable), ("fastest", Choice::Fastest)];

fn choice() -> Choice {
    static CHOICE: OnceLock<Choice> = OnceLock::new();
    *CHOICE.get_or_init(|| match std::env::var("EVENKEEL_CUDA_ATTENTION") {
        Err(_) => Choice::Fastest,
        Ok(name) => match CHOICES.iter().find(|(known, _)| *known == name) {
            Some((_, choice)) => *choice,
            None => panic!("EVENKEEL_CUDA_ATTENTION is `{name}`, expected one of own, repeatable and fastest"),
        },
    })
}
