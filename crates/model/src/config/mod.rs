//! config.json, read into one form for every architecture. Every number is bounded here, before anything is sized by it.

mod described;
mod families;
pub(crate) mod family;
mod full_layers;
mod keys;
pub(crate) mod known_keys;
mod layers;
mod linear_attention;
mod multimodal;
mod quantization;

use std::sync::Arc;

use evenkeel_device::kernel::{Activation, NormKind, Pairs};
use evenkeel_store::DESCRIPTION;
use serde_json::Value;

use crate::adapter::Adapters;
use crate::chain::dropout::Dropouts;
use crate::chain::rotary::Rotary;
pub use crate::config::described::check_description;
use crate::config::described::{described, refuse_contradictions};
use crate::config::families::FAMILIES;
use crate::config::family::{AttentionFactor, EmbeddingFactor, Family, Fixed, LogitFactor, Positions, TextClassifier};
use crate::config::full_layers::LayerHeads;
use crate::config::keys::Keys;
use crate::config::known_keys::refuse_unknown;
use crate::config::layers::{read_experts, read_key_sharers, read_layers, read_token_inputs};
use crate::config::linear_attention::read_linear_attention;
pub use crate::config::quantization::Quantization;
use crate::config::quantization::read_quantization;
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
    /// Key and value heads, the fewest of any layer.
    pub kv_heads: usize,
    /// Elements of a head, the most of any layer.
    pub head_dim: usize,
    pub ffn: usize,
    pub experts: Option<Experts>,
    /// Numbers for each token and layer, which the layer takes in beside attention and MLP.
    pub token_inputs: Option<TokenInputSizes>,
    /// The sizes of linear attention, in layers that have it in place of attention.
    pub linear_attention: Option<LinearAttention>,
    /// Rows of the head: the vocabulary, or the labels of a classifier.
    pub classes: usize,
    /// The names of a classifier's labels, by number, if config.json has them.
    pub label_names: Vec<String>,
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
    /// Whether a classifier's head begins with random numbers, or an adapter has it, whatever the folder has.
    pub has_new_head: bool,
    /// Whether the folder names its tensors as older versions did.
    pub has_older_names: bool,
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
    /// How the model's folder has its weights, if not as plain numbers.
    pub quantization: Option<Quantization>,
    /// The linear layers that are frozen and held in 4 bits, if any are.
    pub packing: Option<Arc<PackedLayers>>,
}

/// A table of numbers for each token and layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenInputSizes {
    /// Numbers for each layer.
    pub width: usize,
    pub rows: usize,
}

/// The experts of layers that have some in place of an MLP, or beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    pub count: usize,
    /// Experts that a token goes to.
    pub chosen: usize,
    /// Columns of each.
    pub ffn: usize,
    /// Columns of the expert that every token goes to besides.
    pub shared: Option<usize>,
    /// Whether the weights of those chosen are divided by their sum.
    pub renormalises: bool,
    /// Whether files have all experts of a layer in one tensor, and not a tensor for each.
    pub are_stacked: bool,
    /// The bound of gates and others, if gates are clamped.
    pub limit: Option<f32>,
    /// The coefficient of the loss of balance among experts, if training has one.
    pub balance: Option<f32>,
}

/// Linear attention by the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearAttention {
    pub key_heads: usize,
    /// A multiple of the key heads.
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Tokens that a short convolution spans.
    pub taps: usize,
    /// The width between the layers that make each token's weights of the convolution, if they are not the same for all.
    pub generator: Option<usize>,
    pub epsilon: f32,
}

/// Options that differ from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    /// Whether it has linear attention in place of attention.
    pub is_linear: bool,
    pub window: Option<usize>,
    pub rotary: Option<usize>,
    /// Multiplies the attention scale.
    pub scale: f32,
    /// Elements of a head.
    pub head_dim: usize,
    /// A multiple of the config's.
    pub kv_heads: usize,
    /// Whether values are what keys are before their norm.
    pub values_are_keys: bool,
    /// The earlier layer whose keys and values it attends to, if it has none of its own.
    pub keys_of: Option<usize>,
    /// How many times as wide as the config says its MLP is.
    pub mlp_factor: usize,
    pub has_experts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    Tokens {
        /// Rows of the table of learned positions, if there is one.
        learned_positions: Option<usize>,
    },
    /// Texts with a label each.
    Texts {
        vocabulary: usize,
        positions: usize,
        /// Rows of the table of positions before that of position 0.
        skipped: usize,
        /// Types of tokens.
        types: usize,
    },
    Images {
        size: usize,
        patch: usize,
        channels: usize,
    },
}

impl Input {
    /// Whether samples have a label each; those of a language model have one for each token.
    pub fn is_classified(&self) -> bool {
        !matches!(self, Input::Tokens { .. })
    }

    /// Whether it is text, of which a tokenizer makes tokens.
    pub fn is_text(&self) -> bool {
        !matches!(self, Input::Images { .. })
    }

    /// The most tokens that a sequence may have, if positions have a table.
    pub fn most_positions(&self) -> Option<usize> {
        match *self {
            Input::Tokens { learned_positions } => learned_positions,
            Input::Texts { positions, .. } => Some(positions),
            Input::Images { .. } => None,
        }
    }

    /// Tokens of one image: its patches and the class token.
    pub fn tokens_per_image(size: usize, patch: usize) -> usize {
        (size / patch).pow(2) + 1
    }
}

impl Config {
    pub fn from_json(json: &Value) -> Result<Config, Error> {
        let family = find_family(json)?;
        let text = family.multimodal.as_ref().map(|multimodal| multimodal::text_config(json, family, multimodal));
        let text = text.transpose()?;
        let json = &renamed(text.as_ref().unwrap_or(json), family);
        let keys = Keys { json };
        check_class(&keys, family)?;
        refuse_unsupported(&keys)?;
        let quantization = read_quantization(keys.get("quantization_config"), family)?;
        refuse_unknown(json, family)?;
        refuse_contradictions(&keys, family)?;
        let names = &family.keys;
        let hidden = keys.size(names.hidden)?;
        refuse_other_values(&keys, family, hidden)?;
        let heads = keys.size(names.heads)?;
        let kv_heads = match family.has_one_key_head {
            true => 1,
            false if family.full_layers.is_some() => keys.size("num_key_value_heads")?,
            false => keys.optional_size("num_key_value_heads")?.unwrap_or(heads),
        };
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
        // GPT-2, GPT-J and Falcon write null for "four times the hidden size".
        let ffn = match keys.optional_size(names.ffn)? {
            None if ["n_inner", "ffn_hidden_size"].contains(&names.ffn) => 4 * hidden,
            None => return Err(keys.missing(names.ffn, "a size")),
            Some(ffn) => ffn,
        };
        let usual = LayerHeads { dim: head_dim, kv_heads, values_are_keys: false };
        let (mut layers, rotaries) = read_layers(&keys, family, heads, usual)?;
        let epsilon = keys.not_negative(names.epsilon)?.unwrap_or(family.default_epsilon as f32);
        let linear_attention = read_linear_attention(&keys, family, epsilon)?;
        let experts = read_experts(&keys, family, ffn, &mut layers)?;
        let token_inputs = read_token_inputs(&keys, family, layers.len())?;
        read_key_sharers(&keys, family, &mut layers)?;
        // Where all layers have experts, their columns are the only ones.
        let ffn = match experts {
            Some(experts) if !family.has_experts_beside() && layers.iter().all(|layer| layer.has_experts) => {
                experts.ffn
            }
            _ => ffn,
        };
        let attention_scale = match family.factors.attention {
            AttentionFactor::One => 1.0,
            AttentionFactor::Key(key, default) => keys.positive(key)?.unwrap_or(default),
            AttentionFactor::Root(key, default) => 1.0 / keys.positive(key)?.unwrap_or(default).sqrt(),
            AttentionFactor::HeadDim => 1.0 / (head_dim as f64).sqrt(),
        };
        let input = read_input(&keys, family)?;
        let classes = match input {
            Input::Tokens { .. } => keys.size("vocab_size")?,
            Input::Texts { .. } => {
                let labels = read_labels(&keys)?;
                // transformers takes one label for a number to be predicted.
                let key = if keys.get("id2label").is_some() { "id2label" } else { "num_labels" };
                keys.require(
                    labels > 1,
                    key,
                    "two labels or more: one stands for a regression, which is not supported",
                )?;
                labels
            }
            Input::Images { .. } => read_labels(&keys)?,
        };
        Ok(Config {
            family,
            hidden,
            heads,
            kv_heads: layers.iter().map(|layer| layer.kv_heads).min().unwrap_or(kv_heads),
            head_dim: layers.iter().map(|layer| layer.head_dim).max().unwrap_or(head_dim),
            ffn,
            experts,
            token_inputs,
            linear_attention,
            classes,
            label_names: if input.is_classified() { label_names(keys.json, classes) } else { Vec::new() },
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
            score_cap: read_cap(&keys, family, CAPS[0])?,
            logit_cap: read_cap(&keys, family, CAPS[1])?,
            pairs: family.rotation().map_or(Pairs::Halves, |rotation| rotation.pairs),
            input,
            init_deviation: keys.not_negative("initializer_range")?.or(keys.not_negative("init_std")?).unwrap_or(0.02),
            positions: match input {
                Input::Tokens { learned_positions } => learned_positions.or_else(|| {
                    // Nothing is sized by it, so a value that is no number counts as absent.
                    Some(keys.get("max_position_embeddings").or(keys.get("n_positions"))?.as_u64()? as usize)
                }),
                Input::Texts { positions, .. } => Some(positions),
                Input::Images { .. } => None,
            },
            dropouts: read_dropouts(&keys, family)?,
            ignored_dropouts: ignored_dropouts(&keys, family)?,
            adapters: None,
            packing: (quantization == Some(Quantization::Nf4)).then(Arc::default),
            quantization,
            head_begins_as_embedding: false,
            has_new_head: false,
            has_older_names: false,
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

    /// Whether layers hand values to later ones beside the stream. Such layers are in one place, and compute with what they keep.
    pub fn hands_values_on(&self) -> bool {
        self.token_inputs.is_some() || self.layers.iter().any(|layer| layer.keys_of.is_some())
    }

    /// The keys of config.json by which layers hand values on.
    pub fn handing_keys(&self) -> impl Iterator<Item = &'static str> {
        let inputs = self.family.token_inputs.as_ref().filter(|_| self.token_inputs.is_some());
        let shares_keys = self.layers.iter().any(|layer| layer.keys_of.is_some());
        let sharers = self.family.key_sharers.as_ref().filter(|_| shares_keys);
        inputs.map(|inputs| inputs.width.0).into_iter().chain(sharers.map(|sharers| sharers.count))
    }

    /// Whether layers may be in several places of a pipeline.
    pub fn can_be_in_stages(&self) -> bool {
        !self.has_balance_loss() && !self.hands_values_on()
    }

    /// Whether a micro-batch may be computed in parts: the balance among experts is that of a whole one.
    pub fn can_be_in_parts(&self) -> bool {
        !self.has_balance_loss()
    }

    /// Key and value heads, the most of any layer.
    pub fn most_kv_heads(&self) -> usize {
        self.layers.iter().map(|layer| layer.kv_heads).max().unwrap_or(self.kv_heads)
    }

    /// Whether training has a loss of balance among experts, for which all layers of a batch are in one place.
    pub fn has_balance_loss(&self) -> bool {
        self.experts.is_some_and(|experts| experts.balance.is_some())
    }

    /// The place of a layer among those with experts.
    pub fn expert_layer(&self, index: usize) -> usize {
        self.layers[..index].iter().filter(|layer| layer.has_experts).count()
    }

    /// The warning for sequences longer than the model was made for.
    pub fn beyond_positions(&self, sequence: usize) -> Option<String> {
        let positions = self.positions.filter(|&positions| sequence > positions)?;
        Some(format!("sequences of {sequence} tokens are longer than the model was made for, {positions}"))
    }
}

/// The known architectures, by their `model_type`.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().filter(|family| family.variant.is_none_or(|(_, wanted)| !wanted)).map(|family| family.model_type)
}

fn find_family(json: &Value) -> Result<&'static Family, Error> {
    let model_type = json.get("model_type").and_then(Value::as_str);
    let class = json.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    if let Some(description) = json.get(DESCRIPTION) {
        return described(description, model_type.unwrap_or("described"), class.unwrap_or("a described decoder"));
    }
    let flag = |key: &str| json.get(key).and_then(Value::as_bool).unwrap_or(false);
    let is_meant = |family: &Family| family.variant.is_none_or(|(key, wanted)| flag(key) == wanted);
    let found = FAMILIES.iter().filter(|family| is_meant(family)).find(|family| match (model_type, class) {
        (Some(model_type), _) => family.model_type == model_type,
        (None, Some(class)) => family.is_called(class),
        (None, None) => false,
    });
    found.ok_or_else(|| Error::UnknownArchitecture {
        found: shorten(model_type.or(class).unwrap_or("(none)")),
        known: model_types().collect::<Vec<_>>().join(", "),
    })
}

/// config.json with the names of keys that this architecture's table has.
fn renamed(json: &Value, family: &Family) -> Value {
    let mut json = json.clone();
    let Some(object) = json.as_object_mut() else { return json };
    family.unused_keys.iter().for_each(|key| drop(object.remove(*key)));
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
            Fixed::Number(expected) => keys.optional_float(key)?.is_none_or(|number| number == expected),
            Fixed::Text(expected) => keys.get(key).is_none_or(|text| text == expected),
            Fixed::Hidden => keys.optional_size(key)?.is_none_or(|size| size == hidden),
        };
        if !fits {
            let found = keys.get(key).map_or_else(String::new, Value::to_string);
            return Err(Error::Unsupported { what: format!("`{key}: {}`", shorten(&found)) });
        }
    }
    Ok(())
}

/// A soft cap, if the architecture has one under this key.
fn read_cap(keys: &Keys, family: &Family, key: &str) -> Result<Option<f32>, Error> {
    let Some((_, default)) = family.factors.caps.iter().find(|(name, _)| *name == key) else { return Ok(None) };
    let cap = if keys.lacks(key) { *default } else { keys.positive(key)? };
    Ok(cap.map(|cap| cap as f32))
}

fn read_dropouts(keys: &Keys, family: &Family) -> Result<Dropouts, Error> {
    let names = &family.dropout;
    let share = |key: &str| -> Result<f32, Error> {
        let share = keys.optional_float(key)?.unwrap_or(names.default) as f32;
        // Kept numbers are divided by their share, so it must not be 0.
        keys.require((0.0..1.0).contains(&share), key, "a number from 0 to below 1, the share that training drops")?;
        Ok(share)
    };
    let residual = names.residual.map_or(Ok(0.0), share)?;
    const CLASSIFIER: &str = "classifier_dropout";
    let classifier = match &family.classifier {
        None => 0.0,
        Some(_) if keys.get(CLASSIFIER).is_none() => residual,
        Some(_) => share(CLASSIFIER)?,
    };
    Ok(Dropouts {
        attention: share(names.attention)?,
        residual,
        embedding: names.embedding.map_or(Ok(0.0), share)?,
        classifier,
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
        Positions::Learned { count, .. } => {
            let rows = keys.size(count)?;
            match &family.classifier {
                None => Input::Tokens { learned_positions: Some(rows) },
                Some(classifier) => read_texts(keys, classifier, count, rows)?,
            }
        }
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

fn read_texts(keys: &Keys, classifier: &TextClassifier, count: &str, rows: usize) -> Result<Input, Error> {
    let padding = || -> Result<usize, Error> { Ok(keys.bounded("pad_token_id", LARGEST_SIZE)?.unwrap_or(1)) };
    let skipped = if classifier.skips_padding { padding()? + 1 } else { 0 };
    keys.require(rows > skipped, count, &format!("more than the {skipped} rows that are the padding's"))?;
    Ok(Input::Texts {
        vocabulary: keys.size("vocab_size")?,
        positions: rows - skipped,
        skipped,
        types: keys.optional_size("type_vocab_size")?.unwrap_or(2),
    })
}

fn read_labels(keys: &Keys) -> Result<usize, Error> {
    match keys.json.get("id2label") {
        None | Some(Value::Null) => Ok(keys.optional_size("num_labels")?.unwrap_or(2)),
        Some(Value::Object(labels)) if !labels.is_empty() => Ok(labels.len()),
        Some(_) => Err(keys.bad("id2label", "a table of labels")),
    }
}

/// The names in `id2label`, if each label has one.
fn label_names(json: &Value, labels: usize) -> Vec<String> {
    let name = |label: usize| json.get("id2label")?.get(label.to_string())?.as_str().map(str::to_owned);
    // What a missing table leaves unsaid takes no memory.
    let names = json.get("id2label").and_then(|_| (0..labels).map(name).collect::<Option<Vec<String>>>());
    names.unwrap_or_default()
}

/// The beginning of a text from a file, for use in a message.
pub(crate) fn shorten(text: &str) -> String {
    evenkeel_store::shortened(text, 80)
}
