//! The automatic cut: which heads, columns and vocabulary rows each shard of a model computes with.
//!
//! Nothing is listed per checkpoint: the cut follows from the model's sizes and the shards' weights. Parts are uneven by nature.
//! Attention is cut in whole groups of query heads with their key and value head. If there are more shards than such groups,
//! several shards share a key and value head, and each of them holds it. A layout that only computes may cut groups by samples as
//! well: see `strip`.

use std::collections::BTreeSet;
use std::ops::Range;

use evenkeel_device::kernel::NF4_BLOCK;
use evenkeel_widths::{Dim, SHARES, Widths};
use serde::{Deserialize, Serialize};

use crate::config::family::{QkNorm, Qkv};
use crate::config::{Config, Input, Layer};
use crate::error::Error;
use crate::sharding::strip::groups_of;

/// How a model is to be cut.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// One for each shard: the share of the work that it gets.
    pub weights: Vec<f64>,
    /// The widths of the shards, if they are known already; then the weights only give the number of shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub widths: Option<Widths>,
    /// Whether the residual stream and its norms are split by tokens.
    pub split_sequence: bool,
    /// The parts that every shard holds whole.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub uncut: BTreeSet<Part>,
    /// Whether a shard has some experts whole, as large a part of them as of columns but at least one, instead of some columns of
    /// every expert.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole_experts: bool,
}

/// Parts that can be cut or left whole; layers by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    Embedding,
    Attention(usize),
    Mlp(usize),
    Head,
}

impl Cut {
    pub fn even(shards: usize) -> Cut {
        Cut::weighted(vec![1.0; shards])
    }

    pub fn weighted(weights: Vec<f64>) -> Cut {
        Cut { weights, ..Cut::default() }
    }
}

/// What is divided if experts stay whole, in words.
pub(crate) const EXPERTS: &str = "experts";

/// A bound that keeps products of shares and tokens from overflowing.
const MOST_TOKEN_SHARES: usize = 1 << 20;

/// The widths of these shards in each dim. Shards that share key and value heads have width 0 in heads.
pub fn widths_of<'a>(shards: impl IntoIterator<Item = &'a Shard>) -> Widths {
    let shards: Vec<&Shard> = shards.into_iter().collect();
    let shares_heads = shards.iter().any(|shard| shard.kv_holders.len() > 1);
    let width = |dim: Dim, (index, shard): (usize, &&Shard)| match dim {
        Dim::Heads => {
            if shares_heads {
                0
            } else {
                shard.head_shares()
            }
        }
        Dim::Columns => shard.ffn.len(),
        Dim::Classes => shard.classes.len(),
        Dim::Inputs => shard.inputs.len(),
        Dim::Tokens => shard.token_shares[index],
    };
    Widths::new(|dim| shards.iter().enumerate().map(|shard| width(dim, shard)).collect())
}

impl Config {
    /// The parts that so many shards must each have whole: attention, if it normalises all heads together, or if shards would share
    /// keys and values that lie in one matrix with queries; the head of texts with fewer labels than shards.
    pub fn whole_parts(&self, shards: usize) -> BTreeSet<Part> {
        if shards == 1 { BTreeSet::new() } else { self.whole_parts_if(shards, shards > self.kv_heads) }
    }

    fn whole_parts_if(&self, shards: usize, share_keys: bool) -> BTreeSet<Part> {
        let names = &self.family.names;
        let are_fused = matches!(names.qkv, Qkv::FusedBlocks(_) | Qkv::FusedByGroup(_));
        let are_whole = matches!(names.qk_norm, Some(QkNorm::Whole(_)))
            || (share_keys && (are_fused || self.has_too_many_sharers(shards)));
        let layers = if are_whole { self.layers.len() } else { 0 };
        let few_labels = matches!(self.input, Input::Texts { .. }) && self.classes < shards;
        // Attention and MLP that are added up are cut alike.
        let of_layer = |layer: usize| [Some(Part::Attention(layer)), self.parallel.then_some(Part::Mlp(layer))];
        let of_layers = (0..layers).flat_map(of_layer).flatten();
        of_layers.chain(few_labels.then_some(Part::Head)).collect()
    }

    /// Whether there are more shards than key heads in a layer that has more of them than others. Its heads would have to be shared
    /// by other shards than theirs.
    fn has_too_many_sharers(&self, shards: usize) -> bool {
        let most = self.most_kv_heads();
        most > self.kv_heads && shards > most
    }

    /// Whether a model of this config can be cut in so many shards of these widths.
    pub fn can_be_cut(&self, widths: &Widths, shards: usize) -> bool {
        let shares_heads = self.kv_heads < shards && widths.of(Dim::Heads).iter().all(|&shares| shares == 0);
        let is_cut = |dim: Dim| {
            let sum = widths.of(dim).iter().try_fold(0usize, |sum, &width| sum.checked_add(width));
            let total = if dim == Dim::Heads && shares_heads { 0 } else { total(dim, self) };
            widths.of(dim).len() == shards && sum == Some(total)
        };
        let tokens = widths.of(Dim::Tokens);
        let has_tokens = tokens.len() == shards && tokens.iter().any(|&share| share > 0);
        let is_small = tokens.iter().all(|&share| share <= MOST_TOKEN_SHARES);
        // Values that layers hand on are those of all samples.
        let shares_samples = widths.share_heads_by_samples() && self.hands_values_on();
        Dim::ALL.into_iter().filter(|&dim| dim != Dim::Tokens).all(is_cut) && has_tokens && is_small && !shares_samples
    }
}

/// The size of a dim to divide; 0 for tokens, whose number varies.
fn total(dim: Dim, config: &Config) -> usize {
    match dim {
        Dim::Heads => SHARES * config.kv_heads,
        Dim::Columns => config.ffn,
        Dim::Classes => config.classes,
        Dim::Inputs => embedded_inputs(config),
        Dim::Tokens => 0,
    }
}

/// The part of a model that one shard computes with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    pub index: usize,
    /// Shards of the model.
    pub count: usize,
    pub heads: Range<usize>,
    pub kv_heads: Range<usize>,
    /// The shards that hold these key and value heads: more than this one if there are fewer heads than shards.
    pub kv_holders: Range<usize>,
    /// This shard's stretch of all groups of heads, in parts of a group, if groups are cut by samples. The heads above are then
    /// those of every group that it has a part of.
    pub shared_line: Option<Range<usize>>,
    pub ffn: Range<usize>,
    /// The experts that it has whole, if they are divided among the shards.
    pub experts: Option<Range<usize>>,
    /// Rows of the head, and of the embedding of a language model.
    pub classes: Range<usize>,
    /// The most classes that any shard has.
    pub widest_classes: usize,
    /// What the embedding of a classifier reads: elements of an image's patches, or vocabulary rows; none of a language model.
    pub inputs: Range<usize>,
    pub split_sequence: bool,
    /// By shard: its share of the stream's rows, if the stream is split by tokens.
    pub token_shares: Vec<usize>,
    pub uncut: BTreeSet<Part>,
}

impl Shard {
    /// The only shard of a model that is not cut.
    pub fn whole(config: &Config) -> Shard {
        Shard {
            index: 0,
            count: 1,
            heads: 0..config.heads,
            kv_heads: 0..config.kv_heads,
            kv_holders: 0..1,
            shared_line: None,
            ffn: 0..config.ffn,
            experts: None,
            classes: 0..config.classes,
            widest_classes: config.classes,
            inputs: 0..embedded_inputs(config),
            split_sequence: false,
            token_shares: vec![1],
            uncut: BTreeSet::new(),
        }
    }

    /// All shards of a model.
    pub fn cut(config: &Config, cut: &Cut) -> Result<Vec<Shard>, Error> {
        let count = cut.weights.len();
        assert!(count > 0 && cut.weights.iter().all(|weight| *weight > 0.0), "weights {:?}", cut.weights);
        let has_own_heads = cut.widths.as_ref().is_some_and(|widths| widths.total(Dim::Heads) > 0);
        let whole = config.whole_parts_if(count, count > config.kv_heads && !has_own_heads);
        let uncut: BTreeSet<Part> = cut.uncut.union(&whole).copied().collect();
        let is_cut = |part: Part| !uncut.contains(&part);
        let any_layer_is_cut = |part: fn(usize) -> Part| (0..config.layers.len()).any(|layer| is_cut(part(layer)));
        let classifies = config.input.is_classified();
        let inputs =
            if matches!(config.input, Input::Images { .. }) { "elements in a patch" } else { "vocabulary rows" };
        let is_divided = |layer: usize| config.layers[layer].has_experts && is_cut(Part::Mlp(layer));
        let divides_experts = cut.whole_experts && (0..config.layers.len()).any(is_divided);
        let divisible = [
            ("attention heads", config.heads, any_layer_is_cut(Part::Attention)),
            ("FFN columns", config.ffn, any_layer_is_cut(Part::Mlp)),
            (EXPERTS, config.experts.map_or(0, |experts| experts.count), divides_experts),
            ("classes", config.classes, is_cut(Part::Head) || (!classifies && is_cut(Part::Embedding))),
            (inputs, embedded_inputs(config), classifies && is_cut(Part::Embedding)),
        ];
        if let Some(&(what, size, _)) = divisible.iter().find(|(_, size, is_cut)| *is_cut && *size < count) {
            return Err(Error::TooManyShards { shards: count, what, size });
        }
        if count == 1 {
            return Ok(vec![Shard::whole(config)]);
        }
        if config.hands_values_on() && uncut.iter().any(|part| matches!(part, Part::Attention(_))) {
            return Err(Error::WholeHanded { shards: count });
        }
        if cut.split_sequence && !uncut.is_empty() {
            return Err(Error::SplitsWhole { parts: uncut.len() });
        }
        assert!(cut.widths.as_ref().is_none_or(|widths| config.can_be_cut(widths, count)), "{:?}", cut.widths);
        let divided = |dim: Dim| match &cut.widths {
            Some(widths) => side_by_side(widths.of(dim)),
            None => cut_dim(total(dim, config), &cut.weights, least_grain(dim, config)),
        };
        // With fewer heads than shards, every shard has attention whole.
        let heads = if config.heads < count { whole_heads(config, count) } else { cut_heads(config, cut) };
        let [ffn, classes, inputs] = [Dim::Columns, Dim::Classes, Dim::Inputs].map(divided);
        // An expert for each shard, however few columns it has.
        let parts_of = |count: usize| apportion(count, &ffn.iter().map(|part| part.len() as f64).collect::<Vec<f64>>());
        let experts = config.experts.filter(|_| cut.whole_experts).map(|experts| parts_of(experts.count));
        let widest_classes = classes.iter().map(Range::len).max().unwrap_or(0);
        let shard = |index: usize| Shard {
            index,
            count,
            heads: heads[index].heads.clone(),
            kv_heads: heads[index].kv_heads.clone(),
            kv_holders: heads[index].kv_holders.clone(),
            shared_line: heads[index].shared_line.clone(),
            ffn: ffn[index].clone(),
            experts: experts.as_ref().map(|experts| experts[index].clone()),
            classes: classes[index].clone(),
            widest_classes,
            inputs: inputs[index].clone(),
            split_sequence: cut.split_sequence,
            token_shares: cut.widths.as_ref().map_or_else(|| vec![1; count], |widths| widths.of(Dim::Tokens).to_vec()),
            uncut: uncut.clone(),
        };
        Ok((0..count).map(shard).collect())
    }

    /// The same cut of the model with other widths.
    pub fn cut_of(&self, widths: Widths) -> Cut {
        Cut {
            widths: Some(widths),
            split_sequence: self.split_sequence,
            uncut: self.uncut.clone(),
            whole_experts: self.experts.is_some(),
            ..Cut::even(self.count)
        }
    }

    /// The first row of each shard in a stream of so many tokens, and the end.
    pub fn row_bounds(&self, tokens: usize) -> Vec<usize> {
        let total: usize = self.token_shares.iter().sum();
        let ends = self.token_shares.iter().scan(0, |end, &share| {
            *end += share;
            // Rounding up gives remainders to the first shards.
            Some((tokens * *end).div_ceil(total))
        });
        [0].into_iter().chain(ends).collect()
    }

    /// The key and value heads that it has of a layer, and the shards that hold them. Where shards share key heads, those of layers
    /// with more of them have their own.
    pub(crate) fn kv_heads_of(&self, layer: &Layer, config: &Config) -> (Range<usize>, Range<usize>) {
        if layer.kv_heads == config.kv_heads {
            return (self.kv_heads.clone(), self.kv_holders.clone());
        }
        let group = config.heads / layer.kv_heads;
        let Range { start, end } = self.heads;
        assert!(start.is_multiple_of(group) && end.is_multiple_of(group), "heads {start}..{end} in groups of {group}");
        (start / group..end / group, self.index..self.index + 1)
    }

    pub fn is_whole(&self) -> bool {
        self.count == 1
    }

    /// The key heads of linear attention, with their value heads: as large a part of them as of attention's heads, in whole heads.
    pub(crate) fn linear_heads(&self, config: &Config, key_heads: usize) -> Range<usize> {
        let (held, all) = match &self.shared_line {
            Some(line) => (line, SHARES * config.kv_heads),
            None => (&self.heads, config.heads),
        };
        let nearest = |bound: usize| (2 * bound * key_heads + all) / (2 * all);
        nearest(held.start)..nearest(held.end)
    }

    fn head_shares(&self) -> usize {
        self.shared_line.as_ref().map_or(SHARES * self.kv_heads.len(), Range::len)
    }

    /// This shard's share of a part of the model.
    pub(crate) fn of(&self, part: Part, config: &Config) -> Shard {
        if self.uncut.contains(&part) { Shard::whole(config) } else { self.clone() }
    }
}

fn embedded_inputs(config: &Config) -> usize {
    match config.input {
        Input::Tokens { .. } => 0,
        Input::Texts { vocabulary, .. } => vocabulary,
        Input::Images { patch, channels, .. } => channels * patch * patch,
    }
}

struct HeadsOfShard {
    heads: Range<usize>,
    kv_heads: Range<usize>,
    kv_holders: Range<usize>,
    shared_line: Option<Range<usize>>,
}

fn whole_heads(config: &Config, shards: usize) -> Vec<HeadsOfShard> {
    let whole = || HeadsOfShard {
        heads: 0..config.heads,
        kv_heads: 0..config.kv_heads,
        kv_holders: 0..shards,
        shared_line: None,
    };
    (0..shards).map(|_| whole()).collect()
}

fn cut_heads(config: &Config, cut: &Cut) -> Vec<HeadsOfShard> {
    let (group, weights) = (config.heads / config.kv_heads, &cut.weights);
    let of_groups = |shard: usize, kv: Range<usize>, shared_line| HeadsOfShard {
        heads: kv.start * group..kv.end * group,
        kv_heads: kv,
        kv_holders: shard..shard + 1,
        shared_line,
    };
    if let Some(widths) = cut.widths.as_ref().filter(|widths| widths.total(Dim::Heads) > 0) {
        let lines = side_by_side(widths.of(Dim::Heads)).into_iter().enumerate();
        let is_shared = widths.share_heads_by_samples();
        return lines.map(|(shard, line)| of_groups(shard, groups_of(&line), is_shared.then_some(line))).collect();
    }
    if config.kv_heads >= weights.len() {
        let kv_heads = apportion(config.kv_heads, weights).into_iter().enumerate();
        return kv_heads.map(|(shard, kv)| of_groups(shard, kv, None)).collect();
    }
    if config.heads < weights.len() || config.has_too_many_sharers(weights.len()) {
        // No layer's attention is cut then.
        return (0..weights.len()).map(|shard| of_groups(shard, 0..0, None)).collect();
    }
    // The smallest groups of any layer stay whole, unless all are alike.
    let least = if config.most_kv_heads() > config.kv_heads { config.heads / config.most_kv_heads() } else { 1 };
    let shards_of_kv = share_out(weights, config.kv_heads, group / least);
    let mut shards = Vec::new();
    for (kv, holders) in shards_of_kv.into_iter().enumerate() {
        for heads in apportion(group / least, &weights[holders.clone()]) {
            let heads = kv * group + heads.start * least..kv * group + heads.end * least;
            let (kv_heads, kv_holders) = (kv..kv + 1, holders.clone());
            shards.push(HeadsOfShard { heads, kv_heads, kv_holders, shared_line: None });
        }
    }
    shards
}

/// Cuts the shards in `parts` runs of about the same weight, none empty and none longer than `longest`.
fn share_out(weights: &[f64], parts: usize, longest: usize) -> Vec<Range<usize>> {
    let (shards, total) = (weights.len(), weights.iter().sum::<f64>());
    let mut start = 0;
    let run = |part: usize| {
        let behind = parts - part - 1;
        let ends = (start + 1).max(shards.saturating_sub(behind * longest))..=(start + longest).min(shards - behind);
        let wanted = total * (part + 1) as f64 / parts as f64;
        let miss = |end: usize| (weights[..end].iter().sum::<f64>() - wanted).abs();
        let end = ends.min_by(|&a, &b| miss(a).total_cmp(&miss(b))).expect("there are enough heads for the shards");
        std::mem::replace(&mut start, end)..end
    };
    (0..parts).map(run).collect()
}

/// Parts that are multiples of these suit tiles and vectors.
const GRAINS: [usize; 7] = [64, 32, 16, 8, 4, 2, 1];
/// A part may be longer than its share by this factor for the sake of a larger grain.
const GRAIN_EXCESS: f64 = 1.03;

/// Weights in 4 bits can only be cut at whole blocks.
fn least_grain(dim: Dim, config: &Config) -> usize {
    if dim == Dim::Columns && config.packing.is_some() { NF4_BLOCK } else { 1 }
}

/// Cuts a dim in whole grains, the largest that leave the parts close to their shares; one part takes the rest. Parts that are
/// multiples of the least grain are preferred to even ones.
fn cut_dim(len: usize, weights: &[f64], least_grain: usize) -> Vec<Range<usize>> {
    let total: f64 = weights.iter().sum();
    let close = |parts: &[Range<usize>]| {
        let mut parts = parts.iter().zip(weights);
        parts.all(|(part, weight)| part.len() as f64 <= GRAIN_EXCESS * len as f64 * weight / total)
    };
    let cut = |grain: usize| -> Vec<Range<usize>> {
        let grains = apportion(len.div_ceil(grain), weights);
        grains.into_iter().map(|part| part.start * grain..len.min(part.end * grain)).collect()
    };
    let large_enough = GRAINS.into_iter().filter(|grain| len / grain >= weights.len());
    if least_grain > 1 && len / least_grain >= weights.len() {
        return cut(least_grain);
    }
    let coarse = large_enough.map(cut).find(|parts| close(parts));
    coarse.unwrap_or_else(|| apportion(len, weights))
}

/// Cuts `0..total` in parts proportional to the weights, none empty unless there are fewer than parts. The largest remainders get
/// the units that rounding down leaves; of equal ones the first.
fn apportion(total: usize, weights: &[f64]) -> Vec<Range<usize>> {
    let parts = weights.len();
    let least = usize::from(total >= parts);
    let (sum, shared) = (weights.iter().sum::<f64>(), total - least * parts);
    // Shares beyond the least that every part gets, so that no part ends below it.
    let ideal: Vec<f64> = weights.iter().map(|w| (total as f64 * w / sum - least as f64).max(0.0)).collect();
    let scale = if ideal.iter().sum::<f64>() > 0.0 { shared as f64 / ideal.iter().sum::<f64>() } else { 0.0 };
    let ideal: Vec<f64> = ideal.iter().map(|share| share * scale).collect();
    let mut sizes: Vec<usize> = ideal.iter().map(|share| (share + 1e-9).floor() as usize).collect();
    let mut by_remainder: Vec<usize> = (0..parts).collect();
    by_remainder.sort_by(|&a, &b| {
        let remainder = |i: usize| ideal[i] - sizes[i] as f64;
        remainder(b).partial_cmp(&remainder(a)).expect("shares are numbers").then(a.cmp(&b))
    });
    let left = shared - sizes.iter().sum::<usize>();
    by_remainder.iter().cycle().take(left).for_each(|&part| sizes[part] += 1);
    sizes.iter_mut().for_each(|size| *size += least);
    side_by_side(&sizes)
}

fn side_by_side(widths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let part = |&width: &usize| {
        end += width;
        end - width..end
    };
    widths.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(parts: &[Range<usize>]) -> Vec<usize> {
        assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start) && parts[0].start == 0, "{parts:?}");
        parts.iter().map(Range::len).collect()
    }

    #[test]
    fn shards_share_key_and_value_heads_by_their_weights() {
        for (weights, parts, longest, expected) in [
            (vec![1.0, 1.0, 0.5], 2, 4, vec![1, 2]),
            (vec![0.5, 1.0, 1.0], 2, 4, vec![2, 1]),
            (vec![1.0; 4], 2, 4, vec![2, 2]),
            (vec![1.0, 1.0, 1.0, 9.0], 2, 3, vec![3, 1]),
            (vec![9.0, 1.0, 1.0, 1.0], 2, 2, vec![2, 2]),
        ] {
            assert_eq!(lengths(&share_out(&weights, parts, longest)), expected, "{weights:?} over {parts}");
        }
    }

    #[test]
    fn parts_are_as_even_as_whole_numbers_allow() {
        for (total, shards, expected) in [
            (101, 2, vec![51, 50]),
            (10, 3, vec![4, 3, 3]),
            (129, 4, vec![33, 32, 32, 32]),
            (12, 5, vec![3, 3, 2, 2, 2]),
            (4, 4, vec![1, 1, 1, 1]),
        ] {
            assert_eq!(lengths(&apportion(total, &vec![1.0; shards])), expected, "{total} over {shards}");
        }
    }

    #[test]
    fn parts_follow_the_weights_and_nobody_goes_empty() {
        for (total, weights, expected) in [
            (10, vec![1.0, 1.0, 0.5], vec![4, 4, 2]),
            (5, vec![100.0, 1.0, 1.0], vec![3, 1, 1]),
            (8, vec![3.0, 1.0], vec![6, 2]),
            (3, vec![1e-6, 1.0], vec![1, 2]),
        ] {
            assert_eq!(lengths(&apportion(total, &weights)), expected, "{total} by {weights:?}");
        }
    }

    #[test]
    fn dims_are_cut_at_multiples_of_64_with_at_most_one_odd_part() {
        for (len, shards) in [(50257, 2), (50257, 8), (151936, 8), (32000, 4), (11008, 3)] {
            let parts = cut_dim(len, &vec![1.0; shards], 1);
            let lengths = lengths(&parts);
            assert_eq!(lengths.iter().sum::<usize>(), len);
            let odd = lengths.iter().filter(|length| !length.is_multiple_of(64)).count();
            assert!(odd <= 1, "{len} over {shards}: {lengths:?}");
            let most = *lengths.iter().max().unwrap() as f64;
            assert!(most <= 1.03 * len as f64 / shards as f64, "{len} over {shards}: {lengths:?}");
        }
        assert_eq!(lengths(&cut_dim(1408, &[1.0; 3], 1)), [480, 480, 448]);
        assert_eq!(lengths(&cut_dim(129, &[1.0; 4], 1)), [33, 32, 32, 32]);
        assert_eq!(lengths(&cut_dim(11008, &[1.0, 1.0, 0.5], 1)), [4416, 4416, 2176]);
        assert_eq!(lengths(&cut_dim(192, &[1.0; 2], 1)), [96, 96]);
        assert_eq!(lengths(&cut_dim(192, &[1.0; 2], 64)), [128, 64]);
    }
}
