//! The kernels that a device can compute, as plain data.
//!
//! A kernel is a struct that names its operands. [`check`](Operation::check) states the shapes it accepts,
//! [`flops`](Operation::flops) and [`bytes`](Operation::bytes) what it costs at least; every device agrees on those. Each
//! device computes it its own way: see `cpu` for the vectorised versions and the tests for plain twins.
//!
//! Shapes in comments: T tokens, H features, N heads, D head dimension, V vocabulary rows held here, R ranks.
//! Activations and matrices have the compute dtype (f32 or bf16). Vectors (norm weights, biases), statistics, losses
//! and gradients of weights are f32. Gradients of vectors and tables are added to what is there.

mod activation;
mod adafactor;
mod attention;
mod balance;
mod cached_attention;
mod delta;
mod elementwise;
mod embedding;
mod expert_biases;
mod experts;
mod loss;
mod magnitude;
mod muon;
mod nf4;
mod norm;
mod optimizer;
mod product;
mod random;
mod rotary;
mod selected_rows;

pub use activation::{
    Activate, ActivateBackward, Activation, CLAMPED_GATE_SLOPE, ClampedGate, ClampedGateBackward, Gated, GatedBackward,
};
pub use adafactor::{Adafactor, AdafactorNorm, Factored, SquareSums};
pub use attention::{Attention, AttentionBackward, AttentionDropout, Mask, ScoreChanges, Segments};
pub use balance::{BalanceBackward, BalanceTally};
pub use cached_attention::CachedAttention;
pub use delta::{
    DELTA_CHUNK, DELTA_EPSILON, DeltaGates, DeltaRule, DeltaRuleBackward, DynamicConv, DynamicConvBackward, GatedNorm,
    GatedNormBackward, ShortConv, ShortConvBackward,
};
pub use elementwise::{
    Add, ColumnSum, Copies, Copy, Fill, GatherColumns, MOST_COPIES, Multiply, ScatterColumns, SoftCap,
};
pub use embedding::{Embed, EmbedBackward, IGNORE};
pub use expert_biases::{AddBiases, BiasDots, BiasSums};
pub use experts::{CombinePairs, GatherPairs, GroupedProduct, PairDots, Route, RouteBackward, RowCount, ScalePairs};
pub use loss::{LossBackward, LossMerge, LossStats, STATS_PER_TOKEN};
pub use magnitude::{ColumnDot, ScaleColumns};
pub use muon::{Combine, MuonMomentum, Normalize};
pub use nf4::{ExpandNf4, NF4_BLOCK, NF4_CODES, NF4_PER_WORD};
pub use norm::{Norm, NormBackward, NormKind};
pub use optimizer::{AdamW, ClipFactor, Lion, MOST_NORMS, Sgd, SquaredNorm, SquaredNorms, frozen_words};
pub use product::{Order, Product, Term};
pub use random::{Dropout, Placement, RandomNormal, seed_of};
pub use rotary::{Pairs, Rotary};
pub use selected_rows::{GatherRows, ScatterRows};

/// The checks and costs of a kernel.
pub trait Operation {
    /// Asserts that the operands fit together. A failure is a bug in the caller.
    fn check(&self);

    /// Floating-point operations, a multiply-add counted as two. Products and attention only: the rest is bytes.
    fn flops(&self) -> u64 {
        0
    }

    /// The fewest bytes that must move: each operand read once, each result written once.
    fn bytes(&self) -> u64;
}

macro_rules! kernels {
    ($($kernel:ident),* $(,)?) => {
        /// Any kernel.
        #[derive(Clone, Debug)]
        #[allow(clippy::large_enum_variant, reason = "moving some hundred bytes is cheaper than allocating them")]
        pub enum Kernel { $($kernel($kernel)),* }

        $(impl From<$kernel> for Kernel {
            fn from(kernel: $kernel) -> Kernel { Kernel::$kernel(kernel) }
        })*

        impl Kernel {
            pub fn name(&self) -> &'static str {
                match self { $(Kernel::$kernel(_) => stringify!($kernel)),* }
            }

            /// The kernel as the trait every kernel implements.
            pub fn operation(&self) -> &dyn Operation {
                match self { $(Kernel::$kernel(kernel) => kernel),* }
            }

            pub(crate) fn run_on_cpu(&self, team: &mut crate::cpu::Team) {
                match self { $(Kernel::$kernel(kernel) => crate::cpu::Run::run(kernel, team)),* }
            }

            pub(crate) fn working_memory_on_cpu(&self) -> crate::WorkingMemory {
                match self { $(Kernel::$kernel(kernel) => crate::cpu::Run::working_memory(kernel)),* }
            }

            pub(crate) fn run_on_cuda(&self, stream: &mut crate::cuda::Stream) {
                match self { $(Kernel::$kernel(kernel) => crate::cuda::Run::run(kernel, stream)),* }
            }
        }
    };
}

kernels! {
    Activate, ActivateBackward, Adafactor, AdafactorNorm, AdamW, Add, AddBiases, Attention, AttentionBackward, BalanceBackward, BalanceTally,
    BiasDots, BiasSums,
    CachedAttention, ClampedGate, ClampedGateBackward, ClipFactor,
    ColumnDot, ColumnSum, Combine, CombinePairs, Copies, Copy, DeltaRule, DeltaRuleBackward, Dropout, DynamicConv, DynamicConvBackward, Embed, EmbedBackward, ExpandNf4, Fill, Gated,
    GatedBackward, GatedNorm, GatedNormBackward, GatherColumns, GatherPairs, GatherRows, GroupedProduct, Lion, LossBackward, LossMerge, LossStats, MuonMomentum,
    Norm, NormBackward, Normalize, PairDots, Product, RandomNormal, Rotary, Route, RouteBackward, Multiply, ScaleColumns, ScalePairs,
    ScatterColumns, ScatterRows, Sgd, ShortConv, ShortConvBackward, SoftCap, SquareSums, SquaredNorm, SquaredNorms,
}

impl Kernel {
    /// Whether it would write nothing, as on a shard without heads or columns. It is then checked but not launched, so devices
    /// need not handle it.
    pub(crate) fn is_idle(&self) -> bool {
        match self {
            Kernel::Activate(kernel) => kernel.out.is_empty(),
            Kernel::ActivateBackward(kernel) => kernel.dx.is_empty(),
            Kernel::Add(kernel) => kernel.out.is_empty(),
            Kernel::AddBiases(kernel) => kernel.x.is_empty(),
            Kernel::Attention(kernel) => kernel.q.count == 0,
            Kernel::AttentionBackward(kernel) => kernel.q.count == 0,
            Kernel::BalanceBackward(kernel) => kernel.dlogits.is_empty(),
            Kernel::BiasDots(kernel) => kernel.x.is_empty(),
            Kernel::BiasSums(kernel) => kernel.x.is_empty(),
            Kernel::ClampedGate(kernel) => kernel.out.is_empty(),
            Kernel::ClampedGateBackward(kernel) => kernel.dx.is_empty(),
            Kernel::ColumnDot(kernel) => kernel.out.is_empty(),
            Kernel::ColumnSum(kernel) => kernel.out.is_empty(),
            Kernel::CombinePairs(kernel) => kernel.out.is_empty(),
            Kernel::Copies(kernel) => kernel.0.iter().all(|copy| copy.out.is_empty()),
            Kernel::Copy(kernel) => kernel.out.is_empty(),
            Kernel::DeltaRule(kernel) => kernel.v.count == 0,
            Kernel::DeltaRuleBackward(kernel) => kernel.v.count == 0,
            Kernel::DynamicConv(kernel) => kernel.out.is_empty(),
            Kernel::DynamicConvBackward(kernel) => kernel.dx.is_empty(),
            Kernel::ExpandNf4(kernel) => kernel.out.is_empty(),
            Kernel::Fill(kernel) => kernel.out.is_empty(),
            Kernel::Gated(kernel) => kernel.out.is_empty(),
            Kernel::GatedBackward(kernel) => kernel.dgate.is_empty(),
            Kernel::GatedNorm(kernel) => kernel.out.is_empty(),
            Kernel::GatedNormBackward(kernel) => kernel.dx.is_empty(),
            Kernel::GatherPairs(kernel) => kernel.out.is_empty(),
            Kernel::GroupedProduct(kernel) => kernel.out.is_empty(),
            Kernel::Norm(kernel) => kernel.out.is_empty(),
            Kernel::NormBackward(kernel) => kernel.dx.is_empty(),
            Kernel::PairDots(kernel) => kernel.out.is_empty(),
            Kernel::Product(kernel) => kernel.out.is_empty(),
            Kernel::RandomNormal(kernel) => kernel.out.is_empty(),
            Kernel::Rotary(kernel) => kernel.x.count == 0,
            Kernel::RouteBackward(kernel) => kernel.dlogits.is_empty(),
            Kernel::Multiply(kernel) => kernel.out.is_empty(),
            Kernel::ScaleColumns(kernel) => kernel.out.is_empty(),
            Kernel::ScalePairs(kernel) => kernel.out.is_empty(),
            Kernel::ShortConv(kernel) => kernel.out.is_empty(),
            Kernel::ShortConvBackward(kernel) => kernel.dx.is_empty(),
            Kernel::SoftCap(kernel) => kernel.out.is_empty(),
            _ => false,
        }
    }
}

fn assert_same_shape(name: &str, views: &[crate::View]) {
    for view in views {
        assert_eq!(view.shape(), views[0].shape(), "{name}: operands of different shapes");
    }
}

fn assert_vector(name: &str, view: &crate::View, len: usize) {
    assert_eq!(view.shape(), [1, len], "{name}: not a vector of {len}");
    assert_eq!(view.dtype, crate::DType::F32, "{name}: vectors are f32");
}

fn assert_indices(name: &str, view: &crate::View, len: usize) {
    assert_eq!(view.shape(), [1, len], "{name}: not {len} indices");
    assert_eq!(view.dtype, crate::DType::U32, "{name}: indices are u32");
}

fn optional_bytes(view: &Option<crate::View>) -> u64 {
    view.map_or(0, |view| view.bytes())
}
