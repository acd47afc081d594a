//! The optimizer and the scheduler: both have a say in the learning rate.
//!
//! DeepSpeed steps its schedulers after the update and counts from -1. So a rising rate here is DeepSpeed's of two steps later,
//! and a falling one that of one step later (of the same step if it falls as a cosine).

use serde_json::Value as Json;
use toml::Value;

use super::keys::{self, Keys};
use super::{Reader, Said, in_toml, show, whole};

/// An optimizer, in DeepSpeed and here.
struct Known {
    name: &'static str,
    setting: &'static str,
    parameters: Keys,
    /// Parameter, setting, DeepSpeed's default.
    defaults: &'static [(&'static str, &'static str, f64)],
}

const ADAMW: Known = Known {
    name: "AdamW",
    setting: "adamw",
    parameters: keys::OPTIMIZER,
    defaults: &[
        ("lr", "train.lr", 1e-3),
        ("betas", "train.beta1", 0.9),
        ("betas", "train.beta2", 0.999),
        ("eps", "train.epsilon", 1e-8),
        ("weight_decay", "train.weight_decay", 0.0),
    ],
};

const OPTIMIZERS: [Known; 4] = [
    Known { name: "Adam", ..ADAMW },
    ADAMW,
    Known {
        name: "Lion",
        setting: "lion",
        parameters: keys::LION,
        defaults: &[
            ("lr", "train.lr", 1e-3),
            ("betas", "train.beta1", 0.9),
            ("betas", "train.beta2", 0.99),
            ("weight_decay", "train.weight_decay", 0.0),
        ],
    },
    Known {
        name: "SGD",
        setting: "sgd",
        parameters: keys::SGD,
        defaults: &[
            ("lr", "train.lr", 1e-3),
            ("momentum", "train.momentum", 0.0),
            ("weight_decay", "train.weight_decay", 0.0),
        ],
    },
];

/// The rates of a run after its warm-up.
#[derive(Clone, Copy, PartialEq)]
enum Scheduler {
    Constant,
    Linear,
    Cosine,
}

/// DeepSpeed's name, train.lr_decay, its parameters.
const SCHEDULERS: [(&str, Scheduler, &str, Keys); 3] = [
    ("WarmupLR", Scheduler::Constant, "constant", keys::WARMUP),
    ("WarmupDecayLR", Scheduler::Linear, "linear", keys::WARMUP_DECAY),
    ("WarmupCosineLR", Scheduler::Cosine, "cosine", keys::WARMUP_COSINE),
];

pub fn read(reader: &mut Reader) {
    let optimizer = optimizer(reader);
    let scheduler = scheduler(reader);
    rate(reader, scheduler);
    if let Some(Known { defaults, .. }) = optimizer {
        for (key, setting, default) in defaults {
            give_default(reader, &format!("optimizer.params.{key}"), setting, Value::Float(*default));
        }
        decay(reader);
    }
    if let Some(scheduler) = scheduler {
        warmup(reader);
        floor(reader, scheduler);
    }
}

/// The optimizer, if it is supported.
fn optimizer(reader: &mut Reader) -> Option<Known> {
    const WHY: &str = "AdamW, Lion and SGD are supported, and train.optimizer has others";
    let names = OPTIMIZERS.map(|known| known.name);
    if !has_section(reader, "optimizer", &["type", "params", "legacy_fusion"]) {
        return None;
    }
    let name = type_of(reader, "optimizer", WHY, &names)?;
    let Some(known) = OPTIMIZERS.into_iter().find(|known| known.name.eq_ignore_ascii_case(name)) else {
        note_type(reader, "optimizer", name, WHY, &names);
        return None;
    };
    reader.give("optimizer.type", "train.optimizer", Value::String(known.setting.to_owned()));
    walk_parameters(reader, "optimizer.params", known.parameters);
    if let Said::This(betas) = reader.said("optimizer.params.betas") {
        match betas.as_array().map(Vec::as_slice) {
            Some([first, second]) => {
                reader.give("optimizer.params.betas", "train.beta1", in_toml(first));
                reader.give("optimizer.params.betas", "train.beta2", in_toml(second));
            }
            _ => reader.note(
                "optimizer.params.betas",
                format!("is {}, expected a list of two numbers", show(&in_toml(betas))),
                "",
            ),
        }
    }
    Some(known)
}

fn scheduler(reader: &mut Reader) -> Option<Scheduler> {
    const WHY: &str = "the rate rises once, then stays or falls";
    let names = SCHEDULERS.map(|(name, ..)| name);
    if !has_section(reader, "scheduler", &["type", "params"]) {
        return None;
    }
    let name = type_of(reader, "scheduler", WHY, &names)?;
    let Some((_, scheduler, decay, keys)) = SCHEDULERS.into_iter().find(|(known, ..)| *known == name) else {
        note_type(reader, "scheduler", name, WHY, &names);
        return None;
    };
    walk_parameters(reader, "scheduler.params", keys);
    reader.give("scheduler.type", "train.lr_decay", Value::String(decay.to_owned()));
    Some(scheduler)
}

/// If DeepSpeed's scheduler has a rate, it overwrites the optimizer's.
fn rate(reader: &mut Reader, scheduler: Option<Scheduler>) {
    const OPTIMIZERS: &str = "optimizer.params.lr";
    const SCHEDULERS: &str = "scheduler.params.warmup_max_lr";
    let has_own = matches!(scheduler, Some(Scheduler::Constant | Scheduler::Linear));
    let own = if has_own { reader.said(SCHEDULERS) } else { Said::Nothing };
    match (reader.said(OPTIMIZERS), own) {
        (Said::This(rate), Said::This(own)) => {
            if rate.as_f64() != own.as_f64() {
                let (rate, own, name) = (show(&in_toml(rate)), show(&in_toml(own)), reader.name);
                let note =
                    format!("{name}: `{OPTIMIZERS}` is {rate}, but `{SCHEDULERS}` is {own} and wins in DeepSpeed");
                reader.raw.notes.push(note);
            }
            reader.give(SCHEDULERS, "train.lr", in_toml(own));
        }
        (_, Said::This(own)) => reader.give(SCHEDULERS, "train.lr", in_toml(own)),
        // WarmupLR takes the optimizer's rate then, but WarmupDecayLR overwrites it with a default.
        (Said::This(rate), Said::Nothing) if scheduler == Some(Scheduler::Linear) && rate.as_f64() != Some(1e-3) => {
            let what = format!("is missing: DeepSpeed would train with 0.001, not with `{OPTIMIZERS}`");
            reader.note(SCHEDULERS, what, "give it the rate that is meant, or \"auto\"");
        }
        (Said::This(rate), _) => reader.give(OPTIMIZERS, "train.lr", in_toml(rate)),
        (_, Said::Nothing) if scheduler == Some(Scheduler::Linear) => {
            reader.give_default(SCHEDULERS, "train.lr", Value::Float(1e-3));
        }
        _ => (),
    }
}

/// Adam without its W adds the decay to the gradient. DeepSpeed's "Adam" is AdamW unless told otherwise.
fn decay(reader: &mut Reader) {
    const KEY: &str = "optimizer.params.adam_w_mode";
    let name = reader.file.pointer("/optimizer/type").and_then(Json::as_str);
    let is_adam = name.is_some_and(|name| name.eq_ignore_ascii_case("Adam"));
    match reader.flag(KEY) {
        Some(false) if is_adam && reader.raw.number("train.weight_decay") != Some(0.0) => {
            let what = "is not supported: weight decay is decoupled from the gradient".to_owned();
            reader.note(KEY, what, "set it to true, or optimizer.params.weight_decay to 0");
        }
        Some(_) => reader.idle.push(format!("`{KEY}`")),
        None => (),
    }
}

fn warmup(reader: &mut Reader) {
    const STEPS: &str = "scheduler.params.warmup_num_steps";
    const FORM: &str = "scheduler.params.warmup_type";
    give_default(reader, STEPS, "train.warmup_steps", Value::Integer(1000));
    let is_left_open = match reader.said(STEPS) {
        Said::Auto => true,
        Said::Nothing => false,
        Said::This(steps) => whole(steps) == Some(0),
    };
    let found = match reader.said(FORM) {
        Said::Auto => return,
        Said::Nothing if is_left_open => return,
        Said::Nothing => "is missing, and DeepSpeed's default is \"log\"".to_owned(),
        Said::This(form) if form == "linear" => return,
        Said::This(form) => format!("is {}", show(&in_toml(form))),
    };
    reader.note(FORM, format!("{found}, which is not supported: the rate rises linearly"), "set it to \"linear\"");
}

/// The value that the rate falls to.
fn floor(reader: &mut Reader, scheduler: Scheduler) {
    const RATIO: &str = "scheduler.params.cos_min_ratio";
    match scheduler {
        Scheduler::Constant => (),
        Scheduler::Linear => reader.give("scheduler.type", "train.min_lr", Value::Float(0.0)),
        Scheduler::Cosine => {
            let Some(rate) = reader.raw.number("train.lr") else { return };
            match reader.said(RATIO) {
                Said::Auto => (),
                Said::Nothing => reader.give_default(RATIO, "train.min_lr", Value::Float(1e-4 * rate)),
                Said::This(ratio) => match ratio.as_f64() {
                    Some(ratio) => reader.give(RATIO, "train.min_lr", Value::Float(ratio * rate)),
                    None => reader.note(RATIO, format!("is {}, expected a number", show(&in_toml(ratio))), ""),
                },
            }
        }
    }
}

/// Also notes unknown keys of the section.
fn has_section(reader: &mut Reader, name: &str, known: &[&'static str]) -> bool {
    let Said::This(section) = reader.said(name) else { return false };
    let Some(keys) = reader.object(name, section) else { return false };
    for key in keys.keys().filter(|key| !known.contains(&key.as_str())) {
        reader.note_unknown(name, key, known.iter().copied());
    }
    true
}

fn walk_parameters(reader: &mut Reader, section: &str, table: Keys) {
    if let Said::This(params) = reader.said(section)
        && let Some(params) = reader.object(section, params)
    {
        reader.walk(section, table, params);
    }
}

fn type_of<'a>(reader: &mut Reader<'a>, section: &str, why: &str, known: &[&str]) -> Option<&'a str> {
    let key = format!("{section}.type");
    match reader.said(&key) {
        Said::This(Json::String(name)) => return Some(name),
        Said::This(other) => note_type(reader, section, &show(&in_toml(other)), why, known),
        Said::Auto => note_type(reader, section, "auto", why, known),
        Said::Nothing => reader.note(&key, format!("is missing, expected one of {}", known.join(", ")), ""),
    }
    None
}

fn note_type(reader: &mut Reader, section: &str, name: &str, why: &str, known: &[&str]) {
    let what = format!("is {}, which is not supported: {why}", show(&Value::String(name.to_owned())));
    let meant = known.iter().find(|known| known.eq_ignore_ascii_case(name)).copied();
    let hint = match meant {
        Some(meant) => format!("did you mean \"{meant}\"?"),
        None => format!("use one of {}", known.join(", ")),
    };
    reader.note(&format!("{section}.type"), what, &hint);
}

/// For a key that the file does not have: "auto" is left to the rest.
fn give_default(reader: &mut Reader, key: &str, setting: &str, value: Value) {
    if matches!(reader.said(key), Said::Nothing) {
        reader.give_default(key, setting, value);
    }
}
