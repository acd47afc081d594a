//! PEFT's adapter_config.json.

use serde_json::{Map, Value, json};

use super::{AdapterConfig, AdapterInit, AdapterScaling, Targets};
use crate::error::Error;

/// Names of tensors in PEFT's files begin so.
pub const PEFT_PREFIX: &str = "base_model.model.";

/// The first version of PEFT whose files have experts' adapters as those written here.
const EXPERTS_VERSION: &str = "0.19.0";

/// Keys that change nothing here: what was trained, where, and with which versions.
const IGNORED: [&str; 13] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "task_type",
];

/// Ways to begin that leave the base's weights as they are. The others change these, so their adapters belong to no known base.
const HARMLESS_INITS: [&str; 4] = ["gaussian", "eva", "orthogonal", "true"];

impl AdapterConfig {
    /// Refuses everything that is set and not understood: it may change numbers.
    pub fn from_peft(json: &Value) -> Result<AdapterConfig, Error> {
        let object = json.as_object().ok_or_else(|| bad("it is no object".to_owned()))?;
        let mut keys = Keys { left: object.clone() };
        match keys.take("peft_type") {
            Some(Value::String(kind)) if kind == "LORA" => (),
            other => return Err(bad(format!("`peft_type` is {}, expected \"LORA\"", shown(other.as_ref())))),
        }
        let defaults = AdapterConfig::default();
        let parameters = keys.names("target_parameters")?;
        let config = AdapterConfig {
            rank: keys.number("r")?.map_or(Ok(defaults.rank), |rank| whole("r", rank))?,
            alpha: keys.number("lora_alpha")?.map_or(defaults.alpha, |alpha| alpha as f32),
            dropout: keys.number("lora_dropout")?.unwrap_or(0.0) as f32,
            targets: match keys.targets("target_modules")? {
                Some(targets) => targets,
                None if !parameters.is_empty() => Targets::Names(Vec::new()),
                None => return Err(bad("`target_modules` is missing".to_owned())),
            },
            parameters,
            excluded: keys.targets("exclude_modules")?,
            layers: keys.layers()?,
            rank_patterns: {
                let patterns = keys.patterns("rank_pattern")?.into_iter();
                patterns
                    .map(|(pattern, rank)| Ok((pattern, whole("rank_pattern", rank)?)))
                    .collect::<Result<_, Error>>()?
            },
            alpha_patterns: {
                let patterns = keys.patterns("alpha_pattern")?.into_iter();
                patterns.map(|(pattern, alpha)| (pattern, alpha as f32)).collect()
            },
            scaling: if keys.flag("use_rslora")? { AdapterScaling::ByRoot } else { AdapterScaling::ByRank },
            is_dora: keys.flag("use_dora")?,
            init: keys.init()?,
            trained_modules: keys.names("modules_to_save")?,
            has_new_names: false,
            keeps_tie: keys.flag("ensure_weight_tying")?,
        };
        match keys.take("bias") {
            None => (),
            Some(Value::String(bias)) if bias == "none" => (),
            Some(other) => return Err(bad(format!("`bias` is {other}, expected \"none\": biases are not trained"))),
        }
        keys.left.retain(|key, value| !IGNORED.contains(&key.as_str()) && is_set(value));
        if let Some((key, value)) = keys.left.iter().next() {
            return Err(bad(format!(
                "`{key}` is {value}, which is not understood and may change what the adapter computes"
            )));
        }
        Ok(config)
    }

    /// The JSON that PEFT reads. `linears` are the names of the adapted layers.
    pub fn to_peft(&self, base: &str, task: Option<&str>, is_transposed: bool, linears: &[String]) -> Value {
        let targets = |targets: &Targets| match targets {
            Targets::AllLinear => json!(linears),
            Targets::Names(names) => json!(names),
            Targets::Pattern(pattern) => json!(pattern),
        };
        let init = match self.init {
            AdapterInit::Uniform => json!(true),
            AdapterInit::Gaussian => json!("gaussian"),
        };
        let patterns = |patterns: Vec<(&String, Value)>| -> Map<String, Value> {
            patterns.into_iter().map(|(pattern, value)| (pattern.clone(), value)).collect()
        };
        // Tells whose order of the experts' inputs and outputs the tensors have.
        let version = (!self.parameters.is_empty()).then_some(EXPERTS_VERSION);
        let ranks = self.rank_patterns.iter().map(|(pattern, rank)| (pattern, json!(rank))).collect();
        let alphas = self.alpha_patterns.iter().map(|(pattern, alpha)| (pattern, json!(alpha))).collect();
        json!({
            "peft_type": "LORA",
            "task_type": task,
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "bias": "none",
            "use_rslora": self.scaling == AdapterScaling::ByRoot,
            "use_dora": self.is_dora,
            "target_modules": targets(&self.targets),
            "target_parameters": (!self.parameters.is_empty()).then_some(&self.parameters),
            "peft_version": version,
            "exclude_modules": self.excluded.as_ref().map(targets),
            "layers_to_transform": self.layers,
            "rank_pattern": patterns(ranks),
            "alpha_pattern": patterns(alphas),
            "modules_to_save": (!self.trained_modules.is_empty()).then_some(&self.trained_modules),
            "ensure_weight_tying": self.keeps_tie,
            "fan_in_fan_out": is_transposed,
            "init_lora_weights": init,
            "inference_mode": true,
        })
    }
}

fn bad(what: String) -> Error {
    Error::BadAdapter { what: format!("adapter_config.json: {what}") }
}

fn shown(value: Option<&Value>) -> String {
    value.map_or("missing".to_owned(), Value::to_string)
}

fn whole(key: &str, number: f64) -> Result<usize, Error> {
    let is_whole = number.fract() == 0.0 && (0.0..1e9).contains(&number);
    is_whole.then_some(number as usize).ok_or_else(|| bad(format!("`{key}` is {number}, expected a whole number")))
}

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(items) => !items.is_empty(),
        _ => true,
    }
}

/// The keys that were not looked at yet.
struct Keys {
    left: Map<String, Value>,
}

impl Keys {
    fn take(&mut self, key: &str) -> Option<Value> {
        self.left.remove(key).filter(|value| !value.is_null())
    }

    fn number(&mut self, key: &str) -> Result<Option<f64>, Error> {
        let read = |value: Value| value.as_f64().ok_or_else(|| bad(format!("`{key}` is {value}, expected a number")));
        self.take(key).map(read).transpose()
    }

    fn flag(&mut self, key: &str) -> Result<bool, Error> {
        match self.take(key) {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(value),
            Some(other) => Err(bad(format!("`{key}` is {other}, expected true or false"))),
        }
    }

    fn names(&mut self, key: &str) -> Result<Vec<String>, Error> {
        match self.targets(key)? {
            None => Ok(Vec::new()),
            Some(Targets::Names(names)) => Ok(names),
            Some(_) => Err(bad(format!("`{key}` is a text, expected a list of names"))),
        }
    }

    fn targets(&mut self, key: &str) -> Result<Option<Targets>, Error> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) if text == "all-linear" => Ok(Some(Targets::AllLinear)),
            Some(Value::String(pattern)) => Ok(Some(Targets::Pattern(pattern))),
            Some(Value::Array(items)) => {
                let name = |item: &Value| item.as_str().map(str::to_owned);
                let names: Option<Vec<String>> = items.iter().map(name).collect();
                let names = names.ok_or_else(|| bad(format!("`{key}` has an entry that is no text")))?;
                Ok(Some(Targets::Names(names)))
            }
            Some(other) => Err(bad(format!("`{key}` is {other}, expected names or a pattern"))),
        }
    }

    fn layers(&mut self) -> Result<Option<Vec<usize>>, Error> {
        const KEY: &str = "layers_to_transform";
        let number = |value: &Value| {
            let number =
                value.as_f64().ok_or_else(|| bad(format!("`{KEY}` has {value}, expected numbers of layers")))?;
            whole(KEY, number)
        };
        match self.take(KEY) {
            None => Ok(None),
            Some(Value::Array(items)) => items.iter().map(number).collect::<Result<_, _>>().map(Some),
            Some(one) => Ok(Some(vec![number(&one)?])),
        }
    }

    fn patterns(&mut self, key: &str) -> Result<Vec<(String, f64)>, Error> {
        let Some(value) = self.take(key) else { return Ok(Vec::new()) };
        let object = value.as_object().ok_or_else(|| bad(format!("`{key}` is {value}, expected an object")))?;
        let entry = |(pattern, value): (&String, &Value)| {
            let number = value.as_f64().ok_or_else(|| bad(format!("`{key}` has {value}, expected numbers")))?;
            Ok((pattern.clone(), number))
        };
        object.iter().map(entry).collect()
    }

    fn init(&mut self) -> Result<AdapterInit, Error> {
        match self.take("init_lora_weights") {
            None | Some(Value::Bool(_)) => Ok(AdapterInit::Uniform),
            Some(Value::String(init)) if HARMLESS_INITS.contains(&init.as_str()) => {
                Ok(if init == "gaussian" { AdapterInit::Gaussian } else { AdapterInit::Uniform })
            }
            Some(other) => Err(bad(format!(
                "`init_lora_weights` is {other}, which changes the base's weights; it is not supported"
            ))),
        }
    }
}
