//! The rules by which weights follow gradients, and the state that each rule keeps for a parameter.

use evenkeel_model::{Model, ParamId, ParamSpec};

use crate::state_kind::StateKind;

/// How weights follow gradients, by any rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerOptions {
    pub rule: Rule,
    /// Weights decay by themselves, `lr · weight_decay` of them in a step; [`Rule::Sgd`] adds the decay to the gradient.
    pub weight_decay: f32,
    /// Whether biases and norm weights decay too.
    pub decay_vectors: bool,
    /// Gradients are scaled down to this global norm, if there is one.
    pub clip_norm: Option<f32>,
}

impl Default for OptimizerOptions {
    fn default() -> OptimizerOptions {
        let rule = Rule::AdamW(AdamW::default());
        OptimizerOptions { rule, weight_decay: 0.1, decay_vectors: false, clip_norm: Some(1.0) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    AdamW(AdamW),
    /// PyTorch's, without dampening.
    Sgd {
        /// 0: no momentum.
        momentum: f32,
        nesterov: bool,
    },
    /// Chen et al. 2023.
    Lion {
        beta1: f32,
        beta2: f32,
    },
    /// PyTorch's with its defaults: steps are relative to a parameter's root mean square, and a matrix's variance is kept as that
    /// of its rows and columns. A parameter with more than two dims counts as a matrix of its first dim and all others.
    Adafactor,
    /// PyTorch's: the momentum of a hidden layer's matrix is made orthogonal. Everything else follows AdamW.
    Muon {
        momentum: f32,
        nesterov: bool,
        scale: MuonScale,
        others: AdamW,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub beta1: f32,
    pub beta2: f32,
    pub epsilon: f32,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 }
    }
}

/// How Muon's learning rate depends on a matrix's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MuonScale {
    /// `√max(1, rows / columns)`
    Original,
    /// `0.2 · √max(rows, columns)`: changes as large as AdamW's, so its learning rate and decay suit.
    MatchRmsAdamW,
}

impl MuonScale {
    pub(super) fn of(self, [rows, cols]: [usize; 2]) -> f32 {
        let (rows, cols) = (rows as f64, cols as f64);
        let scale = match self {
            MuonScale::Original => (rows / cols).max(1.0).sqrt(),
            MuonScale::MatchRmsAdamW => 0.2 * rows.max(cols).sqrt(),
        };
        scale as f32
    }
}

impl Rule {
    /// Its name in checkpoints: rules of one name keep the same state.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Rule::AdamW(_) => "adamw",
            Rule::Sgd { momentum: 0.0, .. } => "sgd without momentum",
            Rule::Sgd { .. } => "sgd",
            Rule::Lion { .. } => "lion",
            Rule::Adafactor => "adafactor",
            Rule::Muon { .. } => "muon",
        }
    }

    /// Whether an element's update depends on that element alone, so that others can be left out of it.
    pub fn is_elementwise(self) -> bool {
        match self {
            Rule::AdamW(_) | Rule::Sgd { .. } | Rule::Lion { .. } => true,
            Rule::Adafactor | Rule::Muon { .. } => false,
        }
    }

    /// The rule for one parameter.
    pub(super) fn of(self, model: &Model, id: ParamId) -> Rule {
        match self {
            Rule::Muon { others, .. } if !model.is_hidden_matrix(id) => Rule::AdamW(others),
            rule => rule,
        }
    }

    /// The state it keeps for a parameter beside the weight.
    pub(super) fn kinds(self, spec: &ParamSpec) -> &'static [StateKind] {
        match self {
            Rule::AdamW(_) => &[StateKind::Mean, StateKind::Variance],
            Rule::Sgd { momentum: 0.0, .. } => &[],
            Rule::Sgd { .. } | Rule::Muon { .. } => &[StateKind::Momentum],
            Rule::Lion { .. } => &[StateKind::Mean],
            Rule::Adafactor if spec.is_vector() => &[StateKind::ColumnVariance],
            Rule::Adafactor => &[StateKind::RowVariance, StateKind::ColumnVariance],
        }
    }

    /// Bytes of a model's weights, f32, and of the state beside them.
    pub fn state_bytes(self, model: &Model) -> u64 {
        let of = |(id, spec): (usize, &ParamSpec)| -> usize {
            let elements = |kind: &StateKind| kind.extent(spec.whole).dims().iter().product::<usize>();
            let beside: usize = self.of(model, ParamId(id)).kinds(spec).iter().map(elements).sum();
            spec.whole.iter().product::<usize>() + beside
        };
        let trained = model.specs.iter().enumerate().filter(|(_, spec)| spec.is_trained);
        4 * trained.map(of).sum::<usize>() as u64
    }

    /// Bytes that move with an element of a hidden layer when it is kept elsewhere: its weight, and the state beside it.
    pub fn bytes_moved_per_element(self) -> usize {
        match self {
            Rule::AdamW(_) => 12,
            Rule::Sgd { momentum: 0.0, .. } | Rule::Adafactor => 4,
            Rule::Sgd { .. } | Rule::Lion { .. } | Rule::Muon { .. } => 8,
        }
    }
}
