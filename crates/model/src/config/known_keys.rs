//! The keys of config.json that are understood. An unknown key may change what the model computes, so it is an error. Keys that
//! are known to change no number are passed over, and so are keys whose value asks for nothing.

use evenkeel_store::DESCRIPTION;
use serde_json::{Map, Value};

use crate::config::family::{
    AttentionFactor, Choice, EmbeddingFactor, ExpertOptions, Family, FullLayers, LinearSizes, LogitFactor, Multimodal,
    Positions, Rotated, SlidingRotation, Window,
};
use crate::config::{DROPOUT, shorten};
use crate::error::Error;

/// Keys that are read for every architecture.
const COMMON: [&str; 8] = [
    "model_type",
    "architectures",
    "vocab_size",
    "initializer_range",
    "tie_word_embeddings",
    "quantization_config",
    "base_model_tp_plan",
    DESCRIPTION,
];

/// Bookkeeping of transformers and of publishers: a file's origin, options of generation, names of labels, heads for other
/// tasks, use of memory, the precision of softmax, which is always f32. None of it changes a number in training.
const HARMLESS: [&str; 84] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "_num_labels",
    "_unsloth_version",
    "attention_softmax_in_fp32",
    "attn_implementation",
    "bad_words_ids",
    "base_model_ep_plan",
    "base_model_pp_plan",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "custom_pipelines",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "generation_config",
    "gradient_checkpointing",
    "id2label",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "mask_token_id",
    "max_length",
    "max_new_tokens",
    "max_position_embeddings",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "model_name",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "output_top_hidden_states",
    "pad_token_id",
    "prefix",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "scale_attention_softmax_in_fp32",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// Factors, neutral at 1. Granite's `attention_multiplier` is not one of them: it replaces 1/√head_dim.
const FACTORS: [&str; 6] =
    ["residual_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale", "lm_head_multiplier", "scale_emb"];

/// Flags that every architecture here computes as if they were true.
const ALWAYS_TRUE: [&str; 3] = ["is_causal", "scale_attn_weights", "use_rope"];

/// The keys of the sizes of linear attention: key heads, value heads, the elements of each, and the taps of the convolution.
pub(crate) const LINEAR_ATTENTION: [&str; 5] = [
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
];

/// Keys that rotations of every type have.
const ROTARY: [&str; 5] =
    ["rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings"];

/// Refuses a config.json with keys that this architecture does not understand, all of them at once.
pub(crate) fn refuse_unknown(json: &Value, family: &Family) -> Result<(), Error> {
    let known = family.known_keys();
    refuse(json, "", family, |key| known.contains(&key))
}

/// The same for what lies around the text model's config.
pub(crate) fn refuse_unknown_around_text(json: &Value, family: &Family, multimodal: &Multimodal) -> Result<(), Error> {
    let is_known = |key: &str| {
        let keys = [&COMMON[..], &HARMLESS, multimodal.other_keys, &["text_config"]];
        keys.iter().any(|keys| keys.contains(&key))
    };
    refuse(json, "", family, is_known)
}

/// The same for the objects of Jet-Nemotron's kinds of attention.
pub(crate) fn refuse_unknown_of_jet(efficient: &Value, family: &Family) -> Result<(), Error> {
    const JET: [&str; 8] = [
        "conv_size",
        "dconv_generator_reduction",
        "dconv_implementation",
        "expand_v",
        "head_dim",
        "mode",
        "norm_eps",
        "num_heads",
    ];
    let of_kinds: [(&str, &[&str]); 2] = [("jet", &JET), ("swa", &["window_size"])];
    refuse(efficient, "efficient_attention_config.", family, |key| of_kinds.iter().any(|(kind, _)| *kind == key))?;
    for (kind, known) in of_kinds {
        let place = format!("efficient_attention_config.{kind}.");
        efficient.get(kind).map_or(Ok(()), |json| refuse(json, &place, family, |key| known.contains(&key)))?;
    }
    Ok(())
}

/// The same for the object of one layer's sizes.
pub(crate) fn refuse_unknown_of_layer(json: &Value, place: &str, family: &Family) -> Result<(), Error> {
    refuse(json, place, family, |key| ["head_dim", "num_key_value_heads"].contains(&key))
}

/// The same for the object of a rotation. `of_type` are the keys that a rotation of its type has beside the usual ones.
pub(crate) fn refuse_unknown_rotary(json: &Value, place: &str, family: &Family, of_type: &[&str]) -> Result<(), Error> {
    let harmless = family.rotation().map_or(&[][..], |rotation| rotation.harmless);
    let of_growth = family.rotation().and_then(|rotation| rotation.growth);
    let lists = [&ROTARY[..], of_type, harmless, of_growth.as_slice()];
    refuse(json, place, family, |key| lists.iter().any(|keys| keys.contains(&key)))
}

fn refuse(json: &Value, place: &str, family: &Family, is_known: impl Fn(&str) -> bool) -> Result<(), Error> {
    const SHOWN: usize = 8;
    let unknown = |object: &Map<String, Value>| -> Vec<String> {
        let unknown = object.iter().filter(|(key, value)| !is_known(key) && !is_neutral(key, value));
        unknown.map(|(key, value)| format!("`{place}{}` is {}", shorten(key), shorten(&value.to_string()))).collect()
    };
    let mut unknown = json.as_object().map_or_else(Vec::new, unknown);
    if unknown.is_empty() {
        return Ok(());
    }
    let more = unknown.len().saturating_sub(SHOWN);
    unknown.truncate(SHOWN);
    if more > 0 {
        unknown.push(format!("and {more} more"));
    }
    Err(Error::NotUnderstood { keys: unknown.join(", "), model_type: family.model_type })
}

/// Whether a value asks for nothing, whatever its key may mean.
fn is_neutral(key: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => *flag == ALWAYS_TRUE.contains(&key),
        Value::Number(number) => match number.as_f64() {
            Some(1.0) => FACTORS.contains(&key),
            Some(0.0) => key.contains("drop") || key.ends_with("_noise"),
            _ => false,
        },
        Value::String(text) => text.is_empty() || (key == "problem_type" && text == "single_label_classification"),
        Value::Array(list) => {
            list.is_empty() || (key == "layer_types" && list.iter().all(|layer| layer == "full_attention"))
        }
        Value::Object(object) => object.is_empty(),
    }
}

impl Family {
    /// The keys of config.json that are read for this architecture, or known to change nothing in it.
    pub(super) fn known_keys(&self) -> Vec<&'static str> {
        let sizes = &self.keys;
        let sizes = [sizes.hidden, sizes.layers, sizes.heads, sizes.ffn, sizes.activation, sizes.epsilon];
        let of_positions: &[&str] = match &self.positions {
            Positions::Rotary(_) => &["rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"],
            Positions::Learned { count, .. } => &[count],
            Positions::Slopes => &[],
            Positions::Image => &["image_size", "patch_size", "num_channels"],
        };
        let of_rotated: &[&str] = match self.rotation().map(|rotation| &rotation.layers) {
            Some(Rotated::Listed) => &["no_rope_layers", "no_rope_layer_interval"],
            Some(Rotated::All | Rotated::Sliding) | None => &[],
        };
        let of_windows: &[&str] = match self.window {
            Window::Never => &[],
            Window::Everywhere => &["sliding_window"],
            Window::From => &["sliding_window", "layer_types", "use_sliding_window", "max_window_layers"],
            Window::Pattern(_) => {
                &["sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"]
            }
            Window::PatternAndLast(_) => &["sliding_window", "layer_types"],
            Window::Jet => &[],
            Window::Unrotated => &["sliding_window", "layer_types", "use_sliding_window"],
        };
        let linear_sizes = self.linear_attention.as_ref().map(|names| names.sizes);
        let of_linear: &[&str] = match linear_sizes {
            Some(LinearSizes::Flat) => &LINEAR_ATTENTION,
            Some(LinearSizes::Jet) => &["efficient_attention_config"],
            None => &[],
        };
        let of_mixed: &[&str] = if linear_sizes.is_some() { &["layer_types", "full_attention_interval"] } else { &[] };
        let own_base = self.rotation().and_then(|rotation| match rotation.sliding {
            SlidingRotation::OwnBase(key, _) => Some(key),
            SlidingRotation::Same | SlidingRotation::Unstretched => None,
        });
        let of_embedding = if let EmbeddingFactor::Key(key) = self.factors.embedding { Some(key) } else { None };
        let of_logits = match self.factors.logits {
            LogitFactor::One => None,
            LogitFactor::Times(key, _) | LogitFactor::Over(key) => Some(key),
        };
        let of_attention = match self.factors.attention {
            AttentionFactor::Key(key, _) | AttentionFactor::Root(key, _) => Some(key),
            AttentionFactor::One | AttentionFactor::HeadDim => None,
        };
        let of_full_layers = self.full_layers.as_ref().map(|full| {
            let FullLayers { head_dim, values_are_keys, kv_heads, by_layer } = full;
            [head_dim.0, *values_are_keys, *kv_heads, *by_layer]
        });
        let of_full_layers: &[&str] = of_full_layers.as_ref().map_or(&[], |keys| keys);
        let of_sharers = self.key_sharers.as_ref().map(|sharers| [sharers.count, sharers.have_wide_mlps]);
        let of_inputs = self.token_inputs.as_ref().map(|inputs| [inputs.width.0, inputs.rows]);
        let rotated = self.rotation().and_then(|rotation| rotation.dim);
        let single = [own_base, of_embedding, of_attention, self.factors.residual, of_logits, rotated];
        let of_factors = self.fixed.iter().map(|(key, _)| *key).chain(self.factors.caps.iter().map(|(key, _)| *key));
        let choices = [&self.qkv_bias, &self.out_bias, &self.mlp_bias, &self.parallel].map(Choice::key);
        [&COMMON[..], &HARMLESS, &DROPOUT, &sizes, of_positions, of_rotated, of_windows, of_linear, of_mixed]
            .into_iter()
            .chain([of_full_layers, self.own_keys, of_sharers.as_slice().as_flattened()])
            .chain([of_inputs.as_slice().as_flattened()])
            .flatten()
            .copied()
            .chain(of_factors)
            .chain(single.into_iter().chain(choices).flatten())
            .chain(self.experts.iter().flat_map(ExpertOptions::known_keys))
            .collect()
    }
}

impl ExpertOptions {
    fn known_keys(&self) -> Vec<&'static str> {
        // transformers has no loss of balance for experts beside an MLP.
        let of_balance: &[&str] =
            if self.beside.is_none() { &["router_aux_loss_coef", "output_router_logits"] } else { &[] };
        let shared = self.shared.as_ref().map(|shared| shared.ffn);
        let limit = self.clamped.as_ref().map(|clamped| clamped.limit.0);
        let renormalises = self.renormalises.key();
        let own = [Some(self.count), Some(self.chosen), self.enabled, self.ffn, shared, limit, renormalises];
        own.into_iter().flatten().chain(of_balance.iter().copied()).collect()
    }
}
