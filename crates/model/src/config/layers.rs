//! The options of layers: windows, rotations and experts.

use serde_json::Value;

use super::family::{ClampedExperts, Family, KeySharers, Rotated, Rotation, SlidingRotation, Window};
use super::full_layers::{LayerHeads, read_layer_heads};
use super::keys::Keys;
use super::known_keys::refuse_unknown_rotary;
use super::linear_attention::{JET_TYPES, jet_window, layers_of_type, linear_layers};
use super::{Experts, LARGEST_SIZE, Layer, TokenInputSizes, shorten};
use crate::chain::rotary::{Growth, Rotary, Scaling};
use crate::error::Error;

/// No real model comes near these; a file that does is broken or hostile.
const MOST_LAYERS: u64 = 1 << 12;
const MOST_EXPERTS: u64 = 1 << 12;
const MOST_EXPERTS_OF_ALL_LAYERS: usize = 1 << 18;

pub(super) fn read_layers(
    keys: &Keys,
    family: &Family,
    heads: usize,
    usual: LayerHeads,
) -> Result<(Vec<Layer>, Vec<Rotary>), Error> {
    let count =
        keys.bounded(family.keys.layers, MOST_LAYERS)?.ok_or_else(|| keys.missing(family.keys.layers, "a size"))?;
    let linear = linear_layers(keys, family, count)?;
    let unrotated = unrotated_layers(keys, family, count)?;
    let sliding = sliding_layers(keys, family, &unrotated)?;
    let window = match family.window {
        Window::Jet => jet_window(keys)?,
        _ if keys.lacks("sliding_window") => family.default_window,
        _ => keys.optional_size("sliding_window")?,
    };
    // Types of layers differ in more than their windows.
    if family.full_layers.is_some() && window.is_none() && sliding.contains(&true) {
        return Err(keys.missing("sliding_window", "the width of windows"));
    }
    let heads = read_layer_heads(keys, family, heads, usual, &sliding)?;
    let dim_of = |wanted: bool| {
        let mut of_kind = heads.iter().zip(&sliding).filter(|(_, is_sliding)| **is_sliding == wanted);
        of_kind.next().map_or(usual.dim, |(heads, _)| heads.dim)
    };
    let dims = [dim_of(false), dim_of(true)];
    let rotaries = family.rotation().map_or(Ok(Vec::new()), |rotation| read_rotaries(keys, family, rotation, dims))?;
    let inverse_index = keys.optional_flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false);
    let only_sliding = family.rotation().is_some_and(|rotation| matches!(rotation.layers, Rotated::Sliding));
    let layers = sliding.iter().zip(unrotated).enumerate().map(|(index, (&is_sliding, is_unrotated))| {
        let is_rotated = !rotaries.is_empty() && !is_unrotated && (is_sliding || !only_sliding);
        Layer {
            is_linear: linear[index],
            window: if is_sliding { window } else { None },
            rotary: is_rotated.then(|| if is_sliding { rotaries.len() - 1 } else { 0 }),
            scale: if inverse_index { 1.0 / (index + 1) as f32 } else { 1.0 },
            head_dim: heads[index].dim,
            kv_heads: heads[index].kv_heads,
            values_are_keys: heads[index].values_are_keys,
            keys_of: None,
            mlp_factor: 1,
            has_experts: false,
        }
    });
    Ok((layers.collect(), rotaries))
}

/// The experts, and which layers have them.
pub(super) fn read_experts(
    keys: &Keys,
    family: &Family,
    ffn: usize,
    layers: &mut [Layer],
) -> Result<Option<Experts>, Error> {
    let Some(options) = &family.experts else { return Ok(None) };
    if let Some(key) = options.enabled
        && !keys.optional_flag(key)?.unwrap_or(false)
    {
        return Ok(None);
    }
    let count_key = options.count;
    let count = keys.bounded(count_key, MOST_EXPERTS)?.ok_or_else(|| keys.missing(count_key, "a number of experts"))?;
    keys.require(count > 0, count_key, "at least one expert")?;
    let chosen = keys.size(options.chosen)?;
    keys.require(chosen <= count, options.chosen, &format!("at most {count} experts"))?;
    let ffn = match options.ffn {
        Some(key) => keys.size(key)?,
        None => ffn,
    };
    keys.require((count * ffn) as u64 <= LARGEST_SIZE, count_key, &format!("{LARGEST_SIZE} columns together at most"))?;
    let few = count * layers.len() <= MOST_EXPERTS_OF_ALL_LAYERS;
    keys.require(few, count_key, &format!("{MOST_EXPERTS_OF_ALL_LAYERS} experts in all layers together at most"))?;
    let step = keys.optional_size("decoder_sparse_step")?.unwrap_or(1);
    let dense = keys.numbers("mlp_only_layers")?;
    for (index, layer) in layers.iter_mut().enumerate() {
        layer.has_experts = (index + 1).is_multiple_of(step) && !dense.contains(&index);
    }
    let renormalises = keys.choice(&options.renormalises)?;
    let shared = options.shared.as_ref().map(|shared| keys.size(shared.ffn)).transpose()?;
    let limit = match &options.clamped {
        Some(ClampedExperts { limit: (key, default), .. }) => Some(keys.positive(key)?.unwrap_or(*default) as f32),
        None => None,
    };
    const BALANCE: &str = "router_aux_loss_coef";
    let has_balance = keys.optional_flag("output_router_logits")?.unwrap_or(false);
    let factor = keys.not_negative(BALANCE)?;
    let balance = match has_balance {
        true => Some(factor.ok_or_else(|| keys.missing(BALANCE, "a number"))?),
        false => None,
    };
    Ok(layers.iter().any(|layer| layer.has_experts).then_some(Experts {
        count,
        chosen,
        ffn,
        shared,
        renormalises,
        are_stacked: options.clamped.is_some() || options.beside.is_some(),
        limit,
        balance,
    }))
}

/// Notes which layers attend to the keys and values of earlier ones.
pub(super) fn read_key_sharers(keys: &Keys, family: &Family, layers: &mut [Layer]) -> Result<(), Error> {
    let Some(KeySharers { count: key, have_wide_mlps, .. }) = &family.key_sharers else { return Ok(()) };
    let are_wide = keys.optional_flag(have_wide_mlps)?.unwrap_or(false);
    let count = keys.bounded(key, MOST_LAYERS)?.unwrap_or(0);
    if count == 0 {
        return Ok(());
    }
    let own = layers.len().checked_sub(count).filter(|&own| own > 0);
    let own = own.ok_or_else(|| keys.bad(key, "fewer than there are layers"))?;
    let (with_keys, sharers) = layers.split_at_mut(own);
    for layer in sharers {
        let source = with_keys.iter().rposition(|other| other.window.is_some() == layer.window.is_some());
        layer.keys_of = Some(source.ok_or_else(|| keys.bad(key, "fewer, so that a layer of each type has its own"))?);
        layer.mlp_factor = if are_wide { 2 } else { 1 };
    }
    Ok(())
}

pub(super) fn read_token_inputs(keys: &Keys, family: &Family, layers: usize) -> Result<Option<TokenInputSizes>, Error> {
    let Some(options) = &family.token_inputs else { return Ok(None) };
    let (key, usual) = options.width;
    let width = keys.bounded(key, LARGEST_SIZE)?.unwrap_or(usual);
    if width == 0 {
        return Ok(None);
    }
    let fits = (width as u64).saturating_mul(layers as u64) <= LARGEST_SIZE;
    keys.require(fits, key, &format!("{LARGEST_SIZE} numbers for all layers together at most"))?;
    let (rows, tokens) = (keys.size(options.rows)?, keys.size("vocab_size")?);
    keys.require(rows >= tokens, options.rows, &format!("a row for each of the {tokens} tokens"))?;
    Ok(Some(TokenInputSizes { width, rows }))
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
        Window::Jet => return layers_of_type(keys, count, JET_TYPES, "swa"),
        Window::From | Window::Pattern(_) | Window::PatternAndLast(_) | Window::Unrotated => (),
    }
    if let Some(types) = keys.layer_types(count)? {
        let sliding = types.iter().map(|layer| match layer.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(keys.bad("layer_types", "sliding_attention or full_attention")),
        });
        let mut sliding: Vec<bool> = sliding.collect::<Result<_, Error>>()?;
        if let (Window::PatternAndLast(_), Some(last)) = (&family.window, sliding.last_mut()) {
            *last = false;
        }
        return Ok(sliding);
    }
    Ok(match family.window {
        Window::PatternAndLast(pattern) => {
            (0..count).map(|layer| !(layer + 1).is_multiple_of(pattern) && layer + 1 < count).collect()
        }
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
fn read_rotaries(
    keys: &Keys,
    family: &Family,
    rotation: &Rotation,
    [full_dim, sliding_dim]: [usize; 2],
) -> Result<Vec<Rotary>, Error> {
    for name in ["rope_scaling", "rope_parameters"] {
        keys.require(keys.get(name).is_none_or(Value::is_object), name, "an object")?;
    }
    let scaling = keys.get("rope_scaling").map(|scaling| ("rope_scaling.", scaling));
    let parameters = keys.get("rope_parameters").map(|parameters| ("rope_parameters.", parameters));
    if rotation.is_given && scaling.or(parameters).is_none() {
        return Err(keys.missing("rope_parameters", "an object"));
    }
    let is_same = scaling.is_none_or(|(_, scaling)| parameters.is_none_or(|(_, parameters)| parameters == scaling));
    keys.require(is_same, "rope_scaling", "no other rotation than that of `rope_parameters`")?;
    if let Some((_, kinds)) = parameters.filter(|(_, parameters)| parameters.get("full_attention").is_some()) {
        refuse_unknown_rotary(kinds, "rope_parameters.", family, &["full_attention", "sliding_attention"])?;
        let sliding_base = match rotation.sliding {
            SlidingRotation::OwnBase(_, base) => base,
            SlidingRotation::Same | SlidingRotation::Unstretched => rotation.default_base,
        };
        let of_kind = [
            ("full_attention", "rope_parameters.full_attention.", rotation.default_base, full_dim),
            ("sliding_attention", "rope_parameters.sliding_attention.", sliding_base, sliding_dim),
        ];
        let read = |(kind, place, base, head_dim): (&str, &str, f64, usize)| {
            let own = kinds.get(kind).filter(|own| !own.is_null()).map(|own| (place, own));
            if rotation.is_given && own.is_none() {
                return Err(keys.missing(place.trim_end_matches('.'), "an object"));
            }
            read_rotary(keys, family, rotation, base, own, head_dim)
        };
        return of_kind.into_iter().map(read).collect();
    }
    if family.full_layers.is_some() {
        return Err(keys.missing("rope_parameters.full_attention", "an object"));
    }
    let full = read_rotary(keys, family, rotation, rotation.default_base, parameters.or(scaling), full_dim)?;
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
    let kind = inner.optional_text("rope_type")?.or(inner.optional_text("type")?).unwrap_or("default");
    let mut fraction = 1.0;
    let dim = match rotation.dim {
        Some(key) => keys.size(key)?,
        None => {
            let factors = [(&inner, "partial_rotary_factor"), (keys, "rotary_pct"), (keys, "partial_rotary_factor")];
            fraction = first(&factors)?.unwrap_or(rotation.default_fraction);
            let (fits, expected) = match rotation.may_be_partial {
                true => (fraction > 0.0 && fraction <= 1.0, "a number above 0, up to 1"),
                false => (fraction == 1.0, "1, since such a model rotates whole heads"),
            };
            let (of, key) = factors.into_iter().find(|(keys, key)| keys.get(key).is_some()).unwrap_or(factors[2]);
            of.require(fits, key, expected)?;
            // The rest of a head turns with frequency 0.
            if kind == "proportional" { head_dim } else { (head_dim as f64 * fraction) as usize }
        }
    };
    let dim_key = rotation.dim.unwrap_or("head_dim");
    keys.require(dim >= 2 && dim.is_multiple_of(2), dim_key, "an even number of rotated elements")?;
    keys.require(dim <= head_dim, dim_key, &format!("at most the {head_dim} elements of a head"))?;
    let rate = rotation.growth.map_or(Ok(None), |key| inner.positive_or_zero(key))?;
    let is_whole = family.full_layers.is_none() || dim == head_dim;
    inner.require(is_whole, "partial_rotary_factor", &format!("1 for a rotation of type `{}`", shorten(kind)))?;
    // Phi-3's first files.
    let kind = if family.model_type == "phi3" && matches!(kind, "su" | "yarn") { "longrope" } else { kind };
    let positive =
        |key: &str| -> Result<f64, Error> { inner.positive(key)?.ok_or_else(|| inner.missing(key, "a number")) };
    const ORIGINAL: &str = "original_max_position_embeddings";
    let positions = || keys.positive("max_position_embeddings");
    let original = || -> Result<f64, Error> {
        let given = inner.positive(ORIGINAL)?.or(keys.positive(ORIGINAL)?).or(positions()?);
        given.ok_or_else(|| inner.missing(ORIGINAL, "a number"))
    };
    let factor_or_ratio = || -> Result<f64, Error> {
        let ratio =
            || -> Result<Option<f64>, Error> { Ok(positions()?.zip(Some(original()?)).map(|(all, own)| all / own)) };
        inner.positive("factor")?.or(ratio()?).ok_or_else(|| inner.missing("factor", "a number"))
    };
    let of_type: &[&str] = match kind {
        "linear" | "dynamic" | "proportional" => &["factor"],
        "llama3" => &["factor", "low_freq_factor", "high_freq_factor"],
        "yarn" => &["factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"],
        "longrope" => &["factor", "attention_factor", "short_factor", "long_factor"],
        _ => &[],
    };
    let scaling = match kind {
        "default" => Scaling::None,
        "linear" => Scaling::Linear { factor: positive("factor")? },
        "proportional" if rotation.dim.is_none() => Scaling::Proportional {
            factor: inner.positive("factor")?.unwrap_or(1.0),
            pairs: (head_dim as f64 * fraction / 2.0) as usize,
        },
        "llama3" => Scaling::Llama3 {
            factor: positive("factor")?,
            low: positive("low_freq_factor")?,
            high: positive("high_freq_factor")?,
            original_positions: positive(ORIGINAL)?,
        },
        "dynamic" => Scaling::Dynamic {
            factor: positive("factor")?,
            positions: positions()?.ok_or_else(|| keys.missing("max_position_embeddings", "a number"))?,
        },
        "yarn" => {
            let factor = factor_or_ratio()?;
            let of_factor = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
            let scales = inner.positive_or_zero("mscale")?.zip(inner.positive_or_zero("mscale_all_dim")?);
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
            let is_given = [&inner, keys].iter().any(|keys| keys.get(ORIGINAL).is_some());
            inner.require(is_given, ORIGINAL, "the positions that the model was made for")?;
            let (factor, original_positions) = (factor_or_ratio()?, original()?);
            let usual = if factor > 1.0 { (1.0 + factor.ln() / original_positions.ln()).sqrt() } else { 1.0 };
            inner.require(original_positions > 1.0, ORIGINAL, "more than one position")?;
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
    let growth = rate.map(|rate| original().map(|positions| Growth { rate, positions })).transpose()?;
    keys.require(growth.is_none() || dim == head_dim, dim_key, "all elements of a head where queries grow")?;
    if let Scaling::Llama3 { low, high, .. } = scaling {
        inner.require(high > low, "high_freq_factor", "more than low_freq_factor")?;
    }
    Ok(Rotary { base, dim, scaling, growth })
}
