//! From a config to a chain of units and the list of its parameters.

use evenkeel_device::kernel::Mask;

use crate::body::{Body, Slot};
use crate::config::{Config, Input, Layer};
use crate::entry::Entry;
use crate::error::Error;
use crate::family::{Mlp, Names, Positions, Qkv};
use crate::head::Head;
use crate::norm::NormSpec;
use crate::op::{Attention, HeadSlot, Index, Linear, Lookup, Op};
use crate::parameters::{Init, ParamId, ParamSpec};

/// A network: its parameters and its chain of units.
#[derive(Clone, Debug)]
pub struct Model {
    pub config: Config,
    pub specs: Vec<ParamSpec>,
    /// Embed, then the layers' sublayers in order.
    pub units: Vec<Unit>,
    pub head: Head,
}

/// One link of the chain.
#[derive(Clone, Debug)]
pub struct Unit {
    pub name: String,
    pub entry: Entry,
    pub body: Body,
}

impl Model {
    pub fn from_json(json: &serde_json::Value) -> Result<Model, Error> {
        Ok(Model::new(Config::from_json(json)?))
    }

    pub fn new(config: Config) -> Model {
        let mut builder = Builder { config: &config, names: &config.family.names, specs: Vec::new() };
        let mut units = vec![builder.embed()];
        let mut post = None;
        for (index, layer) in config.layers.iter().enumerate() {
            post = builder.layer(index, layer, post, &mut units);
        }
        let head = builder.head(post);
        let specs = builder.specs;
        Model { specs, units, head, config }
    }

    pub fn parameter_count(&self) -> u64 {
        self.specs.iter().map(|spec| spec.len() as u64).sum()
    }
}

struct Builder<'a> {
    config: &'a Config,
    names: &'a Names,
    specs: Vec<ParamSpec>,
}

/// The id of the embedding table, which a tied head shares.
const EMBED: ParamId = ParamId(0);

impl Builder<'_> {
    fn embed(&mut self) -> Unit {
        let (hidden, deviation) = (self.config.hidden, self.config.init_deviation);
        let normal = Init::Normal { deviation };
        let mut body = BodyBuilder::default();
        let (stream, output) = match self.config.input {
            Input::Tokens { learned_positions } => {
                let table = self.matrix(self.names.embed, [self.config.classes, hidden], normal);
                assert_eq!(table, EMBED);
                let output = body.lookup(table, Index::Tokens, self.config.embed_scale, None);
                let stream = learned_positions.map(|count| {
                    let Positions::Learned { table, .. } = self.config.family.positions else {
                        unreachable!("learned positions have a table")
                    };
                    let table = self.matrix(table, [count, hidden], normal);
                    body.lookup(table, Index::Positions, 1.0, None)
                });
                (stream, output)
            }
            Input::Images { size, patch, channels } => {
                let weight = self.tensor(self.names.embed, vec![hidden, channels, patch, patch], normal);
                let bias = self.vector("vit.embeddings.patch_embeddings.projection.bias", hidden, 0.0);
                let class = self.tensor("vit.embeddings.cls_token", vec![1, 1, hidden], normal);
                let tokens = Input::tokens_per_image(size, patch);
                let positions = self.tensor("vit.embeddings.position_embeddings", vec![1, tokens, hidden], normal);
                let patches = body.slot();
                body.ops.push(Op::Patches { out: patches });
                let linear = Linear { first: true, ..body.plain_linear(patches, weight, None, false) };
                let output = body.linear(linear);
                // What the projection's bias and the tables add goes to the stream, once per token.
                let stream = body.lookup(positions, Index::Positions, 1.0, None);
                body.lookup(class, Index::ClassRows, 1.0, Some(stream));
                body.lookup(bias, Index::PatchRows, 1.0, Some(stream));
                (Some(stream), output)
            }
        };
        Unit { name: "embed".to_owned(), entry: Entry::default(), body: body.finish(Vec::new(), stream, output) }
    }

    /// Adds a layer's units; returns the norm that its output passes on the way into the stream.
    fn layer(
        &mut self,
        index: usize,
        layer: &Layer,
        post: Option<NormSpec>,
        units: &mut Vec<Unit>,
    ) -> Option<NormSpec> {
        let prefix = self.names.layer.replace("{}", &index.to_string());
        let attention_norm = self.norm(&format!("{prefix}{}", self.names.attention_norm), self.config.hidden);
        let mlp_norm = self.norm(&format!("{prefix}{}", self.names.mlp_norm), self.config.hidden);
        let mut body = BodyBuilder::default();
        let attention_input = body.slot();
        let attended = self.attention(&mut body, attention_input, &prefix, index, layer);
        if self.config.parallel {
            let mlp_input = body.slot();
            let fed = self.mlp(&mut body, mlp_input, &prefix);
            let output = body.slot();
            body.ops.push(Op::Add { a: attended, b: fed, out: output });
            let entry = Entry { post, norms: vec![attention_norm, mlp_norm] };
            let body = body.finish(vec![attention_input, mlp_input], None, output);
            units.push(Unit { name: format!("layer {index}"), entry, body });
            return None;
        }
        let entry = Entry { post, norms: vec![attention_norm] };
        let body = body.finish(vec![attention_input], None, attended);
        units.push(Unit { name: format!("attention {index}"), entry, body });

        let hidden = self.config.hidden;
        let post = self.names.post_attention_norm.map(|name| self.norm(&format!("{prefix}{name}"), hidden));
        let mut body = BodyBuilder::default();
        let input = body.slot();
        let output = self.mlp(&mut body, input, &prefix);
        let entry = Entry { post, norms: vec![mlp_norm] };
        units.push(Unit { name: format!("mlp {index}"), entry, body: body.finish(vec![input], None, output) });
        self.names.post_mlp_norm.map(|name| self.norm(&format!("{prefix}{name}"), hidden))
    }

    fn attention(&mut self, body: &mut BodyBuilder, input: Slot, prefix: &str, index: usize, layer: &Layer) -> Slot {
        let Config { hidden, heads, kv_heads, head_dim: dim, qkv_bias, out_bias, .. } = *self.config;
        let packed = |slot, count| HeadSlot { slot, first: 0, count, dim, step: dim };
        let [mut q, mut k, v] = match self.names.qkv {
            Qkv::Separate([q, k, v]) => {
                let mut project = |name: &str, count: usize| {
                    let name = format!("{prefix}{name}");
                    let linear = self.linear(body, input, &name, [hidden, count * dim], qkv_bias, false, 1.0);
                    packed(body.linear(linear), count)
                };
                [project(q, heads), project(k, kv_heads), project(v, kv_heads)]
            }
            Qkv::FusedBlocks(name) => {
                let name = format!("{prefix}{name}");
                let linear = self.linear(body, input, &name, [hidden, 3 * heads * dim], qkv_bias, true, 1.0);
                let slot = body.linear(linear);
                [0, 1, 2].map(|part| HeadSlot { slot, first: part * heads * dim, count: heads, dim, step: dim })
            }
            Qkv::FusedByHead(name) => {
                let name = format!("{prefix}{name}");
                let linear = self.linear(body, input, &name, [hidden, 3 * heads * dim], qkv_bias, false, 1.0);
                let slot = body.linear(linear);
                [0, 1, 2].map(|part| HeadSlot { slot, first: part * dim, count: heads, dim, step: 3 * dim })
            }
        };
        if let Some(names) = self.names.qk_norm {
            for (heads, name) in [&mut q, &mut k].into_iter().zip(names) {
                let norm = self.norm(&format!("{prefix}{name}"), dim);
                let (x, out, stats) = (heads.slot, body.slot(), body.slot());
                body.ops.push(Op::HeadNorm { x, out, stats, heads: heads.count, norm });
                heads.slot = out;
            }
        }
        if let Some(table) = layer.rotary {
            body.ops.push(Op::Rotary { x: q, table });
            body.ops.push(Op::Rotary { x: k, table });
        }
        let (out, logsum) = (body.slot(), body.slot());
        let mask = Mask { causal: self.config.causal, window: layer.window };
        let scale = self.config.attention_scale * layer.scale;
        body.ops.push(Op::Attention(Attention { q, k, v, out, logsum, mask, scale, layer: index }));
        let name = format!("{prefix}{}", self.names.out);
        let linear =
            self.linear(body, out, &name, [heads * dim, hidden], out_bias, self.transposed(), self.out_scale());
        body.linear(linear)
    }

    fn mlp(&mut self, body: &mut BodyBuilder, input: Slot, prefix: &str) -> Slot {
        let Config { hidden, ffn, mlp_bias, activation, .. } = *self.config;
        let (wide, down) = match self.names.mlp {
            Mlp::Gated { gate, up, down } => {
                let mut project = |name: &str| {
                    let linear =
                        self.linear(body, input, &format!("{prefix}{name}"), [hidden, ffn], mlp_bias, false, 1.0);
                    body.linear(linear)
                };
                let (gate, up) = (project(gate), project(up));
                let out = body.slot();
                body.ops.push(Op::Gated { activation, gate, up, out });
                (out, down)
            }
            Mlp::Plain { up, down } => {
                let name = format!("{prefix}{up}");
                let linear = self.linear(body, input, &name, [hidden, ffn], mlp_bias, self.transposed(), 1.0);
                let before = body.slot();
                (body.linear(Linear { activation: Some((activation, before)), ..linear }), down)
            }
        };
        let name = format!("{prefix}{down}");
        let linear = self.linear(body, wide, &name, [ffn, hidden], mlp_bias, self.transposed(), self.out_scale());
        body.linear(linear)
    }

    fn head(&mut self, post: Option<NormSpec>) -> Head {
        let Config { hidden, classes, init_deviation: deviation, .. } = *self.config;
        let entry = Entry { post, norms: vec![self.norm(self.names.final_norm, hidden)] };
        let first_tokens_only = matches!(self.config.input, Input::Images { .. });
        let name = format!("{}.weight", self.names.head);
        let weight =
            if self.config.tied { EMBED } else { self.matrix(&name, [classes, hidden], Init::Normal { deviation }) };
        let bias = first_tokens_only.then(|| self.vector(&format!("{}.bias", self.names.head), classes, 0.0));
        Head { entry, weight, bias, classes, first_tokens_only }
    }

    /// GPT-2 stores its matrices [in, out].
    fn transposed(&self) -> bool {
        matches!(self.names.qkv, Qkv::FusedBlocks(_))
    }

    /// GPT-2 draws what is added to the stream smaller the more layers add to it.
    fn out_scale(&self) -> f32 {
        if self.transposed() { 1.0 / (2.0 * self.config.layers.len() as f32).sqrt() } else { 1.0 }
    }

    /// A linear layer `name` from `dims[0]` to `dims[1]` features, and its parameters.
    fn linear(
        &mut self,
        body: &mut BodyBuilder,
        x: Slot,
        name: &str,
        dims: [usize; 2],
        bias: bool,
        transposed: bool,
        init_scale: f32,
    ) -> Linear {
        let [input, output] = dims;
        let shape = if transposed { [input, output] } else { [output, input] };
        let deviation = self.config.init_deviation * init_scale;
        let weight = self.matrix(&format!("{name}.weight"), shape, Init::Normal { deviation });
        let bias = bias.then(|| self.vector(&format!("{name}.bias"), output, 0.0));
        body.plain_linear(x, weight, bias, transposed)
    }

    fn norm(&mut self, name: &str, width: usize) -> NormSpec {
        let Config { norm: kind, epsilon, family, .. } = *self.config;
        let weight = self.vector(&format!("{name}.weight"), width, 1.0 - family.norm_offset);
        let has_bias = kind == evenkeel_device::kernel::NormKind::Layer;
        let bias = has_bias.then(|| self.vector(&format!("{name}.bias"), width, 0.0));
        NormSpec { kind, weight, bias, weight_offset: family.norm_offset, epsilon }
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2], init: Init) -> ParamId {
        self.tensor(name, shape.to_vec(), init)
    }

    fn vector(&mut self, name: &str, len: usize, value: f32) -> ParamId {
        self.tensor(name, vec![len], Init::Constant(value))
    }

    fn tensor(&mut self, name: &str, shape: Vec<usize>, init: Init) -> ParamId {
        // Leading ones and trailing dims fold, so that a class token or a table of positions is a plain matrix.
        let len: usize = shape.iter().product();
        let rows = match shape[..] {
            [_] => 1,
            [1, rows, _] => rows,
            [rows, ..] => rows,
            [] => unreachable!("every parameter has a dim"),
        };
        self.specs.push(ParamSpec { name: name.to_owned(), shape, matrix: [rows, len / rows], init });
        ParamId(self.specs.len() - 1)
    }
}

#[derive(Default)]
struct BodyBuilder {
    ops: Vec<Op>,
    slots: usize,
}

impl BodyBuilder {
    fn slot(&mut self) -> Slot {
        self.slots += 1;
        Slot(self.slots - 1)
    }

    fn plain_linear(&mut self, x: Slot, weight: ParamId, bias: Option<ParamId>, transposed: bool) -> Linear {
        Linear { x, out: self.slot(), weight, bias, transposed, activation: None, first: false }
    }

    fn linear(&mut self, linear: Linear) -> Slot {
        let out = linear.out;
        self.ops.push(Op::Linear(linear));
        out
    }

    /// A lookup into a new slot, or added to one.
    fn lookup(&mut self, table: ParamId, index: Index, scale: f32, add_to: Option<Slot>) -> Slot {
        let out = add_to.unwrap_or_else(|| self.slot());
        self.ops.push(Op::Lookup(Lookup { table, index, scale, out, accumulate: add_to.is_some() }));
        out
    }

    fn finish(self, inputs: Vec<Slot>, stream: Option<Slot>, output: Slot) -> Body {
        // Backward of an activation overwrites the gradient it is given, and the output's is shared with the stream.
        let activated =
            |op: &Op| matches!(op, Op::Linear(linear) if linear.out == output && linear.activation.is_some());
        assert!(!self.ops.iter().any(activated), "an output has no activation");
        Body { ops: self.ops, slots: self.slots, inputs, stream, output }
    }
}
