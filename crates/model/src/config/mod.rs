//! config.json, read into one form for every architecture. Every number is bounded here, before anything is sized by it.

pub(crate) mod family;
pub(crate) mod known_keys;
mod quantization;

use std::sync::Arc;

use evenkeel_device::kernel::{Activation, NormKind, Pairs};
use serde_json::Value;

use crate::adapter::Adapters;
use crate::chain::dropout::Dropouts;
use crate::chain::rotary::{Rotary, Scaling};
use crate::config::family::{
    Choice, EmbeddingFactor, FAMILIES, Family, Fixed, LogitFactor, Positions, Rotated, Rotation, SlidingRotation,
    Window,
};
use crate::config::known_keys::{refuse_unknown, refuse_unknown_rotary};
use crate::error::Error;
use crate::nf4::PackedLayers;

/// No real model comes near these; a file that does is broken or hostile.
const LARGEST_SIZE: u64 = 1 << 24;
const MOST_LAYERS: u64 = 1 << 12;
const MOST_EXPERTS: u64 = 1 << 12;
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

fn read_layers(keys: &Keys, family: &Family, head_dim: usize) -> Result<(Vec<Layer>, Vec<Rotary>), Error> {
    let count =
        keys.bounded(family.keys.layers, MOST_LAYERS)?.ok_or_else(|| keys.missing(family.keys.layers, "a size"))?;
    let unrotated = unrotated_layers(keys, family, count)?;
    let sliding = sliding_layers(keys, family, &unrotated)?;
    let window = keys.optional_size("sliding_window")?;
    let rotaries =
        family.rotation().map_or(Ok(Vec::new()), |rotation| read_rotaries(keys, family, rotation, head_dim))?;
    let inverse_index = keys.optional_flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false);
    let only_sliding = family.rotation().is_some_and(|rotation| matches!(rotation.layers, Rotated::Sliding));
    let layers = sliding.iter().zip(unrotated).enumerate().map(|(index, (&is_sliding, is_unrotated))| {
        let is_rotated = !rotaries.is_empty() && !is_unrotated && (is_sliding || !only_sliding);
        Layer {
            window: if is_sliding { window } else { None },
            rotary: is_rotated.then(|| if is_sliding { rotaries.len() - 1 } else { 0 }),
            scale: if inverse_index { 1.0 / (index + 1) as f32 } else { 1.0 },
            has_experts: false,
        }
    });
    Ok((layers.collect(), rotaries))
}

/// The experts, and which layers have them.
fn read_experts(keys: &Keys, family: &Family, ffn: usize, layers: &mut [Layer]) -> Result<Option<Experts>, Error> {
    let Some(options) = &family.experts else { return Ok(None) };
    let count_key = options.count;
    let count = keys.bounded(count_key, MOST_EXPERTS)?.ok_or_else(|| keys.missing(count_key, "a number of experts"))?;
    keys.require(count > 0, count_key, "at least one expert")?;
    const CHOSEN: &str = "num_experts_per_tok";
    let chosen = keys.size(CHOSEN)?;
    keys.require(chosen <= count, CHOSEN, &format!("at most {count} experts"))?;
    let ffn = match options.ffn {
        Some(key) => keys.size(key)?,
        None => ffn,
    };
    keys.require((count * ffn) as u64 <= LARGEST_SIZE, count_key, &format!("{LARGEST_SIZE} columns together at most"))?;
    let step = keys.optional_size("decoder_sparse_step")?.unwrap_or(1);
    let dense = keys.numbers("mlp_only_layers")?;
    for (index, layer) in layers.iter_mut().enumerate() {
        layer.has_experts = (index + 1).is_multiple_of(step) && !dense.contains(&index);
    }
    let renormalises = keys.choice(&options.renormalises)?;
    Ok(layers.iter().any(|layer| layer.has_experts).then_some(Experts {
        count,
        chosen,
        ffn,
        renormalises,
        are_stacked: false,
    }))
}

/// By layer: whether config.json leaves it out of the rotation.
fn unrotated_layers(keys: &Keys, family: &Family, count: usize) -> Result<Vec<bool>, Error> {
    if !family.rotation().is_some_and(|rotation| matches!(rotation.layers, Rotated::Listed)) {
        return Ok(vec![false; count]);
    }
    let Some(list) = keys.get("no_rope_layers") else {
        let interval = keys.optional_size("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((0..count).map(|layer| (layer + 1).is_multiple_of(interval)).collect());
    };
    let list = list.as_array().filter(|list| list.len() == count);
    let list = list.ok_or_else(|| keys.bad("no_rope_layers", &format!("a list of {count}")))?;
    let unrotated = list.iter().map(|layer| match layer.as_u64() {
        Some(1) => Ok(false),
        Some(0) => Ok(true),
        _ => Err(keys.bad("no_rope_layers", "1 for layers that are rotated, 0 for others")),
    });
    unrotated.collect()
}

/// By layer: whether it uses a sliding window.
fn sliding_layers(keys: &Keys, family: &Family, unrotated: &[bool]) -> Result<Vec<bool>, Error> {
    let count = unrotated.len();
    let is_used = keys.optional_flag("use_sliding_window")?.unwrap_or(false);
    match family.window {
        Window::Never => return Ok(vec![false; count]),
        Window::Everywhere => return Ok(vec![true; count]),
        Window::Unrotated if !is_used => return Ok(vec![false; count]),
        Window::From | Window::Pattern(_) | Window::Unrotated => (),
    }
    if let Some(types) = keys.get("layer_types") {
        let types = types.as_array().filter(|types| types.len() == count);
        let types = types.ok_or_else(|| keys.bad("layer_types", &format!("a list of {count}")))?;
        let sliding = types.iter().map(|layer| match layer.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(keys.bad("layer_types", "sliding_attention or full_attention")),
        });
        return sliding.collect();
    }
    Ok(match family.window {
        Window::Pattern(usual) => {
            let pattern = keys.optional_size("sliding_window_pattern")?.unwrap_or(usual);
            (0..count).map(|layer| !(layer + 1).is_multiple_of(pattern)).collect()
        }
        Window::Unrotated => unrotated.to_vec(),
        _ => {
            let first = keys.bounded("max_window_layers", LARGEST_SIZE)?.unwrap_or(count);
            (0..count).map(|layer| is_used && layer >= first).collect()
        }
    })
}

/// The rotation of full layers, followed by that of sliding layers if it differs.
fn read_rotaries(keys: &Keys, family: &Family, rotation: &Rotation, head_dim: usize) -> Result<Vec<Rotary>, Error> {
    for name in ["rope_scaling", "rope_parameters"] {
        keys.require(keys.get(name).is_none_or(Value::is_object), name, "an object")?;
    }
    let scaling = keys.get("rope_scaling").map(|scaling| ("rope_scaling.", scaling));
    let parameters = keys.get("rope_parameters").map(|parameters| ("rope_parameters.", parameters));
    let is_same = scaling.is_none_or(|(_, scaling)| parameters.is_none_or(|(_, parameters)| parameters == scaling));
    keys.require(is_same, "rope_scaling", "no other rotation than that of `rope_parameters`")?;
    if let Some((_, kinds)) = parameters.filter(|(_, parameters)| parameters.get("full_attention").is_some()) {
        refuse_unknown_rotary(kinds, "rope_parameters.", family, &["full_attention", "sliding_attention"])?;
        let sliding_base = match rotation.sliding {
            SlidingRotation::OwnBase(_, base) => base,
            SlidingRotation::Same | SlidingRotation::Unstretched => rotation.default_base,
        };
        let of_kind = [
            ("full_attention", "rope_parameters.full_attention.", rotation.default_base),
            ("sliding_attention", "rope_parameters.sliding_attention.", sliding_base),
        ];
        let read = |(kind, place, base)| {
            let own = kinds.get(kind).filter(|own| !own.is_null()).map(|own| (place, own));
            read_rotary(keys, family, rotation, base, own, head_dim)
        };
        return of_kind.into_iter().map(read).collect();
    }
    let full = read_rotary(keys, family, rotation, rotation.default_base, parameters.or(scaling), head_dim)?;
    let unstretched = |base: f64| Rotary { base, scaling: Scaling::None, ..full.clone() };
    Ok(match rotation.sliding {
        SlidingRotation::Same => vec![full],
        SlidingRotation::Unstretched => vec![full.clone(), unstretched(full.base)],
        SlidingRotation::OwnBase(key, default) => {
            let base = keys.positive(key)?.unwrap_or(default);
            vec![full.clone(), unstretched(base)]
        }
    })
}

/// One rotation from `rope_parameters`, or from `rope_scaling` and the top-level keys of older files. `object` comes with the
/// prefix of its keys in messages.
fn read_rotary(
    keys: &Keys,
    family: &Family,
    rotation: &Rotation,
    default_base: f64,
    object: Option<(&str, &Value)>,
    head_dim: usize,
) -> Result<Rotary, Error> {
    let empty = Value::Object(Default::default());
    let (place, object) = object.unwrap_or(("", &empty));
    let inner = Keys { json: object };
    let first = |names: &[(&Keys, &str)]| -> Result<Option<f64>, Error> {
        for (keys, name) in names {
            if let Some(value) = keys.optional_float(name)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    };
    let bases = [(&inner, "rope_theta"), (keys, "rope_theta"), (keys, "rotary_emb_base")];
    let base = first(&bases)?.unwrap_or(default_base);
    keys.require(base > 0.0, "rope_theta", "a positive number")?;
    let dim = match rotation.dim {
        Some(key) => keys.size(key)?,
        None => {
            let factors = [(&inner, "partial_rotary_factor"), (keys, "partial_rotary_factor"), (keys, "rotary_pct")];
            let fraction = first(&factors)?.unwrap_or(rotation.default_fraction);
            keys.require(fraction > 0.0 && fraction <= 1.0, "partial_rotary_factor", "a number above 0, up to 1")?;
            (head_dim as f64 * fraction) as usize
        }
    };
    let dim_key = rotation.dim.unwrap_or("head_dim");
    keys.require(dim >= 2 && dim.is_multiple_of(2), dim_key, "an even number of rotated elements")?;
    keys.require(dim <= head_dim, dim_key, &format!("at most the {head_dim} elements of a head"))?;
    let kind = inner.optional_text("rope_type")?.or(inner.optional_text("type")?).unwrap_or("default");
    // Phi-3's first files.
    let kind = if family.model_type == "phi3" && matches!(kind, "su" | "yarn") { "longrope" } else { kind };
    let positive =
        |key: &str| -> Result<f64, Error> { inner.positive(key)?.ok_or_else(|| inner.missing(key, "a number")) };
    let positions = || keys.positive("max_position_embeddings");
    let original = || -> Result<f64, Error> {
        const KEY: &str = "original_max_position_embeddings";
        let given = inner.positive(KEY)?.or(keys.positive(KEY)?).or(positions()?);
        given.ok_or_else(|| inner.missing(KEY, "a number"))
    };
    let factor_or_ratio = || -> Result<f64, Error> {
        let ratio =
            || -> Result<Option<f64>, Error> { Ok(positions()?.zip(Some(original()?)).map(|(all, own)| all / own)) };
        inner.positive("factor")?.or(ratio()?).ok_or_else(|| inner.missing("factor", "a number"))
    };
    let of_type: &[&str] = match kind {
        "linear" | "dynamic" => &["factor"],
        "llama3" => &["factor", "low_freq_factor", "high_freq_factor"],
        "yarn" => &["factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"],
        "longrope" => &["factor", "attention_factor", "short_factor", "long_factor"],
        _ => &[],
    };
    let scaling = match kind {
        "default" => Scaling::None,
        "linear" => Scaling::Linear { factor: positive("factor")? },
        "llama3" => Scaling::Llama3 {
            factor: positive("factor")?,
            low: positive("low_freq_factor")?,
            high: positive("high_freq_factor")?,
            original_positions: positive("original_max_position_embeddings")?,
        },
        "dynamic" => Scaling::Dynamic {
            factor: positive("factor")?,
            positions: positions()?.ok_or_else(|| keys.missing("max_position_embeddings", "a number"))?,
        },
        "yarn" => {
            let factor = factor_or_ratio()?;
            let of_factor = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
            let scales = inner.positive("mscale")?.zip(inner.positive("mscale_all_dim")?);
            let usual = scales.map_or(of_factor(1.0), |(one, all)| of_factor(one) / of_factor(all));
            Scaling::Yarn {
                factor,
                fast: inner.positive("beta_fast")?.unwrap_or(32.0),
                slow: inner.positive("beta_slow")?.unwrap_or(1.0),
                original_positions: original()?,
                is_truncated: inner.optional_flag("truncate")?.unwrap_or(true),
                amplitude: inner.positive("attention_factor")?.unwrap_or(usual),
            }
        }
        "longrope" => {
            let (factor, original_positions) = (factor_or_ratio()?, original()?);
            let usual = if factor > 1.0 { (1.0 + factor.ln() / original_positions.ln()).sqrt() } else { 1.0 };
            inner.require(original_positions > 1.0, "original_max_position_embeddings", "more than one position")?;
            Scaling::Long {
                short: inner.factors("short_factor", dim / 2)?,
                long: inner.factors("long_factor", dim / 2)?,
                original_positions,
                amplitude: inner.positive("attention_factor")?.unwrap_or(usual),
            }
        }
        other => return Err(Error::Unsupported { what: format!("rope type `{}`", shorten(other)) }),
    };
    refuse_unknown_rotary(object, place, family, of_type)?;
    if let Scaling::Llama3 { low, high, .. } = scaling {
        inner.require(high > low, "high_freq_factor", "more than low_freq_factor")?;
    }
    Ok(Rotary { base, dim, scaling })
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

/// The keys of a JSON object, checked as they are read.
struct Keys<'a> {
    json: &'a Value,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    fn size(&self, key: &str) -> Result<usize, Error> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key, "a size"))
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, Error> {
        let size = self.bounded(key, LARGEST_SIZE)?;
        self.require(size != Some(0), key, "a size above 0")?;
        Ok(size)
    }

    fn bounded(&self, key: &str, largest: u64) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().filter(|&size| size <= largest);
        size.map(|size| Some(size as usize)).ok_or_else(|| self.bad(key, &format!("a whole number up to {largest}")))
    }

    fn optional_float(&self, key: &str) -> Result<Option<f64>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().filter(|value| value.is_finite()).map(Some).ok_or_else(|| self.bad(key, "a number"))
    }

    fn positive(&self, key: &str) -> Result<Option<f64>, Error> {
        let value = self.optional_float(key)?;
        self.require(value.is_none_or(|value| value > 0.0), key, "a positive number")?;
        Ok(value)
    }

    /// A list of whole numbers, empty if there is none.
    fn numbers(&self, key: &str) -> Result<Vec<usize>, Error> {
        let Some(list) = self.get(key) else { return Ok(Vec::new()) };
        let number = |value: &Value| value.as_u64().and_then(|value| usize::try_from(value).ok());
        let numbers = list.as_array().and_then(|list| list.iter().map(number).collect());
        numbers.ok_or_else(|| self.bad(key, "a list of whole numbers"))
    }

    /// So many positive numbers.
    fn factors(&self, key: &str, count: usize) -> Result<Vec<f64>, Error> {
        let list = self.get(key).ok_or_else(|| self.missing(key, &format!("a list of {count} numbers")))?;
        let list = list.as_array().filter(|list| list.len() == count);
        let number = |value: &Value| value.as_f64().filter(|value| value.is_finite() && *value > 0.0);
        let factors = list.and_then(|list| list.iter().map(number).collect::<Option<Vec<f64>>>());
        factors.ok_or_else(|| self.bad(key, &format!("a list of {count} positive numbers")))
    }

    fn optional_flag(&self, key: &str) -> Result<Option<bool>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.bad(key, "true or false"))
    }

    fn optional_text(&self, key: &str) -> Result<Option<&str>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.bad(key, "a text"))
    }

    fn choice(&self, choice: &Choice) -> Result<bool, Error> {
        match choice {
            Choice::Never => Ok(false),
            Choice::Always => Ok(true),
            Choice::Key(key) => Ok(self.optional_flag(key)?.unwrap_or(false)),
            Choice::KeyOrTrue(key) => Ok(self.optional_flag(key)?.unwrap_or(true)),
        }
    }

    fn activation(&self, key: &str) -> Result<Option<Activation>, Error> {
        match self.optional_text(key)? {
            Some("silu" | "swish") => Ok(Some(Activation::Silu)),
            Some("relu") => Ok(Some(Activation::Relu)),
            Some("gelu") => Ok(Some(Activation::GeluErf)),
            Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Ok(Some(Activation::GeluTanh)),
            None => Ok(None),
            Some(_) => Err(self.bad(key, "silu, gelu, gelu_new, gelu_pytorch_tanh or relu")),
        }
    }

    fn require(&self, holds: bool, key: &str, expected: &str) -> Result<(), Error> {
        if holds { Ok(()) } else { Err(self.bad(key, expected)) }
    }

    fn bad(&self, key: &str, expected: &str) -> Error {
        let found = self.json.get(key).map_or("missing".to_owned(), Value::to_string);
        Error::BadConfig { key: key.to_owned(), expected: expected.to_owned(), found: shorten(&found) }
    }

    fn missing(&self, key: &str, expected: &str) -> Error {
        Error::MissingKey { key: key.to_owned(), expected: expected.to_owned() }
    }
}

/// The beginning of a text from a file, for use in a message.
pub(crate) fn shorten(text: &str) -> String {
    evenkeel_store::shortened(text, 80)
}
