//! Checks keys against each other, and fills in values that follow from other keys.

mod data;
mod pipeline;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use evenkeel_balance::{Mode, Selection};
use evenkeel_device::{DeviceKind, MOST_PEERS};
use evenkeel_model::Imputation;
use evenkeel_step::schedule::{NONE, OASES, Schedule, Units};

use super::raw::RawConfig;
use super::settings::{
    Architecture, DataSource, DecayForm, LrDecay, OnBadRecord, PackingStrategy, RecordFormat, Settings,
};
use super::{ModelSource, RunConfig, Sizes, Straggler, TokenizerSource, adapter, optimizer};
use crate::Mistakes;
pub use data::of_images;
use data::{check_data, check_images};
use pipeline::{check_pipeline, idle_places};

/// Keys that describe a new model.
const SIZES: [&str; 8] = [
    "model.architecture",
    "model.hidden",
    "model.layers",
    "model.heads",
    "model.kv_heads",
    "model.ffn",
    "model.vocab",
    "model.tied",
];

/// Most tokens of a micro-batch; no known machine can hold more.
const MOST_TOKENS: usize = 1 << 26;

impl RawConfig {
    /// Reads every key and looks for contradictions; nothing is checked again after this.
    pub fn check(mut self) -> Result<RunConfig, Mistakes> {
        let mut settings = Settings::read(&mut self);
        if self.incomplete {
            return Err(self.into_mistakes().into());
        }
        let source = check_model(&mut self, &mut settings);
        check_data(&mut self, &settings);
        check_output(&mut self, &settings);
        check_images(&mut self, &settings);
        check_train(&mut self, &settings);
        optimizer::check(&mut self, &settings);
        adapter::check(&mut self, &settings);
        check_eval(&mut self, &settings);
        check_best(&mut self, &settings);
        check_parallel(&mut self, &settings);
        check_balance(&mut self, &settings);
        check_device(&mut self, &settings);
        let mut warnings = std::mem::take(&mut self.notes);
        warnings.extend(shorten_warmup(&mut settings));
        warnings.extend(nothing_to_split(&settings));
        warnings.extend(idle_places(&settings));
        warnings.extend(nothing_to_hide(&settings));
        warnings.extend(never_slow(&settings));
        let tokenizer = resolve(&mut settings);
        let has_sequence = self.is_given("data.sequence");
        let is_parallel_open = self.given_in("parallel").is_empty();
        let adapter_keys = self.given_in("adapter");
        match (source, self.into_mistakes()) {
            (Some(source), mistakes) if mistakes.is_empty() => Ok(RunConfig {
                source,
                tokenizer,
                settings,
                evaluates_folder: false,
                has_sequence,
                is_parallel_open,
                adapter_keys,
                warnings,
            }),
            (_, mistakes) => Err(mistakes.into()),
        }
    }
}

fn check_model(raw: &mut RawConfig, settings: &mut Settings) -> Option<ModelSource> {
    let sizes: Vec<&str> = SIZES.into_iter().filter(|key| raw.is_given(key)).collect();
    let model = &mut settings.model;
    if let (Some(_), Some(_)) = (&model.path, &model.config) {
        let hint = "`model.path` starts from the folder's weights, `model.config` from random ones";
        let what = "`model.path` and `model.config` are both set, expected one of them".to_owned();
        raw.note_contradiction(&["model.config", "model.path"], what, Some(hint));
        return None;
    }
    let file = model.path.as_ref().map(|_| "model.path").or(model.config.as_ref().map(|_| "model.config"));
    if model.new_head && model.path.is_none() {
        let what = "`model.new_head` is set, but no model.path: a new model begins with random numbers".to_owned();
        raw.note_contradiction(&["model.new_head"], what, Some("leave it out"));
    }
    if let (Some(file), Some(&first)) = (file, sizes.first()) {
        let what = format!("{} set, but `{file}` has a model's sizes already", list(&sizes));
        raw.note_contradiction(&[first, file], what, None);
        return None;
    }
    if let Some(path) = &model.path {
        return Some(ModelSource::Folder(path.clone()));
    }
    if let Some(config) = &model.config {
        return Some(ModelSource::Config(config.clone()));
    }
    if !model.ignore_keys.is_empty() {
        let what = "`model.ignore_keys` is set, but the model comes from no config.json".to_owned();
        raw.note_contradiction(&["model.ignore_keys"], what, Some("set model.path or model.config, or leave it out"));
    }
    if sizes.is_empty() {
        let (what, hint) = match raw.evaluates {
            false => ("train", "set model.path, model.config, or model.hidden, layers, heads and ffn"),
            true => ("evaluate", "name its folder: evenkeel eval FOLDER --data FILE"),
        };
        let what = format!("there is no model to {what}");
        raw.note_contradiction(&["model.path", "model.config"], what, Some(hint));
        return None;
    }
    check_sizes(raw, settings)
}

fn check_sizes(raw: &mut RawConfig, settings: &mut Settings) -> Option<ModelSource> {
    let model = &mut settings.model;
    model.architecture.get_or_insert(Architecture::Llama);
    model.tied.get_or_insert(false);
    model.kv_heads = model.kv_heads.or(model.heads);
    let needed = ["model.hidden", "model.layers", "model.heads", "model.ffn"];
    for missing in needed.into_iter().filter(|key| !raw.is_given(key)).collect::<Vec<_>>() {
        let what = format!("`{missing}` is missing, a new model needs it");
        raw.note_contradiction(&[], what, None);
    }
    if let (Some(hidden), Some(heads)) = (model.hidden, model.heads)
        && !(hidden.is_multiple_of(heads) && (hidden / heads).is_multiple_of(2))
    {
        let what = format!("`model.hidden` is {hidden}, which {heads} heads cannot share in even parts");
        let hint = "hidden must be heads times an even number";
        raw.note_contradiction(&["model.hidden", "model.heads"], what, Some(hint));
    }
    if let (Some(heads), Some(kv_heads)) = (model.heads, model.kv_heads)
        && !heads.is_multiple_of(kv_heads)
    {
        let what = format!("`model.kv_heads` is {kv_heads}, which does not divide the {heads} heads");
        raw.note_contradiction(&["model.kv_heads", "model.heads"], what, None);
    }
    Some(ModelSource::Sizes(Sizes {
        architecture: model.architecture?,
        hidden: model.hidden?,
        layers: model.layers?,
        heads: model.heads?,
        kv_heads: model.kv_heads?,
        ffn: model.ffn?,
        vocab: model.vocab,
        tied: model.tied?,
    }))
}

fn check_output(raw: &mut RawConfig, settings: &Settings) {
    let output = &settings.output;
    if output.save_dtype.is_some() && !output.save_model {
        let what = "`output.save_dtype` is set, but `output.save_model` is false".to_owned();
        raw.note_contradiction(&["output.save_dtype", "output.save_model"], what, None);
    }
    if let Some((what, hint)) = names_a_file(&output.folder) {
        raw.note_contradiction(&["output.folder"], format!("`output.folder` is {what}"), Some(hint));
    }
}

/// The problem with a folder that has the name of a file of weights, and a hint at what was probably wanted.
pub fn names_a_file(folder: &Path) -> Option<(String, &'static str)> {
    const OF_WEIGHTS: [&str; 5] = ["safetensors", "bin", "pt", "pth", "onnx"];
    let extension = folder.extension()?.to_str()?.to_lowercase();
    let hint = match extension.as_str() {
        "gguf" => "llama.cpp's convert_hf_to_gguf.py makes a GGUF file of a folder with a model",
        extension if OF_WEIGHTS.contains(&extension) => {
            "leave out the ending; a folder with a model has its weights in it"
        }
        _ => return None,
    };
    Some((format!("{folder:?}, the name of a file, expected a folder's"), hint))
}

fn check_train(raw: &mut RawConfig, settings: &Settings) {
    let train = &settings.train;
    let is_endless =
        train.steps.is_none() && train.epochs.is_none() && train.tokens.is_none() && train.minutes.is_none();
    if is_endless && !raw.evaluates {
        let what = "training has no end".to_owned();
        let hint = "set train.steps, train.epochs, train.tokens or train.minutes";
        let keys = ["train.steps", "train.epochs", "train.tokens", "train.minutes"];
        raw.note_contradiction(&keys, what, Some(hint));
    }
    if train.min_lr > train.lr {
        let what = format!("`train.min_lr` is {}, more than `train.lr`, {}", train.min_lr, train.lr);
        raw.note_contradiction(&["train.min_lr", "train.lr"], what, None);
    } else if train.min_lr > 0.0 && train.lr_decay == LrDecay::Constant {
        let what = format!("`train.min_lr` is {}, but `train.lr_decay` is \"constant\"", train.min_lr);
        raw.note_contradiction(&["train.min_lr", "train.lr_decay"], what, None);
    }
    let of_decays = [
        ("train.lr_cycles", train.lr_cycles.is_some(), LrDecay::CosineRestarts),
        ("train.lr_power", train.lr_power.is_some(), LrDecay::Polynomial),
        ("train.lr_decay_share", train.lr_decay_share.is_some(), LrDecay::Wsd),
        ("train.lr_decay_form", train.lr_decay_form.is_some(), LrDecay::Wsd),
    ];
    for (key, _, decay) in of_decays.into_iter().filter(|(_, is_set, decay)| *is_set && *decay != train.lr_decay) {
        let (found, needed) = (train.lr_decay.name(), decay.name());
        let what = format!("`{key}` is set, but `train.lr_decay` is \"{found}\"");
        raw.note_contradiction(&[key, "train.lr_decay"], what, Some(&format!("it belongs to \"{needed}\"")));
    }
    let tokens = train.batch * settings.data.sequence;
    if !of_images(settings) && tokens > MOST_TOKENS {
        let what = format!("a micro-batch has {tokens} tokens, the limit is {MOST_TOKENS}");
        let hint = "lower train.batch or data.sequence and raise train.accumulate";
        raw.note_contradiction(&["train.batch", "data.sequence"], what, Some(hint));
    }
}

/// A run that is cut short for a trial still warms up completely.
fn shorten_warmup(settings: &mut Settings) -> Option<String> {
    let train = &mut settings.train;
    let steps = train.steps.filter(|&steps| train.warmup_steps > steps)?;
    let before = std::mem::replace(&mut train.warmup_steps, steps);
    Some(format!("`train.warmup_steps` is {before}, more than `train.steps`; it is shortened to {steps}"))
}

fn nothing_to_split(settings: &Settings) -> Option<String> {
    let (zero, dp) = (settings.parallel.zero, settings.parallel.dp);
    (zero > 0 && dp == 1).then(|| {
        format!("`parallel.zero` is {zero}, but `parallel.dp` is 1: there are no other replicas to split with")
    })
}

/// Warns about what has no effect with tp = 1.
fn nothing_to_hide(settings: &Settings) -> Vec<String> {
    let parallel = &settings.parallel;
    let is_idle = |is_set: bool| is_set && parallel.tp == 1;
    let told = |key: &str| {
        format!("`parallel.{key}` is set, but `parallel.tp` is 1: one rank has nothing to hide, split or divide")
    };
    let keys = [
        ("parts", is_idle(parallel.parts.is_some_and(|parts| parts > 1))),
        ("sequence_parallel", is_idle(parallel.sequence_parallel == Some(true))),
        ("whole_experts", is_idle(parallel.whole_experts)),
    ];
    keys.into_iter().filter(|(_, is_idle)| *is_idle).map(|(key, _)| told(key)).collect()
}

/// Warns about stragglers that come after the end of the run.
fn never_slow(settings: &Settings) -> Vec<String> {
    let Some(steps) = settings.train.steps.map(u64::from) else { return Vec::new() };
    let is_late = |text: &&String| Straggler::parse(text).is_ok_and(|straggler| *straggler.steps.start() > steps);
    let told = |text: &String| format!("straggler `{text}` never comes: `train.steps` is {steps}");
    settings.balance.stragglers.iter().filter(is_late).map(told).collect()
}

fn check_parallel(raw: &mut RawConfig, settings: &Settings) {
    let parallel = &settings.parallel;
    let weights = parallel.tp_weights.len();
    if weights > 0 && weights != parallel.tp {
        let what = format!("`parallel.tp_weights` has {weights} numbers, `parallel.tp` is {}", parallel.tp);
        let hint = if parallel.pp > 1 {
            "give one for each rank that shares a layer; parallel.stage_layers divides layers between places"
        } else {
            "give one for each rank"
        };
        raw.note_contradiction(&["parallel.tp_weights", "parallel.tp"], what, Some(hint));
    }
    if settings.train.recompute && parallel.schedule == Some(NONE) {
        let what = "`train.recompute` is true, but `parallel.schedule` is \"none\"".to_owned();
        let hint = "a schedule that recomputes is \"oases\"";
        raw.note_contradiction(&["train.recompute", "parallel.schedule"], what, Some(hint));
    }
    check_schedule(raw, settings);
    check_pipeline(raw, settings);
    /// They say nothing about how the work is shared.
    const BESIDE_A_PLAN: [&str; 3] = ["parallel.auto", "parallel.timeout_s", "parallel.tp_plan"];
    let fixed = raw.given_in("parallel").into_iter().find(|key| !BESIDE_A_PLAN.contains(&key.as_str()));
    if let Some(key) = fixed.filter(|_| parallel.auto) {
        let what = format!("`{key}` is set, but `parallel.auto` leaves that to a plan");
        raw.note_contradiction(&[&key, "parallel.auto"], what, Some("leave one of them out"));
    }
    if parallel.link_latency_us > 0.0 && parallel.link_gb_per_s.is_none() {
        let what = "`parallel.link_latency_us` is set, but no link is emulated".to_owned();
        raw.note_contradiction(&["parallel.link_latency_us"], what, Some("set parallel.link_gb_per_s, too"));
    }
    if !settings.sample.prompts.is_empty() && !settings.output.save_model {
        let what = "`sample.prompts` are given, but `output.save_model` is false".to_owned();
        let hint = "prompts are continued by the model that is saved";
        raw.note_contradiction(&["sample.prompts", "output.save_model"], what, Some(hint));
    }
}

fn schedule_of(settings: &Settings) -> Schedule {
    let (parallel, recomputes) = (&settings.parallel, settings.train.recompute);
    let usual = if recomputes && parallel.recompute_units != Units::All {
        OASES
    } else {
        Schedule::usual(recomputes, parallel.tp)
    };
    parallel.schedule.unwrap_or(usual)
}

/// Refuses choices that the schedule or the rest of the run leaves no room for.
fn check_schedule(raw: &mut RawConfig, settings: &Settings) {
    let (parallel, train) = (&settings.parallel, &settings.train);
    let schedule = schedule_of(settings);
    let name = schedule.name;
    if parallel.recompute_units != Units::All && !schedule.chooses_units {
        let what = format!(
            "`parallel.recompute_units` is \"{}\", but the schedule \"{name}\" cannot choose what to recompute",
            parallel.recompute_units.name()
        );
        let hint = "schedules that can are \"oases\" (train.recompute = true) and \"saved-comm\"";
        raw.note_contradiction(&["parallel.recompute_units", "parallel.schedule", "train.recompute"], what, Some(hint));
    }
    if !parallel.ahead {
        return;
    }
    let (why, key, hint) = if !schedule.overlaps {
        (
            format!("the schedule \"{name}\" overlaps nothing"),
            "parallel.schedule",
            "schedules that do are \"oases\", \"cross-pass\" and \"none\"",
        )
    } else if train.accumulate == 1 {
        (
            "a step has one micro-batch".to_owned(),
            "train.accumulate",
            "set train.accumulate, or leave parallel.ahead out",
        )
    } else if parallel.ranks() == 1 {
        (
            "there is one rank, which exchanges nothing".to_owned(),
            "parallel.tp",
            "set parallel.tp or parallel.dp, or leave parallel.ahead out",
        )
    } else {
        return;
    };
    let what = format!("`parallel.ahead` is true, but {why}");
    raw.note_contradiction(&["parallel.ahead", key], what, Some(hint));
}

fn check_balance(raw: &mut RawConfig, settings: &Settings) {
    let (balance, parallel) = (&settings.balance, &settings.parallel);
    let mode = balance.mode.name();
    if balance.mode != Mode::Off && parallel.tp == 1 && parallel.pp == 1 {
        let what =
            format!("`balance.mode` is \"{mode}\", but `parallel.tp` is 1: there is no other rank to share work with");
        raw.note_contradiction(
            &["balance.mode", "parallel.tp"],
            what,
            Some("set parallel.tp, or balance.mode = \"off\""),
        );
    }
    if balance.mode != Mode::Off && parallel.whole_experts {
        let what = format!(
            "`balance.mode` is \"{mode}\", but `parallel.whole_experts` makes ranks with busy experts look slow"
        );
        raw.note_contradiction(&["balance.mode", "parallel.whole_experts"], what, Some("leave one of them out"));
    }
    if balance.mode == Mode::Resize && balance.gamma_max == 0.0 {
        let what = "`balance.mode` is \"resize\", but `balance.gamma_max` is 0, which prunes nothing".to_owned();
        raw.note_contradiction(&["balance.mode", "balance.gamma_max"], what, Some("0.5 prunes half at most"));
    }
    if balance.gamma_max > 0.0 && !balance.mode.prunes() {
        let what = format!("`balance.gamma_max` is set, but mode \"{mode}\" prunes nothing");
        let hint = "modes that do are \"resize\", \"semi\" and \"auto\"";
        raw.note_contradiction(&["balance.gamma_max", "balance.mode"], what, Some(hint));
    }
    if balance.gamma_max == 0.0 {
        let how = [
            ("balance.imputation", balance.imputation != Imputation::Zero),
            ("balance.freeze", !balance.freeze),
            ("balance.selection", balance.selection != Selection::Priority),
        ];
        for (key, _) in how.into_iter().filter(|(_, is_set)| *is_set) {
            let what = format!("`{key}` is set, but `balance.gamma_max` is 0, which prunes nothing");
            let hint = "set it, too, with mode \"resize\", \"semi\" or \"auto\"; 0.5 prunes half at most";
            raw.note_contradiction(&[key, "balance.gamma_max"], what, Some(hint));
        }
    }
    let least = match balance.mode {
        Mode::Off | Mode::Reshard => 3,
        Mode::Migrate => 1,
        Mode::Auto | Mode::Semi if balance.gamma_max == 0.0 => 1,
        Mode::Resize | Mode::Semi | Mode::Auto => 0,
    };
    if parallel.dp > 1 && parallel.zero > least {
        let stages = if least == 0 { "= 0".to_owned() } else { format!("<= {least}") };
        let what =
            format!("`balance.mode` \"{mode}\" works with `parallel.zero` {stages} only, it is {}", parallel.zero);
        let hint = "\"reshard\" works with every stage";
        raw.note_contradiction(&["balance.mode", "parallel.zero"], what, Some(hint));
    }
    let ranks = parallel.ranks();
    for text in &balance.stragglers {
        let told = match Straggler::parse(text) {
            Err(told) => Some(told),
            Ok(straggler) if straggler.rank >= ranks => {
                Some(format!("straggler `{text}` is rank {}, but ranks are 0 to {}", straggler.rank, ranks - 1))
            }
            Ok(_) => None,
        };
        if let Some(told) = told {
            raw.note_contradiction(&["balance.stragglers"], told, None);
        }
    }
}

/// Each rank has a GPU of its own, or all share one.
fn check_cards(raw: &mut RawConfig, cards: &[u32], ranks: usize, parts: usize) {
    let count = cards.iter().collect::<BTreeSet<_>>().len();
    let keys = ["device.cards", "parallel.tp", "parallel.dp"];
    if cards.len() > 1 && cards.len() != ranks {
        let what =
            format!("`device.cards` has {} numbers, but there {} (pp × dp × tp)", cards.len(), count_of_ranks(ranks));
        raw.note_contradiction(&keys, what, Some("give one for each rank, or a single one for all"));
    } else if count > 1 && count < ranks {
        let what = format!("`device.cards` has {ranks} ranks on {count} GPUs");
        raw.note_contradiction(&keys, what, Some("give each rank a GPU of its own, or all the same one"));
    } else if count > 1 && parts > 0 {
        let what = format!("`device.virtual_gpus` are parts of one GPU, but `device.cards` has {count}");
        let hint = "name a single GPU, or leave device.virtual_gpus out";
        raw.note_contradiction(&["device.virtual_gpus", "device.cards"], what, Some(hint));
    }
}

/// Refuses keys that do not apply to the device, or that a GPU does not support.
fn check_device(raw: &mut RawConfig, settings: &Settings) {
    let (parallel, parts, cards) = (&settings.parallel, settings.device.virtual_gpus.len(), &settings.device.cards);
    let ranks = parallel.ranks();
    if settings.device.kind != DeviceKind::Cuda {
        if parts > 0 {
            let what = "`device.virtual_gpus` are parts of a GPU, but `device.kind` is \"cpu\"".to_owned();
            let hint = "set device.kind = \"cuda\", or parallel.cores_per_rank";
            raw.note_contradiction(&["device.virtual_gpus", "device.kind"], what, Some(hint));
        }
        if settings.device.graph.is_some() {
            let what = "`device.graph` is about a GPU, but `device.kind` is \"cpu\"".to_owned();
            let hint = "set device.kind = \"cuda\", or leave device.graph out";
            raw.note_contradiction(&["device.graph", "device.kind"], what, Some(hint));
        }
        if !cards.is_empty() {
            let what = "`device.cards` are GPUs, but `device.kind` is \"cpu\"".to_owned();
            raw.note_contradiction(&["device.cards", "device.kind"], what, Some("set device.kind = \"cuda\""));
        }
        return;
    }
    check_cards(raw, cards, ranks, parts);
    if parts > 0 && parts != ranks {
        let what =
            format!("`device.virtual_gpus` has {parts} parts, but there {} (pp × dp × tp)", count_of_ranks(ranks));
        let keys = ["device.virtual_gpus", "parallel.tp", "parallel.dp"];
        raw.note_contradiction(&keys, what, Some("give one for each rank"));
    }
    if ranks > MOST_PEERS {
        let what = format!("there are {ranks} ranks (pp × dp × tp), but on GPUs there can be {MOST_PEERS} at most");
        let hint = "use fewer, or compute on the cores with device.kind = \"cpu\"";
        raw.note_contradiction(&["parallel.tp", "parallel.dp", "device.kind"], what, Some(hint));
    }
    if parallel.link_gb_per_s.is_some() {
        let what = "`parallel.link_gb_per_s` is emulated between ranks on a CPU's cores, but `device.kind` is \"cuda\"";
        raw.note_contradiction(&["parallel.link_gb_per_s", "device.kind"], what.to_owned(), None);
    }
    let of_cores = [
        ("device.threads", settings.device.threads.is_some()),
        ("parallel.cores_per_rank", parallel.cores_per_rank.is_some()),
        ("parallel.comm_cores", parallel.comm_cores > 0),
        ("balance.stragglers", !settings.balance.stragglers.is_empty()),
    ];
    for (key, _) in of_cores.into_iter().filter(|(_, is_set)| *is_set) {
        let what = format!("`{key}` is about a CPU's cores, but `device.kind` is \"cuda\"");
        raw.note_contradiction(&[key, "device.kind"], what, None);
    }
}

fn check_eval(raw: &mut RawConfig, settings: &Settings) {
    let data = &settings.data;
    if data.holdout > 0 && !data.eval_paths.is_empty() {
        let what = "`data.holdout` and `data.eval_paths` are both set, expected one of them".to_owned();
        raw.note_contradiction(&["data.holdout", "data.eval_paths"], what, None);
    }
    if data.holdout == 1 {
        let what = "`data.holdout` is 1, which leaves nothing to train on".to_owned();
        raw.note_contradiction(&["data.holdout"], what, Some("use 2 or more, or 0 to keep no records back"));
    }
    if let Some(every) = settings.eval.every.filter(|_| !has_eval_data(settings)) {
        let what = format!("`eval.every` is {every}, but there is nothing to evaluate on");
        let hint = "set data.holdout or data.eval_paths";
        raw.note_contradiction(&["eval.every", "data.holdout", "data.eval_paths"], what, Some(hint));
    }
}

/// Checks the keys that depend on evaluations.
fn check_best(raw: &mut RawConfig, settings: &Settings) {
    let (eval, output) = (&settings.eval, &settings.output);
    let of_evaluations = [
        ("eval.patience", eval.patience.is_some()),
        ("output.keep_best", output.keep_best),
        ("output.save_best", output.save_best),
    ];
    for (key, _) in of_evaluations.into_iter().filter(|(_, is_set)| *is_set && !has_eval_data(settings)) {
        let what = format!("`{key}` is set, but there is nothing to evaluate on");
        let hint = "set data.holdout or data.eval_paths";
        raw.note_contradiction(&[key, "data.holdout", "data.eval_paths"], what, Some(hint));
    }
    if eval.min_delta.is_some() && eval.patience.is_none() {
        let what = "`eval.min_delta` is set, but training does not end early".to_owned();
        raw.note_contradiction(&["eval.min_delta"], what, Some("set eval.patience, too"));
    }
    if output.save_best && !output.save_model {
        let what = "`output.save_best` is set, but `output.save_model` is false".to_owned();
        raw.note_contradiction(&["output.save_best", "output.save_model"], what, None);
    }
    if output.save_best && !output.keep_best && raw.is_given("output.keep_best") {
        let what = "`output.save_best` is set, but `output.keep_best` is false".to_owned();
        raw.note_contradiction(&["output.keep_best", "output.save_best"], what, Some("leave output.keep_best out"));
    }
}

fn has_eval_data(settings: &Settings) -> bool {
    settings.data.holdout > 0 || !settings.data.eval_paths.is_empty()
}

/// Fills in values that follow from other keys, so that the resolved file says what will happen.
fn resolve(settings: &mut Settings) -> Option<TokenizerSource> {
    let of_images = of_images(settings);
    optimizer::resolve(&mut settings.train);
    settings.data.packing &= !of_images;
    if settings.data.packing {
        let runs_on = settings.data.format == RecordFormat::Text;
        let strategy = if runs_on { PackingStrategy::Cut } else { PackingStrategy::BestFit };
        settings.data.packing_strategy.get_or_insert(strategy);
    }
    if settings.data.source == DataSource::Synthetic {
        settings.data.records.get_or_insert(1024);
    }
    if settings.data.on_bad_record == OnBadRecord::Skip {
        settings.data.bad_record_limit.get_or_insert(100);
    }
    if has_eval_data(settings) {
        settings.eval.every.get_or_insert(100);
    }
    settings.output.keep_best |= settings.output.save_best;
    let train = &mut settings.train;
    match train.lr_decay {
        LrDecay::Cosine | LrDecay::Linear | LrDecay::Constant => (),
        LrDecay::CosineRestarts => train.lr_cycles = train.lr_cycles.or(Some(1)),
        LrDecay::Polynomial => train.lr_power = train.lr_power.or(Some(1.0)),
        LrDecay::Wsd => {
            train.lr_decay_share.get_or_insert(0.1);
            train.lr_decay_form.get_or_insert(DecayForm::Cosine);
        }
    }
    let schedule = schedule_of(settings);
    settings.parallel.schedule = Some(schedule);
    settings.train.recompute = schedule != NONE;
    if settings.output.save_model {
        settings.output.save_dtype.get_or_insert(settings.train.dtype);
    }
    if of_images {
        return None;
    }
    let folder = settings.model.path.as_ref().map(|path| path.to_string_lossy().into_owned());
    let tokenizer = settings.data.tokenizer.get_or_insert(folder.unwrap_or_else(|| "bytes".to_owned()));
    Some(match tokenizer.as_str() {
        "bytes" => TokenizerSource::Bytes,
        path => TokenizerSource::Path(PathBuf::from(path)),
    })
}

fn count_of_ranks(ranks: usize) -> String {
    if ranks == 1 { "is one rank".to_owned() } else { format!("are {ranks} ranks") }
}

fn list(keys: &[&str]) -> String {
    let quoted: Vec<String> = keys.iter().map(|key| format!("`{key}`")).collect();
    let verb = if keys.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", quoted.join(", "))
}
