//! Compares a model on one rank with the same model cut over several: losses, gradients and timelines.

use std::ops::Range;
use std::time::Instant;

use evenkeel_comm::{Communicator, Count, ExchangeKind, Options, run_ranks};
use evenkeel_device::{DType, Device, Queue};
use evenkeel_model::{
    Batch, Cut, Gradients, LossOptions, Migration, Model, Noise, ParamId, ParamSpec, Parameters, RotaryTables, Sharing,
    Stretch, Widths, ZeroSharding, ZeroStage,
};
use evenkeel_step::schedule::{Arrangement, Chain, PartSize, evaluation};
use evenkeel_step::trace::{Recording, Span, Timeline};
use evenkeel_step::{Executor, Pipeline, PipelineOrder, Program, Strategy, join, measure_rows, verify};

use super::{device, device_of, golden, on_cuda, parts, sizes};

const OPTIONS: LossOptions = LossOptions { smoothing: 0.1, scale: 0.05 };
/// Relative by norm: the promise for f32.
pub const TOLERANCE: f64 = 1e-5;
/// Relative to the whole's norm: gradients that are zero but for rounding (keys' biases) have no meaningful relative error.
const FLOOR: f64 = 1e-6;

pub struct Outcome {
    pub losses: Vec<f32>,
    evaluated: Vec<f32>,
    /// By parameter: the elements of its slice that the rank keeps, and their gradients.
    gradients: Vec<(ParamSpec, Range<usize>, Vec<f32>)>,
    pub program: Program,
    pub spans: Vec<Span>,
    /// The peak of the step alone, weights and gradients included.
    pub peak_bytes: u64,
    /// Calls and bytes of its migrations, sent and received.
    pub migrated: Count,
    /// All-reductions of the step, as its groups counted them.
    pub all_reductions: u64,
}

impl Outcome {
    pub fn evaluated(&self) -> &[f32] {
        &self.evaluated
    }

    /// The bits of the gradients that the rank keeps, by parameter.
    pub fn gradient_bits(&self) -> Vec<Vec<u32>> {
        self.gradients.iter().map(|(_, _, values)| values.iter().map(|value| value.to_bits()).collect()).collect()
    }
}

/// The source of a model, its weights and its batches.
pub trait Origin: Sync {
    fn model(&self) -> Model;
    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters;
    /// Micro-batches in so many parts.
    fn micros(&self, model: &Model, parts: usize, dtype: DType, queue: &Queue) -> Vec<Vec<Batch>>;
}

impl Origin for str {
    fn model(&self) -> Model {
        Model::open(&golden(self)).expect("a known architecture")
    }

    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        shard.load(&golden(self), dtype, split, queue).expect("golden weights fit")
    }

    fn micros(&self, model: &Model, count: usize, dtype: DType, queue: &Queue) -> Vec<Vec<Batch>> {
        (0..2).map(|micro| parts(model, micro, count, dtype, queue)).collect()
    }
}

/// A golden model in training, with dropout.
pub struct Dropping {
    pub case: &'static str,
    /// The keys of its dropout in config.json.
    keys: serde_json::Value,
}

impl Origin for Dropping {
    fn model(&self) -> Model {
        let mut config = golden(self.case).config().clone();
        config.as_object_mut().unwrap().extend(self.keys.as_object().unwrap().clone());
        Model::from_json(&config).unwrap()
    }

    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        self.case.parameters(shard, dtype, split, queue)
    }

    fn micros(&self, model: &Model, parts: usize, dtype: DType, queue: &Queue) -> Vec<Vec<Batch>> {
        noisy(self.case.micros(model, parts, dtype, queue))
    }
}

/// Micro-batches with noise, as one after the other has it.
pub fn noisy(micros: Vec<Vec<Batch>>) -> Vec<Vec<Batch>> {
    let mut noise = Noise { seed: 3, first_token: 0 };
    let mut noisy = |batch: Batch| {
        let batch = batch.with_noise(noise);
        noise.first_token += batch.token_count() as u64;
        batch
    };
    micros.into_iter().map(|parts| parts.into_iter().map(&mut noisy).collect()).collect()
}

/// Models with dropout in every place that can have it.
pub fn dropping() -> Vec<Dropping> {
    let of = |case, keys| Dropping { case, keys };
    vec![
        // Two key and value heads: four shards share them.
        of("llama_packed", serde_json::json!({"attention_dropout": 0.3})),
        of("gpt2", serde_json::json!({"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1})),
        of("gpt_neox", serde_json::json!({"attention_dropout": 0.3, "hidden_dropout": 0.2})),
        of("gpt_neox_serial", serde_json::json!({"attention_dropout": 0.3, "hidden_dropout": 0.2})),
        of("gpt_oss", serde_json::json!({"attention_dropout": 0.3})),
        of("vit", serde_json::json!({"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2})),
    ]
}

/// How a model runs.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub dp: usize,
    pub zero: usize,
    pub arrangement: Arrangement,
    pub stages: Option<Stages>,
}

/// Stages of about as many units each, over so many places.
#[derive(Clone, Copy, Debug)]
pub struct Stages {
    pub pp: usize,
    pub order: PipelineOrder,
    /// Units that the first stage has too few.
    pub shift: usize,
}

impl Stages {
    fn pipeline(&self, units: usize) -> Pipeline {
        let chunks = self.order.usual_chunks();
        let stages = self.pp * chunks;
        let cut = |stage: usize| (stage * units / stages).saturating_sub(self.shift).max(stage);
        Pipeline { cuts: (1..stages).map(cut).collect(), order: self.order }
    }
}

impl Way {
    pub fn strategy(&self, shards: &[Model], dtype: DType) -> Strategy {
        let strategy = Strategy::of(Cut::even(shards.len())).with_replicas(self.dp, ZeroStage::ALL[self.zero]);
        let strategy = Strategy { dtype, ..strategy.arranged(self.arrangement) };
        match self.stages {
            Some(stages) => strategy.in_stages(stages.pp, stages.pipeline(shards[0].units.len())),
            None => strategy,
        }
    }
}

impl From<Arrangement> for Way {
    fn from(arrangement: Arrangement) -> Way {
        Way { dp: 1, zero: 0, arrangement, stages: None }
    }
}

pub fn on_one_rank(origin: &(impl Origin + ?Sized), dtype: DType) -> Outcome {
    run(&[origin.model()], None, origin, &Communicator::dry(0, 1), &device_of(1), dtype, Arrangement::default().into())
}

pub fn on_ranks(
    origin: &(impl Origin + ?Sized),
    cut: &Cut,
    dtype: DType,
    way: impl Into<Way>,
    options: &Options,
) -> Vec<Outcome> {
    on_working_ranks(origin, cut, None, dtype, way, options)
}

/// Ranks that keep the shards of a cut and compute with those of these widths.
pub fn on_working_ranks(
    origin: &(impl Origin + ?Sized),
    cut: &Cut,
    work: Option<&Widths>,
    dtype: DType,
    way: impl Into<Way>,
    options: &Options,
) -> Vec<Outcome> {
    let (shards, way) = (origin.model().cut(cut).expect("enough heads"), way.into());
    let outcomes = run_ranks(way.strategy(&shards, dtype).ranks(), options, |communicator| {
        let device = device(communicator.rank());
        (run(&shards, work, origin, &communicator, &device, dtype, way), device)
    });
    // A GPU's memory is freed when nothing runs on the GPU any more. If all ranks share one GPU, freeing it earlier would block
    // ranks that the NCCL kernels of others wait for.
    let (outcomes, _devices): (Vec<Outcome>, Vec<Device>) = outcomes.expect("no rank fails").into_iter().unzip();
    outcomes
}

/// The memory that a rank's step needs, from a dry run.
pub fn dry_peak_bytes(origin: &(impl Origin + ?Sized), cut: &Cut, rank: usize, way: impl Into<Way>) -> u64 {
    dry_working_peak_bytes(origin, cut, None, rank, way)
}

pub fn dry_working_peak_bytes(
    origin: &(impl Origin + ?Sized),
    cut: &Cut,
    work: Option<&Widths>,
    rank: usize,
    way: impl Into<Way>,
) -> u64 {
    let (shards, way) = (origin.model().cut(cut).expect("enough heads"), way.into());
    let strategy = way.strategy(&shards, DType::F32);
    let communicator = Communicator::dry(rank, strategy.ranks());
    let (device, split) = (Device::dry(), strategy.zero_sharding(rank));
    let parameters = Parameters::allocate(&strategy.model(&shards, rank), DType::F32, split, device.compute());
    step(&shards, work, &communicator, &device, &parameters, origin, way);
    device.usage().peak_bytes
}

pub fn timeline(outcomes: &[Outcome]) -> Timeline {
    Timeline { ranks: outcomes.iter().map(|outcome| outcome.spans.clone()).collect() }
}

/// One step, and its results.
struct Step {
    gradients: Gradients,
    tables: RotaryTables,
    micros: Vec<Vec<Batch>>,
    losses: Vec<f32>,
    program: Program,
    recording: Recording,
}

fn verified(chains: &[Chain], rank: usize, write: impl Fn(usize, &Chain) -> Program) -> Program {
    let mut programs: Vec<Program> = chains.iter().enumerate().map(|(rank, chain)| write(rank, chain)).collect();
    verify(&programs).unwrap_or_else(|unsound| panic!("a schedule of ours is sound: {unsound}"));
    programs.swap_remove(rank)
}

/// A rank's model to compute with, its migration, and the chains of all ranks.
fn working(
    shards: &[Model],
    work: Option<&Widths>,
    chains: Vec<Chain>,
    strategy: &Strategy,
    rank: usize,
) -> (Model, Option<Migration>, Vec<Chain>) {
    let mesh = strategy.mesh();
    let shard = mesh.shard(rank);
    let Some(widths) = work.cloned() else { return (strategy.model(shards, rank), None, chains) };
    let mut work = shards[0].cut(&shards[0].shard.cut_of(widths)).expect("enough heads");
    let (mut all, dtype) = (Migration::all(shards, &work), strategy.dtype);
    let chains = chains.into_iter().enumerate();
    let chains =
        chains.map(|(rank, chain)| chain.with_migration(&all[mesh.shard(rank)], mesh.shard(rank), dtype)).collect();
    (work.swap_remove(shard), Some(all.swap_remove(shard)), chains)
}

fn step(
    shards: &[Model],
    work: Option<&Widths>,
    communicator: &Communicator,
    device: &Device,
    parameters: &Parameters,
    origin: &(impl Origin + ?Sized),
    way: Way,
) -> Step {
    let (rank, queue) = (communicator.rank(), device.compute());
    let strategy = way.strategy(shards, parameters.dtype());
    let (chains, mesh) = (Chain::all(shards, &strategy), strategy.mesh());
    let (model, migration, chains) = &working(shards, work, chains, &strategy, rank);
    let tables = RotaryTables::new(&model.config, queue, 64);
    let gradients = Gradients::new(parameters, queue);
    let mut shares: Vec<Vec<Vec<Batch>>> = (0..way.dp).map(|_| Vec::new()).collect();
    let micros = origin.micros(model, way.arrangement.parts, parameters.dtype(), queue);
    micros.into_iter().enumerate().for_each(|(micro, parts)| shares[micro % way.dp].push(parts));
    let sizes: Vec<_> = shares.iter().map(|micros| sizes(&shards[0], micros)).collect();
    let program = verified(chains, rank, |rank, chain| way.arrangement.write(chain, &sizes[mesh.replica(rank)]));
    let micros = shares.swap_remove(mesh.replica(rank));
    drop(shares);
    let groups = join(communicator, &chains[rank].groups);
    let (groups, migration) = (&groups[..], migration.as_ref());
    let executor = Executor {
        model,
        device,
        parameters,
        tables: &tables,
        gradients: &gradients,
        groups,
        migration,
        pruning: None,
    };
    let mut recording = Recording::default();
    let found = executor.run(&program, &micros, OPTIONS, Some(&mut recording));
    let losses = found.iter().flat_map(|found| queue.read(&found.losses)).collect();
    Step { gradients, tables, micros, losses, program, recording }
}

fn run(
    shards: &[Model],
    work: Option<&Widths>,
    origin: &(impl Origin + ?Sized),
    communicator: &Communicator,
    device: &Device,
    dtype: DType,
    way: Way,
) -> Outcome {
    let (rank, queue) = (communicator.rank(), device.compute());
    let strategy = way.strategy(shards, dtype);
    let model = &strategy.model(shards, rank);
    let parameters = origin.parameters(model, dtype, strategy.zero_sharding(rank), queue);
    let chain = Chain::of(&shards[strategy.mesh().shard(rank)], &strategy, rank);
    measure_rows(model, &chain, &join(communicator, &chain.groups), device, &parameters);
    device.reset_peak();
    let epoch = Instant::now();
    let Step { gradients, tables, micros, losses, program, recording } =
        step(shards, work, communicator, device, &parameters, origin, way);
    device.finish();
    let peak_bytes = device.usage().peak_bytes;
    let all_reductions = communicator.counts().of(ExchangeKind::AllReduce).calls;
    let spans = recording.read(&program, epoch).expect("everything has run");

    let chains = Chain::all(shards, &strategy);
    let groups = join(communicator, &chains[rank].groups);
    let executor = Executor {
        model,
        device,
        parameters: &parameters,
        tables: &tables,
        gradients: &gradients,
        groups: &groups,
        migration: None,
        pruning: None,
    };
    let mut evaluated = Vec::new();
    for part in micros.into_iter().flatten() {
        let size = PartSize::of(&shards[0], &part);
        let program = verified(&chains, rank, |_, chain| evaluation(chain, &size));
        let found = executor.run(&program, &[vec![part]], OPTIONS, None);
        evaluated.extend(found.iter().flat_map(|found| queue.read(&found.losses)));
    }
    let gradient = |id: ParamId| {
        let spec = model.specs[id.0].clone();
        let own = parameters.own_stretch(id).filter(|_| spec.is_trained);
        let Some(Stretch { elements, place }) = own else { return (spec, 0..0, Vec::new()) };
        let own = gradients.own(queue, parameters.bucket_of(id)).col_range(place);
        (spec, elements, queue.read(&own))
    };
    let gradients = parameters.ids().map(gradient).collect();
    let migrated = communicator.counts().of(ExchangeKind::Redistribute);
    Outcome { losses, evaluated, gradients, program, spans, peak_bytes, migrated, all_reductions }
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

pub fn compare(what: &str, whole: &Outcome, ranks: &[Outcome], tolerance: f64) {
    for (rank, ours) in ranks.iter().enumerate() {
        for (ours, whole) in [(&ours.losses, &whole.losses), (&ours.evaluated, &whole.evaluated)] {
            let error = distance(ours, whole) / norm(whole.iter().copied());
            assert!(error <= tolerance, "{what}, rank {rank}: losses off by {error:e}");
        }
        assert_eq!(ours.losses, ranks[0].losses, "{what}: ranks know the same losses");
    }
    compare_gradients(what, whole, ranks, tolerance);
    for (rank, ours) in ranks.iter().enumerate() {
        for (id, (spec, _, gradient)) in ours.gradients.iter().enumerate() {
            let first = match &spec.sharing {
                Sharing::Alone => rank,
                Sharing::Same => 0,
                Sharing::Summed(holders) => holders.start,
            };
            assert_eq!(gradient, &ranks[first].gradients[id].2, "{what}: {} is one gradient", spec.name);
        }
    }
}

/// Every gradient that a rank keeps is that part of the whole one.
pub fn compare_gradients(what: &str, whole: &Outcome, ranks: &[Outcome], tolerance: f64) {
    let total = norm(whole.gradients.iter().flat_map(|(_, _, gradient)| gradient.iter().copied()));
    for (rank, ours) in ranks.iter().enumerate() {
        for (id, (spec, elements, gradient)) in
            ours.gradients.iter().enumerate().filter(|(_, (spec, ..))| spec.is_trained)
        {
            let expected = &part(&whole.gradients[id].2, spec)[elements.clone()];
            let (error, size) = (distance(gradient, expected), norm(expected.iter().copied()));
            assert!(
                error <= tolerance * size + FLOOR * total,
                "{what}, rank {rank}: {} is off by {error:e} of {size:e}",
                spec.name
            );
        }
    }
}

/// Every loss and every gradient that a rank keeps is that of the same rank of others.
pub fn compare_rank_by_rank(what: &str, ours: &[Outcome], theirs: &[Outcome], tolerance: f64) {
    let total =
        norm(theirs.iter().flat_map(|rank| &rank.gradients).flat_map(|(_, _, gradient)| gradient.iter().copied()));
    assert_eq!(ours.len(), theirs.len());
    for (rank, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let error = distance(&ours.losses, &theirs.losses) / norm(theirs.losses.iter().copied());
        assert!(error <= tolerance, "{what}, rank {rank}: losses off by {error:e}");
        // On a GPU, the bits of a row depend on the number of rows: products choose their kernels by it.
        let error = distance(&ours.evaluated, &theirs.evaluated) / norm(theirs.evaluated.iter().copied());
        let allowed = if on_cuda() { tolerance } else { 0.0 };
        assert!(error <= allowed, "{what}, rank {rank}: evaluation is off by {error:e}");
        for ((spec, _, gradient), (_, _, expected)) in ours.gradients.iter().zip(&theirs.gradients) {
            let (error, size) = (distance(gradient, expected), norm(expected.iter().copied()));
            let name = &spec.name;
            assert!(
                error <= tolerance * size + FLOOR * total,
                "{what}, rank {rank}: {name} off by {error:e} of {size:e}"
            );
        }
    }
}

/// The distance of all gradients that ranks keep from those of one rank, relative to their size.
pub fn gradient_error(whole: &Outcome, ranks: &[Outcome]) -> f64 {
    let (mut off, mut size) = (0.0, 0.0);
    for (id, (spec, elements, gradient)) in ranks.iter().flat_map(|rank| rank.gradients.iter().enumerate()) {
        let expected = &part(&whole.gradients[id].2, spec)[elements.clone()];
        off += distance(gradient, expected).powi(2);
        size += norm(expected.iter().copied()).powi(2);
    }
    (off / size).sqrt()
}

/// The number of elements whose gradients the ranks keep, all together.
pub fn kept_elements(ranks: &[Outcome]) -> usize {
    ranks.iter().flat_map(|rank| &rank.gradients).map(|(_, elements, _)| elements.len()).sum()
}
