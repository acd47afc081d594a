//! Frozen weights in 4 bits, as bitsandbytes has them (NF4): a code for each number and a factor for each 64 of them.
//!
//! A whole matrix is quantised as it is stored, row after row ([`quantize`]), or was quantised before it was saved
//! ([`bitsandbytes`]). A shard holds the codes and factors of its part ([`packed`]): whatever the cut, every number is the same.
//! Layers expand a weight into memory of the compute dtype just before they multiply with it.

pub(crate) mod bitsandbytes;
mod dynamic_map;
pub(crate) mod packed;
pub(crate) mod quantize;
mod sum;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use crate::error::Error;
use crate::parameters::ParamSpec;
pub use evenkeel_device::kernel::NF4_BLOCK;

/// Which linear layers are held in 4 bits: all but the head and those that are skipped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedLayers {
    /// The names of the skipped layers' weights.
    skipped: BTreeSet<String>,
}

impl PackedLayers {
    pub(crate) fn skipping(skipped: BTreeSet<String>) -> PackedLayers {
        PackedLayers { skipped }
    }

    pub(crate) fn packs(&self, weight: &str) -> bool {
        !self.skipped.contains(weight)
    }
}

/// Refuses a part of a packed weight that does not consist of whole blocks.
pub(crate) fn check_cut(spec: &ParamSpec) -> Result<(), Error> {
    let [rows, cols] = spec.whole;
    let refused = |what: String| Error::CutsBlocks { name: spec.name.clone(), what };
    if cols.is_multiple_of(NF4_BLOCK) {
        let is_inside = |col: &usize| !col.is_multiple_of(NF4_BLOCK);
        let cut = spec.slice.pieces().flat_map(|piece| [piece.cols.start, piece.cols.end]).find(is_inside);
        return cut.map_or(Ok(()), |col| Err(refused(format!("it would be cut at column {col} of {cols}"))));
    }
    // Blocks cross the ends of rows.
    if spec.matrix == spec.whole || spec.is_empty() {
        return Ok(());
    }
    Err(refused(format!(
        "its {rows} rows have {cols} numbers, no multiple of {NF4_BLOCK}, so a block lies in two of them"
    )))
}
