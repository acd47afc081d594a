//! The options of linear attention: its sizes, and the layers that have it.

use serde_json::Value;

use super::family::{Family, LinearSizes};
use super::keys::Keys;
use super::known_keys::{LINEAR_ATTENTION, refuse_unknown_of_jet};
use super::{LARGEST_HEAD, LARGEST_SIZE, LinearAttention};
use crate::error::Error;

const MOST_TAPS: usize = 16;

/// The types of layers in `layer_types`.
const USUAL_TYPES: &[&str] = &["linear_attention", "full_attention"];
pub(super) const JET_TYPES: &[&str] = &["jet", "attn", "swa"];

/// The sizes, if some layers may have linear attention.
pub(super) fn read_linear_attention(
    keys: &Keys,
    family: &Family,
    epsilon: f32,
) -> Result<Option<LinearAttention>, Error> {
    let Some(names) = &family.linear_attention else { return Ok(None) };
    let sizes = match names.sizes {
        LinearSizes::Flat => flat_sizes(keys, epsilon)?,
        LinearSizes::Jet => jet_sizes(keys, family)?,
    };
    let LinearAttention { key_heads, value_heads, key_dim, value_dim, taps, .. } = sizes;
    let [key_heads_key, value_heads_key, key_dim_key, value_dim_key, taps_key] = LINEAR_ATTENTION;
    let divides = value_heads.is_multiple_of(key_heads);
    keys.require(divides, value_heads_key, &format!("a multiple of the {key_heads} key heads"))?;
    let bounds = [(key_dim_key, key_dim, LARGEST_HEAD), (value_dim_key, value_dim, LARGEST_HEAD)];
    for (key, size, most) in bounds.into_iter().chain([(taps_key, taps, MOST_TAPS)]) {
        keys.require((1..=most).contains(&size), key, &format!("from 1 to {most}"))?;
    }
    for (key, heads, dim) in [(key_heads_key, key_heads, key_dim), (value_heads_key, value_heads, value_dim)] {
        let fits = (heads as u64) * (dim as u64) * (taps as u64) <= LARGEST_SIZE;
        keys.require(fits, key, &format!("heads of {LARGEST_SIZE} features together at most"))?;
    }
    Ok(Some(sizes))
}

fn flat_sizes(keys: &Keys, epsilon: f32) -> Result<LinearAttention, Error> {
    let size = |key: &str, usual: usize| -> Result<usize, Error> { Ok(keys.optional_size(key)?.unwrap_or(usual)) };
    let [key_heads, value_heads, key_dim, value_dim, taps] = LINEAR_ATTENTION;
    Ok(LinearAttention {
        key_heads: size(key_heads, 16)?,
        value_heads: size(value_heads, 32)?,
        key_dim: size(key_dim, 128)?,
        value_dim: size(value_dim, 128)?,
        taps: size(taps, 4)?,
        generator: None,
        epsilon,
    })
}

fn jet_sizes(keys: &Keys, family: &Family) -> Result<LinearAttention, Error> {
    let efficient = keys.get(EFFICIENT).ok_or_else(|| keys.missing(EFFICIENT, "an object"))?;
    refuse_unknown_of_jet(efficient, family)?;
    let keys = Keys { json: efficient };
    let jet = keys.get("jet").ok_or_else(|| keys.missing("jet", "an object"))?;
    let keys = Keys { json: jet };
    let (heads, key_dim) = (keys.size("num_heads")?, keys.size("head_dim")?);
    let growth = keys.positive("expand_v")?.ok_or_else(|| keys.missing("expand_v", "a number"))?;
    let value_dim = key_dim as f64 * growth;
    keys.require((1.0..=LARGEST_HEAD as f64).contains(&value_dim), "expand_v", "a number that gives heads a size")?;
    let value_dim = value_dim as usize;
    let reduction = keys.size("dconv_generator_reduction")?;
    let generator = heads.saturating_mul(value_dim) / reduction;
    keys.require(generator > 0, "dconv_generator_reduction", "at most the features of all values")?;
    let epsilon = match jet.get("norm_eps") {
        Some(Value::String(text)) => text.parse().ok(),
        Some(value) => value.as_f64(),
        None => Some(1e-5),
    };
    let epsilon = epsilon.filter(|epsilon: &f64| epsilon.is_finite() && *epsilon >= 0.0);
    Ok(LinearAttention {
        key_heads: heads,
        value_heads: heads,
        key_dim,
        value_dim,
        taps: keys.size("conv_size")?,
        generator: Some(generator),
        epsilon: epsilon.ok_or_else(|| keys.bad("norm_eps", "a number"))? as f32,
    })
}

const EFFICIENT: &str = "efficient_attention_config";

/// The window of layers of type `swa`.
pub(super) fn jet_window(keys: &Keys) -> Result<Option<usize>, Error> {
    let windows = keys.get(EFFICIENT).and_then(|efficient| efficient.get("swa"));
    windows.map_or(Ok(None), |json| Keys { json }.size("window_size").map(Some))
}

/// By layer: whether it has linear attention.
pub(super) fn linear_layers(keys: &Keys, family: &Family, count: usize) -> Result<Vec<bool>, Error> {
    match family.linear_attention.as_ref().map(|names| names.sizes) {
        None => Ok(vec![false; count]),
        Some(LinearSizes::Jet) => layers_of_type(keys, count, JET_TYPES, "jet"),
        Some(LinearSizes::Flat) if keys.get("layer_types").is_some() => {
            layers_of_type(keys, count, USUAL_TYPES, "linear_attention")
        }
        Some(LinearSizes::Flat) => {
            let interval = keys.optional_size("full_attention_interval")?.unwrap_or(4);
            Ok((0..count).map(|layer| !(layer + 1).is_multiple_of(interval)).collect())
        }
    }
}

/// By layer: whether `layer_types` has this type for it. All must be among the known ones.
pub(super) fn layers_of_type(keys: &Keys, count: usize, known: &[&str], wanted: &str) -> Result<Vec<bool>, Error> {
    let types = keys.layer_types(count)?.ok_or_else(|| keys.missing("layer_types", "a list"))?;
    let is_wanted = |layer: &Value| {
        let found = layer.as_str().filter(|layer| known.contains(layer));
        found.map(|layer| layer == wanted).ok_or_else(|| keys.bad("layer_types", &known.join(" or ")))
    };
    types.iter().map(is_wanted).collect()
}
