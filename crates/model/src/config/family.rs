//! The known architectures, as data: the names in their files and their options.

use evenkeel_device::kernel::{Activation, NormKind};

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
    pub names: Names,
    pub norm: NormKind,
    pub default_epsilon: f64,
    pub default_activation: Activation,
    /// The share of a head that is rotated if config.json does not say.
    pub default_rotary_fraction: f64,
    /// 1 if a stored norm weight w stands for 1 + w.
    pub norm_offset: f32,
    pub qkv_bias: Choice,
    pub out_bias: Choice,
    pub mlp_bias: Choice,
    pub positions: Positions,
    pub window: Window,
    /// Whether embeddings are multiplied by √hidden.
    pub scaled_embeddings: bool,
    pub tied_by_default: bool,
    pub dropout: DropoutKeys,
}

impl Family {
    /// Whether linear layers store their weights [in, out]: GPT-2's do.
    pub fn is_transposed(&self) -> bool {
        matches!(self.names.qkv, Qkv::FusedBlocks(_))
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
    pub layer: &'static str,
    pub attention_norm: &'static str,
    pub mlp_norm: &'static str,
    /// Norms on a sublayer's output, before it joins the stream.
    pub post_attention_norm: Option<&'static str>,
    pub post_mlp_norm: Option<&'static str>,
    pub qkv: Qkv,
    /// Norms on each head's query and key.
    pub qk_norm: Option<[&'static str; 2]>,
    pub out: &'static str,
    pub mlp: Mlp,
    pub final_norm: &'static str,
    pub head: &'static str,
}

/// How queries, keys and values are projected.
#[derive(Debug)]
pub enum Qkv {
    Separate([&'static str; 3]),
    /// One matrix stored [in, out], all queries, then all keys, then all values.
    FusedBlocks(&'static str),
    /// One matrix stored [out, in], query, key and value of each head together.
    FusedByHead(&'static str),
}

#[derive(Debug)]
pub enum Mlp {
    Gated { gate: &'static str, up: &'static str, down: &'static str },
    Plain { up: &'static str, down: &'static str },
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
    Rotary,
    /// A table of this name, its length under this key.
    Learned {
        table: &'static str,
        count: &'static str,
    },
    /// Patches and a class token.
    Image,
}

/// The layers with sliding windows.
#[derive(Debug)]
pub enum Window {
    Never,
    /// In every layer, if `sliding_window` is set.
    Everywhere,
    /// In the layers that `layer_types` (or the older keys) name.
    ByLayer,
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
    layer: "model.layers.{}.",
    attention_norm: "input_layernorm",
    mlp_norm: "post_attention_layernorm",
    post_attention_norm: None,
    post_mlp_norm: None,
    qkv: Qkv::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    qk_norm: None,
    out: "self_attn.o_proj",
    mlp: Mlp::Gated { gate: "mlp.gate_proj", up: "mlp.up_proj", down: "mlp.down_proj" },
    final_norm: "model.norm",
    head: "lm_head",
};

const LLAMA: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    keys: LLAMA_KEYS,
    own_keys: &["head_dim", "num_key_value_heads", "pretraining_tp"],
    names: LLAMA_NAMES,
    norm: NormKind::Rms,
    default_epsilon: 1e-6,
    default_activation: Activation::Silu,
    default_rotary_fraction: 1.0,
    norm_offset: 0.0,
    qkv_bias: Choice::Key("attention_bias"),
    out_bias: Choice::Key("attention_bias"),
    mlp_bias: Choice::Key("mlp_bias"),
    positions: Positions::Rotary,
    window: Window::Never,
    scaled_embeddings: false,
    tied_by_default: false,
    dropout: DropoutKeys { attention: "attention_dropout", residual: None, embedding: None, default: 0.0 },
};

const QK_NORM: Option<[&str; 2]> = Some(["self_attn.q_norm", "self_attn.k_norm"]);

/// Every known architecture.
pub static FAMILIES: [Family; 8] = [
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
        window: Window::ByLayer,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        class: "Qwen3ForCausalLM",
        names: Names { qk_norm: QK_NORM, ..LLAMA_NAMES },
        mlp_bias: Choice::Never,
        window: Window::ByLayer,
        ..LLAMA
    },
    Family {
        model_type: "gemma3_text",
        class: "Gemma3ForCausalLM",
        keys: Keys { activation: "hidden_activation", ..LLAMA_KEYS },
        own_keys: &[
            "head_dim",
            "num_key_value_heads",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window_pattern",
            "_sliding_window_pattern",
        ],
        names: Names {
            mlp_norm: "pre_feedforward_layernorm",
            post_attention_norm: Some("post_attention_layernorm"),
            post_mlp_norm: Some("post_feedforward_layernorm"),
            qk_norm: QK_NORM,
            ..LLAMA_NAMES
        },
        norm_offset: 1.0,
        default_activation: Activation::GeluTanh,
        mlp_bias: Choice::Never,
        window: Window::ByLayer,
        scaled_embeddings: true,
        tied_by_default: true,
        ..LLAMA
    },
    Family {
        model_type: "gpt2",
        class: "GPT2LMHeadModel",
        keys: Keys {
            hidden: "n_embd",
            layers: "n_layer",
            heads: "n_head",
            ffn: "n_inner",
            activation: "activation_function",
            epsilon: "layer_norm_epsilon",
        },
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
        names: Names {
            base: "transformer.",
            embed: "transformer.wte.weight",
            layer: "transformer.h.{}.",
            attention_norm: "ln_1",
            mlp_norm: "ln_2",
            post_attention_norm: None,
            post_mlp_norm: None,
            qkv: Qkv::FusedBlocks("attn.c_attn"),
            qk_norm: None,
            out: "attn.c_proj",
            mlp: Mlp::Plain { up: "mlp.c_fc", down: "mlp.c_proj" },
            final_norm: "transformer.ln_f",
            head: "lm_head",
        },
        norm: NormKind::Layer,
        default_activation: Activation::GeluTanh,
        default_epsilon: 1e-5,
        qkv_bias: Choice::Always,
        out_bias: Choice::Always,
        mlp_bias: Choice::Always,
        positions: Positions::Learned { table: "transformer.wpe.weight", count: "n_positions" },
        tied_by_default: true,
        dropout: DropoutKeys {
            attention: "attn_pdrop",
            residual: Some("resid_pdrop"),
            embedding: Some("embd_pdrop"),
            default: 0.1,
        },
        ..LLAMA
    },
    Family {
        model_type: "gpt_neox",
        class: "GPTNeoXForCausalLM",
        keys: Keys { epsilon: "layer_norm_eps", ..LLAMA_KEYS },
        own_keys: &["classifier_dropout", "rotary_emb_base", "rotary_pct", "use_parallel_residual"],
        names: Names {
            base: "gpt_neox.",
            embed: "gpt_neox.embed_in.weight",
            layer: "gpt_neox.layers.{}.",
            attention_norm: "input_layernorm",
            mlp_norm: "post_attention_layernorm",
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
        default_activation: Activation::GeluErf,
        default_rotary_fraction: 0.25,
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
            layer: "vit.encoder.layer.{}.",
            attention_norm: "layernorm_before",
            mlp_norm: "layernorm_after",
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
