//! Elements that a shard keeps and that an update must leave as they are: the shard that computes with them has pruned them.

use std::collections::BTreeMap;
use std::ops::Range;

use evenkeel_device::kernel::frozen_words;
use evenkeel_device::{Queue, Tensor};

use crate::chain::model::Model;
use crate::lossy::intake::Intake;
use crate::parameters::ParamId;
use crate::sharding::layout::Region;

/// A bit for each element of the matrices with frozen elements.
#[derive(Default)]
pub struct PrunedMask(BTreeMap<ParamId, Tensor>);

/// The columns that a shard prunes from the model it computes with: by intake, as the model lists them, in ascending order.
pub struct PrunedColumns<'a> {
    pub model: &'a Model,
    pub pruned: Vec<&'a [u32]>,
}

impl PrunedMask {
    /// The elements of `home` that shards leave out. Gradients that shards sum are complete even if one leaves something out, so
    /// their parameters are not frozen.
    pub fn new(queue: &Queue, home: &Model, left_out: &[PrunedColumns]) -> PrunedMask {
        let masks = masks(home, left_out).into_iter();
        PrunedMask(masks.map(|(weight, mask)| (weight, queue.indices(&mask.words))).collect())
    }

    /// The mask for [`AdamW::frozen`](evenkeel_device::kernel::AdamW::frozen), if any element of the parameter is frozen.
    pub fn of(&self, id: ParamId) -> Option<&Tensor> {
        self.0.get(&id)
    }
}

/// The masks of the weights with frozen elements.
fn masks(home: &Model, left_out: &[PrunedColumns]) -> BTreeMap<ParamId, Mask> {
    let mut masks: BTreeMap<ParamId, Mask> = BTreeMap::new();
    for PrunedColumns { model, pruned } in left_out {
        let intakes = model.intakes();
        assert_eq!(intakes.len(), pruned.len(), "columns for each intake");
        for (intake, pruned) in intakes.iter().zip(pruned).filter(|(_, pruned)| !pruned.is_empty()) {
            for &weight in intake.weights.iter().filter(|&&weight| !intake.is_summed(weight)) {
                let (kept, used) = (&home.specs[weight.0], &model.specs[weight.0]);
                for [kept_part, used_part] in kept.slice.overlaps(&used.slice) {
                    let mask = masks.entry(weight).or_insert_with(|| Mask::new(kept.matrix));
                    mask.freeze(&kept_part, &used_part, intake, pruned);
                }
            }
        }
    }
    masks.retain(|_, mask| mask.words.iter().any(|&word| word != 0));
    masks
}

struct Mask {
    words: Vec<u32>,
    cols: usize,
}

impl Mask {
    fn new([rows, cols]: [usize; 2]) -> Mask {
        Mask { words: vec![0; frozen_words(rows * cols)], cols }
    }

    /// Freezes the pruned inputs of a part that lies at `kept` among the kept elements and at `used` among those computed with.
    fn freeze(&mut self, kept: &Region, used: &Region, intake: &Intake, pruned: &[u32]) {
        let inputs = |region: &Region| if intake.transposed { region.rows.clone() } else { region.cols.clone() };
        let (kept_inputs, used_inputs) = (inputs(kept), inputs(used));
        let first = pruned.partition_point(|&column| (column as usize) < used_inputs.start);
        let end = pruned.partition_point(|&column| (column as usize) < used_inputs.end);
        let frozen = pruned[first..end].iter().map(|&column| kept_inputs.start + column as usize - used_inputs.start);
        if intake.transposed {
            frozen.for_each(|row| self.set(row, kept.cols.clone()));
        } else {
            let frozen: Vec<usize> = frozen.collect();
            for row in kept.rows.clone() {
                frozen.iter().for_each(|&col| self.set(row, col..col + 1));
            }
        }
    }

    fn set(&mut self, row: usize, cols: Range<usize>) {
        for element in row * self.cols + cols.start..row * self.cols + cols.end {
            self.words[element / 32] |= 1 << (element % 32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_widths::{Dim, SHARES, Widths};

    use crate::sharding::shard::Cut;

    fn cut(model_type: &str, heads: [usize; 2], ffn: [usize; 2]) -> Vec<Model> {
        let config = match model_type {
            "llama" => serde_json::json!({
                "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4,
                "num_key_value_heads": 4, "intermediate_size": 10, "vocab_size": 16,
            }),
            _ => serde_json::json!({
                "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 4, "n_inner": 10, "n_positions": 8,
                "vocab_size": 16,
            }),
        };
        let widths = Widths::new(|dim| match dim {
            Dim::Heads => heads.map(|heads| heads * SHARES).to_vec(),
            Dim::Columns => ffn.to_vec(),
            Dim::Classes => vec![8, 8],
            Dim::Inputs => vec![0, 0],
            Dim::Tokens => vec![1, 1],
        });
        Model::from_json(&config).unwrap().cut(&Cut { widths: Some(widths), ..Cut::even(2) }).unwrap()
    }

    /// The element of the whole parameter for each element that a shard has of it, row by row.
    fn places(model: &Model, id: ParamId) -> Vec<[usize; 2]> {
        let [rows, cols] = model.specs[id.0].matrix;
        let mut places = vec![[0; 2]; rows * cols];
        for piece in model.specs[id.0].slice.pieces() {
            for (row, held_row) in piece.rows.clone().zip(piece.held_rows.clone()) {
                for (col, held_col) in piece.cols.clone().zip(piece.held_cols.clone()) {
                    places[held_row * cols + held_col] = [row, col];
                }
            }
        }
        places
    }

    #[test]
    fn what_is_kept_is_frozen_where_whoever_computes_with_it_has_pruned_it() {
        for (model_type, work_heads, work_ffn) in
            [("llama", [2, 2], [5, 5]), ("llama", [1, 3], [2, 8]), ("llama", [3, 1], [9, 1]), ("gpt2", [1, 3], [3, 7])]
        {
            let (home, work) = (cut(model_type, [2, 2], [5, 5]), cut(model_type, work_heads, work_ffn));
            // Every third input on the first shard, every other one on the second.
            let pruned: Vec<Vec<Vec<u32>>> = work
                .iter()
                .zip([3, 2])
                .map(|(model, step)| {
                    let of = |intake: &Intake| (0..intake.inputs as u32).filter(|input| input % step == 0).collect();
                    model.intakes().iter().map(of).collect()
                })
                .collect();
            let left_out: Vec<PrunedColumns> = work
                .iter()
                .zip(&pruned)
                .map(|(model, pruned)| PrunedColumns { model, pruned: pruned.iter().map(Vec::as_slice).collect() })
                .collect();
            for home in &home {
                let frozen = masks(home, &left_out);
                for id in (0..home.specs.len()).map(ParamId) {
                    let words = frozen.get(&id).map_or(&[][..], |mask| &mask.words);
                    for (element, place) in places(home, id).into_iter().enumerate() {
                        let expected = work.iter().zip(&pruned).any(|(work, pruned)| {
                            let intakes = work.intakes();
                            let Some(index) = intakes.iter().position(|intake| intake.weights.contains(&id)) else {
                                return false;
                            };
                            let Some(at) = places(work, id).iter().position(|other| *other == place) else {
                                return false;
                            };
                            let cols = work.specs[id.0].matrix[1];
                            let input = if intakes[index].transposed { at / cols } else { at % cols };
                            pruned[index].contains(&(input as u32))
                        });
                        let is_frozen = words.get(element / 32).is_some_and(|word| word >> (element % 32) & 1 == 1);
                        let what = format!("{model_type} {work_heads:?} {work_ffn:?}: {}", home.specs[id.0].name);
                        assert_eq!(is_frozen, expected, "{what} at {place:?} on shard {}", home.shard.index);
                    }
                }
            }
        }
    }
}
