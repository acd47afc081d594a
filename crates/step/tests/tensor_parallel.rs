//! A model cut over ranks against the whole on one: every loss and every gradient.

#[path = "../../../golden/cases.rs"]
mod cases;
mod support;

use cases::CASES;
use evenkeel_comm::{Options, run_ranks};
use evenkeel_device::kernel::Segments;
use evenkeel_device::{DType, Device, Queue};
use evenkeel_model::{Batch, Cut, Gradients, LossOptions, Model, ParamSpec, Parameters, RotaryTables, Sharing};
use evenkeel_step::schedule::{Chain, evaluation, sequential};
use evenkeel_step::{Executor, TensorGroups, verify};
use support::{batch, cpu, golden};

const OPTIONS: LossOptions = LossOptions { smoothing: 0.1, scale: 0.05 };
/// Relative by norm: what is promised of f32.
const TOLERANCE: f64 = 1e-5;
/// Gradients that are zero but for rounding (keys' biases) have no relative error to speak of: of the whole's norm.
const FLOOR: f64 = 1e-6;

struct Outcome {
    losses: Vec<f32>,
    evaluated: Vec<f32>,
    gradients: Vec<(ParamSpec, Vec<f32>)>,
}

/// Where a model's weights come from, and what it reads.
trait Origin: Sync {
    fn model(&self) -> Model;
    fn parameters(&self, shard: &Model, dtype: DType, queue: &Queue) -> Parameters;
    fn batches(&self, model: &Model, dtype: DType, queue: &Queue) -> Vec<Batch>;
}

impl Origin for str {
    fn model(&self) -> Model {
        Model::open(&golden(self)).expect("a known architecture")
    }

    fn parameters(&self, shard: &Model, dtype: DType, queue: &Queue) -> Parameters {
        shard.load(&golden(self), dtype, queue).expect("golden weights fit")
    }

    fn batches(&self, model: &Model, dtype: DType, queue: &Queue) -> Vec<Batch> {
        (0..2).map(|micro| batch(model, micro, dtype, queue)).collect()
    }
}

/// A random Llama on so many tokens.
struct Random {
    vocabulary: usize,
    tokens: usize,
}

impl Origin for Random {
    fn model(&self) -> Model {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": self.vocabulary,
            "tie_word_embeddings": true, "initializer_range": 0.5,
        });
        Model::from_json(&config).unwrap()
    }

    fn parameters(&self, shard: &Model, dtype: DType, queue: &Queue) -> Parameters {
        Parameters::random(&shard.specs, dtype, 3, queue)
    }

    fn batches(&self, _: &Model, _: DType, queue: &Queue) -> Vec<Batch> {
        let ids: Vec<u32> = (0..self.tokens).map(|token| (token * 7919 % self.vocabulary) as u32).collect();
        vec![Batch::tokens(queue, &ids, &ids, Segments::uniform(1, self.tokens))]
    }
}

fn run(
    model: &Model,
    origin: &(impl Origin + ?Sized),
    groups: &TensorGroups,
    device: &Device,
    dtype: DType,
    recompute: bool,
) -> Outcome {
    let queue = device.compute();
    let parameters = origin.parameters(model, dtype, queue);
    let tables = RotaryTables::new(&model.config, queue, 64);
    let gradients = Gradients::new(&model.specs, queue);
    let batches = origin.batches(model, dtype, queue);
    let executor = Executor { model, device, parameters: &parameters, tables: &tables, gradients: &gradients, groups };
    let chunks: Vec<usize> = batches.iter().map(|batch| model.head.chunks(model.head.rows(batch)).count()).collect();
    let program = sequential(&Chain::of(model), &chunks, recompute);
    verify(&program).expect("a schedule of ours is sound");
    let found = executor.run(&program, &batches, OPTIONS);
    let losses = found.iter().flat_map(|found| queue.read(&found.losses)).collect();
    let program = evaluation(&Chain::of(model), chunks[0]);
    verify(&program).expect("a schedule of ours is sound");
    let evaluated = executor.run(&program, &batches[..1], OPTIONS);
    let evaluated = queue.read(&evaluated[0].losses);
    let gradients = parameters.ids().map(|id| queue.read(gradients.sum(queue, id)));
    Outcome { losses, evaluated, gradients: model.specs.iter().cloned().zip(gradients).collect() }
}

fn on_one_rank(origin: &(impl Origin + ?Sized), dtype: DType) -> Outcome {
    let model = origin.model();
    let groups = TensorGroups::of_world(&evenkeel_comm::Communicator::dry(0, 1), &model.shard);
    run(&model, origin, &groups, &cpu(1), dtype, false)
}

fn on_ranks(origin: &(impl Origin + ?Sized), cut: &Cut, dtype: DType, recompute: bool) -> Vec<Outcome> {
    let shards = origin.model().cut(cut).expect("enough heads");
    let outcomes = run_ranks(shards.len(), &Options::default(), |communicator| {
        let shard = &shards[communicator.rank()];
        let groups = TensorGroups::of_world(&communicator, &shard.shard);
        run(shard, origin, &groups, &cpu(1), dtype, recompute)
    });
    outcomes.expect("no rank fails")
}

fn cuts(shards: usize) -> Vec<Cut> {
    let uneven: Vec<f64> = (0..shards).map(|shard| 1.0 + 0.7 * shard as f64).collect();
    let split = |cut: Cut| Cut { split_sequence: true, ..cut };
    let (even, uneven) = (Cut::even(shards), Cut::weighted(uneven));
    vec![even.clone(), uneven.clone(), split(even), split(uneven)]
}

/// The part of a whole gradient that a shard holds.
fn part(whole: &[f32], spec: &ParamSpec) -> Vec<f32> {
    let [rows, cols] = spec.matrix;
    let mut held = vec![0.0; rows * cols];
    for piece in spec.slice.pieces() {
        for (row, held_row) in piece.rows.clone().zip(piece.held_rows.clone()) {
            let from = &whole[row * spec.whole[1]..][piece.cols.clone()];
            held[held_row * cols..][piece.held_cols.clone()].copy_from_slice(from);
        }
    }
    held
}

fn norm(values: impl IntoIterator<Item = f32>) -> f64 {
    values.into_iter().map(|value| (value as f64).powi(2)).sum::<f64>().sqrt()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    norm(a.iter().zip(b).map(|(a, b)| a - b))
}

fn compare(what: &str, whole: &Outcome, ranks: &[Outcome], tolerance: f64) {
    let total = norm(whole.gradients.iter().flat_map(|(_, gradient)| gradient.iter().copied()));
    for (rank, ours) in ranks.iter().enumerate() {
        for (ours, whole) in [(&ours.losses, &whole.losses), (&ours.evaluated, &whole.evaluated)] {
            let error = distance(ours, whole) / norm(whole.iter().copied());
            assert!(error <= tolerance, "{what}, rank {rank}: losses off by {error:e}");
        }
        assert_eq!(ours.losses, ranks[0].losses, "{what}: ranks know the same losses");
        for (id, (spec, gradient)) in ours.gradients.iter().enumerate() {
            let expected = part(&whole.gradients[id].1, spec);
            let (error, size) = (distance(gradient, &expected), norm(expected.iter().copied()));
            assert!(
                error <= tolerance * size + FLOOR * total,
                "{what}, rank {rank}: {} is off by {error:e} of {size:e}",
                spec.name
            );
            let first = match &spec.sharing {
                Sharing::Alone => rank,
                Sharing::Same => 0,
                Sharing::Summed(holders) => holders.start,
            };
            assert_eq!(gradient, &ranks[first].gradients[id].1, "{what}: {} is one gradient", spec.name);
        }
    }
}

#[test]
fn losses_and_every_gradient_equal_the_single_rank_for_every_cut() {
    for case in CASES {
        let whole = on_one_rank(case, DType::F32);
        // One of the models has three heads.
        let heads = Model::open(&golden(case)).unwrap().config.heads;
        for shards in (1..=4).filter(|&shards| shards <= heads) {
            for (index, cut) in cuts(shards).into_iter().enumerate() {
                let recompute = index % 2 == 1;
                let ranks = on_ranks(case, &cut, DType::F32, recompute);
                let what = format!("{case}, {cut:?}, recompute {recompute}");
                compare(&what, &whole, &ranks, TOLERANCE);
            }
        }
    }
}

#[test]
fn a_head_in_several_chunks_and_fewer_tokens_than_ranks_make_no_difference() {
    for (origin, shards) in [
        (Random { vocabulary: 1 << 20, tokens: 20 }, 2),
        (Random { vocabulary: 50, tokens: 2 }, 4),
        (Random { vocabulary: 50, tokens: 1 }, 3),
    ] {
        let whole = on_one_rank(&origin, DType::F32);
        for cut in cuts(shards) {
            let what = format!("{} tokens, {cut:?}", origin.tokens);
            compare(&what, &whole, &on_ranks(&origin, &cut, DType::F32, false), TOLERANCE);
        }
    }
}
