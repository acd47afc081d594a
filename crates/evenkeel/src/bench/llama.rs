//! The random Llama that benchmarks train on random tokens.

use evenkeel_model::{AdapterConfig, Input, Model, even_bounds};
use evenkeel_step::Strategy;
use evenkeel_train::{OptimizerOptions, Samples, TrainerOptions};
use serde_json::{Value, json};

use super::between;
use crate::Mistake;
use crate::config::AdapterBase;
use crate::device::Precision;
use crate::strategy::on_cores;

/// Its sizes, and those of a step.
#[derive(Clone, clap::Args)]
pub struct Llama {
    #[arg(long, default_value_t = 512)]
    pub hidden: usize,
    #[arg(long, default_value_t = 4)]
    pub layers: usize,
    #[arg(long, default_value_t = 8)]
    pub heads: usize,
    /// Heads for keys and values; half of --heads by default.
    #[arg(long)]
    pub kv_heads: Option<usize>,
    /// 2.75 times --hidden by default.
    #[arg(long)]
    pub ffn: Option<usize>,
    #[arg(long, default_value_t = 4096)]
    pub vocab: usize,
    /// Sequences of a step.
    #[arg(long, default_value_t = 4, value_parser = between::<1, 65536>)]
    pub batch: usize,
    /// Tokens of a sequence; every one but the last has a next one to predict.
    #[arg(long, default_value_t = 256, value_parser = between::<2, 1048576>)]
    pub sequence: usize,
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub dtype: Precision,
    #[command(flatten)]
    pub adapters: AdapterArguments,
}

/// The adapters that are trained instead of the model.
#[derive(Clone, Debug, clap::Args)]
pub struct AdapterArguments {
    /// Train LoRA adapters of this rank on all linear layers instead of the whole model.
    #[arg(long, value_name = "RANK", value_parser = between::<1, 16384>)]
    lora: Option<usize>,
    /// Adapt the first so many layers only. With one, the rest of a step is the frozen model's.
    #[arg(long, value_name = "COUNT", requires = "lora", value_parser = between::<1, 65536>)]
    lora_layers: Option<usize>,
    /// Train these modules whole beside the adapters, by the ends of their names, such as embed_tokens,norm.
    #[arg(long, value_name = "NAMES", requires = "lora", value_delimiter = ',')]
    lora_beside: Vec<String>,
    /// How to hold the adapters' base: "nf4", or in --dtype if not given.
    #[arg(long, value_name = "FORMAT", requires = "lora", value_parser = AdapterBase::named)]
    base: Option<AdapterBase>,
}

impl Llama {
    pub fn model(&self) -> Result<Model, Mistake> {
        self.adapted(model_of_options(&self.config())?)
    }

    /// Its config.json.
    pub fn config(&self) -> Value {
        json!({
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads.unwrap_or((self.heads / 2).max(1)),
            "intermediate_size": self.ffn.unwrap_or(self.hidden / 4 * 11),
            "vocab_size": self.vocab,
            "tie_word_embeddings": false,
        })
    }

    /// The model with the adapters.
    pub fn adapted(&self, model: Model) -> Result<Model, Mistake> {
        const MOST_TOKENS: usize = 1 << 26;
        if self.tokens() > MOST_TOKENS {
            let hint = Some("use a smaller --batch or --sequence".to_owned());
            return Err(Mistake { what: format!("a step has {MOST_TOKENS} tokens at most"), hint });
        }
        self.adapters.adapt(model)
    }

    /// Requires a sequence for every replica or micro-batch, whose number is this option's.
    pub fn check_shares(&self, option: &str, shares: usize) -> Result<(), Mistake> {
        if shares <= self.batch {
            return Ok(());
        }
        let what = format!("{option} is {shares}, a step has {} sequences", self.batch);
        Err(Mistake { what, hint: Some("use a larger --batch".to_owned()) })
    }

    pub fn trainer_options(&self) -> TrainerOptions {
        let optimizer = Some(OptimizerOptions { clip_norm: None, ..OptimizerOptions::default() });
        TrainerOptions { optimizer, label_smoothing: 0.0, longest: self.sequence, dropout_seed: 0 }
    }

    /// Equal ranks on cores that compute these sequences in steps of one micro-batch for each replica.
    pub fn strategy(&self, dp: usize, tp: usize, threads: Option<usize>) -> Strategy {
        Strategy { dtype: self.dtype.into(), micro_batch: self.batch.div_ceil(dp), ..on_cores(dp, tp, threads) }
    }

    pub fn tokens(&self) -> usize {
        self.batch * self.sequence
    }

    /// A step's sequences in one micro-batch per replica.
    pub fn samples(&self, step: u64, shares: usize) -> Vec<Samples> {
        let bounds = even_bounds(self.batch, shares);
        let seed = |share: usize| step * shares as u64 + share as u64;
        bounds.windows(2).enumerate().map(|(share, ends)| self.micro(seed(share), ends[1] - ends[0])).collect()
    }

    /// Blank samples of the same sizes.
    pub fn blank(&self, model: &Model, shares: usize) -> Vec<Samples> {
        let bounds = even_bounds(self.batch, shares);
        bounds.windows(2).map(|ends| Samples::blank(model.config.input, ends[1] - ends[0], self.sequence)).collect()
    }

    fn micro(&self, seed: u64, batch: usize) -> Samples {
        Samples::random(Input::Tokens { learned_positions: None }, self.vocab, batch, self.sequence, seed)
    }
}

impl AdapterArguments {
    /// The model with the adapters, if they are wanted.
    pub fn adapt(&self, model: Model) -> Result<Model, Mistake> {
        let Some(rank) = self.lora else { return Ok(model) };
        let model = if self.base == Some(AdapterBase::Nf4) { model.packed() } else { model };
        let layers = self.lora_layers.map(|count| (0..count.min(model.config.layers.len())).collect());
        let trained_modules = self.lora_beside.clone();
        let config =
            AdapterConfig { rank, alpha: 2.0 * rank as f32, layers, trained_modules, ..AdapterConfig::default() };
        model.adapted(config).map_err(|error| Mistake { what: error.to_string(), hint: error.hint() })
    }
}

/// The model of a config.json that was made from a command's options.
pub fn model_of_options(config: &Value) -> Result<Model, Mistake> {
    Model::from_json(config).map_err(|error| {
        let what = error.to_string().replace("config.json: ", "the options make no model: ");
        Mistake { what, hint: Some("--help lists the sizes".to_owned()) }
    })
}
