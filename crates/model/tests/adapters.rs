//! Adapters against PEFT: the folders that `golden/adapters.py` wrote, with logits, losses and the gradients of everything trained.

#[path = "../../../golden/adapter_cases.rs"]
mod cases;
mod support;

use std::collections::BTreeMap;
use std::path::PathBuf;

use cases::CASES;
use evenkeel_device::kernel::{Fill, Segments};
use evenkeel_device::{DType, Device, DeviceKind, Queue};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{
    AdapterConfig, AdapterFolder, AdapterValues, Batch, Context, Error, Gradients, LossOptions, Merger, Model, Noise,
    ParamId, ParamSpec, Parameters, RotaryTables, Targets, ZeroSharding,
};
use evenkeel_store::{FileDtype, Folder, NewFolder, SafeTensorsFile, TensorEntry, save_tensors};
use support::{distance, floats, golden, golden_batch, norm};

const LOGIT_TOLERANCE: f64 = 1e-4;
const LOSS_TOLERANCE: f64 = 1e-5;
/// Relative by norm, per parameter.
const GRADIENT_TOLERANCE: f64 = 1e-4;
const GRADIENT_FLOOR: f64 = 1e-6;
const BF16_LOSS_TOLERANCE: f64 = 2e-2;
const BF16_GRADIENT_TOLERANCE: f64 = 5e-2;
/// With adapters of experts: rounding sends a token to another expert where two are about as good, and then all that it adds to
/// that expert's factors is missing. Scaling these adapters to nothing leaves the errors of `q_proj` as they are.
const BF16_EXPERT_TOLERANCE: f64 = 0.2;
const BF16_GRADIENT_FLOOR: f64 = 2e-3;

fn adapter(case: &str) -> PathBuf {
    golden().join("adapters").join(case)
}

struct Outcome {
    logits: Vec<f32>,
    loss: f64,
    /// By the file's name, of everything trained.
    gradients: Vec<(String, Vec<f32>)>,
}

fn open(case: &str, base: &str) -> (Folder, AdapterFolder, Model) {
    let folder = Folder::open(golden().join(base)).expect("golden folders are sound");
    let saved = AdapterFolder::open(&adapter(case)).unwrap_or_else(|error| panic!("{case}: {error}"));
    let model = Model::open(&folder).expect("a known architecture");
    let model = model.adapted(saved.config.clone()).unwrap_or_else(|error| panic!("{case}: {error}"));
    (folder, saved, model)
}

/// The arrangements of parameters and activations for CPUs and for GPUs; any device can run either.
const KINDS: [DeviceKind; 2] = [DeviceKind::Cpu, DeviceKind::Cuda];

fn run(case: &str, base: &str, kind: DeviceKind, dtype: DType, device: &Device, keep: Keep) -> Outcome {
    let queue = device.compute();
    let (folder, saved, model) = open(case, base);
    let model = model.for_device(kind);
    let values = AdapterValues::Saved(&saved);
    let parameters = model.load_adapted(&folder, &values, dtype, ZeroSharding::NONE, queue);
    let parameters = parameters.unwrap_or_else(|error| panic!("{case}: {error}"));
    let plain = golden_batch(base, &model, dtype, queue);
    let tables = RotaryTables::new(&model.config, queue, plain.token_count());
    let context = Context { queue, parameters: &parameters, tables: &tables, batch: &plain, pruning: None };
    let logits = queue.read(&pass::logits(&model, &context));
    let batch = golden_batch(base, &model, dtype, queue);
    let is_noisy = saved.config.dropout > 0.0;
    let batch = if is_noisy { batch.with_noise(Noise { seed: 77, first_token: 1000 }) } else { batch };
    let context = Context { batch: &batch, ..context };
    let gradients = Gradients::new(&parameters, queue);
    let options = LossOptions { smoothing: 0.0, scale: 1.0 / batch.targets as f32 };
    let losses = queue.read(&pass::losses_and_gradients(&model, &context, &gradients, options, keep));
    let loss = losses.iter().map(|&loss| loss as f64).sum::<f64>() / batch.targets as f64;
    let trained = parameters.ids().filter(|id| parameters.specs[id.0].is_trained);
    let gradient = |id: ParamId| {
        let spec = &parameters.specs[id.0];
        (model.peft_name(spec), spec.in_adapter_file(queue.read(&gradients.sum(queue, id))))
    };
    Outcome { logits, loss, gradients: trained.map(gradient).collect() }
}

#[test]
fn every_adapter_agrees_with_peft_in_f32() {
    let device = support::device(2, 1 << 30);
    for ((case, base), kind) in CASES.into_iter().flat_map(|case| KINDS.map(|kind| (case, kind))) {
        let expected =
            SafeTensorsFile::open(adapter(case).join("expected.safetensors")).expect("golden files are sound");
        let outcome = run(case, base, kind, DType::F32, &device, Keep::Everything);
        let theirs = floats(&expected, "logits");
        assert_eq!(outcome.logits.len(), theirs.len(), "{case}");
        for (ours, theirs) in outcome.logits.iter().zip(theirs) {
            let error = (*ours as f64 - theirs as f64).abs();
            assert!(error <= LOGIT_TOLERANCE, "{case}: logit {ours}, expected {theirs}");
        }
        let loss = floats(&expected, "loss")[0] as f64;
        assert!((outcome.loss - loss).abs() <= LOSS_TOLERANCE, "{case}: loss {}, expected {loss}", outcome.loss);
        let of_tie = usize::from(case == "qwen2_saved_tied");
        let gradients = expected.names().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(outcome.gradients.len() + of_tie, gradients, "{case}");
        for (name, ours) in &outcome.gradients {
            let theirs = floats(&expected, &format!("grad.{name}"));
            let (error, size) = (distance(ours, &theirs), norm(&theirs));
            assert!(size > 0.0, "{case}: the gradient of {name} hides nothing");
            assert!(
                error <= GRADIENT_TOLERANCE * size + GRADIENT_FLOOR,
                "{case}: gradient of {name} off by {error} of {size}"
            );
        }
    }
}

#[test]
fn every_adapter_in_bf16_stays_near_f32() {
    let device = support::device(2, 1 << 30);
    for ((case, base), kind) in CASES.into_iter().flat_map(|case| KINDS.map(|kind| (case, kind))) {
        let exact = run(case, base, kind, DType::F32, &device, Keep::Everything);
        let rounded = run(case, base, kind, DType::Bf16, &device, Keep::Everything);
        let error = (rounded.loss - exact.loss).abs();
        assert!(error <= BF16_LOSS_TOLERANCE, "{case}: loss off by {error}");
        let has_experts = open(case, base).2.config.experts.is_some();
        let tolerance = if has_experts { BF16_EXPERT_TOLERANCE } else { BF16_GRADIENT_TOLERANCE };
        let total = exact.gradients.iter().map(|(_, gradient)| norm(gradient).powi(2)).sum::<f64>().sqrt();
        for ((name, exact), (_, rounded)) in exact.gradients.iter().zip(&rounded.gradients) {
            let (error, size) = (distance(exact, rounded), norm(exact));
            assert!(
                error <= tolerance * size + BF16_GRADIENT_FLOOR * total,
                "{case}: gradient of {name} off by {error} of {size}, {total} in all"
            );
        }
    }
}

#[test]
fn recomputation_repeats_the_same_bits_and_a_dry_run_takes_the_same_memory() {
    let bits = |outcome: &Outcome| -> Vec<u32> {
        outcome.gradients.iter().flat_map(|(_, gradient)| gradient).map(|value| value.to_bits()).collect()
    };
    for ((case, base), kind) in CASES.into_iter().flat_map(|case| KINDS.map(|kind| (case, kind))) {
        let real = support::device(1, 1 << 30);
        let kept = run(case, base, kind, DType::Bf16, &real, Keep::Everything);
        let dry = Device::dry();
        run(case, base, kind, DType::Bf16, &dry, Keep::Everything);
        assert_eq!(real.usage().peak_bytes, dry.usage().peak_bytes, "{case}");
        assert!(bits(&kept) == bits(&run(case, base, kind, DType::Bf16, &real, Keep::Stream)), "{case}");
    }
}

/// A new adapter has a B of zeros: the model computes what its base does.
#[test]
fn a_new_adapter_changes_nothing_until_it_is_trained() {
    let device = support::device(1, 1 << 30);
    let queue = device.compute();
    let bases = ["llama3", "gpt2", "vit", "llama_nf4"].into_iter().flat_map(|base| [(base, false), (base, true)]);
    for ((base, is_dora), packs) in bases.flat_map(|base| [(base, false), (base, true)]) {
        let folder = Folder::open(golden().join(base)).unwrap();
        let plain = Model::open(&folder).unwrap();
        let plain = if packs { plain.packed() } else { plain };
        let adapted = plain.adapted(AdapterConfig { is_dora, ..AdapterConfig::default() }).unwrap();
        let logits = |model: &Model, parameters: &Parameters| {
            let batch = golden_batch(base, model, DType::F32, queue);
            let tables = RotaryTables::new(&model.config, queue, batch.token_count());
            let context = Context { queue, parameters, tables: &tables, batch: &batch, pruning: None };
            queue.read(&pass::logits(model, &context))
        };
        let load = |model: &Model, seed: u64| {
            model.load_adapted(&folder, &AdapterValues::New { seed }, DType::F32, ZeroSharding::NONE, queue).unwrap()
        };
        let (new, other) = (load(&adapted, 1), load(&adapted, 2));
        let (without, with) = (logits(&plain, &load(&plain, 0)), logits(&adapted, &new));
        // A GPU's library may choose another algorithm for a product that adds to zeros. DoRA's magnitudes are summed in f64, and the
        // norms that they stand over in f32.
        let allowed = if support::on_cuda() || is_dora { 1e-6 * norm(&without) } else { 0.0 };
        assert!(distance(&without, &with) <= allowed, "{base}, DoRA {is_dora}, packed {}", plain.is_packed());
        for id in new.ids().filter(|id| new.specs[id.0].name.ends_with("lora_A.weight")) {
            let (one, two) = (queue.read(&new.kept_value(id)), queue.read(&other.kept_value(id)));
            let bound = 1.0 / (new.specs[id.0].whole[1] as f32).sqrt();
            let largest = one.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            assert!(
                one != two && largest <= bound && largest > 0.8 * bound,
                "{base}: {} {largest}",
                new.specs[id.0].name
            );
        }
    }
}

/// Every family with experts, whatever its files call them.
#[test]
fn new_adapters_of_experts_change_nothing_until_they_are_trained() {
    let device = support::device(1, 1 << 30);
    let queue = device.compute();
    let parameters = ["experts.gate_up_proj", "experts.down_proj"].map(str::to_owned).to_vec();
    for base in
        ["mixtral", "qwen3_moe_all", "olmoe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_vision", "gpt_oss_mxfp4"]
    {
        let folder = Folder::open(golden().join(base)).unwrap();
        let plain = Model::open(&folder).unwrap();
        let config = AdapterConfig { parameters: parameters.clone(), ..AdapterConfig::default() };
        let adapted = plain.newly_adapted(config).unwrap();
        let layers = plain.expert_layers().count();
        assert!(layers > 0 && adapted.adapted_expert_names().len() == 2 * layers, "{base}");
        let [without, with] = [&plain, &adapted].map(|model| {
            let new = AdapterValues::New { seed: 1 };
            let parameters = model.load_adapted(&folder, &new, DType::F32, ZeroSharding::NONE, queue).unwrap();
            let batch = golden_batch(base, model, DType::F32, queue);
            let tables = RotaryTables::new(&model.config, queue, batch.token_count());
            let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
            queue.read(&pass::logits(model, &context))
        });
        let allowed = if support::on_cuda() { 1e-6 * norm(&without) } else { 0.0 };
        assert!(distance(&without, &with) <= allowed, "{base}");
    }
}

/// The gradient as the loss itself tells it, for layers that no golden folder has: DoRA before an activation. The norms stay
/// as they were measured, which is what backward takes them for.
#[test]
fn the_loss_falls_as_the_gradients_of_magnitudes_before_an_activation_say() {
    let device = support::device(1, 1 << 30);
    let queue = device.compute();
    for base in ["gpt2", "vit"] {
        let folder = Folder::open(golden().join(base)).unwrap();
        let config = AdapterConfig { is_dora: true, rank: 3, ..AdapterConfig::default() };
        let model = Model::open(&folder).unwrap().adapted(config).unwrap();
        let new = AdapterValues::New { seed: 3 };
        let parameters = model.load_adapted(&folder, &new, DType::F32, ZeroSharding::NONE, queue).unwrap();
        let write = |id: ParamId, values: &[f32]| {
            let value = parameters.kept_value(id);
            let written = queue.write_rows(value.view(), |first, rows| -> Result<(), std::convert::Infallible> {
                let start = first * value.cols;
                rows.copy_from_slice(&values[start..start + rows.len()]);
                Ok(())
            });
            written.expect("writing cannot fail");
        };
        // A new B is zero, and a new magnitude is the norm: both would hide mistakes.
        for id in parameters.ids().filter(|id| parameters.specs[id.0].is_trained) {
            let (name, values) = (&parameters.specs[id.0].name, queue.read(&parameters.kept_value(id)));
            let wave = |place: usize| (0.7 * place as f32 + id.0 as f32).sin();
            let changed = |(place, value): (usize, &f32)| match name {
                name if name.ends_with("lora_B.weight") => 0.2 * wave(place),
                name if name.ends_with("lora_magnitude_vector") => value * (1.0 + 0.3 * wave(place)),
                _ => *value,
            };
            write(id, &values.iter().enumerate().map(changed).collect::<Vec<_>>());
        }
        model.measure_rows(&parameters, queue);
        let batch = golden_batch(base, &model, DType::F32, queue);
        let tables = RotaryTables::new(&model.config, queue, batch.token_count());
        let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
        let options = LossOptions { smoothing: 0.0, scale: 1.0 };
        let loss = |gradients: &Gradients| -> f64 {
            let losses = pass::losses_and_gradients(&model, &context, gradients, options, Keep::Everything);
            queue.read(&losses).iter().map(|&loss| loss as f64).sum()
        };
        let gradients = Gradients::new(&parameters, queue);
        loss(&gradients);
        let names = [".c_fc.", ".intermediate.dense."];
        let is_seen = |id: &ParamId| {
            let spec = &parameters.specs[id.0];
            spec.is_trained && names.iter().any(|name| spec.name.contains(name))
        };
        let seen: Vec<(ParamId, Vec<f32>)> =
            parameters.ids().filter(is_seen).map(|id| (id, queue.read(&gradients.sum(queue, id)))).collect();
        assert!(seen.len() >= 6, "{base}: {}", seen.len());
        for (id, gradient) in seen {
            let (value, size) = (queue.read(&parameters.kept_value(id)), norm(&gradient));
            let step = 1e-2 * norm(&value);
            let at = |step: f64| {
                let moved = value.iter().zip(&gradient).map(|(&value, &g)| value + (step * g as f64 / size) as f32);
                write(id, &moved.collect::<Vec<_>>());
                loss(&Gradients::new(&parameters, queue))
            };
            let slope = (at(step) - at(-step)) / (2.0 * step);
            write(id, &value);
            let name = &parameters.specs[id.0].name;
            assert!((slope - size).abs() <= 1e-2 * size, "{base}: {name} has slope {slope}, its gradient {size}");
        }
    }
}

#[track_caller]
fn refused(base: &str, config: AdapterConfig, expected: &str) {
    let folder = Folder::open(golden().join(base)).unwrap();
    let error = Model::open(&folder).unwrap().adapted(config).expect_err("it must be refused");
    let told = format!("{error}; {}", error.hint().unwrap_or_default());
    assert!(told.contains(expected), "{told}");
}

#[test]
fn targets_that_match_nothing_are_refused_with_what_there_is() {
    let names = |names: &[&str]| Targets::Names(names.iter().map(|name| name.to_string()).collect());
    let with = |targets| AdapterConfig { targets, ..AdapterConfig::default() };
    refused(
        "llama3",
        with(names(&["q_proj", "query"])),
        "`query` matches nothing in this model; it has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
    );
    refused("gpt2", with(names(&["q_proj"])), "it has c_attn, c_proj, c_fc");
    refused("llama3", with(Targets::Pattern("q_proj".into())), "`q_proj` matches nothing");
    let all_excluded = AdapterConfig { excluded: Some(Targets::Pattern(".*".into())), ..AdapterConfig::default() };
    refused("llama3", all_excluded, "the adapter adapts nothing");
    let no_such_module = AdapterConfig { trained_modules: vec!["wte".into()], ..AdapterConfig::default() };
    refused("llama3", no_such_module, "`wte` matches nothing in this model; it has embed_tokens, ");
    refused("llama3", AdapterConfig { rank: 0, ..AdapterConfig::default() }, "rank 0 is not between 1 and");
    refused("llama3", AdapterConfig { dropout: 1.0, ..AdapterConfig::default() }, "dropout 1 is not between");
    refused("llama3", with(Targets::Pattern("(".into())), "the pattern `(` cannot be read");
}

#[test]
fn what_is_named_at_the_ends_of_a_model_is_told_how_it_is_trained() {
    let targets = |name: &str| AdapterConfig { targets: Targets::Names(vec![name.into()]), ..AdapterConfig::default() };
    let trained = |name: &str| AdapterConfig { trained_modules: vec![name.into()], ..AdapterConfig::default() };
    let whole = "cannot be adapted: adapters stand beside linear layers between the embedding and the head; \
                 name it in modules_to_save to train it whole";
    refused("llama2", targets("lm_head"), &format!("`lm_head` {whole}"));
    refused("llama2", targets("embed_tokens"), &format!("`embed_tokens` {whole}"));
    refused("gpt2", targets("wte"), &format!("`wte` {whole}"));
    refused("llama3", targets("lm_head"), "it is tied to `embed_tokens`: name that in modules_to_save");
    let pattern = AdapterConfig { targets: Targets::Pattern("lm_head".into()), ..AdapterConfig::default() };
    refused("llama3", pattern, "it is tied to `embed_tokens`");
    let tied = "`lm_head` has no weights of its own in this model: it is tied to `embed_tokens`; \
                name `embed_tokens`: with keep_tie = true both are trained as one, with `lm_head` beside it each by itself";
    refused("llama3", trained("lm_head"), tied);
    // As the hint says.
    let open =
        |config: AdapterConfig| Model::open(&Folder::open(golden().join("llama3")).unwrap()).unwrap().adapted(config);
    let is_trained = |model: &Model, name: &str| model.specs.iter().any(|spec| spec.is_trained && spec.name == name);
    let both = ["embed_tokens", "lm_head"].map(str::to_owned).to_vec();
    let apart = open(AdapterConfig { trained_modules: both, ..AdapterConfig::default() }).unwrap();
    assert!(is_trained(&apart, "model.embed_tokens.weight") && is_trained(&apart, "lm_head.weight"));
    let as_one = open(AdapterConfig { keeps_tie: true, ..trained("embed_tokens") }).unwrap();
    assert!(as_one.config.tied && is_trained(&as_one, "model.embed_tokens.weight"));
}

#[test]
fn patterns_of_a_new_adapter_that_match_nothing_are_refused_and_those_of_a_saved_one_are_not() {
    let base = Model::open(&Folder::open(golden().join("llama3")).unwrap()).unwrap();
    let targets = || Targets::Names(vec!["q_proj".into(), "v_proj".into()]);
    let new = || AdapterConfig { targets: targets(), ..AdapterConfig::default() };
    let excluded = |name: &str| Some(Targets::Names(vec![name.into()]));
    let cases = [
        (
            AdapterConfig { rank_patterns: vec![("q_proj".into(), 4), ("k_proj".into(), 4)], ..new() },
            "the adapter's pattern `k_proj` matches none of the layers that are adapted; these are q_proj, v_proj",
        ),
        (AdapterConfig { alpha_patterns: vec![("query".into(), 4.0)], ..new() }, "`query` matches none of the layers"),
        (
            AdapterConfig { excluded: excluded("query"), ..new() },
            "`query` matches nothing in this model; it has q_proj, ",
        ),
        (
            AdapterConfig { layers: Some(vec![0, 9]), ..new() },
            "have layer 9, this model's last is number 1; use numbers from 0 to 1",
        ),
    ];
    for (config, expected) in cases {
        let error = base.newly_adapted(config.clone()).expect_err("it must be refused");
        let told = format!("{error}; {}", error.hint().unwrap_or_default());
        assert!(told.contains(expected), "{told}");
        base.adapted(config).unwrap();
    }
    let config = AdapterConfig {
        rank_patterns: vec![("q_proj".into(), 4)],
        alpha_patterns: vec![(r".*\.1\.self_attn\.v_proj".into(), 4.0)],
        excluded: excluded("k_proj"),
        ..new()
    };
    base.newly_adapted(config).unwrap();
}

#[test]
fn an_adapter_of_a_model_of_another_depth_is_told_the_numbers() {
    // As many adapters save it; whole names of layers would be found in a deeper model.
    let mut saved = AdapterFolder::open(&adapter("llama_lora")).unwrap();
    saved.config.targets = Targets::AllLinear;
    let config = std::fs::read_to_string(golden().join("llama3/config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    for (other, expected) in [
        (layers + 2, format!("has layers up to number {}, this model's last is number {}", layers - 1, layers + 1)),
        (layers - 1, format!("has layers up to number {}, this model's last is number {}", layers - 1, layers - 2)),
    ] {
        let mut config = config.clone();
        config["num_hidden_layers"] = other.into();
        let error = Model::from_json(&config).unwrap().with_adapter(&saved).expect_err("another depth");
        assert!(error.to_string().contains(&expected), "{error}");
        let hint = error.hint().unwrap();
        assert!(hint.starts_with("give the model that the adapter was trained on"), "{hint}");
    }
}

/// A copy of a golden adapter's folder with another configuration.
fn changed(case: &str, change: impl Fn(&mut serde_json::Map<String, serde_json::Value>)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(adapter(case).join("adapter_config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    change(json.as_object_mut().unwrap());
    std::fs::write(folder.path().join("adapter_config.json"), json.to_string()).unwrap();
    std::fs::copy(adapter(case).join("adapter_model.safetensors"), folder.path().join("adapter_model.safetensors"))
        .unwrap();
    folder
}

#[test]
fn variants_that_change_numbers_are_refused_by_name() {
    let cases: [(&str, serde_json::Value, &str); 13] = [
        ("init_lora_weights", "pissa".into(), "`init_lora_weights` is \"pissa\""),
        ("init_lora_weights", "olora".into(), "\"olora\""),
        ("init_lora_weights", "lora_ga".into(), "\"lora_ga\""),
        ("init_lora_weights", "loftq".into(), "\"loftq\""),
        ("peft_type", "IA3".into(), "`peft_type` is \"IA3\", expected \"LORA\""),
        ("bias", "all".into(), "`bias` is \"all\""),
        ("lora_bias", true.into(), "`lora_bias` is true"),
        ("layer_replication", serde_json::json!([[0, 2]]), "`layer_replication` is [[0,2]]"),
        ("alora_invocation_tokens", serde_json::json!([3]), "`alora_invocation_tokens`"),
        ("use_qalora", true.into(), "`use_qalora`"),
        ("trainable_token_indices", serde_json::json!([1]), "`trainable_token_indices`"),
        ("something_new", 3.into(), "`something_new` is 3, which is not understood"),
        ("r", serde_json::json!(2.5), "`r` is 2.5, expected a whole number"),
    ];
    for (key, value, expected) in cases {
        let folder = changed("llama_lora", |json| drop(json.insert(key.to_owned(), value.clone())));
        let error = AdapterFolder::open(folder.path()).err().unwrap_or_else(|| panic!("{key} {value} is accepted"));
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn an_adapter_of_another_model_is_refused_before_anything_is_loaded() {
    let check = |case: &str, base: &str, change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| -> Error {
        let copy = changed(case, change);
        let saved = AdapterFolder::open(copy.path()).unwrap();
        let folder = Folder::open(golden().join(base)).unwrap();
        let model = Model::open(&folder).unwrap().adapted(saved.config.clone());
        match model {
            Err(error) => error,
            Ok(model) => model.check_adapter(&saved).err().unwrap_or_else(|| panic!("{case} fits {base}")),
        }
    };
    // The same layers, of other sizes.
    assert!(matches!(
        check("llama_saved_untied", "llama3", &|_| ()),
        Error::MissingTensor { .. } | Error::WrongShape { .. }
    ));
    assert!(matches!(check("llama_lora", "gpt2", &|_| ()), Error::IdleTarget { .. }));
    let rank = |json: &mut serde_json::Map<String, serde_json::Value>| drop(json.insert("r".into(), 5.into()));
    assert!(matches!(check("llama_lora", "llama3", &rank), Error::WrongShape { .. }));
    let fewer = |json: &mut serde_json::Map<String, serde_json::Value>| {
        drop(json.insert("target_modules".into(), serde_json::json!(["q_proj"])));
    };
    assert!(matches!(check("llama_lora", "llama3", &fewer), Error::UnexpectedTensor { unexpected: 24, .. }));
    let more = |json: &mut serde_json::Map<String, serde_json::Value>| {
        drop(json.insert("target_modules".into(), "all-linear".into()));
    };
    assert!(matches!(check("qwen2_rslora", "qwen2", &more), Error::MissingTensor { missing: 8, .. }));
}

/// Weights with their adapters merged, as PEFT merges them.
#[test]
fn merged_weights_are_those_of_peft() {
    let mut compared = 0;
    for (case, base) in CASES {
        let (folder, saved, model) = open(case, base);
        let expected = SafeTensorsFile::open(adapter(case).join("expected.safetensors")).unwrap();
        let read = |id: ParamId| model.read_saved_rows(&saved, id, 0..model.specs[id.0].whole[0]);
        let merger = Merger::new(&model, &folder).unwrap().with_adapters(read).unwrap();
        for (index, spec) in model.specs.iter().enumerate() {
            let name = format!("merged.{}", spec.name);
            if expected.tensor(&name).is_none() {
                continue;
            }
            // Rows that are read singly are the same.
            let rows = (0..spec.whole[0]).flat_map(|row| merger.read_rows(ParamId(index), row..row + 1).unwrap());
            let (ours, theirs) = (rows.collect::<Vec<_>>(), floats(&expected, &name));
            let error = distance(&ours, &theirs) / norm(&theirs);
            assert!(error <= 1e-6, "{case}: {name} off by {error:e}");
            compared += 1;
        }
    }
    assert!(compared >= 8, "{compared}");
}

/// A model with its adapters merged computes what it did, also where weights are stored [in, out] and behind activations.
#[test]
fn a_merged_model_computes_what_the_adapted_one_does() {
    let device = support::device(1, 1 << 30);
    let queue = device.compute();
    for (case, base) in
        CASES.into_iter().filter(|(case, _)| ["dora", "experts"].iter().any(|kind| case.ends_with(kind)))
    {
        let (folder, saved, model) = open(case, base);
        let read = |id: ParamId| model.read_saved_rows(&saved, id, 0..model.specs[id.0].whole[0]);
        let merger = Merger::new(&model, &folder).unwrap().with_adapters(read).unwrap();
        // A merged model is not in 4 bits.
        let plain = golden().join(base).join(if model.is_packed() { "plain" } else { "" });
        let folder = Folder::open(plain).unwrap();
        let plain = Model::open(&folder).unwrap();
        let parameters = plain.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
        for id in parameters.ids() {
            let of_adapted = model.specs.iter().position(|spec| spec.name == parameters.specs[id.0].name).unwrap();
            let rows = merger.read_rows(ParamId(of_adapted), 0..parameters.specs[id.0].whole[0]).unwrap();
            let cols = parameters.specs[id.0].whole[1];
            let written = queue.write_rows(parameters.kept_value(id).view(), |first, out| {
                out.copy_from_slice(&rows[first * cols..][..out.len()]);
                Ok::<_, std::convert::Infallible>(())
            });
            written.expect("writing cannot fail");
        }
        let batch = golden_batch(base, &plain, DType::F32, queue);
        let tables = RotaryTables::new(&plain.config, queue, batch.token_count());
        let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
        let ours = queue.read(&pass::logits(&plain, &context));
        let theirs = run(case, base, DeviceKind::Cpu, DType::F32, &device, Keep::Everything).logits;
        assert!(distance(&ours, &theirs) <= 1e-5 * norm(&theirs), "{case}");
    }
}

#[test]
fn peft_reads_what_was_written() {
    for (case, _) in CASES {
        let saved = AdapterFolder::open(&adapter(case)).unwrap();
        let written = saved.config.to_peft("base", Some("CAUSAL_LM"), false, &[]);
        // Names follow from the tensors.
        let config = AdapterConfig { has_new_names: false, ..saved.config };
        assert_eq!(AdapterConfig::from_peft(&written).unwrap(), config, "{case}");
    }
}

/// Adapters of experts with the outputs of each taken for its inputs, as PEFT before 0.19 saved them.
fn as_before_0_19(case: &str, version: &str, is_swapped: impl Fn(&str) -> bool) -> tempfile::TempDir {
    let file = SafeTensorsFile::open(adapter(case).join("adapter_model.safetensors")).unwrap();
    let [a, b] = [".lora_A.weight", ".lora_B.weight"];
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for name in file.names() {
        let (shape, values) = (file.tensor(name).unwrap().shape().to_vec(), floats(&file, name));
        let Some(module) = name.strip_suffix(a).filter(|module| module.contains("experts") && is_swapped(module))
        else {
            tensors.entry(name.to_owned()).or_insert((shape, values));
            continue;
        };
        // Five experts. ΔW_e[o, i] = Σ B[o, ρ·E + e]·A[e·r + ρ, i], and then the same with A and B of each expert exchanged.
        let ([ranks, input], experts) = ([shape[0], shape[1]], 5);
        let rank = ranks / experts;
        let theirs = floats(&file, &format!("{module}{b}"));
        let output = theirs.len() / ranks;
        let places =
            || (0..experts).flat_map(|expert| (0..rank).map(move |r| (expert * rank + r, r * experts + expert)));
        let (mut new_a, mut new_b) = (vec![0.0; ranks * output], vec![0.0; input * ranks]);
        for (by_expert, by_rank) in places() {
            (0..output).for_each(|o| new_a[by_expert * output + o] = theirs[o * ranks + by_rank]);
            (0..input).for_each(|i| new_b[i * ranks + by_rank] = values[by_expert * input + i]);
        }
        tensors.insert(name.to_owned(), (vec![ranks, output], new_a));
        tensors.insert(format!("{module}{b}"), (vec![input, ranks], new_b));
    }
    let folder = tempfile::tempdir().unwrap();
    let entry = |(name, (shape, _)): (&String, &(Vec<usize>, Vec<f32>))| TensorEntry {
        name: name.clone(),
        dtype: FileDtype::F32,
        shape: shape.clone(),
    };
    let entries: Vec<TensorEntry> = tensors.iter().map(entry).collect();
    let new = NewFolder::create(folder.path().join("saved")).unwrap();
    save_tensors(&new, "adapter_model.safetensors", &entries, &BTreeMap::new(), |name, put| put(&tensors[name].1))
        .unwrap();
    new.commit(false).unwrap();
    let text = std::fs::read_to_string(adapter(case).join("adapter_config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["peft_version"] = version.into();
    std::fs::write(folder.path().join("saved/adapter_config.json"), json.to_string()).unwrap();
    folder
}

#[test]
fn adapters_of_experts_that_older_peft_saved_are_read_the_other_way_round() {
    let (case, base) = ("qwen3_moe_experts", "qwen3_moe");
    let (folder, saved, model) = open(case, base);
    let device = support::device(1, 1 << 28);
    let values = |saved: &AdapterFolder| -> Vec<Vec<f32>> {
        let values = AdapterValues::Saved(saved);
        let parameters =
            model.load_adapted(&folder, &values, DType::F32, ZeroSharding::NONE, device.compute()).unwrap();
        parameters.trained().map(|id| device.compute().read(&parameters.kept_value(id))).collect()
    };
    let older = as_before_0_19(case, "", |_| true);
    let older = AdapterFolder::open(&older.path().join("saved")).unwrap();
    assert!(values(&older) == values(&saved));
    // Some one way round and some the other.
    let mixed = as_before_0_19(case, "", |module| module.contains("layers.0"));
    let mixed = AdapterFolder::open(&mixed.path().join("saved")).unwrap();
    assert!(matches!(model.check_adapter(&mixed), Err(Error::WrongShape { .. })));
    // As many inputs as outputs.
    let square = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
        "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 64, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": true,
    });
    let adapter = AdapterConfig {
        targets: Targets::Names(Vec::new()),
        parameters: vec!["experts.gate_up_proj".into()],
        ..saved.config.clone()
    };
    let model =
        Model::from_json(&square).unwrap().adapted(AdapterConfig { rank_patterns: Vec::new(), ..adapter }).unwrap();
    let with_version = |version: Option<&str>| {
        let folder = tempfile::tempdir().unwrap();
        let name = |factor: &str| format!("base_model.model.model.layers.0.mlp.experts.lora_{factor}.weight");
        let entry = |factor, shape| TensorEntry { name: name(factor), dtype: FileDtype::F32, shape };
        let entries = [entry("A", vec![20, 48]), entry("B", vec![48, 20])];
        let new = NewFolder::create(folder.path().join("saved")).unwrap();
        save_tensors(&new, "adapter_model.safetensors", &entries, &BTreeMap::new(), |_, put| put(&[1.0; 960])).unwrap();
        new.commit(false).unwrap();
        let json = serde_json::json!({
            "peft_type": "LORA", "r": 4, "target_modules": [], "target_parameters": ["experts.gate_up_proj"],
            "peft_version": version,
        });
        std::fs::write(folder.path().join("saved/adapter_config.json"), json.to_string()).unwrap();
        model.check_adapter(&AdapterFolder::open(&folder.path().join("saved")).unwrap())
    };
    with_version(Some("0.18.0")).unwrap();
    with_version(Some("0.21.2")).unwrap();
    for version in [None, Some("0.18.2.dev0")] {
        let error = with_version(version).expect_err("nothing tells").to_string();
        assert!(error.contains("mlp.experts.lora_A.weight` has as many inputs as outputs"), "{error}");
    }
}

/// As PEFT does, also where the base has a tensor for each expert; one matrix, as earlier versions wrote them, is read as well.
#[test]
fn experts_trained_whole_have_a_dim_of_experts_in_files() {
    let config = AdapterConfig { trained_modules: vec!["experts".into()], ..AdapterConfig::default() };
    let device = support::device(1, 1 << 28);
    for (base, shapes) in [
        ("qwen3_moe", vec![[5, 48, 32].as_slice(), &[5, 32, 24]]),
        ("qwen3_moe_one", vec![&[24, 24, 32], &[24, 32, 12]]),
        ("mixtral", vec![&[4, 160, 32], &[4, 32, 80]]),
        ("gpt_oss", vec![&[5, 32, 56], &[5, 28, 32], &[5, 56], &[5, 32]]),
    ] {
        let folder = Folder::open(golden().join(base)).unwrap();
        let model = Model::open(&folder).unwrap().adapted(config.clone()).unwrap();
        let trained = || model.specs.iter().filter(|spec| spec.is_trained);
        let of_layer = trained().filter(|spec| spec.name.contains("layers.0.") && spec.name.contains("experts."));
        let found: Vec<Vec<usize>> = of_layer.map(|spec| spec.shape_in_adapter_file()).collect();
        assert_eq!(found, shapes, "{base}");
        let values = |shape: fn(&ParamSpec) -> Vec<usize>| -> Vec<Vec<f32>> {
            let saved = tempfile::tempdir().unwrap();
            let entry = |spec| TensorEntry { name: model.peft_name(spec), dtype: FileDtype::F32, shape: shape(spec) };
            let entries: Vec<TensorEntry> = trained().map(entry).collect();
            let new = NewFolder::create(saved.path().join("saved")).unwrap();
            save_tensors(&new, "adapter_model.safetensors", &entries, &BTreeMap::new(), |name, put| {
                let entry = entries.iter().find(|entry| entry.name == name).unwrap();
                let numbers: Vec<f32> = (0..entry.shape.iter().product()).map(|number| number as f32).collect();
                put(&numbers)
            })
            .unwrap();
            new.commit(false).unwrap();
            let json = serde_json::json!({
                "peft_type": "LORA", "target_modules": "all-linear", "modules_to_save": ["experts"],
            });
            std::fs::write(saved.path().join("saved/adapter_config.json"), json.to_string()).unwrap();
            let saved = AdapterFolder::open(&saved.path().join("saved")).unwrap();
            model.check_adapter(&saved).unwrap();
            let values = AdapterValues::Saved(&saved);
            let parameters = model.load_adapted(&folder, &values, DType::F32, ZeroSharding::NONE, device.compute());
            let parameters = parameters.unwrap();
            parameters.trained().map(|id| device.compute().read(&parameters.kept_value(id))).collect()
        };
        assert!(values(ParamSpec::shape_in_adapter_file) == values(|spec| spec.shape.clone()), "{base}");
    }
}

#[test]
fn adapters_of_experts_refuse_what_peft_refuses() {
    let of = |name: &str| AdapterConfig { parameters: vec![name.to_owned()], ..AdapterConfig::default() };
    let both = "they have gate_up_proj, down_proj; linear layers belong in adapter.targets";
    for (name, what) in [
        ("q_proj.weight", "`target_parameters` has `q_proj.weight`, which is no parameter of this model's experts"),
        ("mlp.gate.weight", "which is no parameter of this model's experts"),
        ("gate_up", "which is no parameter of this model's experts"),
    ] {
        refused("qwen3_moe", of(name), what);
        refused("qwen3_moe", of(name), both);
    }
    for target in ["experts.gate_up_proj", "up_proj", "w1"] {
        let targets = Targets::Names(vec!["q_proj".into(), target.to_owned()]);
        let adapter = AdapterConfig { targets, ..AdapterConfig::default() };
        let hint = "o_proj; matrices of experts (gate_up_proj, down_proj) belong in adapter.target_parameters";
        refused("mixtral", adapter, hint);
    }
    refused("llama3", of("mlp.experts.down_proj"), "it has no experts: name linear layers in adapter.targets");
    let down = || of("experts.down_proj");
    refused("qwen3_moe", AdapterConfig { dropout: 0.1, ..down() }, "`lora_dropout` is set beside `target_parameters`");
    refused("qwen3_moe", AdapterConfig { is_dora: true, ..down() }, "`use_dora` is set beside `target_parameters`");
    let whole = AdapterConfig { trained_modules: vec!["experts".into()], ..down() };
    refused("qwen3_moe", whole, "down_proj` is in target_parameters and to be trained whole by modules_to_save");
    let text = changed("qwen3_moe_experts", |json| drop(json.insert("target_parameters".into(), "experts".into())));
    let error = AdapterFolder::open(text.path()).err().expect("PEFT takes a list").to_string();
    assert!(error.contains("`target_parameters` is a text, expected a list of names"), "{error}");
    // Neither layers nor exclusions concern experts.
    let folder = Folder::open(golden().join("qwen3_moe")).unwrap();
    let excluded = Some(Targets::Names(vec!["experts".into(), "o_proj".into()]));
    let adapted = AdapterConfig { layers: Some(vec![0]), excluded, ..down() };
    let model = Model::open(&folder).unwrap().adapted(adapted).unwrap();
    let names = ["model.layers.0.mlp.experts.down_proj", "model.layers.2.mlp.experts.down_proj"];
    assert_eq!(model.adapted_expert_names(), names);
}

fn two_layers() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 64, "tie_word_embeddings": true,
    });
    Model::from_json(&config).unwrap()
}

/// Losses, and gradients of all that is trained, of a batch of two sequences.
fn losses_and_gradients(model: &Model, queue: &Queue) -> Vec<f32> {
    let parameters = Parameters::random(model, DType::F32, ZeroSharding::NONE, 3, queue);
    let ids: Vec<u32> = (0..32).map(|i| i * 7 % 64).collect();
    let batch = Batch::tokens(queue, &ids, &ids, Segments::new(vec![0, 20, 32]));
    let tables = RotaryTables::new(&model.config, queue, 32);
    let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
    let gradients = Gradients::new(&parameters, queue);
    let options = LossOptions { smoothing: 0.0, scale: 1.0 };
    let losses = pass::losses_and_gradients(model, &context, &gradients, options, Keep::Everything);
    let trained = parameters.ids().filter(|id| parameters.specs[id.0].is_trained);
    let gradients = trained.flat_map(|id| queue.read(&gradients.sum(queue, id)));
    queue.read(&losses).into_iter().chain(gradients).collect()
}

/// Queries, keys and values compute S at once and the gradients of A at once, and so do gate and up.
#[test]
fn layers_with_the_same_input_share_products_on_gpus() {
    let query_and_value = Targets::Names(vec!["q_proj".to_owned(), "v_proj".to_owned()]);
    for (targets, shared) in [(Targets::AllLinear, 3), (query_and_value, 1)] {
        let model = two_layers().adapted(AdapterConfig { rank: 4, targets, ..AdapterConfig::default() }).unwrap();
        let [alone, grouped] = KINDS.map(|kind| {
            let device = Device::dry();
            losses_and_gradients(&model.for_device(kind), device.compute());
            device.take_counts().0["Product"].launches
        });
        assert_eq!(alone - grouped, 2 * 2 * shared);
    }
}

/// Only the other layers lie beside their adapters, if some with the same input are trained whole or held in 4 bits.
#[test]
fn layers_that_are_not_frozen_and_plain_are_left_out_of_the_arrangement_for_gpus() {
    let adapter = AdapterConfig { rank: 4, ..AdapterConfig::default() };
    let plain = two_layers();
    let adapted = plain.adapted(adapter.clone()).unwrap();
    let whole = ["q_proj.weight", "up_proj.weight"];
    let some = adapted
        .clone()
        .training(|id, spec| adapted.specs[id.0].is_trained || whole.iter().any(|name| spec.name.ends_with(name)));
    let without_q =
        adapted.clone().training(|id, spec| adapted.specs[id.0].is_trained && !spec.name.contains("q_proj"));
    let packed = plain.packed().adapted(adapter).unwrap();
    let device = support::device(1, 1 << 28);
    let queue = device.compute();
    for model in [some, without_q, packed] {
        let losses = KINDS.map(|kind| {
            let model = model.for_device(kind);
            let poison = queue.tensor(1, 1 << 22, DType::F32);
            queue.launch(Fill { out: poison.view(), value: f32::NAN });
            drop(poison);
            losses_and_gradients(&model, queue)
        });
        assert!(distance(&losses[0], &losses[1]) <= 1e-5 * norm(&losses[0]));
    }
}
