use crate::sharding::shard::EXPERTS;
use std::path::{Path, PathBuf};

use evenkeel_device::kernel::NF4_BLOCK;
use evenkeel_store::line_of_description;

/// Why a model cannot be built or loaded. [`Error::hint`] says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] evenkeel_store::Error),
    #[error("config.json: architecture `{found}` is not known; known are {known}")]
    UnknownArchitecture { found: String, known: String },
    #[error("architecture.toml{}: {what}", .line.map_or_else(String::new, |line| format!(":{line}")))]
    BadArchitecture { key: String, line: Option<usize>, what: String, hint: Option<String> },
    #[error("config.json: `architectures` names {found}, but `model_type` is `{model_type}`, expected {expected}")]
    OtherClass { found: String, model_type: &'static str, expected: &'static str },
    #[error("config.json: {keys}; not understood for a `{model_type}`, and it may change what the model computes")]
    NotUnderstood { keys: String, model_type: &'static str },
    #[error("config.json: `{key}` is {found}, expected {expected}")]
    BadConfig { key: String, expected: String, found: String },
    #[error("config.json: `{key}` is missing, expected {expected}")]
    MissingKey { key: String, expected: String },
    #[error("config.json: {what} is not supported")]
    Unsupported { what: String },
    #[error(
        "config.json: `quantization_config` is set ({method}), expected numbers by themselves, 4 bits by bitsandbytes (nf4), or experts in MXFP4 (gpt_oss)"
    )]
    Quantized { method: String },
    #[error("tensor `{name}` in {} is no 4-bit weight that can be read: {what}", .file.display())]
    BadQuantization { name: String, file: PathBuf, what: String },
    #[error("tensor `{name}` in {} is no weight in MXFP4 that can be read: {what}", .file.display())]
    BadMxfp4 { name: String, file: PathBuf, what: String },
    #[error("config.json: `quantization_config` is set, but no weight in {} is in 4 bits", .folder.display())]
    NothingQuantized { folder: PathBuf },
    #[error("tensor `{name}` has numbers that are not finite and cannot be held in 4 bits")]
    NotFinite { name: String },
    #[error(
        "`{name}` is held in 4 bits, in blocks of {NF4_BLOCK} numbers, and only whole blocks can be cut off: {what}"
    )]
    CutsBlocks { name: String, what: String },
    #[error("tensor `{name}` is missing in {}; {missing} of {expected} tensors are", .folder.display())]
    MissingTensor { name: String, folder: PathBuf, missing: usize, expected: usize },
    #[error("`{name}` is not in {}, so it begins with random numbers, but it is not trained", .folder.display())]
    NewButFrozen { name: String, folder: PathBuf },
    #[error("tensor `{name}` in {} does not belong to this model; {unexpected} such tensors", .folder.display())]
    UnexpectedTensor { name: String, folder: PathBuf, unexpected: usize },
    #[error(
        "config.json ties the head to the embedding (`tie_word_embeddings`), but `{head}` and `{embedding}` in {} differ", .folder.display()
    )]
    OtherHead { head: String, embedding: String, folder: PathBuf },
    #[error("tensor `{name}` is {found:?} in {}, config.json needs {expected:?}", .file.display())]
    WrongShape { name: String, file: PathBuf, found: Vec<usize>, expected: Vec<usize> },
    #[error("the model cannot be cut in {shards}: it has {size} {what}")]
    TooManyShards { shards: usize, what: &'static str, size: usize },
    #[error("the plan for tensor parallelism cannot be followed: {what}")]
    BadPlan { what: String },
    #[error(
        "the plan for tensor parallelism cannot be followed: {} {} nothing in this model",
        quoted(.patterns), if .patterns.len() == 1 { "matches" } else { "match" }
    )]
    IdlePatterns { patterns: Vec<String>, layers: Vec<String> },
    #[error("{what}")]
    BadAdapter { what: String },
    #[error("the adapter's `{target}` matches nothing in this model")]
    IdleTarget { target: String, modules: Vec<String>, experts: Vec<String> },
    #[error("`target_parameters` has `{target}`, which is no parameter of this model's experts")]
    IdleParameter { target: String, parameters: Vec<String> },
    #[error("the adapter's pattern `{pattern}` matches none of the layers that are adapted")]
    IdlePattern { pattern: String, modules: Vec<String> },
    #[error("the adapter is to have layer {layer}, this model's last is number {last}")]
    NoSuchLayer { layer: usize, last: usize },
    #[error("`{module}` cannot be adapted: adapters stand beside linear layers between the embedding and the head")]
    NotAdapted { module: String, tied_to: Option<String> },
    #[error("`{head}` has no weights of its own in this model: it is tied to `{embedding}`")]
    TiedHead { head: String, embedding: String },
    #[error("the adapter in {} has layers up to number {found}, this model's last is number {expected}", .folder.display())]
    OtherDepth { folder: PathBuf, base: Option<String>, found: usize, expected: usize },
    #[error("the residual stream cannot be split by tokens: every shard has {parts} parts of the model whole")]
    SplitsWhole { parts: usize },
    #[error("{shards} shards with attention that each has whole, in a model whose layers hand values to later ones")]
    WholeHanded { shards: usize },
    #[error("the classifier in {} has {found} labels, and {expected} are asked for", .file.display())]
    OtherLabels { file: PathBuf, found: usize, expected: usize },
    #[error("an adapter of `{pooler}`, the layer before the classifier's head, is not supported")]
    PoolerAdapter { pooler: &'static str },
    #[error("the adapter adapts nothing")]
    NoTargets,
    #[error("attention has heads of {head_dim} elements, on a GPU {most} are possible")]
    WideHeads { head_dim: usize, most: usize },
}

impl Error {
    /// The same with the line of a mistake in the description that lies in this folder.
    pub fn with_line(mut self, folder: &Path) -> Error {
        if let Error::BadArchitecture { key, line, .. } = &mut self {
            *line = line_of_description(folder, key);
        }
        self
    }

    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Store(error) => error.hint().map(|hint| hint.to_string()),
            Error::UnknownArchitecture { .. } => {
                Some("if it is a decoder of the usual kind, describe it in architecture.toml: docs/models.md".into())
            }
            Error::BadArchitecture { hint, .. } => hint.clone(),
            Error::Unsupported { .. } => None,
            Error::OtherClass { .. } => Some("one of the two was changed: take the model's own config.json".into()),
            Error::NotUnderstood { .. } => {
                Some("if the model computes the same without it, name it in model.ignore_keys, or --ignore-keys of inspect and generate".into())
            }
            Error::BadConfig { .. } | Error::MissingKey { .. } => {
                Some("is the folder complete and from transformers?".into())
            }
            Error::Quantized { .. } => {
                Some("use the model's F32, BF16 or F16 weights; adapter.base = \"nf4\" holds them in 4 bits".into())
            }
            Error::BadQuantization { .. } => {
                Some("quantise the model again with transformers and bitsandbytes, to nf4 in blocks of 64".into())
            }
            Error::BadMxfp4 { .. } => Some(
                "take the model's own folder again, or one in BF16: transformers expands it with Mxfp4Config(dequantize=True)".into(),
            ),
            Error::NothingQuantized { .. } => Some("remove the key, and use adapter.base = \"nf4\"".into()),
            Error::NotFinite { .. } => Some("the checkpoint is of a run that diverged".into()),
            Error::CutsBlocks { .. } => Some(
                "use another parallel.tp or parallel.tp_weights, or a base that is not in 4 bits (leave adapter.base out)".into(),
            ),
            Error::MissingTensor { .. } | Error::UnexpectedTensor { .. } | Error::WrongShape { .. } => {
                Some("the checkpoint and the config are from different models".into())
            }
            Error::OtherHead { head, .. } => {
                Some(format!("set \"tie_word_embeddings\": false in config.json to use the head; to use the embedding, remove `{head}`"))
            }
            Error::NewButFrozen { name, .. } => {
                let module = name.rsplit_once('.').map_or(name.as_str(), |(module, _)| module);
                Some(format!("name `{module}` in adapter.modules_to_save, or train the whole model"))
            }
            Error::BadPlan { .. } => Some("leave the layer out of the plan to have it cut automatically".into()),
            Error::IdlePatterns { layers, .. } => Some(format!("it has {}", layers.join(", "))),
            Error::BadAdapter { .. } => None,
            Error::IdleTarget { modules, experts, .. } if experts.is_empty() => {
                Some(format!("it has {}", modules.join(", ")))
            }
            Error::IdleTarget { modules, experts, .. } => Some(format!(
                "it has {}; matrices of experts ({}) belong in adapter.target_parameters",
                modules.join(", "),
                experts.join(", ")
            )),
            Error::IdleParameter { parameters, .. } if parameters.is_empty() => {
                Some("it has no experts: name linear layers in adapter.targets (PEFT's target_modules)".into())
            }
            Error::IdleParameter { parameters, .. } => {
                Some(format!("they have {}; linear layers belong in adapter.targets (PEFT's target_modules)", parameters.join(", ")))
            }
            Error::IdlePattern { modules, .. } => Some(format!("these are {}", modules.join(", "))),
            Error::NoSuchLayer { last, .. } => Some(format!("use numbers from 0 to {last}")),
            Error::NotAdapted { tied_to: None, .. } => Some("name it in modules_to_save to train it whole".into()),
            Error::NotAdapted { tied_to: Some(embedding), .. } => Some(format!(
                "it is tied to `{embedding}`: name that in modules_to_save to train it whole, with keep_tie = true to train both"
            )),
            Error::TiedHead { head, embedding } => Some(format!(
                "name `{embedding}`: with keep_tie = true both are trained as one, with `{head}` beside it each by itself"
            )),
            Error::OtherDepth { base, .. } => {
                let base = base.as_ref().map_or_else(String::new, |base| format!(", {base:?}"));
                Some(format!("give the model that the adapter was trained on{base}"))
            }
            Error::SplitsWhole { .. } => Some("set parallel.sequence_parallel = false, or cut everything".into()),
            Error::WholeHanded { .. } => Some("use a smaller tp, and a plan that cuts attention".into()),
            Error::OtherLabels { .. } => Some(
                "name as many labels in data.labels as it has, or none; with model.new_head = true its head begins anew".into(),
            ),
            Error::PoolerAdapter { .. } => {
                Some("leave it out of the adapter's targets; among modules_to_save it is trained whole".into())
            }
            Error::NoTargets => {
                Some("name linear layers in adapter.targets, or matrices of experts in adapter.target_parameters".into())
            }
            Error::WideHeads { .. } => Some("run it on CPUs".into()),
            Error::TooManyShards { size, what: EXPERTS, .. } => {
                Some(format!("use tp = {size} or less, or leave parallel.whole_experts out"))
            }
            Error::TooManyShards { size, .. } => Some(format!("use tp = {size} or less")),
        }
    }
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
