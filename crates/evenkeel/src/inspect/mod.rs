//! `evenkeel inspect MODEL`

mod shards;

use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;

use evenkeel_device::DType;
use evenkeel_device::kernel::NF4_BLOCK;
use evenkeel_model::{AdapterConfig, Config, Experts, Input, Model};
use evenkeel_step::schedule::{Arrangement, Schedule};
use evenkeel_step::{Mesh, Strategy};
use evenkeel_train::{Samples, TrainerOptions, costs};

use crate::config::{AdapterBase, OptimizerName, TokenizerSource};
use crate::inputs::feed::Text;
use crate::inputs::model::newly_adapted;
use crate::inputs::model_folder::ModelFolder;
use crate::memory::samples_bytes;
use crate::memory::{Beside, Peak};
use crate::strategy::{cut, cut_experts, on_cores, plan, zero_stage};
use crate::{Failure, Mistake, text, warn};

#[derive(clap::Args)]
pub struct Arguments {
    /// A Hugging Face model folder, or the folder of an adapter.
    model: PathBuf,
    /// The folder of an adapter on the model, as PEFT saves it.
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// Trains a new LoRA adapter of this rank on all linear layers, instead of the whole model.
    #[arg(long, value_name = "RANK", conflicts_with = "adapter", value_parser = clap::value_parser!(u32).range(1..=16384))]
    lora: Option<u32>,
    /// How to hold the frozen linear layers of an adapter's base: "nf4", or the dtype of the table if not given.
    #[arg(long, value_name = "FORMAT", value_parser = AdapterBase::named)]
    base: Option<AdapterBase>,
    /// Sequences (or images) of the training step.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: u32,
    /// Tokens of each sequence; 1024 by default, or as many as the model has positions for.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    sequence: Option<u32>,
    /// The optimizer to train with, as train.optimizer names it.
    #[arg(long, default_value = "adamw", value_parser = OptimizerName::named)]
    optimizer: OptimizerName,
    /// Ranks to shard the model over; prints what each holds.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    tp: u32,
    /// Replicas of the model (data parallelism), each on ranks of its own.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    dp: u32,
    /// ZeRO stage, what replicas split: 1 optimizer state, 2 gradients too, 3 parameters too.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=3))]
    zero: u32,
    /// Relative share of the work of each tensor-parallel rank, such as 1,1,0.5.
    #[arg(long, value_delimiter = ',', value_parser = weight)]
    tp_weights: Vec<f64>,
    /// A sharding plan, JSON; wins over config.json's and the automatic one.
    #[arg(long)]
    tp_plan: Option<PathBuf>,
    /// Give each rank some experts of a mixture whole instead of some columns of every expert.
    #[arg(long)]
    whole_experts: bool,
    /// Whether ranks split the residual stream by tokens; by default they do, unless a plan leaves a part of the model whole.
    #[arg(long)]
    sequence_parallel: Option<bool>,
    /// Keys of config.json to ignore although Evenkeel does not understand them.
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    ignore_keys: Vec<String>,
}

fn weight(text: &str) -> Result<f64, String> {
    let weight = text.parse().ok().filter(|weight: &f64| weight.is_finite() && *weight > 0.0);
    weight.ok_or_else(|| "a number above 0 is needed".to_owned())
}

/// The most inputs that a dry run makes up: token ids or pixel values.
const MOST_INPUTS: usize = 1 << 26;

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let folder = ModelFolder::open(&arguments.model, arguments.adapter.as_deref())?;
    let packs = arguments.base == Some(AdapterBase::Nf4);
    let (model, json) = folder.model(&arguments.ignore_keys, "--ignore-keys", packs)?;
    let model = match arguments.lora {
        Some(rank) => {
            let adapter = AdapterConfig { rank: rank as usize, ..AdapterConfig::default() };
            newly_adapted(&model, adapter, Some(&folder))?
        }
        None => model,
    };
    let config = &model.config;
    let batch = arguments.batch as usize;
    let sequence = sequence(arguments, config)?;
    let (inputs, of_input, per_step) = match config.input {
        Input::Tokens { .. } => {
            let tied = if config.tied { ", tied" } else { "" };
            let positions = config.positions.map_or("any number".to_owned(), |positions| positions.to_string());
            let of_input = format!("vocabulary     {}{tied}\npositions      {positions}", config.classes);
            (batch * sequence, of_input, format!("{batch} × {sequence} tokens"))
        }
        Input::Texts { vocabulary, positions, .. } => {
            let labels = config.classes;
            let of_input = format!("vocabulary     {vocabulary}\npositions      {positions}\nlabels         {labels}");
            (batch * sequence, of_input, format!("{batch} × {sequence} tokens"))
        }
        Input::Images { size, patch, channels } => {
            let of_input = format!("images         {size}², patch {patch}, {} labels", config.classes);
            (batch * channels * size * size, of_input, format!("{batch} images"))
        }
    };
    let described = describe(&model, &of_input);
    if model.is_packed() && config.adapters.is_none() {
        return Ok(format!("{described}\n\n{NOT_TRAINED}"));
    }
    if inputs > MOST_INPUTS {
        let what = format!("a step of {per_step} is too large to be inspected");
        return Err(Mistake {
            what,
            hint: Some("memory and work grow evenly with --batch: inspect a smaller one".into()),
        }
        .into());
    }
    let strategy = arguments.strategy(&model, &json)?;
    let shards = model.cut(&strategy.cut)?;
    let micros = vec![Samples::blank(config.input, batch, sequence); strategy.micros_per_step()];
    // A run has its tokenizer in memory.
    let tokenizer = TokenizerSource::Path(folder.folder_with("tokenizer.json"));
    let tokenizer = config.input.is_text().then(|| Text::from_source(&tokenizer, "data.tokenizer"));
    let (mut rows, mut of_ranks) = (Vec::new(), Vec::new());
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::Bf16)] {
        for recompute in [false, true] {
            let arrangement = Arrangement::of(Schedule::usual(recompute, strategy.mesh().tp));
            let strategy = Strategy { dtype, arrangement, ..strategy.clone() };
            let costs = costs(&shards, &strategy, options(arguments, sequence), &micros);
            let beside = Beside { data_bytes: samples_bytes(&micros[0], &strategy), ..Beside::default() };
            let peak = Peak::of(&costs, strategy.devices.cores_per_rank(), beside);
            let copying = Peak {
                beside: Beside { copy_bytes: arguments.optimizer.options().rule.state_bytes(&model), ..beside },
                ..peak
            };
            let mut row = vec![name.to_owned(), if recompute { "yes" } else { "no" }.to_owned()];
            row.push(text::bytes(costs.iter().map(|cost| cost.state_bytes).sum()));
            row.extend([peak, copying].map(|peak| text::mib(peak.bytes())));
            row.push(text::flops(costs.iter().map(|cost| cost.flops).sum()));
            rows.push(row);
            of_ranks.push(costs);
        }
    }
    drop(tokenizer);
    let text = format!(
        "{described}\n\nTo train it with {}, {per_step} a step{}:\n{}",
        arguments.optimizer.title(),
        on_ranks(strategy.mesh()),
        text::table(&["dtype", "recompute", "state", "peak memory", "with checkpoints", "work per step"], &rows),
    );
    if shards.len() == 1 {
        return Ok(text);
    }
    Ok(format!("{text}\n\nCut over {} ranks, f32:\n{}", shards.len(), shards::describe(&shards, &of_ranks[0])))
}

const NOT_TRAINED: &str =
    "Weights in 4 bits cannot be trained themselves: --lora RANK tells what an adapter on them takes.";

fn describe(model: &Model, of_input: &str) -> String {
    let config = &model.config;
    [
        format!("architecture   {} ({})", config.family.class, config.family.model_type),
        format!("parameters     {}", describe_parameters(model)),
        format!("layers         {}", config.layers.len()),
        format!("hidden         {}, {}", config.hidden, describe_ffn(config)),
        format!("heads          {}", describe_heads(config)),
        of_input.to_owned(),
    ]
    .join("\n")
}

/// The sizes of heads, in the order in which layers first have them.
fn describe_heads(config: &Config) -> String {
    let mut sizes: Vec<(usize, usize)> = config.layers.iter().map(|layer| (layer.head_dim, layer.kv_heads)).collect();
    let mut seen = HashSet::new();
    sizes.retain(|&size| seen.insert(size));
    let describe = |(dim, kv_heads): &(usize, usize)| format!("of size {dim}, {kv_heads} for keys and values");
    format!("{} {}", config.heads, sizes.iter().map(describe).collect::<Vec<_>>().join("; "))
}

fn describe_ffn(config: &Config) -> String {
    let Some(Experts { count, chosen, ffn, .. }) = config.experts else { return format!("FFN {}", config.ffn) };
    if config.family.has_experts_beside() {
        return format!("FFN {} and {count} experts of FFN {ffn}, {chosen} for each token", config.ffn);
    }
    let dense = config.layers.iter().filter(|layer| !layer.has_experts).count();
    let dense = if dense == 0 { String::new() } else { format!("; FFN {} in {dense} layers", config.ffn) };
    format!("{count} experts of FFN {ffn}, {chosen} for each token{dense}")
}

/// The count and, if some are frozen, that of the trained ones, with the memory of each.
fn describe_parameters(model: &Model) -> String {
    let (all, trained) = (model.parameter_count(), model.trained_count());
    let count = text::count(all);
    if all == trained {
        return count;
    }
    let (packed, bits) = (model.packed_count(), PACKED_BITS);
    let in_4_bits = format!("{} in {bits} bits each, {}", text::count(packed), text::bytes(packed / 16 * 9));
    if model.config.adapters.is_none() {
        return format!("{count}, of which {in_4_bits}, are frozen");
    }
    let frozen = all - trained - packed;
    let frozen = format!("{} in f32, {} in bf16", text::bytes(4 * frozen), text::bytes(2 * frozen));
    let frozen = if packed > 0 { format!("{in_4_bits}, the others {frozen}") } else { frozen };
    format!(
        "{count}, of which {} are trained ({:.2} %): {}. Frozen: {frozen}",
        text::count(trained),
        100.0 * trained as f64 / all as f64,
        describe_trained(model),
    )
}

/// The adapters, and the modules that are trained whole beside them.
fn describe_trained(model: &Model) -> String {
    let experts = match model.adapted_expert_names().len() {
        0 => String::new(),
        count => format!(" and {count} parameters of experts"),
    };
    let adapters = format!("adapters of {} layers{experts}", model.adapted_names().len());
    let whole = model.specs.iter().filter(|spec| spec.is_trained && !spec.is_adapter);
    let whole: u64 = whole.map(|spec| spec.whole.iter().product::<usize>() as u64).sum();
    let modules = model.config.adapters.iter().flat_map(|adapters| &adapters.config.trained_modules);
    let modules: Vec<&str> = modules.map(String::as_str).collect();
    if modules.is_empty() {
        return adapters;
    }
    let of_adapters = text::count(model.trained_count() - whole);
    format!("{of_adapters} in {adapters}, {} whole ({})", text::count(whole), modules.join(", "))
}

/// A code, and its part of its block's factor.
const PACKED_BITS: f64 = 4.0 + 32.0 / NF4_BLOCK as f64;

fn on_ranks(mesh: Mesh) -> String {
    match (mesh.dp, mesh.tp) {
        (1, 1) => String::new(),
        (1, tp) => format!(", tp {tp}"),
        (dp, 1) => format!(" and replica, dp {dp}"),
        (dp, tp) => format!(" and replica, dp {dp} × tp {tp}"),
    }
}

fn options(arguments: &Arguments, longest: usize) -> TrainerOptions {
    let optimizer = Some(arguments.optimizer.options());
    TrainerOptions { optimizer, label_smoothing: 0.0, longest, dropout_seed: 0 }
}

impl Arguments {
    fn strategy(&self, model: &Model, config: &serde_json::Value) -> Result<Strategy, Failure> {
        let tp = match (self.tp as usize, self.tp_weights.len()) {
            (1, weights) if weights > 0 => weights,
            (ranks, weights) if weights == 0 || weights == ranks => ranks,
            (ranks, weights) => {
                let what = format!("--tp-weights has {weights} numbers, --tp is {ranks}");
                return Err(Mistake { what, hint: Some("give one for each rank".to_owned()) }.into());
            }
        };
        let uncut = if tp == 1 { BTreeSet::new() } else { plan(self.tp_plan.as_deref(), config)?.uncut(model, tp)? };
        let strategy = on_cores(self.dp as usize, tp, None);
        let cut = cut(tp, &self.tp_weights, uncut, self.sequence_parallel);
        let cut = cut_experts(cut, self.whole_experts, "--whole-experts", model)?;
        Ok(Strategy { cut, micro_batch: self.batch as usize, zero: zero_stage(self.zero as usize), ..strategy })
    }
}

fn sequence(arguments: &Arguments, config: &Config) -> Result<usize, Mistake> {
    const USUAL: usize = 1024;
    if !config.input.is_text() {
        return Ok(1);
    }
    let Some(sequence) = arguments.sequence.map(|sequence| sequence as usize) else {
        return Ok(config.positions.map_or(USUAL, |positions| USUAL.min(positions.max(1))));
    };
    if let Some(longest) = config.input.most_positions().filter(|&longest| sequence > longest) {
        return Err(Mistake {
            what: format!("--sequence is {sequence}, this model has {longest} positions"),
            hint: Some(format!("use --sequence {longest} or less")),
        });
    }
    if let Some(warning) = config.beyond_positions(sequence) {
        warn(&warning);
    }
    Ok(sequence)
}
