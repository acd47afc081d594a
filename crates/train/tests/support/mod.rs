//! Ranks to train with.

#![allow(dead_code, reason = "every test file uses its own part")]

#[path = "../../../../golden/numbers.rs"]
mod numbers;
#[path = "../../../device/tests/support/device.rs"]
pub mod under_test;

use std::path::{Path, PathBuf};

use evenkeel_comm::{Options, RankFailure};
use evenkeel_device::{DType, Device, Queue};
use evenkeel_model::{Cut, Imputation, Input, Model, ParamId, ParamSpec, Parameters, Sharing, ZeroSharding, ZeroStage};
pub use evenkeel_step::Strategy;
use evenkeel_train::{Ranks, Samples, StateKind, Trainer, TrainerOptions};
#[allow(unused_imports, reason = "every test file uses its own part")]
pub use numbers::{distance, floats, indices};

pub fn device(threads: usize) -> Device {
    under_test::device(threads, 1 << 29)
}

/// A golden folder, where cargo runs the tests or where a bundle was unpacked.
pub fn golden(case: &str) -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo or a bundle's script runs the tests");
    Path::new(&package).join("../../golden").join(case)
}

/// Ranks on these axes, with a split stream and in this stage of ZeRO.
pub fn spread(dp: usize, tp: usize, zero: usize) -> Strategy {
    let cut = Cut { split_sequence: tp > 1, ..Cut::even(tp) };
    Strategy::of(cut).with_replicas(dp, ZeroStage::ALL[zero])
}

/// Ranks that train a model, with the parameters that `parameters` makes for a shard; they compute in their dtype.
pub fn start_on(
    model: &Model,
    strategy: &Strategy,
    options: TrainerOptions,
    parameters: impl Fn(&Model, ZeroSharding, &Queue) -> Parameters + Send + Sync + 'static,
) -> Ranks {
    let (shards, strategy) = (model.cut(&strategy.cut).unwrap(), strategy.clone());
    let threads = 3 - strategy.ranks().min(2);
    Ranks::start(strategy.ranks(), &Options::default(), move |communicator| -> Result<Trainer, RankFailure> {
        let rank = communicator.rank();
        let device = under_test::device_of_rank(rank, threads, 1 << 29);
        let shard = &strategy.model(&shards, rank);
        let parameters = parameters(shard, strategy.zero_sharding(rank), device.compute());
        let strategy = Strategy { dtype: parameters.dtype(), ..strategy.clone() };
        Ok(Trainer::new(&shards, &strategy, communicator, device, parameters, options))
    })
    .unwrap()
}

/// Ranks that share a model.
pub fn start(
    model: &Model,
    cut: &Cut,
    options: TrainerOptions,
    parameters: impl Fn(&Model, &Queue) -> Parameters + Send + Sync + 'static,
) -> Ranks {
    start_on(model, &Strategy::of(cut.clone()), options, move |shard, _, queue| parameters(shard, queue))
}

pub fn random(model: &Model, cut: &Cut, options: TrainerOptions, dtype: DType) -> Ranks {
    start(model, cut, options, move |shard, queue| Parameters::random(shard, dtype, ZeroSharding::NONE, 7, queue))
}

/// All parameters and what the optimizer keeps beside them, whole.
pub fn state(ranks: &Ranks) -> Vec<Vec<f32>> {
    let kinds =
        StateKind::ALL.into_iter().flat_map(|kind| ranks.specs().iter().enumerate().map(move |spec| (kind, spec)));
    let whole = |(kind, (index, spec)): (StateKind, (usize, &ParamSpec))| {
        let id = ParamId(index);
        let read = move |trainer: &mut Trainer| Some(trainer.device.compute().read(&trainer.kept(kind, id)?.1));
        if !kind.is_kept_by_all() {
            let is_kept = ranks.with_trainers(move |trainer| trainer.kept(kind, id).is_some()).unwrap().contains(&true);
            return is_kept.then(|| ranks.read_rows(kind, id, 0..spec.whole[0]).unwrap());
        }
        let kept = ranks.with_trainers(read).unwrap();
        assert!(kept.iter().all(|other| *other == kept[0]), "all ranks keep the same {kind:?} of {}", spec.name);
        kept.into_iter().next().flatten()
    };
    kinds.filter_map(whole).collect()
}

/// Asserts that two curves have as many numbers, and that none is further off than `absolute` and `relative` of it allow.
#[track_caller]
pub fn compare_curves(what: &str, ours: &[f64], expected: &[f64], [absolute, relative]: [f64; 2]) {
    assert_eq!(ours.len(), expected.len(), "{what}: {ours:?}, expected {expected:?}");
    assert!(!ours.is_empty(), "{what}: nothing to compare");
    for (place, (ours, expected)) in ours.iter().zip(expected).enumerate() {
        let is_close = (ours - expected).abs() <= absolute + relative * expected.abs();
        assert!(is_close, "{what}, number {place}: {ours}, expected {expected}");
    }
}

/// Asserts that the state of ranks is off by no more than so much of it, by norm.
#[track_caller]
pub fn compare_states(what: &str, ours: &Ranks, expected: &Ranks, tolerance: f64) {
    let [ours, expected] = [ours, expected].map(|ranks| state(ranks).concat());
    assert_eq!(ours.len(), expected.len(), "{what}");
    let off: f64 = ours.iter().zip(&expected).map(|(a, b)| ((a - b) as f64).powi(2)).sum();
    let size: f64 = expected.iter().map(|x| (*x as f64).powi(2)).sum();
    assert!(off.sqrt() <= tolerance * size.sqrt(), "{what}: state off by {off:e} of {size:e}");
}

/// Asserts that what several ranks hold of a parameter, as `values` reads it, is the same on all of them.
pub fn check_replicas<V: PartialEq + Send + 'static>(
    what: &str,
    ranks: &Ranks,
    values: impl Fn(&mut Trainer) -> Vec<V> + Send + Sync + 'static,
) {
    let held = ranks.with_trainers(move |trainer| (trainer.model.specs.clone(), values(trainer))).unwrap();
    let mut shared = 0;
    for (specs, values) in &held {
        for (id, spec) in specs.iter().enumerate() {
            let first = match &spec.sharing {
                Sharing::Alone => continue,
                Sharing::Same => 0,
                Sharing::Summed(holders) => holders.start,
            };
            shared += 1;
            assert!(values[id] == held[first].1[id], "{what}: {}", spec.name);
        }
    }
    assert!(shared > 0);
}

/// Micro-batches of different sizes, with labels that do not count.
pub fn uneven_micros(step: usize, count: usize) -> Vec<Samples> {
    let micro = |micro: usize| {
        let lengths = vec![5 + micro % 3, 4, 6];
        let tokens: usize = lengths.iter().sum();
        let ids: Vec<u32> = (0..tokens).map(|i| ((i / 2 * 5 + (step + micro) % 7 * 3) % 64) as u32).collect();
        let label = |i: usize| if (i + micro).is_multiple_of(7) { u32::MAX } else { ids[(i + 1) % tokens] };
        Samples::Tokens { labels: (0..tokens).map(label).collect(), ids, segment_lengths: lengths }
    };
    (0..count).map(micro).collect()
}

/// Two micro-batches of different sizes.
pub fn micros(model: &Model, step: usize) -> Vec<Samples> {
    let micro = |micro: usize| match model.config.input {
        Input::Tokens { .. } => {
            let lengths = vec![5 + micro, 4, 6];
            let tokens: usize = lengths.iter().sum();
            let ids: Vec<u32> = (0..tokens).map(|i| ((i / 2 * 5 + (step + micro) % 3 * 3) % 64) as u32).collect();
            let labels = (0..tokens).map(|i| ids[(i + 1) % tokens]).collect();
            Samples::Tokens { labels, ids, segment_lengths: lengths }
        }
        Input::Texts { .. } => {
            let lengths = vec![5 + micro, 4, 6];
            let tokens: usize = lengths.iter().sum();
            let ids = (0..tokens).map(|i| ((i / 2 * 5 + (step + micro) % 3 * 3) % 64) as u32).collect();
            let labels = (0..3).map(|text| (text + step as u32) % 3).collect();
            Samples::Texts { ids, types: vec![0; tokens], labels, segment_lengths: lengths }
        }
        Input::Images { size, channels, .. } => {
            let labels: Vec<u32> = (0..2 + micro as u32).map(|image| (image + step as u32) % 3).collect();
            let shade = |i: usize| labels[i / (channels * size * size)] as f32 / 3.0 + ((i + step) % 13) as f32 / 50.0;
            let pixels = (0..labels.len() * channels * size * size).map(shade).collect();
            Samples::Images { pixels, labels }
        }
    };
    vec![micro(0), micro(1)]
}

pub const POLICIES: [Imputation; 3] = [Imputation::Zero, Imputation::Average, Imputation::Same];

pub fn vit() -> Model {
    let config = serde_json::json!({
        "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 4,
        "id2label": {"0": "a", "1": "b", "2": "c", "3": "d"}, "hidden_act": "gelu", "initializer_range": 0.1,
    });
    Model::from_json(&config).unwrap()
}
