//! The known architectures, as data: the names in their files and their options.

use evenkeel_device::kernel::{Activation, NormKind, Pairs};

/// One architecture.
#[derive(Debug)]
pub struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// The class that config.json's `architectures` names.
    pub class: &'static str,
    pub keys: Keys,
    /// Keys of config.json, beside those of the other fields, that this architecture has.
    pub own_keys: &'static [&'static str],
    /// Other names of keys in older or newer files.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Keys with one value that is implemented.
    pub fixed: &'static [(&'static str, Fixed)],
    pub names: Names,
    /// Whether linear layers store their weights [in, out].
    pub is_transposed: bool,
    pub norm: NormKind,
    pub has_norm_bias: bool,
    pub default_epsilon: f64,
    pub default_activation: Activation,
    /// Whether the size of a head does not follow from the others.
    pub needs_head_dim: bool,
    /// 1 if a stored norm weight w stands for 1 + w.
    pub norm_offset: f32,
    pub qkv_bias: Choice,
    pub out_bias: Choice,
    pub mlp_bias: Choice,
    pub has_head_bias: bool,
    /// Whether attention and MLP read the same stream and are added to it together.
    pub parallel: Choice,
    pub positions: Positions,
    pub window: Window,
    pub factors: Factors,
    /// The keys and names of experts, in layers that have them in place of an MLP.
    pub experts: Option<ExpertOptions>,
    pub tied_by_default: bool,
    pub dropout: DropoutKeys,
}

impl Family {
    /// How heads are rotated by position, if they are.
    pub fn rotation(&self) -> Option<&Rotation> {
        if let Positions::Rotary(rotation) = &self.positions { Some(rotation) } else { None }
    }

    /// Whether config.json may name this architecture so, with or without its head.
    pub fn is_called(&self, class: &str) -> bool {
        let heads = ["ForCausalLM", "LMHeadModel", "ForImageClassification"];
        let stem = heads.iter().find_map(|head| self.class.strip_suffix(head)).unwrap_or(self.class);
        let names = [self.class.to_owned(), format!("{stem}Model"), format!("{stem}TextModel")];
        // Early files of Llama have LLaMAForCausalLM.
        names.iter().any(|name| name.eq_ignore_ascii_case(class))
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Fixed {
    Flag(bool),
    /// As large as the stream.
    Hidden,
}

/// The keys of the sizes in config.json.
#[derive(Debug)]
pub struct Keys {
    pub hidden: &'static str,
    pub layers: &'static str,
    pub heads: &'static str,
    pub ffn: &'static str,
    pub activation: &'static str,
    pub epsilon: &'static str,
}

/// The keys in config.json of the shares of numbers that training drops.
#[derive(Debug)]
pub struct DropoutKeys {
    /// The key for attention's weights.
    pub attention: &'static str,
    /// The key for each sublayer's addition to the stream.
    pub residual: Option<&'static str>,
    /// The key for the stream at its beginning.
    pub embedding: Option<&'static str>,
    /// The share if config.json does not say.
    pub default: f64,
}

/// The names of the parameters. Names in a layer follow `layer`, whose `{}` is the layer's number.
#[derive(Debug)]
pub struct Names {
    pub base: &'static str,
    pub embed: &'static str,
    /// A norm on the embeddings.
    pub embed_norm: Option<&'static str>,
    pub layer: &'static str,
    /// Norms of the stream before each sublayer. Where attention and MLP are parallel, an MLP without one reads what attention does.
    pub attention_norm: Option<&'static str>,
    pub mlp_norm: Option<&'static str>,
    /// Norms on a sublayer's output, before it joins the stream.
    pub post_attention_norm: Option<&'static str>,
    pub post_mlp_norm: Option<&'static str>,
    pub qkv: Qkv,
    pub qk_norm: Option<QkNorm>,
    pub out: &'static str,
    pub mlp: Mlp,
    pub final_norm: &'static str,
    pub head: &'static str,
}

/// The names of the norms on queries and keys.
#[derive(Clone, Copy, Debug)]
pub enum QkNorm {
    /// Of each head by itself.
    Heads([&'static str; 2]),
    /// Of all heads together.
    Whole([&'static str; 2]),
}

#[derive(Debug)]
pub struct ExpertOptions {
    pub count: &'static str,
    /// The key of an expert's columns, if not that of an MLP's.
    pub ffn: Option<&'static str>,
    pub renormalises: Choice,
    pub router: &'static str,
    /// The prefix of an expert's names, whose `{}` is its number.
    pub one: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    /// The names where all experts are in one tensor.
    pub stacked: [&'static str; 2],
}

/// How queries, keys and values are projected.
#[derive(Debug)]
pub enum Qkv {
    Separate([&'static str; 3]),
    /// One matrix: all queries, then all keys, then all values.
    FusedBlocks(&'static str),
    /// One matrix: query, key and value of each head together.
    FusedByHead(&'static str),
}

#[derive(Debug)]
pub enum Mlp {
    Gated {
        gate: &'static str,
        up: &'static str,
        down: &'static str,
    },
    /// One matrix with the gate's rows before the others.
    GatedTogether {
        gate_up: &'static str,
        down: &'static str,
    },
    Plain {
        up: &'static str,
        down: &'static str,
    },
}

/// Whether a layer has something: always, never, or as config.json says.
#[derive(Debug)]
pub enum Choice {
    Never,
    Always,
    Key(&'static str),
    /// As the key says, and true without it.
    KeyOrTrue(&'static str),
}

#[derive(Debug)]
pub enum Positions {
    Rotary(Rotation),
    /// A table of this name with a row for each position, their number under this key, behind some other rows.
    Learned {
        table: &'static str,
        count: &'static str,
        skipped: usize,
    },
    /// None; attention's scores fall with the distance, for each head with a slope of its own.
    Slopes,
    /// Patches and a class token.
    Image,
}

#[derive(Debug)]
pub struct Rotation {
    pub pairs: Pairs,
    /// The base and the rotated share of a head if config.json does not say.
    pub default_base: f64,
    pub default_fraction: f64,
    /// The key of the number of rotated elements, where it is no share.
    pub dim: Option<&'static str>,
    pub layers: Rotated,
    pub sliding: SlidingRotation,
}

/// The layers that are rotated.
#[derive(Debug)]
pub enum Rotated {
    All,
    /// Those with a 1 in `no_rope_layers`, or all but each that `no_rope_layer_interval` ends with.
    Listed,
    /// Those with sliding windows.
    Sliding,
}

/// The rotation of layers with sliding windows, if config.json gives none for them.
#[derive(Debug)]
pub enum SlidingRotation {
    Same,
    /// Without what stretches that of the others.
    Unstretched,
    /// The same, with a base of its own under this key.
    OwnBase(&'static str, f64),
}

/// The layers with sliding windows. Where they differ from layer to layer, `layer_types` names them.
#[derive(Debug)]
pub enum Window {
    Never,
    /// In every layer, if `sliding_window` is set.
    Everywhere,
    /// From layer `max_window_layers` on, with `use_sliding_window`.
    From,
    /// In all but every so many-th layer.
    Pattern(usize),
    /// In those that are not rotated, with `use_sliding_window`.
    Unrotated,
}

/// What numbers are multiplied with beside weights.
#[derive(Debug)]
pub struct Factors {
    pub embedding: EmbeddingFactor,
    /// The key of attention's scale, and what it is without the key; 1/√head_dim if there is none.
    pub attention: Option<(&'static str, f64)>,
    /// The key of the factor of what sublayers add to the stream.
    pub residual: Option<&'static str>,
    pub logits: LogitFactor,
    /// Whether there are keys for soft caps on attention's scores and on logits.
    pub has_caps: bool,
}

#[derive(Debug)]
pub enum EmbeddingFactor {
    One,
    SqrtHidden,
    Key(&'static str),
}

#[derive(Debug)]
pub enum LogitFactor {
    One,
    /// Logits are multiplied by the number under this key, or by the default.
    Times(&'static str, f64),
    /// Logits are divided by the number under this key.
    Over(&'static str),
}

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
    qkv: Qkv::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    qk_norm: None,
    out: "self_attn.o_proj",
    mlp: Mlp::Gated { gate: "mlp.gate_proj", up: "mlp.up_proj", down: "mlp.down_proj" },
    final_norm: "model.norm",
    head: "lm_head",
};

const LLAMA_ROTATION: Rotation = Rotation {
    pairs: Pairs::Halves,
    default_base: 1e4,
    default_fraction: 1.0,
    dim: None,
    layers: Rotated::All,
    sliding: SlidingRotation::Same,
};

const NO_FACTORS: Factors = Factors {
    embedding: EmbeddingFactor::One,
    attention: None,
    residual: None,
    logits: LogitFactor::One,
    has_caps: false,
};

const LLAMA: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    keys: LLAMA_KEYS,
    own_keys: &["head_dim", "num_key_value_heads", "pretraining_tp"],
    aliases: &[],
    fixed: &[],
    names: LLAMA_NAMES,
    is_transposed: false,
    norm: NormKind::Rms,
    has_norm_bias: false,
    default_epsilon: 1e-6,
    default_activation: Activation::Silu,
    needs_head_dim: false,
    norm_offset: 0.0,
    qkv_bias: Choice::Key("attention_bias"),
    out_bias: Choice::Key("attention_bias"),
    mlp_bias: Choice::Key("mlp_bias"),
    has_head_bias: false,
    parallel: Choice::Never,
    positions: Positions::Rotary(LLAMA_ROTATION),
    window: Window::Never,
    factors: NO_FACTORS,
    experts: None,
    tied_by_default: false,
    dropout: DropoutKeys { attention: "attention_dropout", residual: None, embedding: None, default: 0.0 },
};

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
    mlp_bias: Choice::Never,
    factors: Factors { embedding: EmbeddingFactor::SqrtHidden, ..NO_FACTORS },
    tied_by_default: true,
    ..LLAMA
};

const QWEN3_EXPERTS: ExpertOptions = ExpertOptions {
    count: "num_experts",
    ffn: Some("moe_intermediate_size"),
    renormalises: Choice::Key("norm_topk_prob"),
    router: "mlp.gate",
    one: "mlp.experts.{}.",
    gate: "gate_proj",
    up: "up_proj",
    down: "down_proj",
    stacked: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
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
    qkv: Qkv::FusedBlocks("attn.c_attn"),
    qk_norm: None,
    out: "attn.c_proj",
    mlp: Mlp::Plain { up: "mlp.c_fc", down: "mlp.c_proj" },
    final_norm: "transformer.ln_f",
    head: "lm_head",
};

const GPT2_DROPOUT: DropoutKeys =
    DropoutKeys { attention: "attn_pdrop", residual: Some("resid_pdrop"), embedding: Some("embd_pdrop"), default: 0.1 };

/// Every known architecture.
pub static FAMILIES: [Family; 24] = [
    LLAMA,
    Family {
        model_type: "mistral",
        class: "MistralForCausalLM",
        qkv_bias: Choice::Never,
        out_bias: Choice::Never,
        mlp_bias: Choice::Never,
        window: Window::Everywhere,
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        class: "Qwen2ForCausalLM",
        qkv_bias: Choice::Always,
        out_bias: Choice::Never,
        mlp_bias: Choice::Never,
        window: Window::From,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        class: "Qwen3ForCausalLM",
        names: Names { qk_norm: Some(QkNorm::Heads(QK_NAMES)), ..LLAMA_NAMES },
        mlp_bias: Choice::Never,
        window: Window::From,
        ..LLAMA
    },
    Family {
        model_type: "qwen3_moe",
        class: "Qwen3MoeForCausalLM",
        own_keys: &["head_dim", "num_key_value_heads", "decoder_sparse_step", "mlp_only_layers"],
        aliases: &[("num_local_experts", "num_experts")],
        names: Names { qk_norm: Some(QkNorm::Heads(QK_NAMES)), ..LLAMA_NAMES },
        mlp_bias: Choice::Never,
        window: Window::From,
        experts: Some(QWEN3_EXPERTS),
        ..LLAMA
    },
    Family {
        model_type: "mixtral",
        class: "MixtralForCausalLM",
        default_epsilon: 1e-5,
        qkv_bias: Choice::Never,
        out_bias: Choice::Never,
        mlp_bias: Choice::Never,
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
    GEMMA,
    Family {
        model_type: "gemma2",
        class: "Gemma2ForCausalLM",
        keys: Keys { activation: "hidden_activation", ..LLAMA_KEYS },
        own_keys: &["head_dim", "num_key_value_heads", "query_pre_attn_scalar", "hidden_act"],
        names: GEMMA2_NAMES,
        window: Window::Pattern(2),
        factors: Factors { has_caps: true, ..GEMMA.factors },
        ..GEMMA
    },
    Family {
        model_type: "gemma3_text",
        class: "Gemma3ForCausalLM",
        keys: Keys { activation: "hidden_activation", ..LLAMA_KEYS },
        own_keys: &["head_dim", "num_key_value_heads", "query_pre_attn_scalar"],
        names: Names { qk_norm: Some(QkNorm::Heads(QK_NAMES)), ..GEMMA2_NAMES },
        positions: Positions::Rotary(Rotation {
            default_base: 1e6,
            sliding: SlidingRotation::OwnBase("rope_local_base_freq", 1e4),
            ..LLAMA_ROTATION
        }),
        window: Window::Pattern(6),
        ..GEMMA
    },
    Family {
        model_type: "granite",
        class: "GraniteForCausalLM",
        factors: Factors {
            embedding: EmbeddingFactor::Key("embedding_multiplier"),
            attention: Some(("attention_multiplier", 1.0)),
            residual: Some("residual_multiplier"),
            logits: LogitFactor::Over("logits_scaling"),
            has_caps: false,
        },
        ..LLAMA
    },
    Family {
        model_type: "smollm3",
        class: "SmolLM3ForCausalLM",
        positions: Positions::Rotary(Rotation { default_base: 2e6, layers: Rotated::Listed, ..LLAMA_ROTATION }),
        window: Window::Unrotated,
        tied_by_default: true,
        ..LLAMA
    },
    Family {
        model_type: "starcoder2",
        class: "Starcoder2ForCausalLM",
        keys: Keys { epsilon: "norm_epsilon", ..LLAMA_KEYS },
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
        own_keys: &["num_key_value_heads", "original_max_position_embeddings"],
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
        positions: Positions::Rotary(Rotation { pairs: Pairs::Neighbours, default_fraction: 0.5, ..LLAMA_ROTATION }),
        ..LLAMA
    },
    Family {
        model_type: "cohere2",
        class: "Cohere2ForCausalLM",
        keys: Keys { epsilon: "layer_norm_eps", ..LLAMA_KEYS },
        names: Names { mlp_norm: None, ..LLAMA_NAMES },
        norm: NormKind::Layer,
        default_epsilon: 1e-5,
        mlp_bias: Choice::Never,
        parallel: Choice::Always,
        positions: Positions::Rotary(Rotation { pairs: Pairs::Neighbours, layers: Rotated::Sliding, ..LLAMA_ROTATION }),
        window: Window::Pattern(4),
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
            "scale_attn_weights",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
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
            final_norm: "model.decoder.final_layer_norm",
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
            "attention_softmax_in_fp32",
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
            qkv: Qkv::FusedByHead("self_attention.query_key_value"),
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
            qkv: Qkv::FusedByHead("attention.query_key_value"),
            qk_norm: None,
            out: "attention.dense",
            mlp: Mlp::Plain { up: "mlp.dense_h_to_4h", down: "mlp.dense_4h_to_h" },
            final_norm: "gpt_neox.final_layer_norm",
            head: "embed_out",
        },
        norm: NormKind::Layer,
        has_norm_bias: true,
        default_activation: Activation::GeluErf,
        positions: Positions::Rotary(Rotation { default_fraction: 0.25, ..LLAMA_ROTATION }),
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
            qkv: Qkv::Separate(["attention.attention.query", "attention.attention.key", "attention.attention.value"]),
            qk_norm: None,
            out: "attention.output.dense",
            mlp: Mlp::Plain { up: "intermediate.dense", down: "output.dense" },
            final_norm: "vit.layernorm",
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
];
