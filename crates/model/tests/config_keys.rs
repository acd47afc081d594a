//! Keys of config.json: ordinary folders are accepted; keys that change the model and are not understood are refused.

#[path = "../../../golden/cases.rs"]
mod cases;
mod support;

use cases::CASES;
use evenkeel_model::{Config, Error};
use serde_json::{Value, json};

/// `changes` over `base`.
fn with(base: &Value, changes: Value) -> Value {
    let mut config = base.clone();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

/// Small models with the keys that transformers 5 writes for each architecture.
fn small() -> Vec<Value> {
    let sizes = json!({
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "initializer_range": 0.02, "architectures": null, "dtype": "float32", "transformers_version": "5.17.0",
    });
    let text = with(
        &sizes,
        json!({
            "vocab_size": 100, "max_position_embeddings": 64, "hidden_act": "silu", "use_cache": true,
            "pad_token_id": null, "bos_token_id": 1, "eos_token_id": [2, 3], "tie_word_embeddings": false,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "attention_dropout": 0.0,
        }),
    );
    let encoder = with(
        &sizes,
        json!({
            "vocab_size": 100, "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "classifier_dropout": null,
            "layer_norm_eps": 1e-12, "use_cache": true, "is_decoder": false, "add_cross_attention": false,
            "bos_token_id": null, "eos_token_id": null, "tie_word_embeddings": true,
        }),
    );
    let rms = with(&text, json!({"rms_norm_eps": 1e-6, "num_key_value_heads": 2, "head_dim": 8}));
    let layer_types = json!({
        "layer_types": ["full_attention", "full_attention"], "use_sliding_window": false, "sliding_window": null,
        "max_window_layers": 28,
    });
    vec![
        with(
            &rms,
            json!({
                "model_type": "llama", "pretraining_tp": 1, "attention_bias": false, "mlp_bias": false,
            }),
        ),
        with(&rms, json!({"model_type": "mistral", "sliding_window": 16})),
        with(&with(&rms, layer_types.clone()), json!({"model_type": "qwen2"})),
        with(&with(&rms, layer_types), json!({"model_type": "qwen3", "attention_bias": false})),
        with(
            &without(&rms, "hidden_act"),
            json!({
                "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
                "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": false,
                "final_logit_softcapping": null, "attn_logit_softcapping": null, "use_bidirectional_attention": false,
                "_sliding_window_pattern": 6, "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                },
            }),
        ),
        with(
            &rms,
            json!({
                "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": true,
                "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
                "router_aux_loss_coef": 0.9, "output_router_logits": false,
            }),
        ),
        json!({
            "model_type": "gpt2", "vocab_size": 100, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
            "n_inner": null, "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1,
            "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "summary_type": "cls_index",
            "summary_use_proj": true, "summary_activation": null, "summary_proj_to_labels": true,
            "summary_first_dropout": 0.1, "scale_attn_weights": true, "use_cache": true, "bos_token_id": 50256,
            "eos_token_id": 50256, "pad_token_id": null, "scale_attn_by_inverse_layer_idx": false,
            "reorder_and_upcast_attn": false, "add_cross_attention": false, "tie_word_embeddings": true,
            "dtype": "float32", "transformers_version": "5.17.0",
        }),
        with(
            &text,
            json!({
                "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_dropout": 0.0, "classifier_dropout": 0.1,
                "layer_norm_eps": 1e-5, "use_parallel_residual": true, "attention_bias": true, "is_decoder": false,
                "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
            }),
        ),
        with(
            &sizes,
            json!({
                "model_type": "vit", "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
                "layer_norm_eps": 1e-12, "image_size": 16, "patch_size": 8, "num_channels": 3, "qkv_bias": true,
                "encoder_stride": 16, "pooler_output_size": 32, "pooler_act": "tanh",
                "id2label": {"0": "cat", "1": "dog"}, "label2id": {"cat": 0, "dog": 1},
                "problem_type": "single_label_classification",
            }),
        ),
        with(&encoder, json!({"model_type": "bert", "pad_token_id": 0})),
        with(&encoder, json!({"model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1})),
    ]
}

/// What transformers wrote for the golden folders.
fn golden() -> impl Iterator<Item = Value> {
    CASES.iter().map(|case| golden_config(case))
}

fn golden_config(case: &str) -> Value {
    let text = std::fs::read_to_string(support::golden().join(case).join("config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn without(config: &Value, key: &str) -> Value {
    let mut config = config.clone();
    config.as_object_mut().unwrap().remove(key);
    config
}

fn of_type(model_type: &str) -> Value {
    let small = small().into_iter().find(|config| config["model_type"] == model_type);
    small.unwrap_or_else(|| golden_config(model_type))
}

/// The keys that transformers 4 writes for every configuration when it writes all of it, not only differences from the defaults.
fn bookkeeping() -> Value {
    // As text, because it is too long for the macro.
    let text = r#"{
        "_name_or_path": "somewhere", "add_cross_attention": false, "bad_words_ids": null, "begin_suppress_tokens": null,
        "bos_token_id": 1, "chunk_size_feed_forward": 0, "cross_attention_hidden_size": null,
        "decoder_start_token_id": null, "diversity_penalty": 0.0, "do_sample": false, "early_stopping": false,
        "encoder_no_repeat_ngram_size": 0, "eos_token_id": 2, "exponential_decay_length_penalty": null,
        "finetuning_task": null, "forced_bos_token_id": null, "forced_eos_token_id": null,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": false, "is_encoder_decoder": false,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
        "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
        "output_attentions": false, "output_hidden_states": false, "output_scores": false, "pad_token_id": null,
        "prefix": null, "problem_type": null, "pruned_heads": {}, "remove_invalid_values": false,
        "repetition_penalty": 1.0, "return_dict": true, "return_dict_in_generate": false, "sep_token_id": null,
        "suppress_tokens": null, "task_specific_params": null, "temperature": 1.0, "tf_legacy_loss": false,
        "tie_encoder_decoder": false, "tie_word_embeddings": true, "tokenizer_class": null, "top_k": 50, "top_p": 1.0,
        "torch_dtype": "bfloat16", "torchscript": false, "transformers_version": "4.57.1", "typical_p": 1.0,
        "use_bfloat16": false, "_attn_implementation_autoset": true, "use_cache": true
    }"#;
    serde_json::from_str(text).unwrap()
}

fn check(config: &Value) -> Config {
    Config::from_json(config).unwrap_or_else(|error| panic!("{config}: {error}"))
}

#[test]
fn what_transformers_writes_of_every_architecture_is_understood() {
    for config in small().into_iter().chain(golden()) {
        check(&config);
        check(&with(&config, bookkeeping()));
        let trained = json!({"use_cache": false, "gradient_checkpointing": true, "output_attentions": true});
        check(&with(&config, trained));
    }
}

#[test]
fn ordinary_folders_are_understood() {
    // The older forms, with keys that publishers add.
    for (model_type, dropped, changes) in [
        (
            "llama",
            "rope_parameters",
            json!({
                "architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0, "torch_dtype": "bfloat16",
                "rope_scaling": {
                    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192, "rope_type": "llama3",
                },
            }),
        ),
        (
            "llama",
            "rope_parameters",
            json!({
                "architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048, "rope_scaling": null,
                "_name_or_path": "x",
            }),
        ),
        (
            "llama",
            "rope_parameters",
            json!({
                "is_llama_config": true, "rope_interleaved": false, "rope_theta": 100000,
                "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            }),
        ),
        ("gpt2", "", json!({"n_special": 0, "predict_special_tokens": true, "n_ctx": 1024, "resid_pdrop": 0.1})),
        ("llama", "", json!({"unsloth_version": "2025.1", "unsloth_fixed": true, "quantization_config": null})),
        ("mistral", "rope_parameters", json!({"rope_theta": 10000.0, "sliding_window": null, "head_dim": null})),
        (
            "qwen2",
            "layer_types",
            json!({
                "sliding_window": 131072, "use_sliding_window": false, "max_window_layers": 28, "use_mrope": false,
            }),
        ),
        ("qwen3", "layer_types", json!({"max_window_layers": 36, "rope_scaling": null})),
        (
            "gemma3_text",
            "rope_parameters",
            json!({
                "cache_implementation": "hybrid", "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": null,
                "layer_types": null, "sliding_window_pattern": 6,
            }),
        ),
        (
            "gpt2",
            "",
            json!({
                "architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, "_num_labels": 1,
                "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
            }),
        ),
        (
            "gpt_neox",
            "rope_parameters",
            json!({
                "rotary_pct": 0.25, "rotary_emb_base": 10000, "rope_theta": 10000, "partial_rotary_factor": 0.25,
                "rope_scaling": null, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
                "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.InstructionTextGenerationPipeline"}},
            }),
        ),
        (
            "gpt_oss",
            "rope_parameters",
            json!({
                "experts_per_token": 2, "initial_context_length": 4096, "swiglu_limit": 7.0, "rope_theta": 150000,
                "rope_scaling": {
                    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                    "rope_type": "yarn", "truncate": false,
                },
                "quantization_config": {
                    "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
                    "quant_method": "mxfp4",
                },
            }),
        ),
        ("vit", "", json!({"architectures": ["ViTModel"], "model_type": "vit", "num_labels": 2})),
        ("vit", "", json!({"architectures": ["ViTForImageClassification"]})),
        (
            "bert",
            "classifier_dropout",
            json!({
                "architectures": ["BertForMaskedLM"], "position_embedding_type": "absolute", "gradient_checkpointing": false,
                "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
                "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
            }),
        ),
        ("bert", "", json!({"architectures": ["BertForSequenceClassification"], "finetuning_task": "sst-2"})),
        ("bert", "", json!({"architectures": ["BertForPreTraining"], "problem_type": "single_label_classification"})),
        ("roberta", "", json!({"architectures": ["RobertaForMaskedLM"], "bos_token_id": 0, "eos_token_id": 2})),
        ("roberta", "", json!({"architectures": ["RobertaModel"], "layer_norm_eps": 1e-5})),
        ("gemma3_text", "", json!({"architectures": ["Gemma3TextModel"]})),
        ("llama", "", json!({"is_causal": true, "scale_attn_weights": true})),
        ("opt", "", json!({"learned_embeddings": true, "scale_embeddings": false, "layerdrop": 0.0})),
        ("phi3", "", json!({"auto_map": {"AutoConfig": "x.Y"}, "full_attn_mod": 1, "interpolate_factor": 1})),
        ("gemma2", "", json!({"sliding_window_size": 4096, "hidden_act": "gelu_pytorch_tanh"})),
        (
            "qwen3_moe",
            "",
            json!({
                "use_qk_norm": true, "shared_expert_intermediate_size": 0, "qkv_bias": false, "max_window_layers": 28,
                "sliding_window": 4096, "use_sliding_window": false,
            }),
        ),
    ] {
        check(&with(&without(&of_type(model_type), dropped), changes));
    }
}

#[test]
fn keys_that_change_the_model_and_are_not_understood_are_refused_by_name() {
    for (model_type, changes, named) in [
        ("llama", json!({"residual_multiplier": 0.22}), "`residual_multiplier` is 0.22"),
        ("llama", json!({"embedding_multiplier": 12}), "`embedding_multiplier` is 12"),
        ("llama", json!({"logits_scaling": 8.0}), "`logits_scaling`"),
        ("llama", json!({"attention_multiplier": 0.015625}), "`attention_multiplier`"),
        ("llama", json!({"attention_multiplier": 1.0}), "`attention_multiplier`"),
        ("llama", json!({"no_rope_layers": [1, 1, 1, 0]}), "`no_rope_layers`"),
        ("llama", json!({"no_rope_layer_interval": 4}), "`no_rope_layer_interval`"),
        ("llama", json!({"num_local_experts": 8}), "`num_local_experts`"),
        ("llama", json!({"swiglu_limit": 7.0}), "`swiglu_limit`"),
        ("llama", json!({"sliding_window": 4096}), "`sliding_window`"),
        ("llama", json!({"layer_types": ["full_attention", "sliding_attention"]}), "`layer_types`"),
        ("llama", json!({"query_pre_attn_scalar": 256}), "`query_pre_attn_scalar`"),
        ("llama", json!({"use_qk_norm": true}), "`use_qk_norm`"),
        ("llama", json!({"is_causal": false}), "`is_causal`"),
        ("llama", json!({"pruned_heads": {"0": [1]}}), "`pruned_heads`"),
        ("llama", json!({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}), "`auto_map`"),
        ("llama", json!({"quantization": {"bits": 4, "group_size": 64}}), "`quantization`"),
        ("mistral", json!({"attention_bias": true}), "`attention_bias`"),
        ("mistral", json!({"mlp_bias": true}), "`mlp_bias`"),
        ("qwen2", json!({"partial_rotary": 0.5}), "`partial_rotary`"),
        ("gemma3_text", json!({"final_logit_softcapping": 30.0}), "`final_logit_softcapping`"),
        ("gemma3_text", json!({"use_bidirectional_attention": true}), "`use_bidirectional_attention`"),
        ("gpt2", json!({"num_key_value_heads": 2}), "`num_key_value_heads`"),
        ("gpt2", json!({"rope_theta": 10000.0}), "`rope_theta`"),
        ("gpt2", json!({"scale_attn_weights": false}), "scale_attn_weights"),
        ("gpt_neox", json!({"head_dim": 16}), "`head_dim`"),
        ("phi3", json!({"full_attn_mod": 2}), "`full_attn_mod: 2`"),
        ("qwen3_moe", json!({"use_sliding_window": true}), "`use_sliding_window: true`"),
        ("qwen3_moe", json!({"layer_types": ["full_attention", "sliding_attention"]}), "`layer_types`"),
        ("qwen3_moe", json!({"shared_expert_intermediate_size": 16}), "`shared_expert_intermediate_size: 16`"),
        ("qwen3_moe", json!({"use_qk_norm": false}), "`use_qk_norm: false`"),
        ("mistral", json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` is 0.5, expected 1"),
        ("llama", json!({"initializer_range": -1.0}), "`initializer_range`"),
        ("llama", json!({"rms_norm_eps": 1e300}), "`rms_norm_eps`"),
        ("gemma2", json!({"final_logit_softcapping": 1e-320}), "`final_logit_softcapping`"),
        ("vit", json!({"problem_type": "regression"}), "`problem_type`"),
        ("vit", json!({"drop_path_rate": 0.1}), "`drop_path_rate`"),
        ("bert", json!({"problem_type": "regression"}), "`problem_type` is \"regression\""),
        ("bert", json!({"problem_type": "multi_label_classification"}), "`problem_type` is \"multi_label"),
        ("bert", json!({"num_labels": 1}), "`num_labels` is 1"),
        ("bert", json!({"id2label": {"0": "score"}}), "regression"),
        ("bert", json!({"is_decoder": true}), "`is_decoder: true`"),
        ("bert", json!({"add_cross_attention": true}), "`add_cross_attention`"),
        ("bert", json!({"position_embedding_type": "relative_key"}), "`position_embedding_type: \"relative_key\"`"),
        ("bert", json!({"embedding_size": 16}), "`embedding_size`"),
        ("bert", json!({"architectures": ["BertForTokenClassification"]}), "BertForTokenClassification"),
        ("roberta", json!({"pad_token_id": 64}), "`max_position_embeddings` is 64"),
        ("roberta", json!({"type_vocab_size": 0}), "`type_vocab_size`"),
        ("llama", json!({"rope_parameters": {"rope_type": "default", "factor": 4.0}}), "`rope_parameters.factor`"),
        ("llama", json!({"rope_parameters": {"mrope_section": [8, 12, 12]}}), "`rope_parameters.mrope_section`"),
        ("llama", json!({"rope_parameters": "linear"}), "`rope_parameters`"),
        ("llama", json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}), "`rope_scaling`"),
        (
            "gemma3_text",
            json!({"rope_parameters": {"full_attention": {"attention_factor": 1.2}, "sliding_attention": {}}}),
            "`rope_parameters.full_attention.attention_factor`",
        ),
    ] {
        let config = with(&of_type(model_type), changes.clone());
        let error = Config::from_json(&config).err().unwrap_or_else(|| panic!("{model_type} took {changes}"));
        assert!(error.to_string().contains(named), "{model_type} {changes}: {error}");
    }
}

#[test]
fn all_of_them_are_named_at_once_with_a_way_out() {
    let granite = with(
        &of_type("llama"),
        json!({
            "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "attention_multiplier": 0.01,
        }),
    );
    let error = Config::from_json(&granite).unwrap_err();
    for key in ["residual_multiplier", "embedding_multiplier", "logits_scaling", "attention_multiplier", "`llama`"] {
        assert!(error.to_string().contains(key), "{error}");
    }
    assert!(error.hint().unwrap().contains("model.ignore_keys"), "{error}");
    let many: Value = (0..100).map(|n| (format!("k\u{1b}{n}{}", "x".repeat(1000)), json!(n))).collect();
    let error = Config::from_json(&with(&of_type("llama"), many)).unwrap_err().to_string();
    assert!(error.contains("and 92 more") && error.len() < 2000 && !error.contains('\u{1b}'), "{error}");
}

#[test]
fn values_that_ask_for_nothing_are_taken_whatever_their_keys() {
    for value in [json!(null), json!(false), json!([]), json!({}), json!("")] {
        check(&with(&of_type("llama"), json!({"no_rope_layers": value})));
    }
    check(&with(
        &of_type("llama"),
        json!({
            "residual_multiplier": 1.0, "embedding_multiplier": 1, "logits_scaling": 1.0, "ffn_dropout": 0.0,
            "layer_types": ["full_attention", "full_attention"],
        }),
    ));
}

#[test]
fn architectures_that_contradict_the_type_are_an_error() {
    for classes in [
        json!(["GraniteForCausalLM"]),
        json!(["MistralForCausalLM"]),
        json!(["LlamaForSequenceClassification"]),
        json!(["LlamaForCausalLM", "MistralForCausalLM"]),
        json!([3]),
    ] {
        let error = Config::from_json(&with(&of_type("llama"), json!({"architectures": classes}))).unwrap_err();
        assert!(matches!(error, Error::OtherClass { .. }), "{classes}: {error}");
        assert!(error.to_string().contains("expected LlamaForCausalLM"), "{error}");
    }
    let error = Config::from_json(&with(&of_type("llama"), json!({"architectures": "LlamaForCausalLM"}))).unwrap_err();
    assert!(error.to_string().contains("a list of classes"), "{error}");
    for classes in [json!(["LlamaForCausalLM"]), json!(["LlamaModel"]), json!([])] {
        check(&with(&of_type("llama"), json!({"architectures": classes})));
    }
}

#[test]
fn an_unknown_architecture_is_not_told_to_lie_about_it() {
    let error = Config::from_json(&with(&of_type("llama"), json!({"model_type": "mamba"}))).unwrap_err();
    let hint = error.hint().unwrap_or_default();
    assert!(matches!(error, Error::UnknownArchitecture { .. }) && !hint.contains("model_type"), "{error}: {hint}");
}

/// transformers stretches it thirty-two times then.
#[test]
fn gpt_oss_without_a_rotation_is_refused() {
    let told = Config::from_json(&without(&of_type("gpt_oss"), "rope_parameters")).unwrap_err().to_string();
    assert!(told.contains("`rope_parameters` is missing"), "{told}");
}

#[test]
fn sizes_of_gemma4s_full_layers_are_read_as_transformers_and_as_publishers_write_them() {
    let written = golden_config("gemma4");
    let published =
        with(&without(&written, "per_layer_config"), json!({"global_head_dim": 16, "num_global_key_value_heads": 1}));
    let [written, published] = [&written, &published].map(check);
    let sizes = |config: &Config| -> Vec<(usize, usize)> {
        config.layers.iter().map(|layer| (layer.head_dim, layer.kv_heads)).collect()
    };
    assert_eq!(sizes(&written), [(16, 1), (8, 2), (16, 1)]);
    assert_eq!(written.layers, published.layers);
    // Without `attention_k_eq_v` the number of key heads is that of all layers.
    let unshared = with(
        &without(&golden_config("gemma4"), "per_layer_config"),
        json!({"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": false}),
    );
    assert_eq!(sizes(&check(&unshared)), [(16, 2), (8, 2), (16, 2)]);
}

#[test]
fn what_is_not_computed_of_gemma4_is_refused_by_name() {
    for (case, changes, named) in [
        ("gemma4", json!({"use_bidirectional_attention": "all"}), "`use_bidirectional_attention: \"all\"`"),
        ("gemma4", json!({"attn_logit_softcapping": 50.0}), "`attn_logit_softcapping`"),
        ("gemma4", json!({"output_router_logits": true}), "`output_router_logits`"),
        (
            "gemma4",
            json!({"per_layer_config": {"0": {"head_dim": 16, "sliding_window": 4}}}),
            "`per_layer_config.sliding_window`",
        ),
        ("gemma4", json!({"per_layer_config": {"0": {"head_dim": 16}}}), "`per_layer_config`"),
        ("gemma4", json!({"per_layer_config": {"3": {"head_dim": 16}}}), "`per_layer_config`"),
        ("gemma4", json!({"global_head_dim": 16}), "`global_head_dim`"),
        ("gemma4_shared", json!({"num_kv_shared_layers": 4}), "`num_kv_shared_layers`"),
        ("gemma4_shared", json!({"vocab_size_per_layer_input": 100}), "`vocab_size_per_layer_input`"),
    ] {
        let error = Config::from_json(&with(&golden_config(case), changes.clone())).unwrap_err().to_string();
        assert!(error.contains(named), "{changes}: {error}");
    }
}

#[test]
fn keys_that_are_missing_have_the_values_that_transformers_gives_them() {
    let read = |case: &str, key: &str| Config::from_json(&without(&golden_config(case), key)).unwrap();
    let window = |config: &Config| config.layers.iter().find_map(|layer| layer.window);
    for (case, expected) in
        [("gemma2", 4096), ("gemma3", 4096), ("gemma4", 512), ("cohere2", 4096), ("olmo3", 4096), ("gpt_oss", 128)]
    {
        assert_eq!(window(&read(case, "sliding_window")), Some(expected), "{case}");
    }
    assert_eq!(window(&read("phi3", "sliding_window")), None);
    let gemma2 = read("gemma2", "final_logit_softcapping");
    assert_eq!(gemma2.logit_cap, Some(30.0));
    assert_eq!(read("gemma2", "attn_logit_softcapping").score_cap, Some(50.0));
    let none = Config::from_json(&with(&golden_config("gemma2"), json!({"attn_logit_softcapping": null}))).unwrap();
    assert_eq!(none.score_cap, None);
    assert_eq!(read("gemma2", "query_pre_attn_scalar").attention_scale, 1.0 / 16.0);
    assert_eq!(read("mixtral", "rope_parameters").rotaries[0].base, 1e6);
    let error = Config::from_json(&without(&golden_config("ministral3"), "rope_parameters")).unwrap_err();
    assert!(error.to_string().contains("`rope_parameters` is missing"), "{error}");
    let windowless = with(&golden_config("gemma4"), json!({"sliding_window": null}));
    assert!(Config::from_json(&windowless).unwrap_err().to_string().contains("`sliding_window` is missing"));
}

#[test]
fn zeros_that_ask_for_nothing_are_understood() {
    let mut config = golden_config("ministral3");
    config["rope_parameters"]["llama_4_scaling_beta"] = json!(0);
    config["rope_parameters"]["mscale_all_dim"] = json!(0.0);
    assert!(Config::from_json(&config).unwrap().rotaries[0].growth.is_none());
}
