//! The known architectures.

use evenkeel_device::kernel::{Activation, NormKind, Pairs};

use super::CAPS;
use super::family::{
    AttentionFactor, Choice, ClampedExperts, Convolution, DropoutKeys, EmbeddingFactor, ExpertOptions, ExpertsBeside,
    Factors, Family, Fixed, FullLayers, KeySharers, Keys, LinearAttentionNames, LinearSizes, LogitFactor, Mlp,
    Multimodal, Names, Positions, Projections, QkNorm, Qkv, Rotated, Rotation, SharedExpert, SlidingRotation,
    TextClassifier, TokenInputs, Window,
};

const LLAMA_KEYS: Keys = Keys {
    hidden: "hidden_size",
    layers: "num_hidden_layers",
    heads: "num_attention_heads",
    ffn: "intermediate_size",
    activation: "hidden_act",
    epsilon: "rms_norm_eps",
};

const LLAMA_NAMES: Names = Names {
    base: "model.",
    embed: "model.embed_tokens.weight",
    embed_norm: None,
    layer: "model.layers.{}.",
    attention_norm: Some("input_layernorm"),
    mlp_norm: Some("post_attention_layernorm"),
    post_attention_norm: None,
    post_mlp_norm: None,
    sum_norms: None,
    qkv: Qkv::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    qk_norm: None,
    out: "self_attn.o_proj",
    mlp: Mlp::Gated { gate: "mlp.gate_proj", up: "mlp.up_proj", down: "mlp.down_proj" },
    layer_scale: None,
    final_norm: Some("model.norm"),
    head: "lm_head",
};

pub(super) const LLAMA_ROTATION: Rotation = Rotation {
    pairs: Pairs::Halves,
    default_base: 1e4,
    default_fraction: 1.0,
    dim: None,
    layers: Rotated::All,
    sliding: SlidingRotation::Same,
    growth: None,
    is_given: false,
    may_be_partial: false,
    harmless: &[],
};

const NO_FACTORS: Factors = Factors {
    embedding: EmbeddingFactor::One,
    attention: AttentionFactor::HeadDim,
    residual: None,
    logits: LogitFactor::One,
    caps: &[],
};

const LLAMA: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    variant: None,
    keys: LLAMA_KEYS,
    own_keys: &["head_dim", "num_key_value_heads", "pretraining_tp"],
    unused_keys: &[],
    aliases: &[],
    fixed: &[],
    names: LLAMA_NAMES,
    is_transposed: false,
    norm: NormKind::Rms,
    has_norm_bias: false,
    default_epsilon: 1e-6,
    default_activation: Activation::Silu,
    needs_head_dim: false,
    has_one_key_head: false,
    norm_offset: 0.0,
    qkv_bias: Choice::Key("attention_bias"),
    out_bias: Choice::Key("attention_bias"),
    mlp_bias: Choice::Key("mlp_bias"),
    has_head_bias: false,
    key_sharers: None,
    token_inputs: None,
    has_value_norm: false,
    full_layers: None,
    sinks: None,
    parallel: Choice::Never,
    positions: Positions::Rotary(LLAMA_ROTATION),
    window: Window::Never,
    default_window: None,
    factors: NO_FACTORS,
    experts: None,
    linear_attention: None,
    tied_by_default: false,
    dropout: DropoutKeys { attention: "attention_dropout", residual: None, embedding: None, default: 0.0 },
    multimodal: None,
    classifier: None,
    carried: &[],
};

const MISTRAL: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    qkv_bias: Choice::Never,
    out_bias: Choice::Never,
    mlp_bias: Choice::Never,
    window: Window::Everywhere,
    default_window: Some(4096),
    ..LLAMA
};

const MINISTRAL3: Family = Family {
    model_type: "ministral3",
    class: "Ministral3ForCausalLM",
    needs_head_dim: true,
    default_epsilon: 1e-5,
    positions: Positions::Rotary(Rotation {
        growth: Some("llama_4_scaling_beta"),
        is_given: true,
        harmless: &["max_position_embeddings"],
        ..LLAMA_ROTATION
    }),
    default_window: None,
    ..MISTRAL
};

/// The names of a text model inside a larger one.
const fn inside(names: Names) -> Names {
    Names {
        base: "model.language_model.",
        embed: "model.language_model.embed_tokens.weight",
        layer: "model.language_model.layers.{}.",
        final_norm: Some("model.language_model.norm"),
        ..names
    }
}

/// What older versions of transformers call these, and those of pictures.
const OLDER_TEXT: &[(&str, &str)] =
    &[("model.language_model.", "language_model.model."), ("lm_head", "language_model.lm_head")];
const PICTURES: &[&str] =
    &["vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."];

const GEMMA4_CARRIED: &[&str] =
    &["model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."];

const QK_NAMES: [&str; 2] = ["self_attn.q_norm", "self_attn.k_norm"];

/// The norms of models that normalise what a sublayer adds, and not what it reads.
const OLMO2_NAMES: Names = Names {
    attention_norm: None,
    mlp_norm: None,
    post_attention_norm: Some("post_attention_layernorm"),
    post_mlp_norm: Some("post_feedforward_layernorm"),
    qk_norm: Some(QkNorm::Whole(QK_NAMES)),
    ..LLAMA_NAMES
};

const GEMMA2_NAMES: Names = Names {
    mlp_norm: Some("pre_feedforward_layernorm"),
    post_attention_norm: Some("post_attention_layernorm"),
    post_mlp_norm: Some("post_feedforward_layernorm"),
    ..LLAMA_NAMES
};

const GEMMA: Family = Family {
    model_type: "gemma",
    class: "GemmaForCausalLM",
    needs_head_dim: true,
    norm_offset: 1.0,
    default_activation: Activation::GeluTanh,
    // Files from before there was a second key for it.
    own_keys: &["head_dim", "num_key_value_heads", "pretraining_tp"],
    fixed: &[("hidden_activation", Fixed::Text("gelu_pytorch_tanh"))],
    mlp_bias: Choice::Never,
    factors: Factors { embedding: EmbeddingFactor::SqrtHidden, ..NO_FACTORS },
    tied_by_default: true,
    ..LLAMA
};

const GEMMA3_TEXT: Family = Family {
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    keys: Keys { activation: "hidden_activation", ..LLAMA_KEYS },
    own_keys: &["head_dim", "num_key_value_heads"],
    fixed: &[],
    names: Names { qk_norm: Some(QkNorm::Heads(QK_NAMES)), ..GEMMA2_NAMES },
    positions: Positions::Rotary(Rotation {
        default_base: 1e6,
        sliding: SlidingRotation::OwnBase("rope_local_base_freq", 1e4),
        ..LLAMA_ROTATION
    }),
    window: Window::Pattern(6),
    default_window: Some(4096),
    factors: Factors { attention: AttentionFactor::Root("query_pre_attn_scalar", 256.0), ..GEMMA.factors },
    ..GEMMA
};

const GEMMA4_TEXT: Family = Family {
    model_type: "gemma4_text",
    class: "Gemma4ForCausalLM",
    own_keys: &["head_dim", "num_key_value_heads"],
    // With `vision`, only tokens of pictures see what follows them.
    fixed: &[("use_bidirectional_attention", Fixed::Text("vision"))],
    names: Names { layer_scale: Some("layer_scalar"), ..GEMMA3_TEXT.names },
    norm_offset: 0.0,
    key_sharers: Some(KeySharers {
        count: "num_kv_shared_layers",
        have_wide_mlps: "use_double_wide_mlp",
        idle: &["self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.", "self_attn.v_norm."],
    }),
    token_inputs: Some(TokenInputs {
        width: ("hidden_size_per_layer_input", 256),
        rows: "vocab_size_per_layer_input",
        table: "embed_tokens_per_layer.weight",
        projection: "per_layer_model_projection",
        norm: "per_layer_projection_norm",
        gate: "per_layer_input_gate",
        out: "per_layer_projection",
        post_norm: "post_per_layer_input_norm",
    }),
    has_value_norm: true,
    full_layers: Some(FullLayers {
        head_dim: ("global_head_dim", 512),
        values_are_keys: "attention_k_eq_v",
        kv_heads: "num_global_key_value_heads",
        by_layer: "per_layer_config",
    }),
    positions: Positions::Rotary(Rotation { is_given: true, may_be_partial: true, ..LLAMA_ROTATION }),
    window: Window::PatternAndLast(6),
    default_window: Some(512),
    factors: Factors { attention: AttentionFactor::One, caps: &[(CAPS[1], None)], ..GEMMA.factors },
    experts: Some(ExpertOptions {
        enabled: Some("enable_moe_block"),
        chosen: "top_k_experts",
        renormalises: Choice::Always,
        router: "router.proj",
        stacked: ["experts.gate_up_proj", "experts.down_proj"],
        beside: Some(ExpertsBeside {
            router_norm: "router.scale",
            expert_scales: "router.per_expert_scale",
            norm: "pre_feedforward_layernorm_2",
            post_norms: ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"],
        }),
        ..QWEN3_EXPERTS
    }),
    ..GEMMA3_TEXT
};

const QWEN3_EXPERTS: ExpertOptions = ExpertOptions {
    enabled: None,
    count: "num_experts",
    chosen: "num_experts_per_tok",
    ffn: Some("moe_intermediate_size"),
    renormalises: Choice::Key("norm_topk_prob"),
    router: "mlp.gate",
    one: "mlp.experts.{}.",
    gate: "gate_proj",
    up: "up_proj",
    down: "down_proj",
    stacked: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    shared: None,
    clamped: None,
    beside: None,
};

const QWEN_SHARED_EXPERT: SharedExpert = SharedExpert {
    ffn: "shared_expert_intermediate_size",
    mlp: Mlp::Gated {
        gate: "mlp.shared_expert.gate_proj",
        up: "mlp.shared_expert.up_proj",
        down: "mlp.shared_expert.down_proj",
    },
    gate: "mlp.shared_expert_gate",
};

const DELTA_NAMES: LinearAttentionNames = LinearAttentionNames {
    sizes: LinearSizes::Flat,
    projections: Projections::Apart {
        qkv: "linear_attn.in_proj_qkv",
        gate: "linear_attn.in_proj_z",
        take: "linear_attn.in_proj_b",
        fade: "linear_attn.in_proj_a",
    },
    convolution: Convolution::Same("linear_attn.conv1d.weight"),
    log_rate: "linear_attn.A_log",
    bias: "linear_attn.dt_bias",
    norm: "linear_attn.norm.weight",
    out: "linear_attn.out_proj",
};

const JET_NAMES: LinearAttentionNames = LinearAttentionNames {
    sizes: LinearSizes::Jet,
    projections: Projections::Separate {
        qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        gate: "self_attn.g_proj",
        take: "self_attn.b_proj",
        fade: "self_attn.a_proj",
    },
    convolution: Convolution::Generated {
        narrow: "self_attn.dynamic_conv1d.kernel_generator.w1",
        wide: "self_attn.dynamic_conv1d.kernel_generator.w2",
    },
    log_rate: "self_attn.A_log",
    bias: "self_attn.dt_bias",
    norm: "self_attn.o_norm.weight",
    out: "self_attn.o_proj",
};

const QWEN3_5: Family = Family {
    model_type: "qwen3_5_text",
    class: "Qwen3_5ForCausalLM",
    own_keys: &["head_dim", "num_key_value_heads", "mamba_ssm_dtype", "mtp_num_hidden_layers"],
    fixed: &[("attn_output_gate", Fixed::Flag(true))],
    names: Names {
        qkv: Qkv::SeparateWithGate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        qk_norm: Some(QkNorm::Heads(QK_NAMES)),
        ..LLAMA_NAMES
    },
    needs_head_dim: true,
    norm_offset: 1.0,
    mlp_bias: Choice::Never,
    positions: Positions::Rotary(Rotation {
        default_fraction: 0.25,
        may_be_partial: true,
        harmless: &["mrope_section", "mrope_interleaved"],
        ..LLAMA_ROTATION
    }),
    linear_attention: Some(DELTA_NAMES),
    carried: &["mtp."],
    ..LLAMA
};

const QWEN3_5_MOE: Family = Family {
    model_type: "qwen3_5_moe_text",
    class: "Qwen3_5MoeForCausalLM",
    keys: Keys { ffn: "moe_intermediate_size", ..LLAMA_KEYS },
    experts: Some(ExpertOptions {
        ffn: None,
        renormalises: Choice::Always,
        shared: Some(QWEN_SHARED_EXPERT),
        ..QWEN3_EXPERTS
    }),
    ..QWEN3_5
};

const QWEN3_5_CARRIED: &[&str] = &["model.visual.", "mtp."];

const QWEN3_5_VISION: Multimodal = Multimodal {
    text_type: "qwen3_5_text",
    other_keys: &[
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "language_model_only",
    ],
    older: &[],
    defaults: &[],
};

const GPT2_KEYS: Keys = Keys {
    hidden: "n_embd",
    layers: "n_layer",
    heads: "n_head",
    ffn: "n_inner",
    activation: "activation_function",
    epsilon: "layer_norm_epsilon",
};

const GPT2_NAMES: Names = Names {
    base: "transformer.",
    embed: "transformer.wte.weight",
    embed_norm: None,
    layer: "transformer.h.{}.",
    attention_norm: Some("ln_1"),
    mlp_norm: Some("ln_2"),
    post_attention_norm: None,
    post_mlp_norm: None,
    sum_norms: None,
    qkv: Qkv::FusedBlocks("attn.c_attn"),
    qk_norm: None,
    out: "attn.c_proj",
    mlp: Mlp::Plain { up: "mlp.c_fc", down: "mlp.c_proj" },
    layer_scale: None,
    final_norm: Some("transformer.ln_f"),
    head: "lm_head",
};

const GPT2_DROPOUT: DropoutKeys =
    DropoutKeys { attention: "attn_pdrop", residual: Some("resid_pdrop"), embedding: Some("embd_pdrop"), default: 0.1 };

const FALCON: Family = Family {
    model_type: "falcon",
    class: "FalconForCausalLM",
    variant: Some((NEW_FALCON, false)),
    keys: Keys { ffn: "ffn_hidden_size", activation: "activation", epsilon: "layer_norm_epsilon", ..LLAMA_KEYS },
    own_keys: &["num_kv_heads", "auto_map"],
    aliases: &[
        ("n_embed", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_head_kv", "num_kv_heads"),
    ],
    fixed: &[
        (NEW_FALCON, Fixed::Flag(false)),
        ("multi_query", Fixed::Flag(true)),
        ("parallel_attn", Fixed::Flag(true)),
        ("alibi", Fixed::Flag(false)),
        ("apply_residual_connection_post_layernorm", Fixed::Flag(false)),
    ],
    names: Names {
        base: "transformer.",
        embed: "transformer.word_embeddings.weight",
        layer: "transformer.h.{}.",
        mlp_norm: None,
        qkv: Qkv::FusedByGroup("self_attention.query_key_value"),
        out: "self_attention.dense",
        mlp: Mlp::Plain { up: "mlp.dense_h_to_4h", down: "mlp.dense_4h_to_h" },
        final_norm: Some("transformer.ln_f"),
        ..LLAMA_NAMES
    },
    norm: NormKind::Layer,
    has_norm_bias: true,
    default_epsilon: 1e-5,
    default_activation: Activation::GeluErf,
    has_one_key_head: true,
    qkv_bias: Choice::Key("bias"),
    out_bias: Choice::Key("bias"),
    mlp_bias: Choice::Key("bias"),
    parallel: Choice::Always,
    tied_by_default: true,
    ..LLAMA
};

const BERT_NAMES: Names = Names {
    base: "bert.",
    embed: "bert.embeddings.word_embeddings.weight",
    embed_norm: Some("bert.embeddings.LayerNorm"),
    layer: "bert.encoder.layer.{}.",
    attention_norm: None,
    mlp_norm: None,
    post_attention_norm: None,
    post_mlp_norm: None,
    sum_norms: Some(["attention.output.LayerNorm", "output.LayerNorm"]),
    qkv: Qkv::Separate(["attention.self.query", "attention.self.key", "attention.self.value"]),
    qk_norm: None,
    out: "attention.output.dense",
    mlp: Mlp::Plain { up: "intermediate.dense", down: "output.dense" },
    layer_scale: None,
    final_norm: None,
    head: "classifier",
};

const BERT: Family = Family {
    model_type: "bert",
    class: "BertForSequenceClassification",
    keys: Keys { epsilon: "layer_norm_eps", ..LLAMA_KEYS },
    own_keys: &[
        "classifier_dropout",
        "directionality",
        "pad_token_id",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
        "type_vocab_size",
    ],
    fixed: &[("is_decoder", Fixed::Flag(false)), ("position_embedding_type", Fixed::Text("absolute"))],
    names: BERT_NAMES,
    norm: NormKind::Layer,
    has_norm_bias: true,
    default_epsilon: 1e-12,
    default_activation: Activation::GeluErf,
    qkv_bias: Choice::Always,
    out_bias: Choice::Always,
    mlp_bias: Choice::Always,
    has_head_bias: true,
    positions: Positions::Learned {
        table: "bert.embeddings.position_embeddings.weight",
        count: "max_position_embeddings",
        skipped: 0,
    },
    dropout: DropoutKeys {
        attention: "attention_probs_dropout_prob",
        residual: Some("hidden_dropout_prob"),
        embedding: Some("hidden_dropout_prob"),
        default: 0.1,
    },
    classifier: Some(TextClassifier {
        types: "bert.embeddings.token_type_embeddings.weight",
        pooler: "bert.pooler.dense",
        drops_first_token: false,
        skips_padding: false,
        others: &["cls."],
    }),
    ..LLAMA
};

/// The flag of Falcon's larger models.
const NEW_FALCON: &str = "new_decoder_architecture";

/// Every known architecture.
pub static FAMILIES: [Family; 40] = [
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    Family {
        model_type: "mistral3",
        class: "Mistral3ForConditionalGeneration",
        names: inside(MINISTRAL3.names),
        multimodal: Some(Multimodal {
            text_type: "ministral3",
            other_keys: &[
                "vision_config",
                "image_token_index",
                "image_token_id",
                "projector_hidden_act",
                "vision_feature_layer",
                "multimodal_projector_bias",
                "spatial_merge_size",
            ],
            older: OLDER_TEXT,
            defaults: &[],
        }),
        carried: PICTURES,
        ..MINISTRAL3
    },
    Family {
        model_type: "qwen2",
        class: "Qwen2ForCausalLM",
        default_window: Some(4096),
        qkv_bias: Choice::Always,
        out_bias: Choice::Never,
        mlp_bias: Choice::Never,
        window: Window::From,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        class: "Qwen3ForCausalLM",
        default_window: Some(4096),
        names: Names { qk_norm: Some(QkNorm::Heads(QK_NAMES)), ..LLAMA_NAMES },
        mlp_bias: Choice::Never,
        window: Window::From,
        ..LLAMA
    },
    Family {
        model_type: "qwen3_moe",
        class: "Qwen3MoeForCausalLM",
        own_keys: &[
            "head_dim",
            "num_key_value_heads",
            "decoder_sparse_step",
            "mlp_only_layers",
            "sliding_window",
            "max_window_layers",
        ],
        aliases: &[("num_local_experts", "num_experts")],
        fixed: &[
            ("use_sliding_window", Fixed::Flag(false)),
            ("use_qk_norm", Fixed::Flag(true)),
            ("shared_expert_intermediate_size", Fixed::Number(0.0)),
        ],
        names: Names { qk_norm: Some(QkNorm::Heads(QK_NAMES)), ..LLAMA_NAMES },
        mlp_bias: Choice::Never,
        experts: Some(QWEN3_EXPERTS),
        ..LLAMA
    },
    QWEN3_5,
    Family {
        model_type: "qwen3_5",
        class: "Qwen3_5ForConditionalGeneration",
        names: inside(QWEN3_5.names),
        multimodal: Some(QWEN3_5_VISION),
        carried: QWEN3_5_CARRIED,
        ..QWEN3_5
    },
    QWEN3_5_MOE,
    Family {
        model_type: "qwen3_5_moe",
        class: "Qwen3_5MoeForConditionalGeneration",
        names: inside(QWEN3_5.names),
        multimodal: Some(Multimodal { text_type: "qwen3_5_moe_text", ..QWEN3_5_VISION }),
        carried: QWEN3_5_CARRIED,
        ..QWEN3_5_MOE
    },
    Family {
        model_type: "qwen3_next",
        class: "Qwen3NextForCausalLM",
        own_keys: &["head_dim", "num_key_value_heads", "decoder_sparse_step", "mlp_only_layers"],
        aliases: &[("num_local_experts", "num_experts")],
        fixed: &[],
        experts: Some(ExpertOptions {
            renormalises: Choice::KeyOrTrue("norm_topk_prob"),
            shared: Some(QWEN_SHARED_EXPERT),
            ..QWEN3_EXPERTS
        }),
        linear_attention: Some(LinearAttentionNames {
            projections: Projections::ByHead { qkvz: "linear_attn.in_proj_qkvz", ba: "linear_attn.in_proj_ba" },
            ..DELTA_NAMES
        }),
        ..QWEN3_5
    },
    Family {
        model_type: "mixtral",
        class: "MixtralForCausalLM",
        default_epsilon: 1e-5,
        qkv_bias: Choice::Never,
        out_bias: Choice::Never,
        mlp_bias: Choice::Never,
        positions: Positions::Rotary(Rotation { default_base: 1e6, ..LLAMA_ROTATION }),
        window: Window::Everywhere,
        experts: Some(ExpertOptions {
            count: "num_local_experts",
            ffn: None,
            renormalises: Choice::Always,
            router: "block_sparse_moe.gate",
            one: "block_sparse_moe.experts.{}.",
            gate: "w1",
            up: "w3",
            down: "w2",
            ..QWEN3_EXPERTS
        }),
        ..LLAMA
    },
    Family {
        model_type: "olmoe",
        class: "OlmoeForCausalLM",
        names: Names { qk_norm: Some(QkNorm::Whole(QK_NAMES)), ..LLAMA_NAMES },
        default_epsilon: 1e-5,
        mlp_bias: Choice::Never,
        experts: Some(ExpertOptions { ffn: None, ..QWEN3_EXPERTS }),
        ..LLAMA
    },
    Family {
        model_type: "gpt_oss",
        class: "GptOssForCausalLM",
        own_keys: &["head_dim", "num_key_value_heads", "experts_per_token", "initial_context_length"],
        aliases: &[("experts_per_token", "num_experts_per_tok")],
        default_epsilon: 1e-5,
        needs_head_dim: true,
        qkv_bias: Choice::KeyOrTrue("attention_bias"),
        out_bias: Choice::KeyOrTrue("attention_bias"),
        mlp_bias: Choice::Never,
        sinks: Some("self_attn.sinks"),
        positions: Positions::Rotary(Rotation { default_base: 1.5e5, is_given: true, ..LLAMA_ROTATION }),
        window: Window::Pattern(2),
        default_window: Some(128),
        experts: Some(ExpertOptions {
            count: "num_local_experts",
            ffn: None,
            renormalises: Choice::Always,
            router: "mlp.router",
            clamped: Some(ClampedExperts {
                biases: ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"],
                limit: ("swiglu_limit", 7.0),
            }),
            ..QWEN3_EXPERTS
        }),
        ..LLAMA
    },
    GEMMA,
    Family {
        model_type: "gemma2",
        class: "Gemma2ForCausalLM",
        keys: Keys { activation: "hidden_activation", ..LLAMA_KEYS },
        own_keys: &["head_dim", "num_key_value_heads", "hidden_act", "sliding_window_size"],
        fixed: &[],
        names: GEMMA2_NAMES,
        window: Window::Pattern(2),
        default_window: Some(4096),
        factors: Factors { caps: &[(CAPS[0], Some(50.0)), (CAPS[1], Some(30.0))], ..GEMMA3_TEXT.factors },
        ..GEMMA
    },
    Family {
        model_type: "jet_nemotron",
        class: "JetNemotronForCausalLM",
        own_keys: &["num_key_value_heads", "max_window_layers", "auto_map", "layer_types"],
        fixed: &[("use_mrope", Fixed::Flag(false))],
        qkv_bias: Choice::Always,
        out_bias: Choice::Never,
        mlp_bias: Choice::Never,
        window: Window::Jet,
        linear_attention: Some(JET_NAMES),
        ..LLAMA
    },
    GEMMA3_TEXT,
    Family {
        model_type: "gemma3",
        class: "Gemma3ForConditionalGeneration",
        names: inside(GEMMA3_TEXT.names),
        multimodal: Some(Multimodal {
            text_type: "gemma3_text",
            other_keys: &[
                "vision_config",
                "mm_tokens_per_image",
                "boi_token_index",
                "eoi_token_index",
                "image_token_index",
                "boi_token_id",
                "eoi_token_id",
                "image_token_id",
            ],
            older: OLDER_TEXT,
            defaults: &[
                ("num_attention_heads", 8),
                ("num_key_value_heads", 4),
                ("head_dim", 256),
                ("query_pre_attn_scalar", 256),
                ("vocab_size", 262_208),
            ],
        }),
        carried: PICTURES,
        ..GEMMA3_TEXT
    },
    GEMMA4_TEXT,
    Family {
        model_type: "gemma4",
        class: "Gemma4ForConditionalGeneration",
        names: inside(GEMMA4_TEXT.names),
        multimodal: Some(Multimodal {
            text_type: "gemma4_text",
            other_keys: &[
                "vision_config",
                "audio_config",
                "vision_soft_tokens_per_image",
                "boi_token_id",
                "eoi_token_id",
                "image_token_id",
                "video_token_id",
                "boa_token_id",
                "eoa_token_id",
                "eoa_token_index",
                "audio_token_id",
            ],
            older: &[],
            defaults: &[
                ("num_attention_heads", 8),
                ("num_key_value_heads", 4),
                ("head_dim", 256),
                ("sliding_window", 512),
                ("vocab_size", 262_144),
                ("vocab_size_per_layer_input", 262_144),
            ],
        }),
        carried: GEMMA4_CARRIED,
        ..GEMMA4_TEXT
    },
    Family {
        model_type: "granite",
        class: "GraniteForCausalLM",
        factors: Factors {
            embedding: EmbeddingFactor::Key("embedding_multiplier"),
            attention: AttentionFactor::Key("attention_multiplier", 1.0),
            residual: Some("residual_multiplier"),
            logits: LogitFactor::Over("logits_scaling"),
            caps: &[],
        },
        ..LLAMA
    },
    Family {
        model_type: "smollm3",
        class: "SmolLM3ForCausalLM",
        own_keys: &["head_dim", "num_key_value_heads", "pretraining_tp", "max_window_layers"],
        positions: Positions::Rotary(Rotation { default_base: 2e6, layers: Rotated::Listed, ..LLAMA_ROTATION }),
        window: Window::Unrotated,
        tied_by_default: true,
        ..LLAMA
    },
    Family {
        model_type: "starcoder2",
        class: "Starcoder2ForCausalLM",
        keys: Keys { epsilon: "norm_epsilon", ..LLAMA_KEYS },
        // The last three are those of an earlier version, beside the ones that are read.
        own_keys: &[
            "head_dim",
            "num_key_value_heads",
            "pretraining_tp",
            "activation_function",
            "layer_norm_epsilon",
            "rms_norm_eps",
        ],
        fixed: &[("mlp_type", Fixed::Text("default")), ("norm_type", Fixed::Text("layer_norm"))],
        names: Names { mlp: Mlp::Plain { up: "mlp.c_fc", down: "mlp.c_proj" }, ..LLAMA_NAMES },
        norm: NormKind::Layer,
        has_norm_bias: true,
        default_epsilon: 1e-5,
        default_activation: Activation::GeluTanh,
        qkv_bias: Choice::KeyOrTrue("use_bias"),
        out_bias: Choice::KeyOrTrue("use_bias"),
        mlp_bias: Choice::KeyOrTrue("use_bias"),
        window: Window::Everywhere,
        tied_by_default: true,
        dropout: DropoutKeys {
            residual: Some("residual_dropout"),
            embedding: Some("embedding_dropout"),
            ..LLAMA.dropout
        },
        ..LLAMA
    },
    Family {
        model_type: "phi3",
        class: "Phi3ForCausalLM",
        own_keys: &["num_key_value_heads", "original_max_position_embeddings", "auto_map"],
        fixed: &[("full_attn_mod", Fixed::Number(1.0)), ("interpolate_factor", Fixed::Number(1.0))],
        positions: Positions::Rotary(Rotation { may_be_partial: true, ..LLAMA_ROTATION }),
        names: Names {
            qkv: Qkv::FusedBlocks("self_attn.qkv_proj"),
            mlp: Mlp::GatedTogether { gate_up: "mlp.gate_up_proj", down: "mlp.down_proj" },
            ..LLAMA_NAMES
        },
        default_epsilon: 1e-5,
        qkv_bias: Choice::Never,
        out_bias: Choice::Never,
        mlp_bias: Choice::Never,
        window: Window::Everywhere,
        dropout: DropoutKeys { residual: Some("resid_pdrop"), ..LLAMA.dropout },
        ..LLAMA
    },
    Family {
        model_type: "olmo2",
        class: "Olmo2ForCausalLM",
        names: OLMO2_NAMES,
        default_epsilon: 1e-5,
        mlp_bias: Choice::Never,
        ..LLAMA
    },
    Family {
        model_type: "olmo3",
        class: "Olmo3ForCausalLM",
        names: OLMO2_NAMES,
        default_epsilon: 1e-5,
        mlp_bias: Choice::Never,
        positions: Positions::Rotary(Rotation {
            default_base: 5e5,
            sliding: SlidingRotation::Unstretched,
            ..LLAMA_ROTATION
        }),
        window: Window::Pattern(4),
        default_window: Some(4096),
        ..LLAMA
    },
    Family {
        model_type: "glm4",
        class: "Glm4ForCausalLM",
        names: Names {
            post_attention_norm: Some("post_self_attn_layernorm"),
            post_mlp_norm: Some("post_mlp_layernorm"),
            mlp: Mlp::GatedTogether { gate_up: "mlp.gate_up_proj", down: "mlp.down_proj" },
            ..LLAMA_NAMES
        },
        default_epsilon: 1.5625e-7,
        qkv_bias: Choice::KeyOrTrue("attention_bias"),
        out_bias: Choice::Never,
        mlp_bias: Choice::Never,
        positions: Positions::Rotary(Rotation {
            pairs: Pairs::Neighbours,
            default_fraction: 0.5,
            may_be_partial: true,
            ..LLAMA_ROTATION
        }),
        ..LLAMA
    },
    Family {
        model_type: "cohere2",
        class: "Cohere2ForCausalLM",
        keys: Keys { epsilon: "layer_norm_eps", ..LLAMA_KEYS },
        // `layer_switch` says again what `sliding_window_pattern` does.
        own_keys: &["head_dim", "num_key_value_heads", "rotary_pct", "layer_switch", "use_parallel_embedding"],
        fixed: &[
            ("order_of_interleaved_layers", Fixed::Text("local_attn_first")),
            ("position_embedding_type", Fixed::Text("rope_gptj")),
            ("use_embedding_sharing", Fixed::Flag(true)),
            ("use_gated_activation", Fixed::Flag(true)),
            ("use_parallel_block", Fixed::Flag(true)),
        ],
        names: Names { mlp_norm: None, ..LLAMA_NAMES },
        norm: NormKind::Layer,
        default_epsilon: 1e-5,
        mlp_bias: Choice::Never,
        parallel: Choice::Always,
        positions: Positions::Rotary(Rotation { pairs: Pairs::Neighbours, layers: Rotated::Sliding, ..LLAMA_ROTATION }),
        window: Window::Pattern(4),
        default_window: Some(4096),
        factors: Factors { logits: LogitFactor::Times("logit_scale", 0.0625), ..NO_FACTORS },
        tied_by_default: true,
        ..LLAMA
    },
    Family {
        model_type: "gpt2",
        class: "GPT2LMHeadModel",
        keys: GPT2_KEYS,
        own_keys: &[
            "n_ctx",
            "n_special",
            "predict_special_tokens",
            "reorder_and_upcast_attn",
            "scale_attn_by_inverse_layer_idx",
        ],
        names: GPT2_NAMES,
        is_transposed: true,
        norm: NormKind::Layer,
        has_norm_bias: true,
        default_activation: Activation::GeluTanh,
        default_epsilon: 1e-5,
        qkv_bias: Choice::Always,
        out_bias: Choice::Always,
        mlp_bias: Choice::Always,
        positions: Positions::Learned { table: "transformer.wpe.weight", count: "n_positions", skipped: 0 },
        tied_by_default: true,
        dropout: GPT2_DROPOUT,
        ..LLAMA
    },
    Family {
        model_type: "gptj",
        class: "GPTJForCausalLM",
        keys: GPT2_KEYS,
        own_keys: &["n_positions"],
        fixed: &[("rotary", Fixed::Flag(true))],
        names: Names {
            mlp_norm: None,
            qkv: Qkv::Separate(["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
            out: "attn.out_proj",
            mlp: Mlp::Plain { up: "mlp.fc_in", down: "mlp.fc_out" },
            ..GPT2_NAMES
        },
        norm: NormKind::Layer,
        has_norm_bias: true,
        default_activation: Activation::GeluTanh,
        default_epsilon: 1e-5,
        qkv_bias: Choice::Never,
        out_bias: Choice::Never,
        mlp_bias: Choice::Always,
        has_head_bias: true,
        parallel: Choice::Always,
        positions: Positions::Rotary(Rotation { pairs: Pairs::Neighbours, dim: Some("rotary_dim"), ..LLAMA_ROTATION }),
        dropout: DropoutKeys { default: 0.0, ..GPT2_DROPOUT },
        ..LLAMA
    },
    Family {
        model_type: "opt",
        class: "OPTForCausalLM",
        keys: Keys { ffn: "ffn_dim", activation: "activation_function", epsilon: "layer_norm_eps", ..LLAMA_KEYS },
        own_keys: &["init_std"],
        fixed: &[
            ("do_layer_norm_before", Fixed::Flag(true)),
            ("_remove_final_layer_norm", Fixed::Flag(false)),
            ("layer_norm_elementwise_affine", Fixed::Flag(true)),
            ("learned_embeddings", Fixed::Flag(true)),
            ("scale_embeddings", Fixed::Flag(false)),
            ("word_embed_proj_dim", Fixed::Hidden),
        ],
        names: Names {
            base: "model.",
            embed: "model.decoder.embed_tokens.weight",
            layer: "model.decoder.layers.{}.",
            attention_norm: Some("self_attn_layer_norm"),
            mlp_norm: Some("final_layer_norm"),
            out: "self_attn.out_proj",
            mlp: Mlp::Plain { up: "fc1", down: "fc2" },
            final_norm: Some("model.decoder.final_layer_norm"),
            ..LLAMA_NAMES
        },
        norm: NormKind::Layer,
        has_norm_bias: true,
        default_activation: Activation::Relu,
        default_epsilon: 1e-5,
        qkv_bias: Choice::KeyOrTrue("enable_bias"),
        out_bias: Choice::KeyOrTrue("enable_bias"),
        mlp_bias: Choice::KeyOrTrue("enable_bias"),
        positions: Positions::Learned {
            table: "model.decoder.embed_positions.weight",
            count: "max_position_embeddings",
            skipped: 2,
        },
        tied_by_default: true,
        dropout: DropoutKeys { residual: Some("dropout"), default: 0.1, ..LLAMA.dropout },
        ..LLAMA
    },
    Family {
        model_type: "bloom",
        class: "BloomForCausalLM",
        keys: Keys { hidden: "hidden_size", ..GPT2_KEYS },
        own_keys: &[
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "pretraining_tp",
            "seq_length",
            "skip_bias_add",
            "unk_token_id",
        ],
        aliases: &[("n_embed", "hidden_size"), ("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer")],
        fixed: &[("apply_residual_connection_post_layernorm", Fixed::Flag(false))],
        names: Names {
            embed: "transformer.word_embeddings.weight",
            embed_norm: Some("transformer.word_embeddings_layernorm"),
            attention_norm: Some("input_layernorm"),
            mlp_norm: Some("post_attention_layernorm"),
            qkv: Qkv::FusedByGroup("self_attention.query_key_value"),
            out: "self_attention.dense",
            mlp: Mlp::Plain { up: "mlp.dense_h_to_4h", down: "mlp.dense_4h_to_h" },
            ..GPT2_NAMES
        },
        norm: NormKind::Layer,
        has_norm_bias: true,
        default_activation: Activation::GeluTanh,
        default_epsilon: 1e-5,
        qkv_bias: Choice::Always,
        out_bias: Choice::Always,
        mlp_bias: Choice::Always,
        positions: Positions::Slopes,
        tied_by_default: true,
        dropout: DropoutKeys { residual: Some("hidden_dropout"), ..LLAMA.dropout },
        ..LLAMA
    },
    FALCON,
    Family {
        variant: Some((NEW_FALCON, true)),
        own_keys: &["num_key_value_heads", "multi_query", "parallel_attn", "auto_map"],
        aliases: &[
            ("n_embed", "hidden_size"),
            ("n_layer", "num_hidden_layers"),
            ("n_head", "num_attention_heads"),
            ("n_head_kv", "num_key_value_heads"),
            ("num_kv_heads", "num_key_value_heads"),
        ],
        fixed: &[
            (NEW_FALCON, Fixed::Flag(true)),
            ("alibi", Fixed::Flag(false)),
            ("num_ln_in_parallel_attn", Fixed::Number(2.0)),
        ],
        names: Names { attention_norm: Some("ln_attn"), mlp_norm: Some("ln_mlp"), ..FALCON.names },
        has_one_key_head: false,
        ..FALCON
    },
    Family {
        model_type: "gpt_neox",
        class: "GPTNeoXForCausalLM",
        keys: Keys { epsilon: "layer_norm_eps", ..LLAMA_KEYS },
        own_keys: &["classifier_dropout", "rotary_emb_base", "rotary_pct"],
        names: Names {
            base: "gpt_neox.",
            embed: "gpt_neox.embed_in.weight",
            embed_norm: None,
            layer: "gpt_neox.layers.{}.",
            attention_norm: Some("input_layernorm"),
            mlp_norm: Some("post_attention_layernorm"),
            post_attention_norm: None,
            post_mlp_norm: None,
            sum_norms: None,
            qkv: Qkv::FusedByGroup("attention.query_key_value"),
            qk_norm: None,
            out: "attention.dense",
            mlp: Mlp::Plain { up: "mlp.dense_h_to_4h", down: "mlp.dense_4h_to_h" },
            layer_scale: None,
            final_norm: Some("gpt_neox.final_layer_norm"),
            head: "embed_out",
        },
        norm: NormKind::Layer,
        has_norm_bias: true,
        default_activation: Activation::GeluErf,
        positions: Positions::Rotary(Rotation { default_fraction: 0.25, may_be_partial: true, ..LLAMA_ROTATION }),
        parallel: Choice::KeyOrTrue("use_parallel_residual"),
        default_epsilon: 1e-5,
        qkv_bias: Choice::KeyOrTrue("attention_bias"),
        out_bias: Choice::KeyOrTrue("attention_bias"),
        mlp_bias: Choice::Always,
        dropout: DropoutKeys {
            attention: "attention_dropout",
            residual: Some("hidden_dropout"),
            embedding: Some("hidden_dropout"),
            default: 0.0,
        },
        ..LLAMA
    },
    Family {
        model_type: "vit",
        class: "ViTForImageClassification",
        keys: Keys { epsilon: "layer_norm_eps", ..LLAMA_KEYS },
        own_keys: &["encoder_stride", "pooler_act", "pooler_output_size"],
        names: Names {
            base: "vit.",
            embed: "vit.embeddings.patch_embeddings.projection.weight",
            embed_norm: None,
            layer: "vit.encoder.layer.{}.",
            attention_norm: Some("layernorm_before"),
            mlp_norm: Some("layernorm_after"),
            post_attention_norm: None,
            post_mlp_norm: None,
            sum_norms: None,
            qkv: Qkv::Separate(["attention.attention.query", "attention.attention.key", "attention.attention.value"]),
            qk_norm: None,
            out: "attention.output.dense",
            mlp: Mlp::Plain { up: "intermediate.dense", down: "output.dense" },
            layer_scale: None,
            final_norm: Some("vit.layernorm"),
            head: "classifier",
        },
        norm: NormKind::Layer,
        has_norm_bias: true,
        default_activation: Activation::GeluErf,
        default_epsilon: 1e-12,
        qkv_bias: Choice::KeyOrTrue("qkv_bias"),
        out_bias: Choice::Always,
        mlp_bias: Choice::Always,
        positions: Positions::Image,
        dropout: DropoutKeys {
            attention: "attention_probs_dropout_prob",
            residual: Some("hidden_dropout_prob"),
            embedding: Some("hidden_dropout_prob"),
            default: 0.0,
        },
        ..LLAMA
    },
    BERT,
    Family {
        model_type: "roberta",
        class: "RobertaForSequenceClassification",
        names: Names {
            base: "roberta.",
            embed: "roberta.embeddings.word_embeddings.weight",
            embed_norm: Some("roberta.embeddings.LayerNorm"),
            layer: "roberta.encoder.layer.{}.",
            head: "classifier.out_proj",
            ..BERT_NAMES
        },
        positions: Positions::Learned {
            table: "roberta.embeddings.position_embeddings.weight",
            count: "max_position_embeddings",
            skipped: 0,
        },
        classifier: Some(TextClassifier {
            types: "roberta.embeddings.token_type_embeddings.weight",
            pooler: "classifier.dense",
            drops_first_token: true,
            skips_padding: true,
            others: &["lm_head.", "roberta.pooler.", "pooler."],
        }),
        ..BERT
    },
];
