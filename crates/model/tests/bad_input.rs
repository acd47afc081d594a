//! Broken and hostile model folders: a clear error, no panic, and nothing allocated by a number that was not checked.

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use evenkeel_device::{CpuOptions, DType, Device};
use evenkeel_model::{Config, Error, Model, ZeroSharding};
use evenkeel_store::Folder;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use support::changed::{load_changed as load_golden, read_tensors};

fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 12, "vocab_size": 10,
    })
}

fn with(base: Value, changes: &[(&str, Value)]) -> Value {
    let mut config = base;
    for (key, value) in changes {
        config[*key] = value.clone();
    }
    config
}

#[test]
fn bad_configs_are_refused_with_the_key_named() {
    let rope = |rope: Value| json!({ "rope_parameters": rope })["rope_parameters"].clone();
    let cases: Vec<(&str, Value, &str)> = vec![
        ("hidden_size", json!(0), "hidden_size"),
        ("hidden_size", json!(-8), "hidden_size"),
        ("hidden_size", json!(1u64 << 40), "hidden_size"),
        ("hidden_size", json!("8"), "hidden_size"),
        ("hidden_size", json!(7), "hidden_size"),
        ("hidden_size", Value::Null, "hidden_size"),
        ("num_hidden_layers", json!(1u64 << 30), "num_hidden_layers"),
        ("num_attention_heads", json!(0), "num_attention_heads"),
        ("num_key_value_heads", json!(3), "num_key_value_heads"),
        ("head_dim", json!(3), "head_dim"),
        ("head_dim", json!(1 << 20), "head_dim"),
        ("scale_attn_weights", json!(false), "scale_attn_weights"),
        ("vocab_size", json!(1e300), "vocab_size"),
        ("intermediate_size", json!([12]), "intermediate_size"),
        ("hidden_act", json!("relu6"), "hidden_act"),
        ("rms_norm_eps", json!(-1.0), "rms_norm_eps"),
        ("tie_word_embeddings", json!("yes"), "tie_word_embeddings"),
        ("rope_parameters", rope(json!({"rope_type": "ntk", "factor": 2.0})), "ntk"),
        ("rope_parameters", rope(json!({"rope_type": "yarn", "factor": 2.0})), "original_max_position_embeddings"),
        ("rope_parameters", rope(json!({"rope_type": "yarn", "original_max_position_embeddings": 8})), "factor"),
        ("rope_parameters", rope(json!({"rope_type": "dynamic", "factor": 2.0})), "max_position_embeddings"),
        (
            "rope_parameters",
            rope(json!({
                "rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 8,
                "short_factor": [1.0], "long_factor": [1.0],
            })),
            "short_factor",
        ),
        ("embedding_multiplier", json!(2.0), "embedding_multiplier"),
        ("rope_parameters", rope(json!({"rope_type": "linear"})), "factor"),
        ("rope_parameters", rope(json!({"rope_type": "linear", "factor": 0.0})), "factor"),
        ("rope_theta", json!(-1.0), "rope_theta"),
        ("partial_rotary_factor", json!(1.5), "partial_rotary_factor"),
        ("final_logit_softcapping", json!(30.0), "final_logit_softcapping"),
        ("add_cross_attention", json!(true), "add_cross_attention"),
        ("quantization_config", json!({"quant_method": "gptq", "bits": 4}), "`quantization_config` is set (gptq)"),
        ("quantization_config", json!({}), "quantization_config"),
        ("attention_dropout", json!("a lot"), "attention_dropout"),
        ("attention_dropout", json!(1.5), "attention_dropout"),
        ("attention_dropout", json!(-0.1), "attention_dropout"),
        ("attention_dropout", json!(1.0), "below 1"),
        // So close to 1 that an f32 is 1.
        ("attention_dropout", json!(0.999_999_999), "below 1"),
        ("hidden_dropout", json!(1.5), "hidden_dropout"),
    ];
    for (key, value, named) in cases {
        let config = with(llama(), &[(key, value.clone())]);
        let error = Config::from_json(&config).err().unwrap_or_else(|| panic!("{key} = {value} was taken"));
        assert!(error.to_string().contains(named), "{key} = {value}: {error}");
    }
    assert!(Config::from_json(&with(llama(), &[("quantization_config", Value::Null)])).is_ok());
}

#[test]
fn the_factor_of_the_balance_loss_is_finite_and_not_negative() {
    let mixture = |factor: Value, is_used: bool| {
        let config = json!({
            "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1,
            "output_router_logits": is_used, "router_aux_loss_coef": factor,
        });
        let config = config.as_object().unwrap().iter().map(|(key, value)| (key.as_str(), value.clone()));
        Config::from_json(&with(llama(), &config.collect::<Vec<_>>()))
    };
    assert!(mixture(json!(0), true).is_ok());
    assert!(mixture(Value::Null, false).is_ok());
    for (factor, found) in [(json!(-0.01), "-0.01"), (json!(1e300), "1e+300"), (Value::Null, "missing")] {
        let error = mixture(factor.clone(), true).unwrap_err().to_string();
        assert!(error.contains(&format!("`router_aux_loss_coef` is {found}, expected a number")), "{error}");
        assert_eq!(mixture(factor.clone(), false).is_ok(), factor.is_null());
    }
}

#[test]
fn an_unknown_architecture_is_told_the_known_ones() {
    for config in [json!({"model_type": "mamba"}), json!({}), json!([]), json!({"architectures": ["T5Model"]})] {
        let error = Config::from_json(&config).unwrap_err();
        assert!(matches!(error, Error::UnknownArchitecture { .. }), "{error}");
        for known in ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "vit"] {
            assert!(error.to_string().contains(known), "{error}");
        }
    }
}

#[test]
fn text_from_a_file_cannot_flood_or_corrupt_a_message() {
    let error = Config::from_json(&json!({"model_type": "x\u{1b}[31m".repeat(100_000)})).unwrap_err().to_string();
    assert!(error.len() < 500 && !error.contains('\u{1b}'));
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>)>;

/// The tensors a model needs, all zero.
fn tensors(model: &Model) -> Tensors {
    model.specs.iter().map(|spec| (spec.name.clone(), (Dtype::F32, spec.shape.clone()))).collect()
}

fn write_folder(folder: &Path, config: &Value, tensors: &Tensors) {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let buffers: Vec<Vec<u8>> = tensors
        .values()
        .map(|(dtype, shape)| vec![0u8; shape.iter().product::<usize>() * dtype.bitsize() / 8])
        .collect();
    let views = tensors
        .iter()
        .zip(&buffers)
        .map(|((name, (dtype, shape)), bytes)| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// Writes a Llama whose tensors `change` has altered, and loads it.
fn load_changed(config: Value, change: impl Fn(&mut Tensors)) -> Result<(), Error> {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::from_json(&config).unwrap();
    let mut tensors = tensors(&model);
    change(&mut tensors);
    write_folder(folder.path(), &config, &tensors);
    let folder = Folder::open(folder.path())?;
    let device = Device::cpu(&CpuOptions { memory_bytes: 1 << 24, ..CpuOptions::with_threads(1) }).unwrap();
    Model::open(&folder)?.load(&folder, DType::Bf16, ZeroSharding::NONE, device.compute()).map(drop)
}

const QUERY: &str = "model.layers.0.self_attn.q_proj.weight";

#[test]
fn tensors_that_do_not_fit_the_config_are_refused_by_name() {
    let missing = load_changed(llama(), |tensors| drop(tensors.remove(QUERY))).unwrap_err();
    assert!(matches!(&missing, Error::MissingTensor { name, missing: 1, .. } if name == QUERY), "{missing}");

    let extra = load_changed(llama(), |tensors| {
        tensors.insert("model.layers.7.mlp.up_proj.weight".into(), (Dtype::F32, vec![2, 2]));
    });
    assert!(matches!(extra.unwrap_err(), Error::UnexpectedTensor { unexpected: 1, .. }));

    for shape in [vec![8, 9], vec![64], vec![8, 8, 1], vec![]] {
        let wrong = load_changed(llama(), |tensors| drop(tensors.insert(QUERY.into(), (Dtype::F32, shape.clone()))));
        assert!(matches!(&wrong, Err(Error::WrongShape { name, .. }) if name == QUERY), "{shape:?}: {wrong:?}");
    }

    let dtype = load_changed(llama(), |tensors| drop(tensors.insert(QUERY.into(), (Dtype::I64, vec![8, 8]))));
    let message = dtype.unwrap_err().to_string();
    assert!(message.contains(QUERY) && message.contains("I64"), "{message}");
}

#[test]
fn harmless_differences_load() {
    let half = load_changed(llama(), |tensors| tensors.values_mut().for_each(|tensor| tensor.0 = Dtype::F16));
    assert!(half.is_ok(), "{half:?}");
    let buffers = load_changed(llama(), |tensors| {
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), (Dtype::F32, vec![2]));
    });
    assert!(buffers.is_ok(), "{buffers:?}");
    let tied = with(llama(), &[("tie_word_embeddings", json!(true))]);
    let doubled =
        load_changed(tied, |tensors| drop(tensors.insert("lm_head.weight".into(), (Dtype::F32, vec![10, 8]))));
    assert!(doubled.is_ok(), "{doubled:?}");
    let bare = load_changed(llama(), |tensors| {
        let renamed = std::mem::take(tensors).into_iter();
        *tensors = renamed.map(|(name, tensor)| (name.trim_start_matches("model.").to_owned(), tensor)).collect();
    });
    assert!(bare.is_ok(), "a checkpoint without the prefix: {bare:?}");
}

/// A tied Qwen2 with a head beside the embedding.
fn load_with_head(head: (Dtype, Vec<usize>, Vec<u8>)) -> Result<(), Error> {
    load_golden("qwen2", "", |_, tensors| drop(tensors.insert("lm_head.weight".into(), head.clone())))
}

#[test]
fn a_head_that_is_tied_may_only_be_a_copy_of_the_embedding() {
    let (dtype, shape, bytes) = read_tensors("qwen2").remove("model.embed_tokens.weight").unwrap();
    assert_eq!(dtype, Dtype::F32);
    load_with_head((dtype, shape.clone(), bytes.clone())).unwrap();
    let as_f64 = |bytes: &[u8]| -> Vec<u8> {
        let numbers = bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        numbers.flat_map(|number| f64::from(number).to_le_bytes()).collect()
    };
    load_with_head((Dtype::F64, shape.clone(), as_f64(&bytes))).unwrap();
    let mut other = bytes.clone();
    *other.last_mut().unwrap() ^= 1;
    for head in [
        (Dtype::F64, shape.clone(), as_f64(&other)),
        (dtype, vec![1, shape[1]], bytes[..shape[1] * 4].to_vec()),
        (dtype, shape, other.clone()),
    ] {
        let error = load_with_head(head.clone()).unwrap_err();
        assert!(error.to_string().contains("`lm_head.weight` and `model.embed_tokens.weight` in"), "{error}");
        assert!(error.hint().unwrap().contains("set \"tie_word_embeddings\": false in config.json"), "{error}");
    }
    let untied = load_golden("qwen2", "", |config, tensors| {
        config["tie_word_embeddings"] = json!(false);
        let embedding = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".into(), (embedding.0, embedding.1, other.clone()));
    });
    untied.unwrap();
}

#[test]
fn types_that_cannot_be_computed_with_are_refused_before_memory_is_used() {
    const DOWN: &str = "model.layers.0.mlp.experts.1.down_proj.weight";
    for dtype in [Dtype::I32, Dtype::F8_E4M3] {
        let error = load_golden("qwen3_moe", "", |_, tensors| {
            let (found, shape, bytes) = tensors.get_mut(DOWN).unwrap();
            *found = dtype;
            bytes.truncate(shape.iter().product::<usize>() * dtype.bitsize() / 8);
        });
        let message = error.unwrap_err().to_string();
        assert!(message.contains(DOWN) && message.contains(&format!("{dtype:?}")), "{message}");
    }
}

#[test]
fn a_config_of_absurd_size_allocates_nothing_before_the_files_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let small = llama();
    let huge = with(
        llama(),
        &[("hidden_size", json!(1 << 22)), ("intermediate_size", json!(1 << 24)), ("head_dim", json!(4))],
    );
    write_folder(folder.path(), &huge, &tensors(&Model::from_json(&small).unwrap()));
    let folder = Folder::open(folder.path()).unwrap();
    let device = Device::dry();
    let error =
        Model::open(&folder).unwrap().load(&folder, DType::F32, ZeroSharding::NONE, device.compute()).err().unwrap();
    assert!(matches!(error, Error::WrongShape { .. }), "{error}");
    assert_eq!(device.usage().peak_bytes, 0);
}
