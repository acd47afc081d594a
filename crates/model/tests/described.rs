//! Decoders described beside their config.json: known ones, described as if they were Llamas with other names and options, are the
//! same models.

mod support;

use evenkeel_device::DType;
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{Context, Gradients, LossOptions, Model, RotaryTables, ZeroSharding, check_description};
use evenkeel_store::{DESCRIPTION, Folder, read_config};
use serde_json::{Value, json};
use support::{device, golden, golden_batch};

/// Known decoders, what config.json calls otherwise there, and what they do otherwise than Llama.
fn cases() -> [(&'static str, Value); 4] {
    [
        (
            "gpt_neox",
            json!({
                "like": "llama",
                "keys": {"layer_norm_eps": "rms_norm_eps"},
                "unused_keys": ["use_parallel_residual", "classifier_dropout", "attention_bias"],
                "names": {
                    "embed": "gpt_neox.embed_in.weight", "layer": "gpt_neox.layers.{}.", "qkv": "attention.query_key_value",
                    "out": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
                    "final_norm": "gpt_neox.final_layer_norm", "head": "embed_out",
                },
                "options": {
                    "norm": "layer", "norm_bias": true, "activation": "gelu", "qkv_order": "groups", "qkv_bias": true,
                    "out_bias": true, "mlp_bias": true, "parallel": true,
                },
            }),
        ),
        (
            "gpt2",
            json!({
                "like": "llama",
                "keys": {
                    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                    "n_inner": "intermediate_size", "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps",
                },
                "unused_keys": [
                    "summary_type", "summary_use_proj", "summary_proj_to_labels", "summary_first_dropout",
                    "summary_activation", "scale_attn_weights",
                ],
                "names": {
                    "embed": "transformer.wte.weight", "layer": "transformer.h.{}.", "attention_norm": "ln_1", "mlp_norm": "ln_2",
                    "qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj",
                    "final_norm": "transformer.ln_f", "positions": "transformer.wpe.weight",
                },
                "options": {
                    "norm": "layer", "norm_bias": true, "activation": "gelu_new", "qkv_order": "blocks", "qkv_bias": true,
                    "out_bias": true, "mlp_bias": true, "transposed": true, "tied": true, "positions": "learned",
                    "position_key": "n_positions",
                },
            }),
        ),
        (
            "phi3",
            json!({
                "like": "llama",
                "unused_keys": ["original_max_position_embeddings"],
                "names": {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"},
                "options": {
                    "qkv_order": "blocks", "qkv_bias": false, "out_bias": false, "mlp_bias": false, "sliding_window": true,
                },
            }),
        ),
        (
            "olmo2",
            json!({
                "like": "qwen3",
                "names": {
                    "attention_norm": "", "mlp_norm": "", "post_attention_norm": "post_attention_layernorm",
                    "post_mlp_norm": "post_feedforward_layernorm", "qk_norm": ["self_attn.q_norm", "self_attn.k_norm"],
                },
                "options": {"qk_norm_of": "all", "sliding_window": false},
            }),
        ),
    ]
}

fn described(config: &Value, description: &Value) -> Value {
    let mut config = config.clone();
    config["model_type"] = "one_of_their_own".into();
    config["architectures"] = json!(["TheirOwnForCausalLM"]);
    config[DESCRIPTION] = description.clone();
    // GPT-2's own way to say "four times the hidden size".
    if config.get("n_inner").is_some_and(Value::is_null) {
        config["n_inner"] = (4 * config["n_embd"].as_u64().unwrap()).into();
    }
    config
}

/// The logits and all gradients.
fn numbers(case: &str, model: &Model, folder: &Folder) -> Vec<Vec<f32>> {
    let device = device(1, 1 << 30);
    let queue = device.compute();
    let parameters = model.load(folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
    let batch = golden_batch(case, model, DType::F32, queue);
    let tables = RotaryTables::new(&model.config, queue, batch.longest);
    let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
    let gradients = Gradients::new(&parameters, queue);
    let options = LossOptions { smoothing: 0.0, scale: 1.0 / batch.targets as f32 };
    pass::losses_and_gradients(model, &context, &gradients, options, Keep::Everything);
    let logits = queue.read(&pass::logits(model, &context));
    parameters.ids().map(|id| queue.read(&gradients.sum(queue, id))).chain([logits]).collect()
}

#[test]
fn a_described_decoder_is_the_known_one() {
    for (case, description) in cases() {
        let folder = Folder::open(golden().join(case)).expect("golden folders are sound");
        let known = Model::of_folder(folder.config(), &folder).unwrap();
        let own = Model::of_folder(&described(folder.config(), &description), &folder)
            .unwrap_or_else(|error| panic!("{case}: {error}"));
        own.check(&folder).unwrap();
        let names = |model: &Model| model.specs.iter().map(|spec| spec.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&own), names(&known), "{case}");
        assert!(numbers(case, &own, &folder) == numbers(case, &known, &folder), "{case}: other numbers");
    }
}

#[test]
fn a_wrong_description_is_an_error_that_says_what_is_wrong() {
    let config = json!({
        "model_type": "own", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "vocab_size": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    for (description, expected) in [
        (json!({}), "`like` is missing, expected one of llama"),
        (json!(3), "it is 3, expected a table"),
        (json!({"like": "mixtral"}), "`like` is \"mixtral\", expected one of llama"),
        (json!({"like": "bert"}), "`like` is \"bert\", expected one of llama"),
        (json!({"like": "llama", "layers": 3}), "unknown key `layers`"),
        (
            json!({"like": "llama", "options": {"norm": "batch"}}),
            "`options.norm` is \"batch\", expected `rms` or `layer`",
        ),
        (json!({"like": "llama", "options": {"activation": "sine"}}), "`options.activation` is \"sine\""),
        (json!({"like": "llama", "names": {"layer": "blocks."}}), "`names.layer` is \"blocks.\""),
        (json!({"like": "llama", "names": {"qkv": "qkv"}}), "`options.qkv_order` is missing"),
        (json!({"like": "llama", "names": {"gate": "wide"}}), "`names` of an MLP are"),
        (json!({"like": "llama", "options": {"positions": "learned"}}), "`names.positions` is missing"),
        (json!({"like": "opt", "options": {"rotary_base": 1e5}}), "options of rotations are set"),
        (json!({"like": "llama", "options": {"qk_norm_of": "all"}}), "`options.qk_norm_of` is set"),
        (
            json!({"like": "llama", "names": {"qkv": ["a", "b"]}}),
            "`names.qkv` is [\"a\",\"b\"], expected one name, or three",
        ),
        (
            json!({"like": "llama", "names": {"mlp_norm": "input_layernorm"}}),
            "two parts are called \"input_layernorm\"",
        ),
        (json!({"like": "llama", "options": {"rotary_base": -5.0}}), "`options.rotary_base` is -5"),
        (json!({"like": "llama", "options": {"rotary_fraction": 1.5}}), "`options.rotary_fraction` is 1.5"),
        (json!({"like": "llama", "options": {"epsilon": 0.5}}), "`options.epsilon` is not what config.json says"),
        (json!({"like": "llama", "options": {"tied": true}}), "`options.tied` is not what config.json says"),
        (json!({"like": "llama", "options": {"activation": "relu"}}), "`options.activation` is not what config.json"),
        (
            json!({"like": "opt", "options": {"skipped_positions": 9_223_372_036_854_775_807_u64}}),
            "`options.skipped_positions` is 9223372036854775807",
        ),
    ] {
        let error = Model::from_json(&described(&config, &description)).err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|error| error.contains(expected)), "{description}: {error:?}");
    }
    for (description, expected) in [
        (json!({"like": "llama", "names": 3}), "`names` is 3, expected a table"),
        (json!({"like": "llama", "unused_keys": "all"}), "`unused_keys` is \"all\", expected a list of texts"),
        (json!({"like": "llama", "options": {"tied": "yes"}}), "`options.tied` is \"yes\", expected true or false"),
        (json!({"like": "llama", "options": {"epsilon": true}}), "`options.epsilon` is true, expected a number"),
        (json!({"like": "llama", "keys": {"depth": 3}}), "`keys.depth` is 3, expected a text"),
    ] {
        let error = Model::from_json(&described(&config, &description)).unwrap_err().to_string();
        assert!(error.contains(expected), "{description}: {error}");
    }
    // What config.json says besides must still be understood.
    let error = Model::from_json(&described(&json!({"depth": 3}), &json!({"like": "llama"}))).unwrap_err().to_string();
    assert!(error.contains("`depth` is 3"), "{error}");
}

#[test]
fn keys_that_a_description_calls_unused_are_not_read() {
    let config = json!({
        "model_type": "own", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "vocab_size": 64, "rms_norm_eps": 0.5,
    });
    let epsilon = |description: Value| Model::from_json(&described(&config, &description)).unwrap().config.epsilon;
    assert_eq!(epsilon(json!({"like": "llama"})), 0.5);
    assert_eq!(epsilon(json!({"like": "llama", "unused_keys": ["rms_norm_eps"]})), 1e-6);
}

#[test]
fn the_description_lies_beside_config_json() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "own"}"#).unwrap();
    std::fs::write(folder.path().join("architecture.toml"), "like = \"llama\"\n[options]\nparallel = true\n").unwrap();
    let config = read_config(folder.path().join("config.json")).unwrap();
    assert_eq!(config[DESCRIPTION], json!({"like": "llama", "options": {"parallel": true}}));
    std::fs::write(folder.path().join("architecture.toml"), "like = llama").unwrap();
    let error = read_config(folder.path().join("config.json")).unwrap_err().to_string();
    assert!(error.contains("architecture.toml") && error.contains("is not TOML"), "{error}");
}

/// As mistakes in a run's configuration are told.
#[test]
fn mistakes_in_a_description_are_told_with_their_line_and_the_nearest_name() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "own", "d_model": 32, "n_layers": 2, "num_attention_heads": 4, "n_old": 1,
        "intermediate_size": 48, "vocab_size": 64}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let right = "like = \"llama\"\nunused_keys = [\"n_old\"]\n[keys]\nd_model = \"hidden_size\"\n\
                 n_layers = \"num_hidden_layers\"\n[options]\nnorm = \"rms\"\n[names]\nbase = \"model.\"\n";
    let read = |text: &str| {
        std::fs::write(folder.path().join("architecture.toml"), text).unwrap();
        let config = read_config(folder.path().join("config.json")).unwrap();
        check_description(&config, folder.path())?;
        Model::from_json(&config).map_err(|error| error.with_line(folder.path()))
    };
    read(right).unwrap();
    for (from, to, expected, hint) in [
        (
            "like = \"llama\"",
            "like = \"lama\"",
            ":1: `like` is \"lama\", expected one of llama",
            "did you mean \"llama\"?",
        ),
        ("unused_keys", "unused_key", ":2: unknown key `unused_key`", "did you mean `unused_keys`?"),
        (
            "n_old",
            "n_olt",
            ":2: `unused_keys` has \"n_olt\", which config.json does not have",
            "did you mean \"n_old\"?",
        ),
        (
            "\"hidden_size\"",
            "\"hiden_size\"",
            ":4: `keys.d_model` is \"hiden_size\", which is no key of config.json for a `llama`",
            "did you mean \"hidden_size\"?",
        ),
        (
            "n_layers =",
            "n_layer =",
            ":5: `keys` has `n_layer`, which config.json does not have",
            "did you mean \"n_layers\"?",
        ),
        ("norm =", "nrom =", ":7: unknown key `options.nrom`", "did you mean `options.norm`?"),
        ("\"rms\"", "\"rmsn\"", ":7: `options.norm` is \"rmsn\", expected `rms` or `layer`", "did you mean \"rms\"?"),
        ("base =", "norm_bias =", ":9: unknown key `names.norm_bias`", "did you mean `options.norm_bias`?"),
        ("base =", "xyzzy =", ":9: unknown key `names.xyzzy`", "the keys here are base, embed, "),
    ] {
        let error = read(&right.replace(from, to)).unwrap_err();
        assert!(error.to_string().contains(&format!("architecture.toml{expected}")), "{error}");
        assert!(error.hint().is_some_and(|found| found.contains(hint)), "{error}: {:?}", error.hint());
    }
    // What a model was saved with may speak of keys that saving leaves out.
    let saved = json!({"model_type": "own", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "vocab_size": 64, "evenkeel_architecture": {"like": "llama", "unused_keys": ["torch_dtype"]}});
    std::fs::remove_file(folder.path().join("architecture.toml")).unwrap();
    check_description(&saved, folder.path()).unwrap();
    Model::from_json(&saved).unwrap();
    std::fs::write(folder.path().join("architecture.toml"), "like = \"llama\"\n[keys\n").unwrap();
    let error = read_config(folder.path().join("config.json")).unwrap_err().to_string();
    assert!(error.contains("architecture.toml`: is not TOML in line 2: "), "{error}");
}

#[test]
fn the_example_of_the_documentation_is_a_description() {
    let page = include_str!("../../../docs/models.md");
    let example = page.split("```text\n").find(|text| text.starts_with("like = ")).expect("the page has it");
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "own", "d_model": 32, "n_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "vocab_size": 64}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    std::fs::write(folder.path().join("architecture.toml"), example.split("```").next().unwrap()).unwrap();
    let model = Model::from_json(&read_config(folder.path().join("config.json")).unwrap()).unwrap();
    assert!(model.specs.iter().any(|spec| spec.name == "transformer.blocks.1.attn.qkv.weight"));
}
