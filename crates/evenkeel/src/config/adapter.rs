//! The keys of adapters, and what they mean to the model.

use evenkeel_model::{AdapterConfig, AdapterInit, AdapterScaling, Targets};

use evenkeel_balance::Mode;

use super::raw::RawConfig;
use super::settings::{Adapter, AdapterBase, AdapterKind, Dtype, Settings};

pub const PRUNED_ADAPTERS: &str =
    "`balance.gamma_max` prunes the gradients of layers, but an adapter's layers are frozen";
pub const PRUNED_HINT: &str = "set balance.gamma_max = 0: \"reshard\", \"migrate\" and \"auto\" work without it";

/// Why 4-bit bases are not balanced, and what to do.
pub const PACKED_MOVES: &str =
    "`balance.mode` moves or prunes columns of layers, but the base is held in blocks of 4-bit numbers";
pub const PACKED_HINT: &str = "set balance.mode = \"off\"; parallel.tp_weights divides the work once";

/// The rank of an adapter if none is set.
const USUAL_RANK: usize = 16;

/// Why DoRA is not trained with dropout.
pub const DORA_DROPOUT_HINT: &str =
    "PEFT's dropout changes what DoRA adds to, not only the adapter: use a dropout of 0";

const EXPERTS_HINT: &str = "adapters of experts have neither dropout nor magnitudes (DoRA), as in PEFT: leave one out";

/// A key that describes a new adapter and is set.
fn set_key(adapter: &Adapter) -> Option<&'static str> {
    let keys = [
        ("adapter.rank", adapter.rank != USUAL_RANK),
        ("adapter.alpha", adapter.alpha.is_some()),
        ("adapter.dropout", adapter.dropout != 0.0),
        ("adapter.targets", !adapter.targets.is_empty()),
        ("adapter.target_pattern", adapter.target_pattern.is_some()),
        ("adapter.target_parameters", !adapter.target_parameters.is_empty()),
        ("adapter.exclude", !adapter.exclude.is_empty()),
        ("adapter.layers", !adapter.layers.is_empty()),
        ("adapter.rank_pattern", !adapter.rank_pattern.is_empty()),
        ("adapter.alpha_pattern", !adapter.alpha_pattern.is_empty()),
        ("adapter.rslora", adapter.rslora),
        ("adapter.dora", adapter.dora),
        ("adapter.init", adapter.init != AdapterInit::Uniform),
        ("adapter.modules_to_save", !adapter.modules_to_save.is_empty()),
        ("adapter.keep_tie", adapter.keep_tie),
    ];
    keys.into_iter().find(|(_, is_set)| *is_set).map(|(key, _)| key)
}

/// Stands for every linear layer but the head.
const ALL_LINEAR: &str = "all-linear";
/// Stands for no linear layer.
const NO_LINEAR: &str = "none";

pub fn check(raw: &mut RawConfig, settings: &Settings) {
    let adapter = &settings.adapter;
    if let (None, None, Some(key)) = (adapter.kind, &adapter.path, set_key(adapter)) {
        let what = format!("`{key}` is set, but there is no adapter");
        raw.note_contradiction(&[key, "adapter.kind"], what, Some("set adapter.kind = \"lora\""));
    }
    if !adapter.targets.is_empty() && adapter.target_pattern.is_some() {
        let what = "`adapter.targets` and `adapter.target_pattern` are both set, expected one of them".to_owned();
        raw.note_contradiction(&["adapter.targets", "adapter.target_pattern"], what, None);
    }
    for (key, patterns) in
        [("adapter.rank_pattern", &adapter.rank_pattern), ("adapter.alpha_pattern", &adapter.alpha_pattern)]
    {
        for text in patterns {
            let number = pattern(text).map(|(_, number)| number);
            let fits = number.is_some_and(|number| number > 0.0 && (key.contains("alpha") || number.fract() == 0.0));
            if !fits {
                let what = format!("`{key}` has \"{text}\", expected \"PATTERN=NUMBER\"");
                raw.note_contradiction(&[key], what, Some("for example \"q_proj=32\""));
            }
        }
    }
    if adapter.dora && adapter.dropout > 0.0 {
        let what = format!("`adapter.dropout` is {}, but `adapter.dora` is set", adapter.dropout);
        raw.note_contradiction(&["adapter.dropout", "adapter.dora"], what, Some(DORA_DROPOUT_HINT));
    }
    if !adapter.target_parameters.is_empty() {
        for (key, is_set) in [("adapter.dropout", adapter.dropout > 0.0), ("adapter.dora", adapter.dora)] {
            if is_set {
                let what = format!("`{key}` and `adapter.target_parameters` are both set");
                raw.note_contradiction(&[key, "adapter.target_parameters"], what, Some(EXPERTS_HINT));
            }
        }
    }
    let is_adapted = adapter.kind.is_some() || adapter.path.is_some();
    if adapter.base == Some(AdapterBase::Bf16) && settings.train.dtype != Dtype::Bf16 {
        let what = "`adapter.base` is \"bf16\", but the run computes in f32".to_owned();
        let hint = "set train.dtype = \"bf16\", or leave adapter.base out";
        raw.note_contradiction(&["adapter.base", "train.dtype"], what, Some(hint));
    }
    if adapter.base == Some(AdapterBase::Nf4) && settings.balance.mode != Mode::Off {
        raw.note_contradiction(&["adapter.base", "balance.mode"], PACKED_MOVES.to_owned(), Some(PACKED_HINT));
    }
    if is_adapted && settings.balance.gamma_max > 0.0 {
        raw.note_contradiction(&["balance.gamma_max", "adapter.kind"], PRUNED_ADAPTERS.to_owned(), Some(PRUNED_HINT));
    }
    if is_adapted && settings.model.path.is_none() && !raw.evaluates {
        let what = "an adapter is trained beside a model's weights, but `model.path` is not set".to_owned();
        raw.note_contradiction(&["adapter.kind", "model.path"], what, Some("give the folder of a model to adapt"));
    }
}

/// "PATTERN=NUMBER"
fn pattern(text: &str) -> Option<(String, f64)> {
    let (pattern, number) = text.rsplit_once('=')?;
    Some((pattern.to_owned(), number.trim().parse().ok().filter(|number: &f64| number.is_finite())?))
}

impl AdapterBase {
    /// The value of --base. Its only use is to ask for 4 bits: everything else follows from a dtype.
    pub fn named(text: &str) -> Result<AdapterBase, String> {
        if text == "nf4" {
            Ok(AdapterBase::Nf4)
        } else {
            Err("nf4 is the only other format than the dtype's".to_owned())
        }
    }
}

impl Adapter {
    /// Whether the base is to be held in 4 bits.
    pub fn packs(&self) -> bool {
        self.base == Some(AdapterBase::Nf4)
    }

    /// The new adapter that the keys describe, if they do.
    pub fn new_adapter(&self) -> Option<AdapterConfig> {
        self.kind.map(|_| self.described())
    }

    fn described(&self) -> AdapterConfig {
        let names = |names: &[String]| match names {
            [] => Targets::AllLinear,
            [name] if name == ALL_LINEAR => Targets::AllLinear,
            [name] if name == NO_LINEAR => Targets::Names(Vec::new()),
            names => Targets::Names(names.to_vec()),
        };
        let patterns = |texts: &[String]| -> Vec<(String, f64)> {
            texts.iter().map(|text| pattern(text).expect("checked")).collect()
        };
        let ranks = patterns(&self.rank_pattern).into_iter();
        let alphas = patterns(&self.alpha_pattern).into_iter();
        AdapterConfig {
            rank: self.rank,
            alpha: self.alpha.unwrap_or(2.0 * self.rank as f64) as f32,
            dropout: self.dropout as f32,
            targets: self.target_pattern.clone().map_or_else(|| names(&self.targets), Targets::Pattern),
            parameters: self.target_parameters.clone(),
            excluded: (!self.exclude.is_empty()).then(|| Targets::Names(self.exclude.clone())),
            layers: (!self.layers.is_empty()).then(|| self.layers.iter().map(|&layer| layer as usize).collect()),
            rank_patterns: ranks.map(|(pattern, rank)| (pattern, rank as usize)).collect(),
            alpha_patterns: alphas.map(|(pattern, alpha)| (pattern, alpha as f32)).collect(),
            scaling: if self.rslora { AdapterScaling::ByRoot } else { AdapterScaling::ByRank },
            is_dora: self.dora,
            init: self.init,
            trained_modules: self.modules_to_save.clone(),
            has_new_names: false,
            keeps_tie: self.keep_tie,
        }
    }

    /// The given keys with one value that contradict a saved adapter: each with its value and the adapter's.
    pub fn contradictions(&self, saved: &AdapterConfig, given: &[String]) -> Vec<(&'static str, String, String)> {
        let ours = self.described();
        let keys = [
            ("adapter.rank", ours.rank.to_string(), saved.rank.to_string()),
            ("adapter.alpha", ours.alpha.to_string(), saved.alpha.to_string()),
            ("adapter.dropout", ours.dropout.to_string(), saved.dropout.to_string()),
            ("adapter.rslora", is_by_root(&ours).to_string(), is_by_root(saved).to_string()),
            ("adapter.dora", ours.is_dora.to_string(), saved.is_dora.to_string()),
            ("adapter.keep_tie", ours.keeps_tie.to_string(), saved.keeps_tie.to_string()),
        ];
        let is_given = |key: &str| given.iter().any(|given| given == key);
        keys.into_iter().filter(|(key, ours, theirs)| is_given(key) && ours != theirs).collect()
    }

    /// A saved adapter's configuration with the keys that are set and single out layers or modules, one at a time.
    pub fn variations(&self, saved: &AdapterConfig) -> Vec<(&'static str, AdapterConfig)> {
        let described = self.described();
        let AdapterConfig { targets, parameters, excluded, layers, .. } = described;
        let AdapterConfig { rank_patterns, alpha_patterns, trained_modules, .. } = described;
        let key = if self.target_pattern.is_some() { "adapter.target_pattern" } else { "adapter.targets" };
        let saved = || saved.clone();
        let variations = [
            (set_targets(self), key, AdapterConfig { targets, ..saved() }),
            (!parameters.is_empty(), "adapter.target_parameters", AdapterConfig { parameters, ..saved() }),
            (excluded.is_some(), "adapter.exclude", AdapterConfig { excluded, ..saved() }),
            (layers.is_some(), "adapter.layers", AdapterConfig { layers, ..saved() }),
            (!rank_patterns.is_empty(), "adapter.rank_pattern", AdapterConfig { rank_patterns, ..saved() }),
            (!alpha_patterns.is_empty(), "adapter.alpha_pattern", AdapterConfig { alpha_patterns, ..saved() }),
            (!trained_modules.is_empty(), "adapter.modules_to_save", AdapterConfig { trained_modules, ..saved() }),
        ];
        variations.into_iter().filter(|(is_set, ..)| *is_set).map(|(_, key, config)| (key, config)).collect()
    }

    /// Tells what a continued adapter is, for the run's own configuration.
    pub fn describe_saved(&mut self, saved: &AdapterConfig) {
        let exact = |number: f32| number.to_string().parse().expect("a number's own text");
        self.kind = Some(AdapterKind::Lora);
        self.rank = saved.rank;
        self.alpha = Some(exact(saved.alpha));
        self.dropout = exact(saved.dropout);
        self.rslora = is_by_root(saved);
        self.dora = saved.is_dora;
        self.keep_tie = saved.keeps_tie;
    }
}

fn set_targets(adapter: &Adapter) -> bool {
    !adapter.targets.is_empty() || adapter.target_pattern.is_some()
}

fn is_by_root(config: &AdapterConfig) -> bool {
    config.scaling == AdapterScaling::ByRoot
}
