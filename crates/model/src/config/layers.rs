//! The options of layers: windows, rotations and experts.

use serde_json::Value;

use super::family::{Family, Rotated, Rotation, SlidingRotation, Window};
use super::keys::Keys;
use super::known_keys::refuse_unknown_rotary;
use super::{Experts, LARGEST_SIZE, Layer, shorten};
use crate::chain::rotary::{Rotary, Scaling};
use crate::error::Error;

/// No real model comes near these; a file that does is broken or hostile.
const MOST_LAYERS: u64 = 1 << 12;
const MOST_EXPERTS: u64 = 1 << 12;

pub(super) fn read_layers(keys: &Keys, family: &Family, head_dim: usize) -> Result<(Vec<Layer>, Vec<Rotary>), Error> {
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
pub(super) fn read_experts(
    keys: &Keys,
    family: &Family,
    ffn: usize,
    layers: &mut [Layer],
) -> Result<Option<Experts>, Error> {
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
