//! The sizes of heads layer by layer, where layers without a sliding window have others.

use serde_json::Value;

use super::family::{Family, FullLayers};
use super::keys::Keys;
use super::known_keys::refuse_unknown_of_layer;
use super::{LARGEST_HEAD, LARGEST_SIZE};
use crate::error::Error;

/// The keys and values of a layer, and the elements of its heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LayerHeads {
    pub dim: usize,
    pub kv_heads: usize,
    pub values_are_keys: bool,
}

/// By layer. Layers of a kind are alike, and the number of key heads of one kind divides that of the other.
pub(super) fn read_layer_heads(
    keys: &Keys,
    family: &Family,
    heads: usize,
    usual: LayerHeads,
    sliding: &[bool],
) -> Result<Vec<LayerHeads>, Error> {
    let Some(full) = &family.full_layers else { return Ok(vec![usual; sliding.len()]) };
    let values_are_keys = keys.optional_flag(full.values_are_keys)?.unwrap_or(false);
    let of_all = match keys.json.get(full.by_layer) {
        Some(by_layer) => read_by_layer(keys, family, full, by_layer, usual, sliding.len())?,
        None => {
            let (dim_key, default) = full.head_dim;
            let kv_heads = keys.optional_size(full.kv_heads)?.filter(|_| values_are_keys);
            let of_full = LayerHeads {
                dim: keys.optional_size(dim_key)?.unwrap_or(default),
                kv_heads: kv_heads.unwrap_or(usual.kv_heads),
                ..usual
            };
            sliding.iter().map(|&is_sliding| if is_sliding { usual } else { of_full }).collect()
        }
    };
    let mut kinds = [None; 2];
    for (own, &is_sliding) in of_all.iter().zip(sliding) {
        keys.require(own.dim <= LARGEST_HEAD, full.head_dim.0, &format!("at most {LARGEST_HEAD}"))?;
        let fits = (heads * own.dim) as u64 <= LARGEST_SIZE;
        keys.require(fits, full.head_dim.0, &format!("heads of {LARGEST_SIZE} features together at most"))?;
        keys.require(heads.is_multiple_of(own.kv_heads), full.kv_heads, &format!("a divisor of {heads} heads"))?;
        let kind = kinds[usize::from(is_sliding)].get_or_insert(*own);
        keys.require(kind == own, full.by_layer, "the same sizes for all layers of a type")?;
    }
    if let [Some(of_full), Some(of_sliding)] = kinds {
        let (fewest, most) = (of_full.kv_heads.min(of_sliding.kv_heads), of_full.kv_heads.max(of_sliding.kv_heads));
        keys.require(most.is_multiple_of(fewest), full.kv_heads, &format!("a divisor or a multiple of {most}"))?;
    }
    let with_values =
        |(own, is_sliding): (LayerHeads, &bool)| LayerHeads { values_are_keys: values_are_keys && !is_sliding, ..own };
    Ok(of_all.into_iter().zip(sliding).map(with_values).collect())
}

/// The sizes of the form `{"5": {"head_dim": 512, "num_key_value_heads": 4}, …}`, the usual ones where it has none.
fn read_by_layer(
    keys: &Keys,
    family: &Family,
    full: &FullLayers,
    by_layer: &Value,
    usual: LayerHeads,
    layers: usize,
) -> Result<Vec<LayerHeads>, Error> {
    let expected = "an object of layers' sizes by their numbers";
    let by_layer = by_layer.as_object().ok_or_else(|| keys.bad(full.by_layer, expected))?;
    for key in [full.head_dim.0, full.kv_heads] {
        keys.require(keys.get(key).is_none(), key, &format!("nothing beside `{}`", full.by_layer))?;
    }
    let mut of_all = vec![usual; layers];
    for (number, sizes) in by_layer {
        let number = number.parse().ok().filter(|&number: &usize| number < layers && sizes.is_object());
        let own = number.map(|number| &mut of_all[number]).ok_or_else(|| keys.bad(full.by_layer, expected))?;
        refuse_unknown_of_layer(sizes, &format!("{}.", full.by_layer), family)?;
        let sizes = Keys { json: sizes };
        own.dim = sizes.optional_size("head_dim")?.unwrap_or(usual.dim);
        own.kv_heads = sizes.optional_size("num_key_value_heads")?.unwrap_or(usual.kv_heads);
    }
    Ok(of_all)
}
