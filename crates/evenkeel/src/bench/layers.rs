//! Unequal layers of a benchmark's Llama: with sliding windows or without, trained or frozen.

use evenkeel_model::Model;
use serde_json::json;

use super::between;
use super::llama::{Llama, model_of_options};
use crate::{Mistake, text};

#[derive(clap::Args)]
pub struct LayerArguments {
    /// Freeze the parameters whose names contain one of these, such as mlp,embed_tokens.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub frozen: Vec<String>,
    /// Tokens that each token sees, itself included: a sliding window, as in Qwen2, which has biases for queries, keys and values.
    #[arg(long, value_name = "TOKENS", value_parser = between::<1, 1048576>)]
    pub window: Option<usize>,
    /// Layers that see everything in spite of --window, counted from 0, such as 5,11.
    #[arg(long, value_delimiter = ',', value_name = "LAYER", requires = "window")]
    pub dense: Vec<usize>,
}

impl LayerArguments {
    pub fn model(&self, llama: &Llama) -> Result<Model, Mistake> {
        if let Some(layer) = self.dense.iter().find(|layer| **layer >= llama.layers) {
            let what = format!("--dense names layer {layer}, but there are {}, counted from 0", llama.layers);
            return Err(Mistake { what, hint: Some("use more --layers, or name others".to_owned()) });
        }
        let mut config = llama.config();
        if let Some(window) = self.window {
            let is_dense = |layer: usize| self.dense.contains(&layer);
            let kind = |layer| if is_dense(layer) { "full_attention" } else { "sliding_attention" };
            config["model_type"] = json!("qwen2");
            config["use_sliding_window"] = json!(true);
            config["sliding_window"] = json!(window);
            config["layer_types"] = (0..llama.layers).map(kind).collect();
        }
        self.freeze(llama.adapted(model_of_options(&config)?)?)
    }

    fn freeze(&self, model: Model) -> Result<Model, Mistake> {
        let hint = Some(format!("there are {}, and the same in other layers", names(&model).join(", ")));
        if let Some(name) = self.frozen.iter().find(|name| !model.specs.iter().any(|it| it.name.contains(*name))) {
            return Err(Mistake { what: format!("--frozen has `{name}`, which no parameter's name contains"), hint });
        }
        let is_frozen = |name: &str| self.frozen.iter().any(|part| name.contains(part));
        let model = model.training(|_, spec| spec.is_trained && !is_frozen(&spec.name));
        if model.trained_count() == 0 {
            return Err(Mistake { what: format!("--frozen {} leaves nothing to train", self.frozen.join(",")), hint });
        }
        Ok(model)
    }

    /// For the line that describes a benchmark, behind the number of parameters.
    pub fn describe(&self, model: &Model) -> String {
        let frozen = match frozen_count(model) {
            0 => String::new(),
            count => format!(", {} of them frozen", text::count(count)),
        };
        let window = self.window.map_or(String::new(), |window| format!(", windows of {window} tokens"));
        let dense = if self.dense.is_empty() { String::new() } else { format!(" except in layers {:?}", self.dense) };
        format!("{frozen}{window}{dense}")
    }
}

pub fn frozen_count(model: &Model) -> u64 {
    model.parameter_count() - model.trained_count()
}

/// The parameters of the first layer, and those that belong to no layer.
fn names(model: &Model) -> Vec<&str> {
    let names = model.specs.iter().filter(|spec| !spec.is_derived).map(|spec| spec.name.as_str());
    names.filter(|name| !name.contains(".layers.") || name.contains(".layers.0.")).collect()
}
