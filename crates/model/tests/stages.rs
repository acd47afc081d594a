//! A model cut in stages that run one after another against the whole: every loss and every gradient.

mod support;

use evenkeel_device::kernel::Segments;
use evenkeel_device::{DType, Device};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{
    Batch, Context, Gradients, LossOptions, Model, Noise, ParamId, Parameters, RotaryTables, ZeroSharding,
};
use serde_json::{Value, json};

const OPTIONS: LossOptions = LossOptions { smoothing: 0.1, scale: 0.05 };

/// Untied with dropout, tied with post norms, side by side, with a table of positions, with norms of sums.
fn configs() -> Vec<(&'static str, Value)> {
    let sizes = json!({
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "vocab_size": 64, "initializer_range": 0.2,
    });
    let with = |keys: Value| {
        let mut config = sizes.clone();
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        config
    };
    vec![
        (
            "llama",
            with(
                json!({"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": false, "attention_dropout": 0.2}),
            ),
        ),
        (
            "gemma3",
            with(json!({
                "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4,
                "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true,
                "layer_types": ["sliding_attention", "full_attention"],
            })),
        ),
        (
            "gpt_neox",
            with(json!({"model_type": "gpt_neox", "use_parallel_residual": true, "max_position_embeddings": 32})),
        ),
        (
            "gpt2",
            json!({
                "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64,
                "resid_pdrop": 0.2, "embd_pdrop": 0.1, "initializer_range": 0.2,
            }),
        ),
        (
            "roberta",
            with(json!({
                "model_type": "roberta", "max_position_embeddings": 34, "pad_token_id": 1, "num_labels": 5,
                "hidden_dropout_prob": 0.2, "classifier_dropout": 0.3,
            })),
        ),
    ]
}

struct Held {
    parameters: Parameters,
    gradients: Gradients,
    tables: RotaryTables,
}

impl Held {
    fn new(model: &Model, dtype: DType, device: &Device) -> Held {
        let queue = device.compute();
        let parameters = Parameters::random(model, dtype, ZeroSharding::NONE, 3, queue);
        let gradients = Gradients::new(&parameters, queue);
        Held { parameters, gradients, tables: RotaryTables::new(&model.config, queue, 32) }
    }

    fn context<'a>(&'a self, batch: &'a Batch, device: &'a Device) -> Context<'a> {
        let (queue, parameters, tables) = (device.compute(), &self.parameters, &self.tables);
        Context { queue, parameters, tables, batch, pruning: None }
    }

    fn gradient(&self, id: ParamId, device: &Device) -> Vec<f32> {
        device.compute().read(&self.gradients.sum(device.compute(), id))
    }
}

fn batch(model: &Model, device: &Device) -> Batch {
    let ids: Vec<u32> = (0..21).map(|token| token * 37 % 64).collect();
    let labels: Vec<u32> = ids.iter().map(|id| (id + 5) % 64).collect();
    let (queue, segments) = (device.compute(), Segments::new(vec![0, 7, 12, 21]));
    let batch = if model.config.input.is_classified() {
        Batch::texts(queue, &ids, &[0; 21], &[4, 0, 2], segments)
    } else {
        Batch::tokens(queue, &ids, &labels, segments)
    };
    batch.with_noise(Noise { seed: 5, first_token: 100 })
}

#[test]
fn stages_compute_what_the_whole_computes() {
    let device = support::device(2, 1 << 28);
    for (name, config) in configs() {
        let model = Model::from_json(&config).unwrap();
        let batch = batch(&model, &device);
        let units = model.units.len();
        for (dtype, keep) in [(DType::F32, Keep::Everything), (DType::F32, Keep::Stream), (DType::Bf16, Keep::Stream)] {
            let whole = Held::new(&model, dtype, &device);
            let losses =
                pass::losses_and_gradients(&model, &whole.context(&batch, &device), &whole.gradients, OPTIONS, keep);
            let losses = device.compute().read(&losses);
            let cuts = (1..units).map(|end| vec![0, end, units]).chain([(0..=units).collect()]);
            for bounds in cuts {
                let what = format!("{name}, {dtype:?}, {keep:?}, stages that begin at {bounds:?}");
                let stages: Vec<Model> = bounds.windows(2).map(|pair| model.stage(pair[0]..pair[1])).collect();
                let held: Vec<Held> = stages.iter().map(|stage| Held::new(stage, dtype, &device)).collect();
                let by_stages = run(&stages, &held, &batch, &device, keep);
                assert!(by_stages == losses, "{what}: other losses");
                check_gradients(&what, &stages, &held, &whole, &device);
            }
        }
    }
}

fn run(stages: &[Model], held: &[Held], batch: &Batch, device: &Device, keep: Keep) -> Vec<f32> {
    let (last, before) = stages.split_last().unwrap();
    let (mut stream, mut states) = (None, Vec::new());
    for (stage, held) in before.iter().zip(held) {
        let (leaving, state) = pass::stage_forward(stage, &held.context(batch, device), keep, stream.as_ref());
        stream = Some(leaving);
        states.push(state);
    }
    let of_last = held.last().unwrap();
    let context = of_last.context(batch, device);
    let (losses, mut gradient) = pass::last_stage(last, &context, &of_last.gradients, OPTIONS, keep, stream.as_ref());
    for ((stage, held), state) in before.iter().zip(held).zip(states).rev() {
        let context = held.context(batch, device);
        gradient = pass::stage_backward(stage, &context, &held.gradients, state, gradient.expect("a stream arrived"));
    }
    assert!(gradient.is_none(), "nothing arrives at the first stage");
    device.compute().read(&losses)
}

/// Each parameter's gradient is that of the stage that holds it; a tied table's is the sum of the first and the last stage's.
fn check_gradients(what: &str, stages: &[Model], held: &[Held], whole: &Held, device: &Device) {
    for (index, spec) in whole.parameters.specs.iter().enumerate() {
        let id = ParamId(index);
        let holds = |(_, stage): &(&Held, &Model)| !stage.specs[index].is_empty();
        let parts: Vec<Vec<f32>> =
            held.iter().zip(stages).filter(holds).map(|(held, _)| held.gradient(id, device)).collect();
        let expected = whole.gradient(id, device);
        match &parts[..] {
            [only] => assert!(*only == expected, "{what}: another gradient of {}", spec.name),
            [first, last] => {
                let off = |((a, b), expected): ((&f32, &f32), &f32)| (a + b - expected).abs();
                let off = first.iter().zip(last).zip(&expected).map(off).fold(0.0, f32::max);
                let most = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                assert!(most > 0.0 && off <= 1e-5 * most, "{what}: {} off by {off} of {most}", spec.name);
            }
            _ => panic!("{what}: {} stages hold {}", parts.len(), spec.name),
        }
    }
}
