//! Ranks to train with.

use evenkeel_comm::{Options, RankFailure};
use evenkeel_device::{CpuOptions, DType, Device, Queue};
use evenkeel_model::{Cut, Model, ParamId, Parameters};
use evenkeel_train::{Kind, Ranks, Trainer, TrainerOptions};

pub fn device(threads: usize) -> Device {
    Device::cpu(&CpuOptions { memory_bytes: 1 << 28, ..CpuOptions::with_threads(threads) }).unwrap()
}

/// Ranks that share a model, with the parameters that `parameters` makes for a shard.
pub fn start(
    model: &Model,
    cut: &Cut,
    options: TrainerOptions,
    parameters: impl Fn(&Model, &Queue) -> Parameters + Send + Sync + 'static,
) -> Ranks {
    let shards = model.cut(cut).unwrap();
    let threads = 3 - shards.len().min(2);
    Ranks::start(shards.len(), &Options::default(), move |communicator| -> Result<Trainer, RankFailure> {
        let device = device(threads);
        let parameters = parameters(&shards[communicator.rank()], device.compute());
        Ok(Trainer::new(&shards, communicator, device, parameters, options))
    })
    .unwrap()
}

pub fn random(model: &Model, cut: &Cut, options: TrainerOptions, dtype: DType) -> Ranks {
    start(model, cut, options, move |shard, queue| Parameters::random(&shard.specs, dtype, 7, queue))
}

/// All parameters and moments, whole.
pub fn state(ranks: &Ranks) -> Vec<Vec<f32>> {
    let whole = |kind, (index, rows)| ranks.read_rows(kind, ParamId(index), 0..rows).unwrap();
    let sizes = || ranks.specs().iter().map(|spec| spec.whole[0]).enumerate();
    let kinds = [Kind::Weight, Kind::Mean, Kind::Variance];
    kinds.into_iter().flat_map(|kind| sizes().map(move |size| (kind, size))).map(|(k, size)| whole(k, size)).collect()
}
