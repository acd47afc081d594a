//! Adapters: small matrices beside frozen linear layers, which training changes instead of the layers (LoRA, rsLoRA, DoRA).
//!
//! An adapted layer computes `x·Wᵀ + s·D(x)·Aᵀ·Bᵀ + bias`: A is [rank, inputs], B [outputs, rank], and D drops some inputs. DoRA
//! multiplies each output, before the bias, by `m/‖W + s·B·A‖`: a trained magnitude over the norm of the output's row.

mod experts;
mod folder;
mod magnitude;
mod merge;
mod names;
mod peft;
mod targets;

use std::collections::BTreeSet;

use regex::Regex;

use crate::error::Error;
use crate::parameters::ParamSpec;
pub use experts::ExpertFactor;
pub use folder::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterFolder, AdapterValues, LABEL_NAMES};
pub use merge::Merger;
pub use peft::PEFT_PREFIX;
use targets::Matcher;
pub use targets::Targets;

/// No adapter of use comes near these; a file that does is broken or hostile.
const LARGEST_RANK: usize = 1 << 14;
const MOST_PATTERNS: usize = 1 << 12;

/// Which layers are adapted, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    pub rank: usize,
    pub alpha: f32,
    /// The share of an adapter's inputs that training drops.
    pub dropout: f32,
    pub targets: Targets,
    /// The parameters of experts that are adapted: whole names, or ends of names behind a dot. What is excluded and which layers
    /// are adapted does not concern them, as in PEFT.
    pub parameters: Vec<String>,
    pub excluded: Option<Targets>,
    /// The only layers to adapt, by their numbers.
    pub layers: Option<Vec<usize>>,
    /// Patterns of layers with another rank. The first that matches counts.
    pub rank_patterns: Vec<(String, usize)>,
    pub alpha_patterns: Vec<(String, f32)>,
    pub scaling: AdapterScaling,
    /// Whether each output has a trained magnitude (DoRA).
    pub is_dora: bool,
    pub init: AdapterInit,
    /// The ends of the names of modules that are trained whole beside the adapters.
    pub trained_modules: Vec<String>,
    /// Whether names are those that newer versions of transformers have in memory, where they differ from the checkpoint's.
    pub has_new_names: bool,
    /// Whether a head that is tied to a trained embedding is trained with it. If not, the embedding is trained and the head
    /// keeps the base's.
    pub keeps_tie: bool,
}

/// The factor of an adapter's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterScaling {
    /// alpha / rank
    #[default]
    ByRank,
    /// alpha / √rank, as rsLoRA has it.
    ByRoot,
}

/// The distribution of a new A. A new B is zero, so a new adapter changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterInit {
    /// Between ±1/√inputs.
    #[default]
    Uniform,
    /// A normal distribution of deviation 1/rank.
    Gaussian,
}

impl Default for AdapterConfig {
    /// PEFT's numbers, for all linear layers.
    fn default() -> AdapterConfig {
        AdapterConfig {
            rank: 8,
            alpha: 8.0,
            dropout: 0.0,
            targets: Targets::AllLinear,
            parameters: Vec::new(),
            excluded: None,
            layers: None,
            rank_patterns: Vec::new(),
            alpha_patterns: Vec::new(),
            scaling: AdapterScaling::ByRank,
            is_dora: false,
            init: AdapterInit::Uniform,
            trained_modules: Vec::new(),
            has_new_names: false,
            keeps_tie: false,
        }
    }
}

/// An [`AdapterConfig`] whose patterns have been read.
#[derive(Clone, Debug)]
pub struct Adapters {
    pub config: AdapterConfig,
    targets: Matcher,
    excluded: Option<Matcher>,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f32)>,
}

/// The adapter of one linear layer, or of one parameter of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerAdapter {
    pub rank: usize,
    pub scale: f32,
    pub dropout: f32,
    pub is_dora: bool,
    pub init: AdapterInit,
}

impl Adapters {
    pub fn new(config: AdapterConfig) -> Result<Adapters, Error> {
        let ranks = config.rank_patterns.iter().map(|(_, rank)| *rank).chain([config.rank]);
        if let Some(rank) = ranks.into_iter().find(|rank| !(1..=LARGEST_RANK).contains(rank)) {
            return Err(Error::BadAdapter { what: format!("rank {rank} is not between 1 and {LARGEST_RANK}") });
        }
        let patterns = config.rank_patterns.len() + config.alpha_patterns.len();
        if patterns > MOST_PATTERNS {
            return Err(Error::BadAdapter { what: format!("{patterns} patterns are more than {MOST_PATTERNS}") });
        }
        if config.layers.is_some() && matches!(config.targets, Targets::Pattern(_)) {
            let what = "the layers are numbered, but the targets are a pattern, which should name the layers itself";
            return Err(Error::BadAdapter { what: what.to_owned() });
        }
        if !(0.0..1.0).contains(&config.dropout) {
            return Err(Error::BadAdapter { what: format!("dropout {} is not between 0 and 1", config.dropout) });
        }
        if !config.parameters.is_empty() {
            let refused = [("lora_dropout", config.dropout > 0.0), ("use_dora", config.is_dora)];
            if let Some((key, _)) = refused.iter().find(|(_, is_set)| *is_set) {
                let what =
                    format!("`{key}` is set beside `target_parameters`: adapters of experts have none, as in PEFT");
                return Err(Error::BadAdapter { what });
            }
        }
        let alphas = config.alpha_patterns.iter().map(|(_, alpha)| *alpha).chain([config.alpha]);
        if let Some(alpha) = alphas.into_iter().find(|alpha| !alpha.is_finite()) {
            return Err(Error::BadAdapter { what: format!("alpha is {alpha}") });
        }
        Ok(Adapters {
            targets: Matcher::new(&config.targets)?,
            excluded: config.excluded.as_ref().map(Matcher::new).transpose()?,
            ranks: targets::behind_dots(&config.rank_patterns)?,
            alphas: targets::behind_dots(&config.alpha_patterns)?,
            config,
        })
    }

    /// The adapter's name for a module or a parameter of the model.
    pub fn name_of(&self, name: &str) -> String {
        if self.config.has_new_names { names::renamed(name) } else { name.to_owned() }
    }

    /// The adapter of the linear layer of this name, if it has one.
    pub(crate) fn of(&self, module: &str) -> Option<LayerAdapter> {
        let module = &self.name_of(module);
        let layers = self.config.layers.as_deref();
        if self.excluded.as_ref().is_some_and(|excluded| excluded.matches(module, None)) {
            return None;
        }
        self.targets.matches(module, layers).then(|| self.at(module))
    }

    /// The adapter of the experts' parameter of this name, if it has one.
    pub(crate) fn of_parameter(&self, name: &str) -> Option<LayerAdapter> {
        let is_meant = |target: &String| name == target || targets::is_end(name, target);
        self.config.parameters.iter().any(is_meant).then(|| self.at(name))
    }

    fn at(&self, name: &str) -> LayerAdapter {
        let AdapterConfig { dropout, init, scaling, is_dora, .. } = self.config;
        let rank = targets::first_match(&self.ranks, name).unwrap_or(self.config.rank);
        let alpha = targets::first_match(&self.alphas, name).unwrap_or(self.config.alpha);
        let divisor = match scaling {
            AdapterScaling::ByRank => rank as f64,
            AdapterScaling::ByRoot => (rank as f64).sqrt(),
        };
        LayerAdapter { rank, scale: (f64::from(alpha) / divisor) as f32, dropout, is_dora, init }
    }

    /// Whether training changes a parameter: an adapter's, or one of a module that is trained whole.
    pub(crate) fn trains(&self, spec: &ParamSpec) -> bool {
        let name = self.name_of(&spec.name);
        spec.is_adapter || self.config.trained_modules.iter().any(|module| is_inside(&name, module))
    }

    /// Compares the targets and the modules that are trained whole with a model's: each must be there.
    pub(crate) fn check(
        &self,
        specs: &[ParamSpec],
        linears: &[String],
        experts: &[String],
        ends: &Ends,
    ) -> Result<(), Error> {
        let linears = self.names_of(linears);
        let is_idle = |target: &&String| !experts.iter().any(|name| name == *target || targets::is_end(name, target));
        if let Some(target) = self.config.parameters.iter().find(is_idle) {
            return Err(Error::IdleParameter { target: target.clone(), parameters: last_names(experts) });
        }
        if let Some(target) = self.targets.idle(&linears) {
            return Err(ends.as_target(&target, &self.targets).unwrap_or_else(|| Error::IdleTarget {
                target,
                modules: last_names(&linears),
                experts: last_names(experts),
            }));
        }
        if !specs.iter().any(|spec| spec.is_adapter) {
            return Err(Error::NoTargets);
        }
        let base = || specs.iter().filter(|spec| !spec.is_adapter).map(|spec| self.name_of(&spec.name));
        for module in &self.config.trained_modules {
            if base().any(|name| is_inside(&name, module)) {
                continue;
            }
            if ends.is_tied && ends.head.ends_with(module) {
                return Err(Error::TiedHead { head: module.clone(), embedding: last_name(&ends.embedding).to_owned() });
            }
            let modules: Vec<String> = base().map(|name| module_of(&name).to_owned()).collect();
            return Err(idle(module.clone(), &modules));
        }
        Ok(())
    }

    /// Compares what singles out layers with a model's: a new adapter's must each match something. PEFT saves such as do not.
    pub(crate) fn check_patterns(&self, linears: &[String], adapted: &[String]) -> Result<(), Error> {
        let linears = self.names_of(linears);
        if let Some(target) = self.excluded.as_ref().and_then(|excluded| excluded.idle(&linears)) {
            return Err(idle(target, &linears));
        }
        let numbers: BTreeSet<usize> = linears.iter().filter_map(|linear| targets::layer_of(linear)).collect();
        if let Some(layer) = self.config.layers.iter().flatten().find(|&layer| !numbers.contains(layer)) {
            let last = numbers.last().copied().unwrap_or(0);
            return Err(Error::NoSuchLayer { layer: *layer, last });
        }
        let of_ranks = self.config.rank_patterns.iter().map(|(pattern, _)| pattern);
        let of_alphas = self.config.alpha_patterns.iter().map(|(pattern, _)| pattern);
        let ranks = of_ranks.zip(self.ranks.iter().map(|(regex, _)| regex));
        let alphas = of_alphas.zip(self.alphas.iter().map(|(regex, _)| regex));
        for (pattern, regex) in ranks.chain(alphas) {
            if !adapted.iter().any(|module| regex.is_match(module)) {
                return Err(Error::IdlePattern { pattern: pattern.clone(), modules: last_names(adapted) });
            }
        }
        Ok(())
    }

    fn names_of(&self, modules: &[String]) -> Vec<String> {
        modules.iter().map(|name| self.name_of(name)).collect()
    }
}

/// The first and the last module of a model, which can be trained whole and not adapted.
pub(crate) struct Ends {
    pub embedding: String,
    pub head: String,
    /// Whether the head has the embedding's weights.
    pub is_tied: bool,
}

impl Ends {
    /// Why a target that matches no layer cannot be adapted, if it is one of these.
    fn as_target(&self, target: &str, targets: &Matcher) -> Option<Error> {
        let is_head = targets.means(target, &self.head);
        if !is_head && !targets.means(target, &self.embedding) {
            return None;
        }
        let tied_to = (is_head && self.is_tied).then(|| last_name(&self.embedding).to_owned());
        Some(Error::NotAdapted { module: target.to_owned(), tied_to })
    }
}

fn idle(target: String, modules: &[String]) -> Error {
    Error::IdleTarget { target, modules: last_names(modules), experts: Vec::new() }
}

/// Whether a parameter belongs to a module whose name ends so.
fn is_inside(parameter: &str, module: &str) -> bool {
    let ends = parameter.match_indices('.').map(|(end, _)| end);
    ends.into_iter().any(|end| parameter[..end].ends_with(module))
}

fn module_of(parameter: &str) -> &str {
    parameter.rsplit_once('.').map_or(parameter, |(module, _)| module)
}

/// The last part of each name, once.
fn last_names(modules: &[String]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for module in modules {
        let name = last_name(module);
        if !names.iter().any(|other| other == name) {
            names.push(name.to_owned());
        }
    }
    names
}

fn last_name(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}
