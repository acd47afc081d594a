//! The strategies there are for so many sequences a step on given devices.

use std::collections::BTreeSet;

use evenkeel_model::{Cut, Part, ZeroStage};
use evenkeel_step::schedule::{Arrangement, NONE, OASES, Schedule, Units};
use evenkeel_step::{Devices, Mesh, Pipeline, PipelineOrder, Strategy};

/// Devices that ranks may compute on, one each.
#[derive(Clone, Debug, PartialEq)]
pub struct RankDevices {
    pub devices: Devices,
    /// By rank: about how fast its device is, in any unit.
    pub speeds: Vec<f64>,
}

/// The devices and sequences to find strategies for.
pub struct Space {
    pub devices: Vec<RankDevices>,
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
/// Sequences of a micro-batch, at most: more make no product faster.
const MOST_SEQUENCES: usize = 1024;

impl Space {
    /// All of them that compute nothing again, in an order that depends on nothing else: fewer ranks, shards and micro-batches first,
    /// and strategies that need less of everything before those that need more. Stages are not cut yet: their pipelines have cuts of
    /// 0, as many as there must be.
    pub fn strategies(&self) -> Vec<Strategy> {
        let mut all = Vec::new();
        for RankDevices { devices, speeds } in &self.devices {
            for mesh in meshes(speeds.len()).into_iter().filter(|mesh| self.sequences.is_multiple_of(mesh.dp)) {
                let of_replica = self.sequences / mesh.dp;
                let is_like = |count: usize| of_replica / count == self.like.micro_batch;
                let counts = divisors(of_replica).into_iter().filter(|count| *count <= MOST_MICROS || is_like(*count));
                let counts = counts.filter(|count| mesh.pp == 1 || *count >= mesh.pp);
                let counts = counts.filter(|count| of_replica / count <= MOST_SEQUENCES || is_like(*count));
                for (accumulate, weights) in counts.flat_map(|count| weights(mesh, speeds).map(move |it| (count, it))) {
                    let uncut = if mesh.tp > 1 { self.uncut.clone() } else { BTreeSet::new() };
                    let strategy = Strategy {
                        micro_batch: of_replica / accumulate,
                        accumulate,
                        cut: Cut { uncut, ..Cut::weighted(weights) },
                        devices: devices.clone(),
                        ..self.like.clone()
                    };
                    all.extend(arranged(&strategy.with_replicas(mesh.dp, ZeroStage::Nothing), mesh.pp));
                }
            }
        }
        all
    }
}

/// ZeRO's stages, orders, parts and streams for given axes.
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
            None => staged.in_stages(1, Pipeline::default()),
            Some(order) => staged.in_stages(pp, Pipeline { cuts: vec![0; pp * order.usual_chunks() - 1], order }),
        };
        for (parts, &split_sequence) in (1..=parts).flat_map(|parts| streams.iter().map(move |it| (parts, it))) {
            let cut = Cut { split_sequence, ..staged.cut.clone() };
            all.push(Strategy { cut, arrangement: Arrangement::default().in_parts(parts), ..staged.clone() });
        }
    }
    all
}

/// The same strategy with less memory, and more time: it computes attention or MLP again, if they are units of their own, or all
/// layers.
pub fn recomputing(strategy: &Strategy, chooses_units: bool) -> Vec<Strategy> {
    if strategy.arrangement.schedule != NONE {
        return Vec::new();
    }
    let some = [Units::Attention, Units::Mlp].map(|units| Arrangement::of(OASES).recomputing(units));
    let some = some.into_iter().filter(|_| chooses_units);
    let all = Arrangement::of(Schedule::usual(true, strategy.cut.weights.len()));
    let parts = strategy.arrangement.parts;
    some.chain([all]).map(|arrangement| strategy.clone().arranged(arrangement.in_parts(parts))).collect()
}

/// The widths of shards to try: even ones and, if their devices are unequal, widths like the devices' speeds and halfway to them,
/// since a device that is twice as fast may gain less from twice the width.
fn weights(mesh: Mesh, speeds: &[f64]) -> impl Iterator<Item = Vec<f64>> {
    let mut of_shards = vec![0.0; mesh.tp];
    speeds.iter().enumerate().for_each(|(rank, speed)| of_shards[mesh.shard(rank)] += speed);
    let mean = of_shards.iter().sum::<f64>() / mesh.tp as f64;
    let toward =
        move |share: f64| of_shards.iter().map(|speed| 1.0 - share + share * speed / mean).collect::<Vec<f64>>();
    let are_unequal = toward(1.0).iter().any(|weight| (weight - 1.0).abs() > 0.01);
    let shares: &[f64] = if are_unequal { &[0.0, 0.5, 1.0] } else { &[0.0] };
    shares.iter().map(move |share| toward(*share))
}

/// All axes with so many ranks.
fn meshes(ranks: usize) -> Vec<Mesh> {
    let pairs = divisors(ranks).into_iter().flat_map(|tp| divisors(ranks / tp).into_iter().map(move |pp| (tp, pp)));
    pairs.map(|(tp, pp)| Mesh { pp, dp: ranks / tp / pp, tp }).collect()
}

fn divisors(of: usize) -> Vec<usize> {
    (1..=of).filter(|divisor| of.is_multiple_of(*divisor)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_strategy_has_all_sequences_and_ranks_and_occurs_once() {
        let cores = |ranks: usize| RankDevices {
            devices: Devices::Cpu { cores_per_rank: 4 / ranks, comm_cores: 0 },
            speeds: vec![1.0; ranks],
        };
        // A configuration with stages has no effect on strategies without them.
        let stages = Pipeline { cuts: vec![1], order: PipelineOrder::Gpipe };
        let like = Strategy::of(Cut::even(1)).in_stages(2, stages);
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

    #[test]
    fn unequal_devices_get_unequal_widths_to_try() {
        let of = |mesh, speeds: &[f64]| weights(mesh, speeds).collect::<Vec<_>>();
        let tp = Mesh { pp: 1, dp: 1, tp: 2 };
        assert_eq!(of(tp, &[2.0, 2.0]), [[1.0, 1.0]]);
        assert_eq!(of(tp, &[3.0, 1.0]), [[1.0, 1.0], [1.25, 0.75], [1.5, 0.5]]);
        // Every shard has one fast and one slow device.
        assert_eq!(of(Mesh { pp: 2, dp: 1, tp: 2 }, &[3.0, 3.0, 1.0, 1.0]), [[1.0, 1.0]]);
    }
}
