//! Rules other than AdamW: against PyTorch, against the single rank on every mesh, and through checkpoints and reshards.

mod support;

use evenkeel_device::DType;
use evenkeel_model::{Cut, GRAIN, Model, ParamId, Parameters, ZeroSharding};
use evenkeel_store::{Folder, SafeTensorsFile};
use evenkeel_train::{
    AdamW, MuonScale, OptimizerOptions, Progress, Ranks, Rule, Samples, StateKind, Trainer, TrainerOptions, checkpoint,
    costs,
};
use support::{Strategy, device, distance, floats, golden, indices, micros, spread, start_on, state};

const SGD: Rule = Rule::Sgd { momentum: 0.9, nesterov: false };
const NESTEROV: Rule = Rule::Sgd { momentum: 0.9, nesterov: true };
const LION: Rule = Rule::Lion { beta1: 0.9, beta2: 0.99 };

fn muon(scale: MuonScale, nesterov: bool, epsilon: f32) -> Rule {
    Rule::Muon { momentum: 0.95, nesterov, scale, others: AdamW { beta1: 0.9, beta2: 0.95, epsilon } }
}

/// With an epsilon that keeps what AdamW does from the signs of gradients that are nothing but rounding.
fn rules() -> [Rule; 5] {
    let muon = muon(MuonScale::MatchRmsAdamW, true, 1e-3);
    [Rule::Sgd { momentum: 0.0, nesterov: false }, NESTEROV, LION, Rule::Adafactor, muon]
}

fn options(rule: Rule) -> TrainerOptions {
    let optimizer = OptimizerOptions { rule, weight_decay: 0.1, decay_vectors: false, clip_norm: Some(0.5) };
    TrainerOptions { optimizer: Some(optimizer), label_smoothing: 0.0, longest: 64, dropout_seed: 0 }
}

/// Key and value heads that four shards share, and a tied head.
fn llama() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "tie_word_embeddings": true,
    });
    Model::from_json(&config).unwrap()
}

/// Fused and transposed matrices, biases, and a table of positions.
fn gpt2() -> Model {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64,
    });
    Model::from_json(&config).unwrap()
}

fn ranks_in(model: &Model, topology: &Strategy, rule: Rule, dtype: DType) -> Ranks {
    start_on(model, topology, options(rule), move |shard, split, queue| {
        Parameters::random(shard, dtype, split, 7, queue)
    })
}

fn ranks(model: &Model, topology: &Strategy, rule: Rule) -> Ranks {
    ranks_in(model, topology, rule, DType::F32)
}

fn lr(rule: Rule) -> f64 {
    match rule {
        Rule::Sgd { .. } => 0.1,
        Rule::Lion { .. } => 1e-3,
        _ => 1e-2,
    }
}

fn train(model: &Model, ranks: &Ranks, rule: Rule, steps: std::ops::Range<usize>) -> Vec<f64> {
    let step = |step| {
        let outcome = ranks.step([micros(model, step), micros(model, step + 1)].concat(), lr(rule)).unwrap();
        assert!(outcome.updated);
        outcome.loss
    };
    steps.map(step).collect()
}

fn whole(ranks: &Ranks, kind: StateKind, id: usize) -> Vec<f32> {
    ranks.read_rows(kind, ParamId(id), 0..ranks.specs()[id].whole[0]).unwrap()
}

fn weights(ranks: &Ranks) -> Vec<Vec<f32>> {
    (0..ranks.specs().len()).map(|id| whole(ranks, StateKind::Weight, id)).collect()
}

#[test]
fn ten_steps_follow_pytorch_by_every_rule() {
    const STEPS: usize = 10;
    let expected =
        SafeTensorsFile::open(golden("qwen2").join("optimizers.safetensors")).expect("golden files are sound");
    let folder = Folder::open(golden("qwen2")).unwrap();
    let (ids, labels, offsets) =
        (indices(&expected, "input_ids"), indices(&expected, "labels"), indices(&expected, "segments"));
    for (name, rule, lr) in [
        ("sgd", SGD, 1e-2),
        ("nesterov", NESTEROV, 1e-2),
        ("lion", LION, 1e-4),
        ("adafactor", Rule::Adafactor, 1e-2),
        ("muon", muon(MuonScale::MatchRmsAdamW, true, 1e-8), 1e-3),
        ("muon_original", muon(MuonScale::Original, false, 1e-8), 1e-3),
    ] {
        let device = device(2);
        let queue = device.compute();
        let model = Model::open(&folder).unwrap();
        let parameters = model.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
        let start: Vec<Vec<f32>> = parameters.ids().map(|id| queue.read(&parameters.master(id))).collect();
        let optimizer = OptimizerOptions { rule, weight_decay: 0.1, decay_vectors: true, clip_norm: None };
        let options = TrainerOptions { optimizer: Some(optimizer), ..options(rule) };
        let mut trainer = Trainer::alone(model, device.clone(), parameters, options);
        let losses = floats(&expected, &format!("losses.{name}"));
        for (step, &theirs) in losses.iter().enumerate() {
            let of_step = |all: &[u32]| all[step * all.len() / STEPS..][..all.len() / STEPS].to_vec();
            let segment_lengths = offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
            let samples = Samples::Tokens { ids: of_step(&ids), labels: of_step(&labels), segment_lengths };
            let ours = trainer.step(&[samples], lr).unwrap().loss;
            assert!((ours - theirs as f64).abs() <= 1e-4, "{name} step {step}: {ours}, {theirs}");
        }
        let parameters = &trainer.parameters;
        for (id, start) in parameters.ids().zip(&start) {
            let parameter = format!("{name}.{}", parameters.specs[id.0].name);
            let (ours, theirs) = (queue.read(&parameters.master(id)), floats(&expected, &parameter));
            let (error, moved) = (distance(&ours, &theirs), distance(start, &theirs));
            assert!(error <= 1e-2 * moved, "{parameter} off by {error} of {moved}");
        }
    }
}

/// Meshes in which every rule is compared with the single rank.
fn topologies() -> Vec<Strategy> {
    let uneven = Strategy { cut: Cut::weighted(vec![1.0, 2.0, 1.0]), ..spread(1, 3, 0) };
    let meshes = [(1, 2, 0), (1, 4, 0), (2, 1, 0), (2, 1, 1), (3, 1, 2), (2, 1, 3), (2, 2, 1), (2, 2, 3)];
    meshes.into_iter().map(|(dp, tp, zero)| spread(dp, tp, zero)).chain([uneven]).collect()
}

#[test]
fn every_rule_moves_every_parameter_as_on_the_single_rank() {
    const STEPS: usize = 3;
    for (name, model) in [("llama", llama()), ("gpt2", gpt2())] {
        for rule in rules() {
            let single = ranks(&model, &spread(1, 1, 0), rule);
            let start = weights(&single);
            // The sign of what is nothing but rounding differs: one step, and without such elements.
            let steps = if matches!(rule, Rule::Lion { .. }) { 1 } else { STEPS };
            let curve = train(&model, &single, rule, 0..steps);
            let expected = weights(&single);
            for topology in topologies() {
                let what = format!("{name}, {rule:?}, {topology:?}");
                let ours = ranks(&model, &topology, rule);
                for (step, (ours, theirs)) in train(&model, &ours, rule, 0..steps).iter().zip(&curve).enumerate() {
                    assert!((ours - theirs).abs() <= 1e-5 * theirs, "{what}, step {step}: {ours}, single {theirs}");
                }
                for (id, (found, expected)) in weights(&ours).iter().zip(&expected).enumerate() {
                    let parameter = &ours.specs()[id].name;
                    let mut is_sure = vec![true; found.len()];
                    if let Rule::Lion { .. } = rule {
                        let means = whole(&single, StateKind::Mean, id);
                        let most = means.iter().fold(0.0f32, |most, mean| most.max(mean.abs()));
                        is_sure = means.iter().map(|mean| mean.abs() > 1e-4 * most).collect();
                        let unsure = means.iter().filter(|mean| **mean != 0.0 && mean.abs() <= 1e-4 * most).count();
                        assert!(2 * unsure < means.len(), "{what}: {parameter} is compared by its half");
                    }
                    let sure = |values: &[f32]| -> Vec<f32> {
                        values.iter().zip(&is_sure).filter(|(_, is_sure)| **is_sure).map(|(&value, _)| value).collect()
                    };
                    let [found, expected, start] = [found, expected, &start[id]].map(|values| sure(values));
                    let (error, moved) = (distance(&found, &expected), distance(&start, &expected));
                    // A key's bias has no gradient but rounding.
                    let is_moved = moved > 1e-6 * (expected.len() as f64).sqrt();
                    assert!(!is_moved || error <= 2e-3 * moved, "{what}: {parameter} off by {error} of {moved}");
                }
            }
        }
    }
}

#[test]
fn a_checkpoint_of_every_rule_resumes_on_any_other_topology() {
    let model = llama();
    let uneven = Strategy { cut: Cut::weighted(vec![1.0, 2.0, 1.0]), ..spread(2, 3, 1) };
    let topologies = [spread(1, 1, 0), spread(2, 2, 3), uneven, spread(2, 1, 2), spread(1, 4, 0)];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    for (which, rule) in rules().into_iter().enumerate() {
        for index in [which, which + 2] {
            let [from, to] = [index, index + 1].map(|index| &topologies[index % topologies.len()]);
            let what = format!("{rule:?}, {from:?} to {to:?}");
            let before = ranks(&model, from, rule);
            train(&model, &before, rule, 0..2);
            let progress = Progress { step: 2, ..Progress::default() };
            checkpoint::save(&path, &before, &progress, serde_json::Value::Null).unwrap();
            let after = ranks(&model, to, rule);
            checkpoint::load(&path, &after).unwrap();
            assert_eq!(state(&before), state(&after), "{what}");
            let (ours, theirs) = (train(&model, &after, rule, 2..4), train(&model, &before, rule, 2..4));
            let off = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off <= 1e-4, "{what}: {ours:?}, {theirs:?}");
            // On the same one, bit for bit.
            let same = ranks(&model, from, rule);
            checkpoint::load(&path, &same).unwrap();
            train(&model, &same, rule, 2..4);
            assert_eq!(state(&before), state(&same), "{rule:?}, {from:?} again");
        }
    }
}

#[test]
fn the_state_of_another_rule_is_refused_with_both_names() {
    let (model, alone) = (llama(), spread(1, 1, 0));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let all: Vec<Rule> = rules().into_iter().chain([Rule::AdamW(AdamW::default())]).collect();
    for &from in &all {
        checkpoint::save(&path, &ranks(&model, &alone, from), &Progress::default(), serde_json::Value::Null).unwrap();
        for &to in &all {
            let loaded = checkpoint::load(&path, &ranks(&model, &alone, to));
            match loaded {
                Ok(_) => assert_eq!(from, to),
                Err(error) => {
                    assert_ne!(from, to, "{error}");
                    assert!(error.to_string().contains("holds the state of the optimizer \""), "{error}");
                    assert!(error.hint().is_some_and(|hint| hint.contains("train.optimizer")) && !error.is_fault());
                }
            }
        }
    }
}

#[test]
fn the_state_of_every_rule_moves_with_a_reshard() {
    let model = llama();
    for (rule, (dp, tp, zero)) in rules().into_iter().zip([(1, 2, 0), (2, 2, 0), (2, 2, 3), (2, 2, 1), (2, 2, 3)]) {
        let topology = spread(dp, tp, zero);
        let cut = |weights: &[f64]| Cut { weights: weights.to_vec(), ..topology.cut.clone() };
        let [moved, stayed] = [(); 2].map(|()| ranks(&model, &topology, rule));
        train(&model, &moved, rule, 0..2);
        let before = state(&moved);
        moved.reshard(cut(&[3.0, 1.0])).unwrap();
        assert_eq!(state(&moved), before, "{rule:?}");
        let ours = train(&model, &moved, rule, 2..4);
        moved.reshard(cut(&[1.0, 1.0])).unwrap();
        let ours = [ours, train(&model, &moved, rule, 4..5)].concat();
        let theirs = train(&model, &stayed, rule, 0..5);
        for (ours, theirs) in ours.iter().zip(&theirs[2..]) {
            assert!((ours - theirs).abs() <= 1e-4, "{rule:?}: {ours}, {theirs}");
        }
    }
}

#[test]
fn ranks_that_hold_the_same_keep_the_same_bits() {
    let model = llama();
    for rule in rules() {
        for topology in [spread(1, 4, 0), spread(2, 2, 0)] {
            let ranks = ranks_in(&model, &topology, rule, DType::Bf16);
            train(&model, &ranks, rule, 0..3);
            support::check_replicas(&format!("{rule:?}"), &ranks, |trainer| {
                let queue = trainer.device.compute();
                let read = |id| trainer.kept(StateKind::Weight, id).map(|(_, kept)| queue.read(&kept));
                trainer.parameters.ids().map(read).collect()
            });
        }
    }
}

#[test]
fn state_takes_what_a_rule_keeps() {
    let model = llama();
    let elements = |is_counted: &dyn Fn(ParamId) -> bool| -> u64 {
        let of = |&(id, _): &(ParamId, usize)| {
            if is_counted(id) { model.specs[id.0].len().next_multiple_of(GRAIN) } else { 0 }
        };
        model.buckets.iter().flat_map(|bucket| &bucket.members).map(of).sum::<usize>() as u64
    };
    let all = elements(&|_| true);
    let hidden = elements(&|id| model.is_hidden_matrix(id));
    assert!(0 < hidden && hidden < all);
    let rows_and_columns: usize =
        model.specs.iter().map(|spec| if spec.is_vector() { spec.len() } else { spec.whole.iter().sum() }).sum();
    let [plain, sgd, lion, adafactor, muon] = rules();
    for (rule, kept) in [
        (Rule::AdamW(AdamW::default()), 2 * all),
        (plain, 0),
        (sgd, all),
        (lion, all),
        (muon, hidden + 2 * (all - hidden)),
        (adafactor, rows_and_columns as u64),
    ] {
        let cost = costs(std::slice::from_ref(&model), &spread(1, 1, 0), options(rule), &micros(&model, 0))[0];
        // Masters and gradients; scalars, tables and padding beside them.
        let expected = 4 * (2 * all + kept);
        let beside = cost.state_bytes.checked_sub(expected);
        assert!(beside.is_some_and(|bytes| bytes < 8 << 10), "{rule:?}: {}, expected {expected}", cost.state_bytes);
        let weights: u64 = model.parameter_count();
        let exact = (rule.state_bytes(&model) / 4).checked_sub(weights).unwrap();
        assert!(exact <= kept && 10 * (kept - exact) <= kept, "{rule:?}: {exact} numbers, {kept} in the arena");
    }
}
