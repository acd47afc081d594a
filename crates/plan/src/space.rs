//! The strategies there are for so many sequences a step on given devices.

use std::collections::BTreeSet;

use evenkeel_model::{Cut, Part, ZeroStage};
use evenkeel_step::schedule::{Arrangement, Schedule};
use evenkeel_step::{Devices, Pipeline, PipelineOrder, Strategy};

/// The devices and sequences to find strategies for.
pub struct Space {
    /// Numbers of ranks, and what they compute on.
    pub devices: Vec<(usize, Devices)>,
    /// Sequences of a step, all replicas together.
    pub sequences: usize,
    /// Everything that is not searched, such as the dtype. Its micro-batches are looked at, however many they are.
    pub like: Strategy,
    /// Parts of the model that every shard computes whole.
    pub uncut: BTreeSet<Part>,
}

/// More parts make products too small for what they hide.
const MOST_PARTS: usize = 2;
/// Micro-batches of a replica in a step, at most: more take longer to simulate, and hardly less memory.
const MOST_MICROS: usize = 64;

impl Space {
    /// All of them, in an order that depends on nothing else: fewer ranks, shards and micro-batches first, and what needs less of
    /// everything before what needs more. Stages are not cut yet: their pipelines have cuts of 0, as many as there must be.
    pub fn strategies(&self) -> Vec<Strategy> {
        let axes = self.devices.iter().flat_map(|(ranks, devices)| {
            triples(*ranks).into_iter().map(move |[pp, dp, tp]| (pp, dp, tp, devices.clone()))
        });
        let mut all = Vec::new();
        for (pp, dp, tp, devices) in axes.filter(|(_, dp, ..)| self.sequences.is_multiple_of(*dp)) {
            let of_replica = self.sequences / dp;
            let is_like = |count: usize| of_replica / count == self.like.micro_batch;
            let counts = divisors(of_replica).into_iter().filter(|count| *count <= MOST_MICROS || is_like(*count));
            for accumulate in counts.filter(|count| pp == 1 || *count >= pp) {
                let strategy = Strategy {
                    micro_batch: of_replica / accumulate,
                    accumulate,
                    cut: if tp > 1 { Cut { uncut: self.uncut.clone(), ..Cut::even(tp) } } else { Cut::even(1) },
                    devices: devices.clone(),
                    ..self.like.clone()
                };
                all.extend(arranged(&strategy.with_replicas(dp, ZeroStage::Nothing), pp));
            }
        }
        all
    }
}

/// ZeRO's stages, orders, recomputation, parts and streams for given axes.
fn arranged(strategy: &Strategy, pp: usize) -> Vec<Strategy> {
    let tp = strategy.cut.weights.len();
    let zeros = match (strategy.dp, pp) {
        (1, _) => &ZeroStage::ALL[..1],
        (_, 1) => &ZeroStage::ALL[..],
        // Later stages of ZeRO move the same parameters for every micro-batch.
        _ => &ZeroStage::ALL[..2],
    };
    let orders = if pp == 1 { vec![None] } else { PipelineOrder::ALL.map(Some).to_vec() };
    let parts = if tp == 1 { 1 } else { MOST_PARTS.min(strategy.micro_batch) };
    let streams: &[bool] = if tp == 1 || !strategy.cut.uncut.is_empty() { &[false] } else { &[true, false] };
    let mut all = Vec::new();
    for (order, &zero) in orders.iter().flat_map(|order| zeros.iter().map(move |zero| (order, zero))) {
        let staged = strategy.clone().with_replicas(strategy.dp, zero);
        let staged = match *order {
            None => staged,
            Some(order) => staged.in_stages(pp, Pipeline { cuts: vec![0; pp * order.usual_chunks() - 1], order }),
        };
        for recomputes in [false, true] {
            let arrangement = Arrangement::of(Schedule::usual(recomputes, tp));
            for (parts, &split_sequence) in (1..=parts).flat_map(|parts| streams.iter().map(move |it| (parts, it))) {
                let cut = Cut { split_sequence, ..staged.cut.clone() };
                all.push(Strategy { cut, arrangement: arrangement.in_parts(parts), ..staged.clone() });
            }
        }
    }
    all
}

/// All [pp, dp, tp] with this product.
fn triples(ranks: usize) -> Vec<[usize; 3]> {
    let pairs = divisors(ranks).into_iter().flat_map(|tp| divisors(ranks / tp).into_iter().map(move |pp| (tp, pp)));
    pairs.map(|(tp, pp)| [pp, ranks / tp / pp, tp]).collect()
}

fn divisors(of: usize) -> Vec<usize> {
    (1..=of).filter(|divisor| of.is_multiple_of(*divisor)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_strategy_has_all_sequences_and_ranks_and_occurs_once() {
        let cores = |ranks: usize| (ranks, Devices::Cpu { cores_per_rank: 4 / ranks, comm_cores: 0 });
        let like = Strategy::of(Cut::even(1));
        let space = Space { devices: [1, 2, 4].map(cores).to_vec(), sequences: 8, like, uncut: BTreeSet::new() };
        let all = space.strategies();
        for (index, strategy) in all.iter().enumerate() {
            assert_eq!(strategy.micro_batch * strategy.micros_per_step(), 8, "{strategy}");
            assert_eq!(strategy.ranks() * strategy.devices.cores_per_rank(), 4, "{strategy}");
            assert!(all[..index].iter().all(|other| other != strategy), "{strategy} twice");
        }
        let has =
            |pp: usize, dp: usize, tp: usize| all.iter().any(|it| (it.pp, it.dp, it.cut.weights.len()) == (pp, dp, tp));
        assert!(
            [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
                .iter()
                .all(|&(p, d, t)| has(p, d, t))
        );
    }
}
