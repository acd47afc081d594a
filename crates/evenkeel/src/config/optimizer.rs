//! The keys of the optimizer: which of them each has, and their values if not set.

use evenkeel_train::{AdamW, OptimizerOptions, Rule};

use toml::Value;

use super::raw::RawConfig;
use super::setting::{Setting, anything};
use super::settings::{MuonScale, OptimizerName, Settings, Train};

use OptimizerName::{Adafactor, AdamW as ADAMW, Lion, Muon, Sgd};

/// The optimizers that have a key. All optimizers have the other keys.
const KEYS: [(&str, &[OptimizerName]); 6] = [
    ("train.beta1", &[ADAMW, Lion, Muon]),
    ("train.beta2", &[ADAMW, Lion, Muon]),
    ("train.epsilon", &[ADAMW, Muon]),
    ("train.momentum", &[Sgd, Muon]),
    ("train.nesterov", &[Sgd, Muon]),
    ("train.muon_scale", &[Muon]),
];

pub fn check(raw: &mut RawConfig, settings: &Settings) {
    let (train, name) = (&settings.train, settings.train.optimizer.name());
    for (key, optimizers) in KEYS {
        if raw.is_given(key) && !optimizers.contains(&train.optimizer) {
            let what = format!("`{key}` is set, but `train.optimizer` is \"{name}\", which does not use it");
            let quoted: Vec<String> = optimizers.iter().map(|of| format!("\"{}\"", of.name())).collect();
            let hint = format!("it is for {}; leave it out", quoted.join(", "));
            raw.note_contradiction(&[key, "train.optimizer"], what, Some(&hint));
        }
    }
    if train.nesterov == Some(true) && train.momentum == Some(0.0) {
        let what = "`train.nesterov` is true, but `train.momentum` is 0".to_owned();
        raw.note_contradiction(&["train.nesterov", "train.momentum"], what, Some("0.9 is usual"));
    }
    let moves_together = matches!(train.optimizer, Adafactor | Muon);
    if moves_together && settings.balance.gamma_max > 0.0 {
        let what = format!("`balance.gamma_max` prunes elements of updates, but \"{name}\" updates whole matrices");
        let hint = "set balance.gamma_max = 0, or train.optimizer = \"adamw\", \"sgd\" or \"lion\"";
        raw.note_contradiction(&["balance.gamma_max", "train.optimizer"], what, Some(hint));
    }
}

/// Fills in the optimizer's keys.
pub fn resolve(train: &mut Train) {
    let has = |key: &str| KEYS.iter().any(|(known, of)| *known == key && of.contains(&train.optimizer));
    let usual = |key: &str, value: f64| has(key).then_some(value);
    train.beta1 = train.beta1.or(usual("train.beta1", 0.9));
    train.beta2 = train.beta2.or(usual("train.beta2", if train.optimizer == Lion { 0.99 } else { 0.95 }));
    train.epsilon = train.epsilon.or(usual("train.epsilon", 1e-8));
    train.momentum = train.momentum.or(usual("train.momentum", if train.optimizer == Muon { 0.95 } else { 0.9 }));
    let looks_ahead = train.optimizer == Muon && train.momentum != Some(0.0);
    train.nesterov = train.nesterov.or(has("train.nesterov").then_some(looks_ahead));
    train.muon_scale = train.muon_scale.or(has("train.muon_scale").then_some(MuonScale::MatchRmsAdamW));
    let decays = !matches!(train.optimizer, Sgd | Adafactor);
    train.weight_decay.get_or_insert(if decays { 0.1 } else { 0.0 });
}

impl OptimizerName {
    /// For the command line.
    pub fn named(text: &str) -> Result<OptimizerName, String> {
        let kind = OptimizerName::kind(anything());
        OptimizerName::read(&Value::String(text.to_owned()), anything()).ok_or_else(|| kind.expected())
    }

    /// Its usual spelling.
    pub fn title(self) -> &'static str {
        match self {
            ADAMW => "AdamW",
            Sgd => "SGD with momentum",
            Lion => "Lion",
            Adafactor => "Adafactor",
            Muon => "Muon",
        }
    }

    /// Its options if no other key is set.
    pub fn options(self) -> OptimizerOptions {
        let mut raw = RawConfig::new();
        raw.set("--optimizer", &format!("train.optimizer={}", self.name()));
        let mut settings = Settings::read(&mut raw);
        resolve(&mut settings.train);
        settings.train.optimizer_options()
    }
}

impl Train {
    /// The options that these keys stand for.
    pub fn optimizer_options(&self) -> OptimizerOptions {
        const FILLED: &str = "what an optimizer has is filled in";
        let number = |value: Option<f64>| value.expect(FILLED) as f32;
        let adamw = || AdamW { beta1: number(self.beta1), beta2: number(self.beta2), epsilon: number(self.epsilon) };
        let rule = match self.optimizer {
            ADAMW => Rule::AdamW(adamw()),
            Sgd => Rule::Sgd { momentum: number(self.momentum), nesterov: self.nesterov.expect(FILLED) },
            Lion => Rule::Lion { beta1: number(self.beta1), beta2: number(self.beta2) },
            Adafactor => Rule::Adafactor,
            Muon => Rule::Muon {
                momentum: number(self.momentum),
                nesterov: self.nesterov.expect(FILLED),
                scale: match self.muon_scale.expect(FILLED) {
                    MuonScale::MatchRmsAdamW => evenkeel_train::MuonScale::MatchRmsAdamW,
                    MuonScale::Original => evenkeel_train::MuonScale::Original,
                },
                others: adamw(),
            },
        };
        OptimizerOptions {
            rule,
            weight_decay: number(self.weight_decay),
            decay_vectors: false,
            clip_norm: Some(self.clip_norm as f32).filter(|&norm| norm > 0.0),
        }
    }
}
