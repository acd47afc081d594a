//! config.json, read into one form for every architecture. Every number is bounded here, before anything is sized by it.

pub(crate) mod family;
mod keys;
pub(crate) mod known_keys;
mod layers;
mod quantization;

use std::sync::Arc;

use evenkeel_device::kernel::{Activation, NormKind, Pairs};
use serde_json::Value;

use crate::adapter::Adapters;
use crate::chain::dropout::Dropouts;
use crate::chain::rotary::Rotary;
use crate::config::family::{EmbeddingFactor, FAMILIES, Family, Fixed, LogitFactor, Positions};
use crate::config::keys::Keys;
use crate::config::known_keys::refuse_unknown;
use crate::config::layers::{read_experts, read_layers};
use crate::error::Error;
use crate::nf4::PackedLayers;

/// No real model comes near these; a file that does is broken or hostile.
const LARGEST_SIZE: u64 = 1 << 24;
const LARGEST_HEAD: usize = 1 << 12;
const LARGEST_IMAGE: usize = 1 << 24;

/// The keys of the shares of numbers that training drops, of all architectures. None uses all of them.
pub(crate) const DROPOUT: [&str; 10] = [
    "attention_dropout",
    "hidden_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "residual_dropout",
    "embedding_dropout",
    "dropout",
];

/// The keys of the soft caps on attention's scores and on logits.
pub(crate) const CAPS: [&str; 2] = ["attn_logit_softcapping", "final_logit_softcapping"];

/// A model's sizes and options.
#[derive(Clone, Debug)]
pub struct Config {
    pub family: &'static Family,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub experts: Option<Experts>,
    /// Rows of the head: the vocabulary, or the labels of a classifier.
    pub classes: usize,
    pub layers: Vec<Layer>,
    /// The rotations in use; layers name them by index.
    pub rotaries: Vec<Rotary>,
    pub pairs: Pairs,
    pub norm: NormKind,
    pub epsilon: f32,
    pub activation: Activation,
    pub attention_scale: f32,
    pub causal: bool,
    pub qkv_bias: bool,
    pub out_bias: bool,
    pub mlp_bias: bool,
    /// Whether attention and MLP read the same stream and are added to it together.
    pub parallel: bool,
    pub tied: bool,
    /// Whether a head that is not tied begins as a copy of the embedding, since the folder has none.
    pub head_begins_as_embedding: bool,
    pub embed_scale: f32,
    /// Multiplies what sublayers add to the stream.
    pub residual_scale: f32,
    pub logit_scale: f32,
    /// The soft caps on attention's scores and on logits.
    pub score_cap: Option<f32>,
    pub logit_cap: Option<f32>,
    pub input: Input,
    pub init_deviation: f32,
    /// The longest sequence that the model was made for, if config.json says.
    pub positions: Option<usize>,
    pub dropouts: Dropouts,
    /// The keys that ask for dropout under names of other architectures.
    pub ignored_dropouts: Vec<&'static str>,
    /// The adapters of linear layers, if training changes these instead of the layers.
    pub adapters: Option<Arc<Adapters>>,
    /// The linear layers that are frozen and held in 4 bits, if any are.
    pub packing: Option<Arc<PackedLayers>>,
}

/// The experts of layers that have some in place of an MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    pub count: usize,
    /// Experts that a token goes to.
    pub chosen: usize,
    /// Columns of each.
    pub ffn: usize,
    /// Whether the weights of those chosen are divided by their sum.
    pub renormalises: bool,
    /// Whether files have all experts of a layer in one tensor, and not a tensor for each.
    pub are_stacked: bool,
}

/// Options that differ from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    pub window: Option<usize>,
    pub rotary: Option<usize>,
    /// Multiplies the attention scale.
    pub scale: f32,
    pub has_experts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    Tokens {
        /// Rows of the table of learned positions, if there is one.
        learned_positions: Option<usize>,
    },
    Images {
        size: usize,
        patch: usize,
        channels: usize,
    },
}

impl Input {
    /// Tokens of one image: its patches and the class token.
    pub fn tokens_per_image(size: usize, patch: usize) -> usize {
        (size / patch).pow(2) + 1
    }
}

impl Config {
    pub fn from_json(json: &Value) -> Result<Config, Error> {
        let family = find_family(json)?;
        let json = &renamed(json, family);
        let keys = Keys { json };
        check_class(&keys, family)?;
        refuse_unsupported(&keys)?;
        let is_quantized = quantization::is_nf4(keys.get("quantization_config"))?;
        refuse_unknown(json, family)?;
        let names = &family.keys;
        let hidden = keys.size(names.hidden)?;
        refuse_other_values(&keys, family, hidden)?;
        let heads = keys.size(names.heads)?;
        let kv_heads = keys.optional_size("num_key_value_heads")?.unwrap_or(heads);
        let head_dim = match keys.optional_size("head_dim")? {
            Some(dim) => dim,
            None if family.needs_head_dim => return Err(keys.missing("head_dim", "a size")),
            None => {
                keys.require(hidden % heads == 0, names.hidden, &format!("a multiple of {heads} heads"))?;
                hidden / heads
            }
        };
        keys.require(head_dim <= LARGEST_HEAD, "head_dim", &format!("at most {LARGEST_HEAD}"))?;
        let width_fits = heads * head_dim <= LARGEST_SIZE as usize;
        keys.require(width_fits, names.heads, &format!("heads of {LARGEST_SIZE} features together at most"))?;
        keys.require(heads.is_multiple_of(kv_heads), "num_key_value_heads", &format!("a divisor of {heads} heads"))?;
        // GPT-2 and GPT-J write null for "four times the hidden size".
        let ffn = match keys.optional_size(names.ffn)? {
            None if names.ffn == "n_inner" => 4 * hidden,
            None => return Err(keys.missing(names.ffn, "a size")),
            Some(ffn) => ffn,
        };
        let (mut layers, rotaries) = read_layers(&keys, family, head_dim)?;
        let experts = read_experts(&keys, family, ffn, &mut layers)?;
        // Where all layers have experts, their columns are the only ones.
        let ffn = match experts {
            Some(experts) if layers.iter().all(|layer| layer.has_experts) => experts.ffn,
            _ => ffn,
        };
        let attention_scale = match family.factors.attention {
            Some((key, default)) => keys.positive(key)?.unwrap_or(default),
            None => 1.0 / keys.positive("query_pre_attn_scalar")?.unwrap_or(head_dim as f64).sqrt(),
        };
        let input = read_input(&keys, family)?;
        let classes = match input {
            Input::Tokens { .. } => keys.size("vocab_size")?,
            Input::Images { .. } => read_labels(&keys)?,
        };
        let epsilon = keys.optional_float(names.epsilon)?.unwrap_or(family.default_epsilon) as f32;
        keys.require(epsilon >= 0.0, names.epsilon, "a number that is not negative")?;
        Ok(Config {
            family,
            hidden,
            heads,
            kv_heads,
            head_dim,
            ffn,
            experts,
            classes,
            layers,
            rotaries,
            norm: family.norm,
            epsilon,
            activation: keys.activation(names.activation)?.unwrap_or(family.default_activation),
            attention_scale: attention_scale as f32,
            causal: matches!(input, Input::Tokens { .. }),
            qkv_bias: keys.choice(&family.qkv_bias)?,
            out_bias: keys.choice(&family.out_bias)?,
            mlp_bias: keys.choice(&family.mlp_bias)?,
            parallel: keys.choice(&family.parallel)?,
            tied: matches!(input, Input::Tokens { .. })
                && keys.optional_flag("tie_word_embeddings")?.unwrap_or(family.tied_by_default),
            embed_scale: match family.factors.embedding {
                EmbeddingFactor::One => 1.0,
                EmbeddingFactor::SqrtHidden => (hidden as f32).sqrt(),
                EmbeddingFactor::Key(key) => keys.positive(key)?.unwrap_or(1.0) as f32,
            },
            residual_scale: match family.factors.residual {
                None => 1.0,
                Some(key) => keys.positive(key)?.unwrap_or(1.0) as f32,
            },
            logit_scale: match family.factors.logits {
                LogitFactor::One => 1.0,
                LogitFactor::Times(key, default) => keys.positive(key)?.unwrap_or(default) as f32,
                LogitFactor::Over(key) => 1.0 / keys.positive(key)?.unwrap_or(1.0) as f32,
            },
            score_cap: keys.positive(CAPS[0])?.map(|cap| cap as f32),
            logit_cap: keys.positive(CAPS[1])?.map(|cap| cap as f32),
            pairs: family.rotation().map_or(Pairs::Halves, |rotation| rotation.pairs),
            input,
            init_deviation: keys
                .optional_float("initializer_range")?
                .or(keys.optional_float("init_std")?)
                .unwrap_or(0.02) as f32,
            positions: match input {
                Input::Tokens { learned_positions } => learned_positions.or_else(|| {
                    // Nothing is sized by it, so a value that is no number counts as absent.
                    Some(keys.get("max_position_embeddings").or(keys.get("n_positions"))?.as_u64()? as usize)
                }),
                Input::Images { .. } => None,
            },
            dropouts: read_dropouts(&keys, family)?,
            ignored_dropouts: ignored_dropouts(&keys, family)?,
            adapters: None,
            packing: is_quantized.then(Arc::default),
            head_begins_as_embedding: false,
        })
    }
}

impl Config {
    /// The settings of config.json that training on sequences of so many tokens does not follow, a line each.
    pub fn warnings(&self, sequence: usize) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.ignored_dropouts.is_empty() {
            let keys: Vec<String> = self.ignored_dropouts.iter().map(|key| format!("`{key}`")).collect();
            let (keys, model_type) = (keys.join(", "), self.family.model_type);
            lines.push(format!("config.json sets {keys}, for which training of a `{model_type}` model drops nothing"));
        }
        lines.extend(self.beyond_positions(sequence));
        lines
    }

    /// The warning for sequences longer than the model was made for.
    pub fn beyond_positions(&self, sequence: usize) -> Option<String> {
        let positions = self.positions.filter(|&positions| sequence > positions)?;
        Some(format!("sequences of {sequence} tokens are longer than the model was made for, {positions}"))
    }
}

fn find_family(json: &Value) -> Result<&'static Family, Error> {
    let model_type = json.get("model_type").and_then(Value::as_str);
    let class = json.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let found = FAMILIES.iter().find(|family| match (model_type, class) {
        (Some(model_type), _) => family.model_type == model_type,
        (None, Some(class)) => family.is_called(class),
        (None, None) => false,
    });
    found.ok_or_else(|| Error::UnknownArchitecture {
        found: shorten(model_type.or(class).unwrap_or("(none)")),
        known: FAMILIES.iter().map(|family| family.model_type).collect::<Vec<_>>().join(", "),
    })
}

/// config.json with the names of keys that this architecture's table has.
fn renamed(json: &Value, family: &Family) -> Value {
    let mut json = json.clone();
    let Some(object) = json.as_object_mut() else { return json };
    for (alias, key) in family.aliases {
        if !object.contains_key(*key)
            && let Some(value) = object.remove(*alias)
        {
            object.insert((*key).to_owned(), value);
        }
    }
    json
}

/// Refuses `architectures` and `model_type` that disagree: one of them was changed.
fn check_class(keys: &Keys, family: &Family) -> Result<(), Error> {
    let Some(classes) = keys.get("architectures") else { return Ok(()) };
    let classes = classes.as_array().ok_or_else(|| keys.bad("architectures", "a list of classes"))?;
    match classes.iter().find(|class| !class.as_str().is_some_and(|class| family.is_called(class))) {
        None => Ok(()),
        Some(class) => Err(Error::OtherClass {
            found: shorten(&class.to_string()),
            model_type: family.model_type,
            expected: family.class,
        }),
    }
}

/// Refuses keys that are understood, with values that no unit implements.
fn refuse_unsupported(keys: &Keys) -> Result<(), Error> {
    if keys.optional_flag("scale_attn_weights")? == Some(false) {
        return Err(Error::Unsupported { what: "`scale_attn_weights: false`".to_owned() });
    }
    Ok(())
}

/// Refuses options of an architecture that no unit implements.
fn refuse_other_values(keys: &Keys, family: &Family, hidden: usize) -> Result<(), Error> {
    for &(key, fixed) in family.fixed {
        let fits = match fixed {
            Fixed::Flag(expected) => keys.optional_flag(key)?.is_none_or(|flag| flag == expected),
            Fixed::Hidden => keys.optional_size(key)?.is_none_or(|size| size == hidden),
        };
        if !fits {
            let found = keys.get(key).map_or_else(String::new, Value::to_string);
            return Err(Error::Unsupported { what: format!("`{key}: {}`", shorten(&found)) });
        }
    }
    Ok(())
}

fn read_dropouts(keys: &Keys, family: &Family) -> Result<Dropouts, Error> {
    let names = &family.dropout;
    let share = |key: &str| -> Result<f32, Error> {
        let share = keys.optional_float(key)?.unwrap_or(names.default) as f32;
        // Kept numbers are divided by their share, so it must not be 0.
        keys.require((0.0..1.0).contains(&share), key, "a number from 0 to below 1, the share that training drops")?;
        Ok(share)
    };
    Ok(Dropouts {
        attention: share(names.attention)?,
        residual: names.residual.map_or(Ok(0.0), share)?,
        embedding: names.embedding.map_or(Ok(0.0), share)?,
    })
}

fn ignored_dropouts(keys: &Keys, family: &Family) -> Result<Vec<&'static str>, Error> {
    let names = &family.dropout;
    let used = [Some(names.attention), names.residual, names.embedding];
    let mut ignored = Vec::new();
    for key in DROPOUT.into_iter().filter(|&key| !used.contains(&Some(key))) {
        let share = keys.optional_float(key)?.unwrap_or(0.0);
        keys.require((0.0..=1.0).contains(&share), key, "a number from 0 to 1")?;
        if share > 0.0 {
            ignored.push(key);
        }
    }
    Ok(ignored)
}

fn read_input(keys: &Keys, family: &Family) -> Result<Input, Error> {
    Ok(match family.positions {
        Positions::Rotary(_) | Positions::Slopes => Input::Tokens { learned_positions: None },
        Positions::Learned { count, .. } => Input::Tokens { learned_positions: Some(keys.size(count)?) },
        Positions::Image => {
            let (size, patch) = (keys.size("image_size")?, keys.size("patch_size")?);
            keys.require(size.is_multiple_of(patch), "image_size", &format!("a multiple of the patch, {patch}"))?;
            let channels = keys.optional_size("num_channels")?.unwrap_or(3);
            let values = (size as u64).saturating_mul(size as u64).saturating_mul(channels as u64);
            keys.require(values <= LARGEST_IMAGE as u64, "image_size", &format!("{LARGEST_IMAGE} values at most"))?;
            Input::Images { size, patch, channels }
        }
    })
}

fn read_labels(keys: &Keys) -> Result<usize, Error> {
    match keys.json.get("id2label") {
        None | Some(Value::Null) => Ok(keys.optional_size("num_labels")?.unwrap_or(2)),
        Some(Value::Object(labels)) if !labels.is_empty() => Ok(labels.len()),
        Some(_) => Err(keys.bad("id2label", "a table of labels")),
    }
}

/// The beginning of a text from a file, for use in a message.
pub(crate) fn shorten(text: &str) -> String {
    evenkeel_store::shortened(text, 80)
}
