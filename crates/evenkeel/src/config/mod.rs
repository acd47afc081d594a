//! The configuration of a run: read from a TOML file and the command line, checked once.
//!
//! `settings.rs` is the table of keys; everything else follows from it. [`RawConfig`] holds the given values and their origins,
//! [`RawConfig::check`] reports every mistake at once, and a [`RunConfig`] has none: nothing below validates it again. This
//! module does not check whether files exist; the code that opens them reports that.

mod adapter;
mod check;
mod command;
mod deepspeed;
mod explain;
mod foreign;
mod optimizer;
mod raw;
mod setting;
mod settings;
mod straggler;
mod table;
#[cfg(test)]
mod tests;

use std::fmt::Write;
use std::path::PathBuf;

pub use adapter::{DORA_DROPOUT_HINT, PACKED_HINT, PACKED_MOVES, PRUNED_ADAPTERS, PRUNED_HINT};
pub use check::{names_a_file, of_images};
pub use command::{Arguments, Overrides, run};
pub use explain::{explain, explain_in_markdown};
pub use raw::{RawConfig, key_of_flag};
pub use setting::in_toml;
pub use settings::{
    AdapterBase, Architecture, Data, DataSource, DecayForm, Dtype, InstructionPrompt, LrDecay, OnBadRecord,
    OptimizerName, PackingStrategy, Parallel, RecordFormat, Settings, StageCut,
};
pub use straggler::Straggler;

/// The file in a run's folder that has its configuration.
pub const RUN_CONFIG: &str = "run.toml";
/// The section of that file that a run writes and nobody reads back.
pub const RUN_STRATEGY: &str = "strategy";

/// A configuration without mistakes, every default filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct RunConfig {
    pub source: ModelSource,
    /// `None` for images.
    pub tokenizer: Option<TokenizerSource>,
    pub settings: Settings,
    /// Whether the model is one that was saved, and not the one that the run begins with.
    pub evaluates_folder: bool,
    /// Whether the user gave the length of sequences.
    has_sequence: bool,
    /// Whether the user gave no key of the section `parallel`.
    pub is_parallel_open: bool,
    /// The keys of [adapter] that the user gave.
    pub adapter_keys: Vec<String>,
    /// Changes to the configuration, and settings that may not be as the user thinks.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// A Hugging Face folder with weights.
    Folder(PathBuf),
    /// A config.json, to start from random weights.
    Config(PathBuf),
    /// A new model with random weights.
    Sizes(Sizes),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    pub architecture: Architecture,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub ffn: usize,
    /// The tokenizer's if `None`.
    pub vocab: Option<usize>,
    pub tied: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TokenizerSource {
    Bytes,
    /// A tokenizer.json or a folder with one.
    Path(PathBuf),
}

impl RunConfig {
    /// Micro-batches of an evaluation; all of them if `None`.
    pub fn eval_batches(&self) -> Option<u64> {
        Some(self.settings.eval.batches).filter(|&batches| batches > 0)
    }

    /// Takes the model of a folder, whatever the run was to begin with.
    pub fn evaluate_folder(&mut self, path: PathBuf) {
        self.source = ModelSource::Folder(path);
        self.evaluates_folder = true;
        (self.settings.adapter.path, self.settings.adapter.kind) = (None, None);
    }

    /// Limits sequences to the model's positions, unless the user gave their length.
    pub fn fit_sequence(&mut self, positions: Option<usize>) {
        let sequence = &mut self.settings.data.sequence;
        *sequence = positions.filter(|_| !self.has_sequence).map_or(*sequence, |positions| positions.min(*sequence));
    }

    /// A file that gives this configuration again.
    pub fn to_toml(&self) -> String {
        let mut text = format!("# {}\n", self.describe());
        for (section, values) in self.settings.values() {
            if !values.is_empty() {
                let _ = write!(text, "\n[{section}]\n");
            }
            for (key, value) in values {
                let _ = writeln!(text, "{key} = {}", setting::in_toml(&value));
            }
        }
        text
    }

    /// One line. Paths are quoted, so that none can end it.
    fn describe(&self) -> String {
        let model = match &self.source {
            ModelSource::Folder(path) => format!("Fine-tunes the model in {path:?}"),
            ModelSource::Config(path) => format!("Pre-trains the model that {path:?} describes"),
            ModelSource::Sizes(sizes) => {
                let Sizes { architecture, hidden, layers, heads, kv_heads, ffn, vocab, tied } = sizes;
                let (name, tied) = (architecture.name(), if *tied { ", tied" } else { "" });
                let vocab =
                    vocab.map_or("the tokenizer's vocabulary".to_owned(), |vocab| format!("vocabulary {vocab}"));
                format!(
                    "Pre-trains a new {name}: {layers} layers, hidden {hidden}, {heads} heads ({kv_heads} for keys and \
                     values), FFN {ffn}, {vocab}{tied}"
                )
            }
        };
        match &self.tokenizer {
            None => format!("{model}, on images."),
            Some(TokenizerSource::Bytes) => format!("{model}, on bytes."),
            Some(TokenizerSource::Path(path)) => format!("{model}, on tokens of {path:?}."),
        }
    }
}
