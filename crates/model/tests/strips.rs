//! Groups of heads that shards share by samples: the shards' results add up to the whole's, and nothing is computed twice.

#[path = "../../../golden/cases.rs"]
mod cases;
mod support;

use cases::CASES;
use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{DType, Device, Queue, Tensor};
use evenkeel_model::{
    Batch, Config, Context, Cut, Dim, Generator, Gradients, Images, Input, Model, Noise, Parameters, RotaryTables,
    SHARES, Shard, Sharing, Unit, UnitKind, ZeroSharding, widths_of,
};
use evenkeel_store::Folder;
use serde_json::{Value, json};

/// Relative by norm: the promise for f32.
const TOLERANCE: f64 = 1e-5;
/// Relative to the whole's norm: gradients that are zero but for rounding (keys' biases) have no meaningful relative error.
const FLOOR: f64 = 1e-6;
const BF16_TOLERANCE: f64 = 2e-2;

/// Cases that are built differently.
const ARCHITECTURES: [&str; 7] = ["llama2", "gpt2", "gpt_neox", "gpt_oss", "gptj", "phi3", "vit"];

/// Those whose attention can be cut.
fn cases() -> impl Iterator<Item = &'static str> {
    CASES.into_iter().filter(|case| {
        let config = dropping(case).config;
        config.whole_parts(2).is_empty() && !config.hands_values_on()
    })
}

fn golden(case: &str) -> Folder {
    Folder::open(support::golden().join(case)).expect("golden folders are sound")
}

fn device() -> Device {
    support::device(1, 1 << 30)
}

/// A golden model with dropout in every place that can have it.
fn dropping(case: &str) -> Model {
    let keys: Value = match case {
        "gpt2" | "gptj" => json!({"attn_pdrop": 0.3, "resid_pdrop": 0.2}),
        "phi3" => json!({"attention_dropout": 0.3, "resid_pdrop": 0.2}),
        "gpt_neox" | "gpt_neox_serial" => json!({"attention_dropout": 0.3, "hidden_dropout": 0.2}),
        "bert" | "roberta" | "vit" => json!({"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2}),
        _ => json!({"attention_dropout": 0.3}),
    };
    let mut config = golden(case).config().clone();
    let text = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
    text.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let found = Model::open(&golden(case)).expect("a known architecture").config;
    Model::new(Config { dropouts: Config::from_json(&config).expect("known keys").dropouts, ..found })
}

/// A cut whose shards have these parts of the line of all groups.
fn cut(config: &Config, head_shares: &[usize]) -> Cut {
    let even = Cut::even(head_shares.len());
    let shards = Shard::cut(config, &even).expect("enough of everything");
    let widths = widths_of(&shards).with(Dim::Heads, head_shares.to_vec());
    Cut { widths: Some(widths), ..even }
}

/// Cuts of a line over 2, 3 and 4 shards.
fn cuts(groups: usize, most_shards: usize) -> Vec<Vec<usize>> {
    let total = groups * SHARES;
    let mut cuts = vec![
        vec![total * 2 / 3, total - total * 2 / 3],
        // A shard with less than a group.
        vec![total - 23, 23],
        vec![20, total - 20],
        // A shard with nothing, in any place.
        vec![total / 2 + 7, 0, total / 2 - 7],
        vec![0, 33, total - 33],
        vec![total - 33, 33, 0],
        // One group shared by three shards, and by four.
        vec![20, 24, total - 44],
        vec![total - 44, 30, 14],
        vec![15, 17, 16, total - 48],
        vec![total * 3 / 8 + 1, total / 8 + 3, total / 4 + 9, total - total * 3 / 8 - total / 8 - total / 4 - 13],
    ];
    if groups == 4 {
        // Whole groups beside shared ones, and parts of two groups without a whole one between them.
        cuts.push(vec![SHARES, SHARES + 32, 32, SHARES]);
        cuts.push(vec![SHARES + 32, SHARES, SHARES + 32]);
        cuts.push(vec![40, 3 * SHARES, 24]);
    }
    cuts.retain(|cut| cut.len() <= most_shards);
    cuts
}

/// Samples of these lengths, or as many images.
fn batch(model: &Model, lengths: &[usize], first_token: u64, dtype: DType, queue: &Queue) -> Batch {
    let batch = match model.config.input {
        Input::Tokens { .. } | Input::Texts { .. } => {
            let offsets: Vec<usize> = (0..=lengths.len()).map(|count| lengths[..count].iter().sum()).collect();
            let tokens = offsets[lengths.len()];
            Batch::tokens(queue, &vec![1; tokens], &vec![IGNORE; tokens], Segments::new(offsets))
        }
        Input::Images { size, channels, .. } => {
            let (pixels, count) = (vec![0.5; lengths.len() * channels * size * size], lengths.len());
            Batch::images(queue, Images { pixels: &pixels, count }, &vec![0; count], model.config.input, dtype)
        }
    };
    batch.with_noise(Noise { seed: 5, first_token })
}

/// Micro-batches that add to the same gradients: some samples and a single one; packed documents of very different lengths.
const STEPS: [&[&[usize]]; 2] = [&[&[7, 5, 6, 5], &[9]], &[&[1, 13, 2, 4, 3, 9, 0, 6]]];

fn numbers(seed: u64, rows: usize, cols: usize, dtype: DType, queue: &Queue) -> Tensor {
    let mut random = fastrand::Rng::with_seed(seed);
    let values: Vec<f32> = (0..rows * cols).map(|_| random.f32() * 2.0 - 1.0).collect();
    queue.floats(rows, cols, dtype, &values)
}

/// The results of a unit's body in a step.
#[derive(PartialEq)]
struct Outcome {
    /// By micro-batch: the partial output, and the partial gradients of the inputs.
    outputs: Vec<Vec<f32>>,
    dinputs: Vec<Vec<f32>>,
    /// By parameter.
    gradients: Vec<Vec<f32>>,
}

/// One shard of a model with its parameters, ready to run.
struct Runner<'a> {
    model: &'a Model,
    parameters: &'a Parameters,
    gradients: Gradients,
    tables: RotaryTables,
    queue: &'a Queue,
}

impl<'a> Runner<'a> {
    fn new(model: &'a Model, parameters: &'a Parameters, queue: &'a Queue) -> Runner<'a> {
        let gradients = Gradients::new(parameters, queue);
        let tables = RotaryTables::new(&model.config, queue, 64);
        Runner { model, parameters, gradients, tables, queue }
    }

    fn step(&self, unit: &Unit, lengths: &[&[usize]], seed: u64) -> Outcome {
        let Runner { model, parameters, gradients, tables, queue } = self;
        let (dtype, hidden) = (parameters.dtype(), model.config.hidden);
        let (mut outputs, mut dinputs, mut first_token) = (Vec::new(), Vec::new(), 100);
        gradients.clear();
        for (micro, lengths) in (seed..).zip(lengths) {
            let batch = batch(model, lengths, first_token, dtype, queue);
            let tokens = batch.token_count();
            first_token += tokens as u64;
            let context = Context { queue, parameters, tables, batch: &batch, pruning: None };
            let inputs: Vec<Tensor> = (0..unit.input_count() as u64)
                .map(|input| numbers(1000 * micro + input, tokens, hidden, dtype, queue))
                .collect();
            let doutput = numbers(1000 * micro + 500, tokens, hidden, dtype, queue);
            let (_, first, _) = unit.body().forward(&context, &inputs);
            let (_, output, state) = unit.body().forward(&context, &inputs);
            let output = queue.read(&output);
            assert!(output == queue.read(&first), "recomputation repeats the same bits");
            let (gradients_of_inputs, backward) =
                unit.body().backward_input(&context, gradients, state, None, &doutput);
            unit.body().backward_weight(&context, gradients, backward);
            outputs.push(output);
            dinputs.extend(gradients_of_inputs.iter().map(|gradient| queue.read(gradient)));
        }
        let gradient = |id| gradients.sum_of_trained(queue, id).map_or_else(Vec::new, |sum| queue.read(&sum));
        let gradients = parameters.ids().map(gradient).collect();
        Outcome { outputs, dinputs, gradients }
    }
}

fn attentions(model: &Model) -> impl Iterator<Item = (usize, &Unit)> {
    let attends = |unit: &Unit| matches!(unit.kind, UnitKind::Attention(_) | UnitKind::Layer(_));
    model.units.iter().enumerate().filter(move |(_, unit)| attends(unit))
}

fn sum(summands: &[&Vec<f32>]) -> Vec<f32> {
    (0..summands[0].len()).map(|i| summands.iter().map(|values| values[i] as f64).sum::<f64>() as f32).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| (value as f64).powi(2)).sum::<f64>().sqrt()
}

fn assert_close(ours: &[f32], whole: &[f32], tolerance: f64, floor: f64, what: impl std::fmt::Display) {
    assert_eq!(ours.len(), whole.len(), "{what}");
    let error = norm(&ours.iter().zip(whole).map(|(a, b)| a - b).collect::<Vec<_>>());
    assert!(error <= tolerance * norm(whole) + floor, "{what}: off by {error:e} of {:e}", norm(whole));
}

/// A parameter's whole gradient, from those of all shards. If all shards compute the same, each one's is the whole.
fn whole_gradients(shards: &[Model], outcomes: &[Outcome], id: usize) -> Vec<Vec<f32>> {
    let [rows, cols] = shards[0].specs[id].whole;
    if shards[0].specs[id].sharing == Sharing::Same {
        return outcomes.iter().map(|outcome| outcome.gradients[id].clone()).collect();
    }
    let mut whole = vec![0.0; rows * cols];
    for (shard, outcome) in shards.iter().zip(outcomes) {
        let spec = &shard.specs[id];
        for piece in spec.slice.pieces() {
            for (row, held_row) in piece.rows.clone().zip(piece.held_rows.clone()) {
                let from = &outcome.gradients[id][held_row * spec.matrix[1]..][piece.held_cols.clone()];
                let to = &mut whole[row * cols..][piece.cols.clone()];
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
        }
    }
    vec![whole]
}

fn compare(what: &str, model: &Model, whole: &Outcome, shards: &[Model], outcomes: &[Outcome], tolerance: f64) {
    for (micro, expected) in whole.outputs.iter().enumerate() {
        let ours: Vec<&Vec<f32>> = outcomes.iter().map(|outcome| &outcome.outputs[micro]).collect();
        assert_close(&sum(&ours), expected, tolerance, 0.0, format!("{what}: output of micro-batch {micro}"));
    }
    for (input, expected) in whole.dinputs.iter().enumerate() {
        let ours: Vec<&Vec<f32>> = outcomes.iter().map(|outcome| &outcome.dinputs[input]).collect();
        assert_close(&sum(&ours), expected, tolerance, 0.0, format!("{what}: gradient of input {input}"));
    }
    let total = whole.gradients.iter().map(|gradient| norm(gradient).powi(2)).sum::<f64>().sqrt();
    for (id, expected) in whole.gradients.iter().enumerate() {
        for ours in whole_gradients(shards, outcomes, id) {
            let name = &model.specs[id].name;
            assert_close(&ours, expected, tolerance, FLOOR * total, format!("{what}: gradient of {name}"));
        }
    }
}

/// Runs the attentions of a model whole and cut in every way, and compares.
fn check(case: &str, dtype: DType, tolerance: f64) {
    let (device, folder, model) = (device(), golden(case), dropping(case));
    let queue = device.compute();
    let load = |model: &Model| model.load(&folder, dtype, ZeroSharding::NONE, queue).expect("golden weights fit");
    let parameters = load(&model);
    let whole = Runner::new(&model, &parameters, queue);
    for head_shares in cuts(model.config.kv_heads, model.config.heads.min(model.config.classes)) {
        let shards = model.cut(&cut(&model.config, &head_shares)).expect("enough heads");
        let parameters: Vec<Parameters> = shards.iter().map(load).collect();
        let runners = shards.iter().zip(&parameters).map(|(shard, parameters)| Runner::new(shard, parameters, queue));
        let runners: Vec<Runner> = runners.collect();
        for (index, unit) in attentions(&model) {
            for (step, lengths) in STEPS.into_iter().enumerate() {
                let what = format!("{case} {head_shares:?}, {}, step {step}", unit.kind);
                let expected = whole.step(unit, lengths, 7);
                let run = |runner: &Runner| {
                    let unit = &runner.model.units[index];
                    // An earlier step, whose cleared gradients must not affect the next.
                    runner.step(unit, lengths, 3);
                    runner.step(unit, lengths, 7)
                };
                let outcomes: Vec<Outcome> = runners.iter().map(run).collect();
                compare(&what, &model, &expected, &shards, &outcomes, tolerance);
            }
        }
    }
}

#[test]
fn what_shards_compute_of_shared_heads_adds_up_to_the_whole() {
    // On a GPU each new shape of a product costs a choice of its algorithm.
    let check = |case: &str| check(case, DType::F32, TOLERANCE);
    if support::on_cuda() { ARCHITECTURES.into_iter().for_each(check) } else { cases().for_each(check) }
}

#[test]
fn shared_heads_add_up_in_bf16() {
    ARCHITECTURES.iter().for_each(|case| check(case, DType::Bf16, BF16_TOLERANCE));
}

#[test]
fn no_product_and_no_attention_is_computed_twice() {
    for case in cases() {
        let model = dropping(case);
        let flops = |model: &Model, index: usize, lengths: &[&[usize]]| {
            let device = Device::dry();
            let parameters = Parameters::allocate(model, DType::F32, ZeroSharding::NONE, device.compute());
            Runner::new(model, &parameters, device.compute()).step(&model.units[index], lengths, 0);
            device.take_counts().flops()
        };
        for head_shares in cuts(model.config.kv_heads, model.config.heads.min(model.config.classes)) {
            let shards = model.cut(&cut(&model.config, &head_shares)).expect("enough heads");
            for (index, unit) in attentions(&model) {
                // What makes a convolution's weights of a token begins with a layer that every shard computes.
                let (UnitKind::Attention(layer) | UnitKind::Layer(layer)) = unit.kind else { unreachable!() };
                let generator = model.config.linear_attention.and_then(|sizes| sizes.generator);
                if model.config.layers[layer].is_linear && generator.is_some() {
                    continue;
                }
                for lengths in STEPS {
                    let of_shards: u128 = shards.iter().map(|shard| flops(shard, index, lengths)).sum();
                    assert_eq!(of_shards, flops(&model, index, lengths), "{case} {head_shares:?} {lengths:?}");
                }
            }
        }
    }
}

#[test]
fn a_dry_run_of_a_shared_shard_takes_the_same_memory_as_a_real_one() {
    for case in cases() {
        let model = dropping(case);
        let groups = model.config.kv_heads * SHARES;
        for shard in model.cut(&cut(&model.config, &[groups - 23, 23])).expect("enough heads") {
            let devices = [device(), Device::dry()];
            let peaks = devices.each_ref().map(|device| {
                let queue = device.compute();
                let parameters = Parameters::random(&shard, DType::Bf16, ZeroSharding::NONE, 1, queue);
                let runner = Runner::new(&shard, &parameters, queue);
                attentions(&shard).for_each(|(_, unit)| drop(runner.step(unit, STEPS[0], 0)));
                device.usage().peak_bytes
            });
            assert_eq!(peaks[0], peaks[1], "{case} shard {}", shard.shard.index);
            assert_eq!(devices[1].usage().live_bytes, 0, "{case}: everything is given back");
        }
    }
}

/// A config with this many groups of heads, of any number that divides eight.
fn config(kv_heads: usize) -> Config {
    let mut config = golden("llama2").config().clone();
    let sizes = json!({"num_attention_heads": 8, "num_key_value_heads": kv_heads, "hidden_size": 64, "head_dim": 8});
    config.as_object_mut().unwrap().extend(sizes.as_object().unwrap().clone());
    Config::from_json(&config).expect("a sound config")
}

/// `total` cut at random in `parts`, some of them perhaps empty.
fn random_parts(random: &mut fastrand::Rng, total: usize, parts: usize) -> Vec<usize> {
    let mut bounds: Vec<usize> = (1..parts).map(|_| random.usize(0..=total)).chain([0, total]).collect();
    bounds.sort_unstable();
    bounds.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

#[test]
fn every_head_of_every_token_is_computed_once() {
    let mut random = fastrand::Rng::with_seed(11);
    for _ in 0..3000 {
        let kv_heads = [1, 2, 4, 8][random.usize(0..4)];
        let (config, count) = (config(kv_heads), random.usize(2..=8));
        let head_shares = random_parts(&mut random, kv_heads * SHARES, count);
        let samples = random.usize(1..12);
        let lengths: Vec<usize> = (0..samples).map(|_| random.usize(0..40)).collect();
        let segments = Segments::new((0..=samples).map(|count| lengths[..count].iter().sum()).collect());
        let shards = Shard::cut(&config, &cut(&config, &head_shares)).expect("enough heads");
        let what = format!("{head_shares:?} of {kv_heads} groups, {segments:?}");
        let mut computed = vec![vec![0; segments.tokens()]; kv_heads];
        for shard in &shards {
            for strip in shard.strips() {
                let is_held = shard.kv_heads.start <= strip.kv_heads.start && strip.kv_heads.end <= shard.kv_heads.end;
                assert!(is_held, "{what}: {strip:?} by a shard with {:?}", shard.kv_heads);
                let rows = strip.rows(&segments);
                let is_whole = |bound: usize| bound == 0 || segments.iter().any(|segment| segment.end == bound);
                assert!(is_whole(rows.start) && is_whole(rows.end), "{what}: rows {rows:?} cut a sample");
                strip.kv_heads.for_each(|head| computed[head][rows.clone()].iter_mut().for_each(|times| *times += 1));
            }
        }
        assert!(computed.iter().flatten().all(|&times| times == 1), "{what}: {computed:?}");
    }
}

#[test]
fn a_share_of_a_group_is_that_share_of_many_samples() {
    let config = config(4);
    // Speeds 1 and 0.5: two thirds of the line.
    let shards = Shard::cut(&config, &cut(&config, &[171, 85])).expect("enough heads");
    let segments = Segments::uniform(64, 10);
    let pairs = |shard: &Shard| -> usize {
        shard.strips().iter().map(|strip| strip.kv_heads.len() * strip.rows(&segments).len()).sum()
    };
    assert_eq!(shards.iter().map(pairs).collect::<Vec<_>>(), [1710, 850]);
}

#[test]
fn widths_of_shared_shards_cut_the_same_again() {
    for (kv_heads, head_shares, is_shared) in [
        (4, vec![171, 85], true),
        (4, vec![192, 64], false),
        (4, vec![256, 0], false),
        (2, vec![50, 0, 78], true),
        (2, vec![64, 0, 64], false),
        (1, vec![20, 44], true),
    ] {
        let config = config(kv_heads);
        let cut = cut(&config, &head_shares);
        let shards = Shard::cut(&config, &cut).expect("enough heads");
        let widths = widths_of(&shards);
        assert_eq!(Some(&widths), cut.widths.as_ref());
        assert!(config.can_be_cut(&widths, shards.len()), "{widths:?}");
        assert_eq!(widths.share_heads_by_samples(), is_shared, "{widths:?}");
        assert!(shards.iter().all(|shard| shard.is_shared_by_samples() == is_shared), "{shards:?}");
    }
    let uneven = cut(&config(4), &[171, 85]).widths.unwrap().with(Dim::Heads, vec![171, 86]);
    assert!(!config(4).can_be_cut(&uneven, 2), "more than there is");
}

#[test]
fn parameters_of_shared_shards_lie_in_the_same_buckets_as_those_of_whole_groups() {
    for case in ["llama2", "qwen2", "gpt2", "gpt_neox", "vit"] {
        let model = dropping(case);
        let total = model.config.kv_heads * SHARES;
        let members = |model: &Model| -> Vec<Vec<usize>> {
            model.buckets.iter().map(|bucket| bucket.members.iter().map(|(id, _)| id.0).collect()).collect()
        };
        let homes = model.cut(&Cut::even(2)).expect("enough heads");
        for head_shares in [[total - 23, 23], [20, total - 20]] {
            for shard in model.cut(&cut(&model.config, &head_shares)).expect("enough heads") {
                assert_eq!(members(&shard), members(&homes[shard.shard.index]), "{case} {head_shares:?}");
                assert!(shard.buckets.iter().all(|bucket| !bucket.users.is_empty()), "{case} {head_shares:?}");
            }
        }
    }
    let model = dropping("gpt2");
    let shards = model.cut(&cut(&model.config, &[100, 0, 156])).expect("enough heads");
    let members = |shard: &Model| shard.buckets.iter().map(|bucket| bucket.members.len()).collect::<Vec<_>>();
    assert_eq!(members(&shards[1]), members(&shards[0]), "a shard without heads");
    assert!(shards[1].buckets.iter().all(|bucket| !bucket.users.is_empty()));
}

#[test]
#[should_panic(expected = "heads that shards share by samples have no cache")]
fn nothing_is_generated_on_shared_heads() {
    let (device, model) = (Device::dry(), dropping("llama2"));
    let shards = model.cut(&cut(&model.config, &[171, 85])).expect("enough heads");
    let parameters = Parameters::allocate(&shards[0], DType::F32, ZeroSharding::NONE, device.compute());
    let _ = Generator::new(&shards[0], &parameters, device.compute(), 1, 8);
}
