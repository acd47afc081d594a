//! What an architecture is described with: the names in its files and its options.

use evenkeel_device::kernel::{Activation, NormKind, Pairs};

/// One architecture.
#[derive(Clone, Debug)]
pub struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// The class that config.json's `architectures` names.
    pub class: &'static str,
    /// A flag of config.json that tells it from others of the same `model_type`, false if absent.
    pub variant: Option<(&'static str, bool)>,
    pub keys: Keys,
    /// Keys of config.json, beside those of the other fields, that this architecture has.
    pub own_keys: &'static [&'static str],
    /// Keys of config.json that are not read, whatever else reads them: a description says so.
    pub unused_keys: &'static [&'static str],
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
    /// Whether all queries share one key and value, whatever config.json says of their number.
    pub has_one_key_head: bool,
    /// 1 if a stored norm weight w stands for 1 + w.
    pub norm_offset: f32,
    pub qkv_bias: Choice,
    pub out_bias: Choice,
    pub mlp_bias: Choice,
    pub has_head_bias: bool,
    /// What is particular to layers at the end without keys and values of their own.
    pub key_sharers: Option<KeySharers>,
    /// What layers add to the stream for the token itself, beside attention and MLP.
    pub token_inputs: Option<TokenInputs>,
    /// Whether values are normalised head by head, without a weight.
    pub has_value_norm: bool,
    /// What is particular to layers without a sliding window.
    pub full_layers: Option<FullLayers>,
    /// The name of attention's sinks: a logit of each head that joins the softmax's sum and has no value.
    pub sinks: Option<&'static str>,
    /// Whether attention and MLP read the same stream and are added to it together.
    pub parallel: Choice,
    pub positions: Positions,
    pub window: Window,
    /// The width of windows if config.json has no key for it, not even null.
    pub default_window: Option<usize>,
    pub factors: Factors,
    /// The keys and names of experts, in layers that have them in place of an MLP.
    pub experts: Option<ExpertOptions>,
    /// The names of linear attention, in layers that have it in place of attention.
    pub linear_attention: Option<LinearAttentionNames>,
    pub tied_by_default: bool,
    pub dropout: DropoutKeys,
    /// Where the text model lies inside a larger one.
    pub multimodal: Option<Multimodal>,
    /// What labels texts, if it is no language model.
    pub classifier: Option<TextClassifier>,
    /// Beginnings of the names of tensors that training leaves alone and saved models have as they were.
    pub carried: &'static [&'static str],
}

/// A model that also reads pictures or sounds, of which only the text is trained.
#[derive(Clone, Debug)]
pub struct Multimodal {
    /// `model_type` in `text_config`.
    pub text_type: &'static str,
    /// Keys of config.json that say nothing about text.
    pub other_keys: &'static [&'static str],
    /// Beginnings of names, and what folders of older versions have in their place.
    pub older: &'static [(&'static str, &'static str)],
    /// Sizes that `text_config` may leave out.
    pub defaults: &'static [(&'static str, u64)],
}

/// What a classifier of texts has beside a text model's layers: it reads the first token of each text.
#[derive(Clone, Debug)]
pub struct TextClassifier {
    /// The table of the types of tokens.
    pub types: &'static str,
    /// The layer before the head, with a hyperbolic tangent behind it.
    pub pooler: &'static str,
    /// Whether training drops numbers before that layer too, and not only behind it.
    pub drops_first_token: bool,
    /// Whether the table of positions begins with rows up to the padding token's.
    pub skips_padding: bool,
    /// Beginnings of the names of tensors that are other heads'.
    pub others: &'static [&'static str],
}

impl Family {
    /// How heads are rotated by position, if they are.
    pub fn rotation(&self) -> Option<&Rotation> {
        if let Positions::Rotary(rotation) = &self.positions { Some(rotation) } else { None }
    }

    /// Whether layers with experts have an MLP beside them.
    pub fn has_experts_beside(&self) -> bool {
        self.experts.as_ref().is_some_and(|options| options.beside.is_some())
    }

    /// Whether config.json may name this architecture so, with or without its head.
    pub fn is_called(&self, class: &str) -> bool {
        let heads = ["ForCausalLM", "LMHeadModel", "ForImageClassification", "ForSequenceClassification"];
        let stem = heads.iter().find_map(|head| self.class.strip_suffix(head)).unwrap_or(self.class);
        let names = [self.class.to_owned(), format!("{stem}Model"), format!("{stem}TextModel")];
        // A classifier of texts may begin with the network of a model that fills in words.
        let others = if self.classifier.is_some() { &["ForMaskedLM", "ForPreTraining"][..] } else { &[] };
        let mut names = names.into_iter().chain(others.iter().map(|head| format!("{stem}{head}")));
        // Early files of Llama have LLaMAForCausalLM.
        names.any(|name| name.eq_ignore_ascii_case(class))
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Fixed {
    Flag(bool),
    Number(f64),
    /// As large as the stream.
    Hidden,
    /// This text, or nothing.
    Text(&'static str),
}

/// The keys of the sizes in config.json.
#[derive(Clone, Debug)]
pub struct Keys {
    pub hidden: &'static str,
    pub layers: &'static str,
    pub heads: &'static str,
    pub ffn: &'static str,
    pub activation: &'static str,
    pub epsilon: &'static str,
}

/// The keys in config.json of the shares of numbers that training drops.
#[derive(Clone, Debug)]
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
#[derive(Clone, Debug)]
pub struct Names {
    pub base: &'static str,
    pub embed: &'static str,
    /// A norm of the sum of all embeddings.
    pub embed_norm: Option<&'static str>,
    pub layer: &'static str,
    /// Norms of the stream before each sublayer. Where attention and MLP are parallel, an MLP without one reads what attention does.
    pub attention_norm: Option<&'static str>,
    pub mlp_norm: Option<&'static str>,
    /// Norms on a sublayer's output, before it joins the stream.
    pub post_attention_norm: Option<&'static str>,
    pub post_mlp_norm: Option<&'static str>,
    /// Norms of the stream behind what attention and MLP add to it: the stream is then what they give.
    pub sum_norms: Option<[&'static str; 2]>,
    pub qkv: Qkv,
    pub qk_norm: Option<QkNorm>,
    pub out: &'static str,
    pub mlp: Mlp,
    /// A number that the stream is multiplied with behind each layer. It is not trained.
    pub layer_scale: Option<&'static str>,
    pub final_norm: Option<&'static str>,
    pub head: &'static str,
}

/// Layers at the end that attend to the keys and values of earlier ones: each to those of the last of its type that has its own.
#[derive(Clone, Debug)]
pub struct KeySharers {
    /// The key of their number.
    pub count: &'static str,
    /// The flag that their MLPs are twice as wide as others'.
    pub have_wide_mlps: &'static str,
    /// The names in such a layer of tensors that files may have, though nothing computes with them.
    pub idle: &'static [&'static str],
}

/// Numbers for each token and layer: looked up by the token, plus a projection of the embedding. A layer adds a projection of them
/// to the stream, times a gate that it makes of the stream. Names of what all layers share follow [`Names::base`].
#[derive(Clone, Debug)]
pub struct TokenInputs {
    /// The key of their number in each layer, 0 for none, and what it is without the key.
    pub width: (&'static str, usize),
    /// The key of the table's rows.
    pub rows: &'static str,
    pub table: &'static str,
    pub projection: &'static str,
    pub norm: &'static str,
    pub gate: &'static str,
    pub out: &'static str,
    pub post_norm: &'static str,
}

/// What is particular to layers without a sliding window.
#[derive(Clone, Debug)]
pub struct FullLayers {
    /// The key of the size of their heads, and what it is without the key.
    pub head_dim: (&'static str, usize),
    /// The flag that they have no value projection: values are what keys are before their norm.
    pub values_are_keys: &'static str,
    /// The key of the number of key and value heads of such layers.
    pub kv_heads: &'static str,
    /// The object that has these sizes by layer, in newer files.
    pub by_layer: &'static str,
}

/// The names of the norms on queries and keys.
#[derive(Clone, Copy, Debug)]
pub enum QkNorm {
    /// Of each head by itself.
    Heads([&'static str; 2]),
    /// Of all heads together.
    Whole([&'static str; 2]),
}

#[derive(Clone, Debug)]
pub struct ExpertOptions {
    /// The flag without which there are none, if there is one.
    pub enabled: Option<&'static str>,
    pub count: &'static str,
    /// The key of the number of experts that a token goes to.
    pub chosen: &'static str,
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
    pub shared: Option<SharedExpert>,
    /// What is particular to experts with clamped gates.
    pub clamped: Option<ClampedExperts>,
    /// What is particular to experts beside an MLP.
    pub beside: Option<ExpertsBeside>,
}

/// An expert that every token goes to, with a gate that says how much of it a token gets.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    /// The key of its columns.
    pub ffn: &'static str,
    pub mlp: Mlp,
    pub gate: &'static str,
}

/// Experts beside an MLP that reads the same stream. They are in one tensor, as are others', in every file.
#[derive(Clone, Debug)]
pub struct ExpertsBeside {
    /// The weight of the router's own norm of the stream. Logits are divided by the square root of the stream's width.
    pub router_norm: &'static str,
    /// A factor for each expert of the weights of those chosen.
    pub expert_scales: &'static str,
    /// The norm of what experts read.
    pub norm: &'static str,
    /// Norms of the MLP's and of the experts' output, before they are added up.
    pub post_norms: [&'static str; 2],
}

/// Experts with clamped gates and with biases. All are in one tensor, [in, out] of each, gates in even columns and the rest in
/// odd ones.
#[derive(Clone, Debug)]
pub struct ClampedExperts {
    pub biases: [&'static str; 2],
    /// The key of the bound of gates and others, and what it is without the key.
    pub limit: (&'static str, f64),
}

/// The names of linear attention's parameters in a layer.
#[derive(Clone, Debug)]
pub struct LinearAttentionNames {
    pub sizes: LinearSizes,
    pub projections: Projections,
    pub convolution: Convolution,
    pub log_rate: &'static str,
    pub bias: &'static str,
    pub norm: &'static str,
    pub out: &'static str,
}

/// Where config.json has the sizes of linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearSizes {
    /// Among the other keys.
    Flat,
    /// In the object `jet` of `efficient_attention_config`.
    Jet,
}

/// The short convolution before the rule.
#[derive(Clone, Debug)]
pub enum Convolution {
    /// Of queries, keys and values, the same for all tokens.
    Same(&'static str),
    /// Of values alone, with weights that two linear layers make of each token.
    Generated { narrow: &'static str, wide: &'static str },
}

/// How linear attention's queries, keys, values and gates are projected.
#[derive(Clone, Debug)]
pub enum Projections {
    /// One matrix for all queries, all keys and all values, and one for each gate: of the output, of what is taken in, of what fades.
    Apart { qkv: &'static str, gate: &'static str, take: &'static str, fade: &'static str },
    /// A matrix for each.
    Separate { qkv: [&'static str; 3], gate: &'static str, take: &'static str, fade: &'static str },
    /// Key head by key head: query, key, values and their gates; and the gates of what is taken in and of what fades.
    ByHead { qkvz: &'static str, ba: &'static str },
}

impl Projections {
    pub fn names(&self) -> Vec<&'static str> {
        match *self {
            Projections::Apart { qkv, gate, take, fade } => vec![qkv, gate, take, fade],
            Projections::Separate { qkv: [q, k, v], gate, take, fade } => vec![q, k, v, gate, take, fade],
            Projections::ByHead { qkvz, ba } => vec![qkvz, ba],
        }
    }
}

/// How queries, keys and values are projected.
#[derive(Clone, Debug)]
pub enum Qkv {
    Separate([&'static str; 3]),
    /// The same, and behind each head's query is the gate of its output.
    SeparateWithGate([&'static str; 3]),
    /// One matrix: all queries, then all keys, then all values.
    FusedBlocks(&'static str),
    /// One matrix: the queries, the key and the value of each key head together.
    FusedByGroup(&'static str),
}

#[derive(Clone, Debug)]
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
#[derive(Clone, Debug)]
pub enum Choice {
    Never,
    Always,
    Key(&'static str),
    /// As the key says, and true without it.
    KeyOrTrue(&'static str),
}

impl Choice {
    /// The key of config.json that decides.
    pub fn key(&self) -> Option<&'static str> {
        match self {
            Choice::Never | Choice::Always => None,
            Choice::Key(key) | Choice::KeyOrTrue(key) => Some(key),
        }
    }
}

#[derive(Clone, Debug)]
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

#[derive(Clone, Debug)]
pub struct Rotation {
    pub pairs: Pairs,
    /// The base and the rotated share of a head if config.json does not say.
    pub default_base: f64,
    pub default_fraction: f64,
    /// The key of the number of rotated elements, where it is no share.
    pub dim: Option<&'static str>,
    pub layers: Rotated,
    pub sliding: SlidingRotation,
    /// The key of the rate at which queries grow with their positions.
    pub growth: Option<&'static str>,
    /// Whether config.json must say how it is stretched.
    pub is_given: bool,
    /// Whether config.json may say that only a share of a head is rotated.
    pub may_be_partial: bool,
    /// Keys of the rotation that change nothing for text.
    pub harmless: &'static [&'static str],
}

/// The layers that are rotated.
#[derive(Clone, Debug)]
pub enum Rotated {
    All,
    /// Those with a 1 in `no_rope_layers`, or all but each that `no_rope_layer_interval` ends with.
    Listed,
    /// Those with sliding windows.
    Sliding,
}

/// The rotation of layers with sliding windows, if config.json gives none for them.
#[derive(Clone, Debug)]
pub enum SlidingRotation {
    Same,
    /// Without what stretches that of the others.
    Unstretched,
    /// The same, with a base of its own under this key.
    OwnBase(&'static str, f64),
}

/// The layers with sliding windows. Where they differ from layer to layer, `layer_types` names them.
#[derive(Clone, Debug)]
pub enum Window {
    Never,
    /// In every layer, if `sliding_window` is set.
    Everywhere,
    /// From layer `max_window_layers` on, with `use_sliding_window`.
    From,
    /// In all but every so many-th layer.
    Pattern(usize),
    /// In all but every so many-th layer and the last.
    PatternAndLast(usize),
    /// In those that are not rotated, with `use_sliding_window`.
    Unrotated,
    /// In those of type `swa`, as wide as that object of `efficient_attention_config` says.
    Jet,
}

/// What numbers are multiplied with beside weights.
#[derive(Clone, Debug)]
pub struct Factors {
    pub embedding: EmbeddingFactor,
    pub attention: AttentionFactor,
    /// The key of the factor of what sublayers add to the stream.
    pub residual: Option<&'static str>,
    pub logits: LogitFactor,
    /// The keys of soft caps on attention's scores and on logits, as far as there are any, and what these are without the key.
    pub caps: &'static [(&'static str, Option<f64>)],
}

#[derive(Clone, Debug)]
pub enum AttentionFactor {
    One,
    /// 1/√head_dim
    HeadDim,
    /// 1/√ of the number under this key, or of the default.
    Root(&'static str, f64),
    /// The number under this key, or the default.
    Key(&'static str, f64),
}

#[derive(Clone, Debug)]
pub enum EmbeddingFactor {
    One,
    SqrtHidden,
    Key(&'static str),
}

#[derive(Clone, Debug)]
pub enum LogitFactor {
    One,
    /// Logits are multiplied by the number under this key, or by the default.
    Times(&'static str, f64),
    /// Logits are divided by the number under this key.
    Over(&'static str),
}
