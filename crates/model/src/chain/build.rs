//! From a config to a chain of units and the list of its parameters.

mod attention;
mod experts;
mod linear_attention;
mod token_inputs;

use std::ops::Range;

use evenkeel_device::DeviceKind;

use crate::adapter::{AdapterInit, LayerAdapter};
use crate::chain::adapted::{LinearAdapter, LinearMagnitude, MagnitudeParameters};
use crate::chain::body::{Body, Slot};
use crate::chain::dropout::{Dropout, Site};
use crate::chain::entry::{Entry, Join};
use crate::chain::head::{Head, HeadRows};
use crate::chain::linear::{Linear, LinearPart};
use crate::chain::lookup::{Index, Lookup};
use crate::chain::norm::NormSpec;
use crate::chain::op::Op;
use crate::chain::pooler::Pooler;
use crate::chain::unit::{Sublayer, Unit, UnitKind};
use crate::config::family::{Mlp, Names, Positions, TextClassifier};
use crate::config::{Config, Input, Layer};
use crate::parameters::{FileTensor, Init, ParamId, ParamSpec};
use crate::sharding::layout::{Ranges, Sharing, Slice, as_matrix};
use crate::sharding::shard::{Part, Shard};

/// The parameters and units of a shard.
pub(crate) fn build(config: &Config, shard: &Shard, kind: DeviceKind) -> (Vec<ParamSpec>, Vec<Unit>) {
    let mut builder = Builder { config, names: &config.family.names, shard, kind, specs: Vec::new(), adapters: 0 };
    let mut units = vec![builder.embed()];
    let hidden = config.hidden;
    let norm = builder.names.embed_norm.map(|name| builder.norm(name, hidden));
    let mut join = Join { norm, ..Join::default() };
    for (index, layer) in config.layers.iter().enumerate() {
        join = builder.layer(index, layer, join, &mut units);
    }
    units.push(builder.head(join, units.len()));
    if let Some(multimodal) = config.family.multimodal.as_ref().filter(|_| config.has_older_names) {
        for spec in builder.specs.iter_mut().filter(|spec| spec.tensors.is_empty() && !spec.is_adapter) {
            spec.tensors = vec![FileTensor { name: multimodal.older_name(&spec.name), shape: spec.shape.clone() }];
        }
    }
    (builder.specs, units)
}

struct Builder<'a> {
    config: &'a Config,
    names: &'a Names,
    shard: &'a Shard,
    kind: DeviceKind,
    specs: Vec<ParamSpec>,
    /// Adapters so far.
    adapters: usize,
}

/// A linear layer's parameters, and a shard's part of them.
struct LinearSpec {
    name: String,
    /// Input and output features of the whole layer.
    dims: [usize; 2],
    cut: LinearCut,
    sharing: Sharing,
    has_bias: bool,
    /// Whether the weight is stored [in, out].
    transposed: bool,
    init_scale: f32,
}

enum LinearCut {
    Outputs(Ranges),
    /// The shard's output is a summand.
    Inputs(Range<usize>),
}

/// A linear layer's parameters on this shard, and how it computes with them.
#[derive(Clone, Copy)]
struct LinearWeights {
    weight: ParamId,
    bias: Option<ParamId>,
    /// Whether this shard adds the bias: only one of those whose outputs are summed does.
    adds_bias: bool,
    transposed: bool,
    adapter: Option<AdapterWeights>,
}

/// The adapter of a linear layer, and the layer's inputs that this shard has.
#[derive(Clone, Copy)]
struct AdapterWeights {
    a: ParamId,
    b: ParamId,
    scale: f32,
    dropout: Option<Dropout>,
    first_input: usize,
    inputs: usize,
    magnitude: Option<MagnitudeParameters>,
}

/// The id of the embedding table, which a tied head shares.
pub(crate) const EMBED: ParamId = ParamId(0);

impl Builder<'_> {
    fn embed(&mut self) -> Unit {
        let (hidden, deviation) = (self.config.hidden, self.config.init_deviation);
        let normal = Init::Normal { deviation };
        let shard = self.shard.of(Part::Embedding, self.config);
        let mut body = BodyBuilder::default();
        let (stream, output) = match self.config.input {
            Input::Tokens { learned_positions } => {
                let slice = Slice::of_rows(shard.classes.clone(), hidden);
                let shape = vec![self.config.classes, hidden];
                let table = self.tensor(self.names.embed, shape, slice, sharing(&shard), normal);
                assert_eq!(table, EMBED);
                let output = body.lookup(Lookup {
                    first: shard.classes.start,
                    scale: self.config.embed_scale,
                    ..Lookup::of(table, Index::Tokens)
                });
                let stream = learned_positions.map(|count| {
                    let Positions::Learned { table, skipped, .. } = self.config.family.positions else {
                        unreachable!("learned positions have a table")
                    };
                    let table = self.replicated(table, vec![skipped + count, hidden], normal);
                    body.lookup(Lookup { skipped, ..Lookup::of(table, Index::Positions) })
                });
                (stream, output)
            }
            Input::Texts { vocabulary, positions, skipped, types } => {
                let (Some(classifier), Positions::Learned { table, .. }) =
                    (&self.config.family.classifier, &self.config.family.positions)
                else {
                    unreachable!("classifiers of texts have tables of positions and types")
                };
                let slice = Slice::of_rows(shard.inputs.clone(), hidden);
                let words = self.tensor(self.names.embed, vec![vocabulary, hidden], slice, sharing(&shard), normal);
                assert_eq!(words, EMBED);
                let output = body.lookup(Lookup { first: shard.inputs.start, ..Lookup::of(words, Index::Tokens) });
                let places = self.replicated(table, vec![skipped + positions, hidden], normal);
                let types = self.replicated(classifier.types, vec![types, hidden], normal);
                let stream = body.lookup(Lookup { skipped, ..Lookup::of(places, Index::Positions) });
                body.add_lookup(Lookup::of(types, Index::Types), stream);
                (Some(stream), output)
            }
            Input::Images { size, patch, channels } => {
                let elements = shard.inputs.clone();
                let slice = Slice::of_cols(hidden, elements.clone());
                let shape = vec![hidden, channels, patch, patch];
                let weight = self.tensor(self.names.embed, shape, slice, sharing(&shard), normal);
                let bias = self.vector("vit.embeddings.patch_embeddings.projection.bias", hidden, 0.0);
                let class = self.replicated("vit.embeddings.cls_token", vec![1, 1, hidden], normal);
                let tokens = Input::tokens_per_image(size, patch);
                let positions = self.replicated("vit.embeddings.position_embeddings", vec![1, tokens, hidden], normal);
                let patches = body.slot();
                body.ops.push(Op::Patches { elements, out: patches });
                let linear = Linear { first: true, ..body.plain_linear(patches, weight) };
                let output = body.linear(linear);
                // The projection's bias and the tables go to the stream, once per token.
                let stream = body.lookup(Lookup::of(positions, Index::Positions));
                body.add_lookup(Lookup::of(class, Index::ClassRows), stream);
                body.add_lookup(Lookup::of(bias, Index::PatchRows), stream);
                (Some(stream), output)
            }
        };
        let body = body.finish(Vec::new(), stream, output);
        Unit { kind: UnitKind::Embedding, entry: None, sublayer: Sublayer::Body(body), is_partial: !shard.is_whole() }
    }

    /// Adds a layer's units; returns how its output joins the stream, but for dropout.
    fn layer(&mut self, index: usize, layer: &Layer, join: Join, units: &mut Vec<Unit>) -> Join {
        let prefix = self.names.layer.replace("{}", &index.to_string());
        let hidden = self.config.hidden;
        let beside = self.config.experts.filter(|_| layer.has_experts && self.config.family.has_experts_beside());
        let norms = [self.names.attention_norm, self.names.mlp_norm.filter(|_| beside.is_none())];
        let [attention_norm, mlp_norm] =
            norms.map(|name| name.map(|name| self.norm(&format!("{prefix}{name}"), hidden)));
        let [attention_shard, mlp_shard] =
            [Part::Attention(index), Part::Mlp(index)].map(|part| self.shard.of(part, self.config));
        let mut body = BodyBuilder::default();
        let attention_input = body.slot();
        let attended = match (self.config.linear_attention, &self.config.family.linear_attention) {
            (Some(sizes), Some(names)) if layer.is_linear => {
                self.linear_attention(&mut body, attention_input, &prefix, index, sizes, names, &attention_shard)
            }
            _ => self.attention(&mut body, attention_input, &prefix, index, layer, &attention_shard),
        };
        self.scale(&mut body, attended);
        let is_partial = !attention_shard.is_whole();
        if self.config.parallel {
            assert_eq!(is_partial, !mlp_shard.is_whole(), "what is added up is cut alike");
            let mlp_input = if mlp_norm.is_some() { body.slot() } else { attention_input };
            let fed = self.feed(&mut body, mlp_input, &prefix, index, &mlp_shard);
            self.scale(&mut body, fed);
            // Each has its own dropout, so both are dropped before they are added. Dropping a shard's summand with the sum's mask
            // gives a summand of the dropped sum.
            for (x, site) in [(attended, Site::AttentionOutput(index)), (fed, Site::MlpOutput(index))] {
                body.ops.extend(
                    Dropout::new(self.config.dropouts.residual, site).map(|dropout| Op::Dropout { x, dropout }),
                );
            }
            let output = body.slot();
            body.ops.push(Op::Add { a: attended, b: fed, out: output });
            let of_mlp = mlp_norm.map(|norm| (mlp_input, Some(norm)));
            let (inputs, norms) = [(attention_input, attention_norm)].into_iter().chain(of_mlp).unzip();
            let entry = self.entry(units.len(), join, norms);
            let sublayer = Sublayer::Body(body.finish(inputs, None, output));
            units.push(Unit { kind: UnitKind::Layer(index), entry, sublayer, is_partial });
            return Join::default();
        }
        let (mut inputs, mut norms) = (vec![attention_input], vec![attention_norm]);
        if let (0, Some(sizes)) = (index, self.config.token_inputs) {
            inputs.push(self.hand_token_inputs(&mut body, sizes));
            norms.push(None);
        }
        let entry = self.entry(units.len(), join, norms);
        let sublayer = Sublayer::Body(body.finish(inputs, None, attended));
        units.push(Unit { kind: UnitKind::Attention(index), entry, sublayer, is_partial });

        let [attention_sum, mlp_sum] = self.names.sum_norms.map_or([None; 2], |names| names.map(Some));
        let join = self.join(&prefix, self.names.post_attention_norm, attention_sum);
        let mut body = BodyBuilder::default();
        let (output, inputs, norms, halves) = match beside {
            Some(experts) => {
                let (output, inputs, halves) = self.mlp_and_experts(&mut body, &prefix, index, experts, &mlp_shard);
                let (inputs, norms) = inputs.into_iter().map(|(input, norm)| (input, Some(norm))).unzip();
                (output, inputs, norms, Some(halves))
            }
            None => {
                let input = body.slot();
                (self.feed(&mut body, input, &prefix, index, &mlp_shard), vec![input], vec![mlp_norm], None)
            }
        };
        self.scale(&mut body, output);
        let entry = self.entry(units.len(), join, norms);
        let sublayer = Sublayer::Body(body.finish(inputs, None, output));
        units.push(Unit { kind: UnitKind::Mlp(index), entry, sublayer, is_partial: !mlp_shard.is_whole() });
        let join = self.join(&prefix, self.names.post_mlp_norm, mlp_sum);
        let scale = self.names.layer_scale.map(|name| {
            let scale = self.vector(&format!("{prefix}{name}"), 1, 1.0);
            self.specs[scale.0].is_constant = true;
            scale
        });
        let join = Join { halves, ..join };
        let Some(sizes) = self.config.token_inputs else { return Join { scale, ..join } };
        let (post, unit) = self.token_input(units.len(), index, &prefix, sizes, join);
        units.push(unit);
        Join { post: Some(post), scale, ..Join::default() }
    }

    /// How an output joins the stream: with these norms of itself and of the sum.
    fn join(&mut self, prefix: &str, post: Option<&str>, sum: Option<&str>) -> Join {
        let hidden = self.config.hidden;
        let mut named = |name: Option<&str>| name.map(|name| self.norm(&format!("{prefix}{name}"), hidden));
        Join { post: named(post), norm: named(sum), ..Join::default() }
    }

    /// Multiplies what a sublayer adds to the stream.
    fn scale(&self, body: &mut BodyBuilder, x: Slot) {
        let factor = self.config.residual_scale;
        body.ops.extend((factor != 1.0).then_some(Op::Scale { x, factor }));
    }

    /// Adds a layer's MLP, or its experts.
    fn feed(&mut self, body: &mut BodyBuilder, input: Slot, prefix: &str, index: usize, shard: &Shard) -> Slot {
        match self.config.experts {
            Some(experts) if self.config.layers[index].has_experts => {
                self.experts(body, [input; 2], prefix, index, experts, shard)
            }
            _ => self.mlp(body, input, prefix, self.config.layers[index].mlp_factor, shard),
        }
    }

    /// An MLP so many times as wide as the config says.
    fn mlp(&mut self, body: &mut BodyBuilder, input: Slot, prefix: &str, factor: usize, shard: &Shard) -> Slot {
        let own = factor * shard.ffn.start..factor * shard.ffn.end;
        let columns = (factor * self.config.ffn, own);
        let (wide, down) = self.widened(body, input, prefix, &self.names.mlp, columns, shard);
        self.linear(body, wide, down)
    }

    /// All of an MLP but its last layer, which reads the slot. `ffn` are its columns, and those of them that the shard has.
    fn widened(
        &mut self,
        body: &mut BodyBuilder,
        input: Slot,
        prefix: &str,
        names: &Mlp,
        (ffn, own): (usize, Range<usize>),
        shard: &Shard,
    ) -> (Slot, LinearSpec) {
        let Config { hidden, mlp_bias, activation, .. } = *self.config;
        let widening = |name: &str, held: Vec<Range<usize>>| LinearSpec {
            name: format!("{prefix}{name}"),
            dims: [hidden, held.len() * ffn],
            cut: LinearCut::Outputs(Ranges::new(held)),
            sharing: sharing(shard),
            has_bias: mlp_bias,
            transposed: self.config.family.is_transposed,
            init_scale: 1.0,
        };
        let (wide, down) = match *names {
            Mlp::Gated { gate, up, down } => {
                let [gate, up] = [gate, up].map(|name| widening(name, vec![own.clone()]));
                let (gate, up) = (self.linear(body, input, gate), self.linear(body, input, up));
                let out = body.slot();
                body.ops.push(Op::Gated { activation, gate, up, out });
                (out, down)
            }
            Mlp::GatedTogether { gate_up, down } => {
                let x = widening(gate_up, vec![own.clone(), ffn + own.start..ffn + own.end]);
                let (x, out) = (self.linear(body, input, x), body.slot());
                body.ops.push(Op::GatedTogether { activation, x, out });
                (out, down)
            }
            Mlp::Plain { up, down } => {
                let up = widening(up, vec![own.clone()]);
                let linear = self.linear_op(body, input, up);
                let before = body.slot();
                (body.linear(Linear { activation: Some((activation, before)), ..linear }), down)
            }
        };
        let linear = LinearSpec {
            name: format!("{prefix}{down}"),
            dims: [ffn, hidden],
            cut: LinearCut::Inputs(own),
            sharing: sharing(shard),
            has_bias: mlp_bias,
            transposed: self.config.family.is_transposed,
            init_scale: self.out_scale(),
        };
        (wide, linear)
    }

    fn head(&mut self, join: Join, unit: usize) -> Unit {
        let Config { hidden, classes, init_deviation: deviation, tied, logit_scale: scale, logit_cap: cap, .. } =
            *self.config;
        let shard = self.shard.of(if tied { Part::Embedding } else { Part::Head }, self.config);
        let norm = self.names.final_norm.map(|name| self.norm(name, hidden));
        let entry = self.entry(unit, join, vec![norm]);
        let reads = match &self.config.family.classifier {
            _ if !self.config.input.is_classified() => HeadRows::All,
            None => HeadRows::ClassTokens,
            Some(classifier) => HeadRows::FirstTokens(self.pooler(classifier, sharing(&shard))),
        };
        let (name, held) = (self.names.head, shard.classes.clone());
        let weight = if tied {
            EMBED
        } else {
            let slice = Slice::of_rows(held.clone(), hidden);
            let init = Init::Normal { deviation };
            self.tensor(&format!("{name}.weight"), vec![classes, hidden], slice, sharing(&shard), init)
        };
        let bias = (matches!(reads, HeadRows::ClassTokens) || self.config.family.has_head_bias).then(|| {
            let slice = Slice::of_cols(1, held.clone());
            self.tensor(&format!("{name}.bias"), vec![classes], slice, sharing(&shard), Init::Constant(0.0))
        });
        let (first_class, widest) = (held.start, shard.widest_classes);
        let logit_bytes = self.kind.logit_bytes();
        let head = Head { weight, bias, classes, first_class, widest, reads, scale, cap, logit_bytes };
        Unit { kind: UnitKind::Head, entry, sublayer: Sublayer::Head(head), is_partial: !shard.is_whole() }
    }

    /// The layer before the head of texts. Each shard's classes give a summand of its gradient.
    fn pooler(&mut self, classifier: &TextClassifier, sharing: Sharing) -> Pooler {
        let Config { hidden, init_deviation: deviation, dropouts, .. } = *self.config;
        let (name, sharing) = (classifier.pooler, self.summed(&sharing));
        let weight = Slice::whole([hidden, hidden]);
        let init = Init::Normal { deviation };
        let weight = self.tensor(&format!("{name}.weight"), vec![hidden, hidden], weight, sharing.clone(), init);
        let bias = Slice::whole([1, hidden]);
        let bias = self.tensor(&format!("{name}.bias"), vec![hidden], bias, sharing, Init::Constant(0.0));
        let share = if classifier.drops_first_token { dropouts.classifier } else { 0.0 };
        let first_dropout = Dropout::new(share, Site::FirstTokens);
        Pooler { weight, bias, first_dropout, dropout: Dropout::new(dropouts.classifier, Site::Pooled) }
    }

    /// The entry of the unit of this number. The embedding's output makes up the stream, so dropout applies to the sum of both.
    fn entry(&self, unit: usize, join: Join, norms: Vec<Option<NormSpec>>) -> Option<Entry> {
        let (dropouts, site) = (&self.config.dropouts, Site::Entry(unit));
        let is_first = unit == 1;
        let output = if is_first || self.config.parallel { 0.0 } else { dropouts.residual };
        let stream = if is_first { dropouts.embedding } else { 0.0 };
        let [output_dropout, stream_dropout] = [output, stream].map(|share| Dropout::new(share, site));
        let rooms = vec![0; norms.len()];
        let join = Join { output_dropout, stream_dropout, ..join };
        Some(Entry { join: Some(join), norms, rooms, output_room: 0 })
    }

    /// GPT-2 draws weights whose output is added to the stream smaller, the more layers there are.
    fn out_scale(&self) -> f32 {
        if self.config.family.is_transposed { 1.0 / (2.0 * self.config.layers.len() as f32).sqrt() } else { 1.0 }
    }

    /// Adds a linear layer to a body.
    fn linear(&mut self, body: &mut BodyBuilder, x: Slot, spec: LinearSpec) -> Slot {
        let linear = self.linear_op(body, x, spec);
        body.linear(linear)
    }

    fn linear_op(&mut self, body: &mut BodyBuilder, x: Slot, spec: LinearSpec) -> Linear {
        let weights = self.linear_weights(spec);
        body.linear_with(x, weights, None)
    }

    fn linear_weights(&mut self, spec: LinearSpec) -> LinearWeights {
        let LinearSpec { name, dims: [input, output], cut, sharing, has_bias, transposed, init_scale } = spec;
        let is_summand = matches!(cut, LinearCut::Inputs(_));
        let (inputs, outputs) = match cut {
            LinearCut::Outputs(held) => (Ranges::from(0..input), held),
            LinearCut::Inputs(held) => (held.into(), Ranges::from(0..output)),
        };
        let (shape, slice) = if transposed {
            (vec![input, output], Slice { rows: inputs.clone(), cols: outputs.clone() })
        } else {
            (vec![output, input], Slice { rows: outputs.clone(), cols: inputs.clone() })
        };
        let init = Init::Normal { deviation: self.config.init_deviation * init_scale };
        let adds_bias = !is_summand || sharing == Sharing::Same || self.shard.index == 0;
        let weight = self.tensor(&format!("{name}.weight"), shape, slice, sharing.clone(), init);
        let spec = &mut self.specs[weight.0];
        spec.is_packed = self.config.packing.as_ref().is_some_and(|packing| packing.packs(&spec.name));
        let bias = has_bias.then(|| {
            let sharing = if is_summand { Sharing::Same } else { sharing.clone() };
            let slice = Slice::of_cols(1, outputs.clone());
            self.tensor(&format!("{name}.bias"), vec![output], slice, sharing, Init::Constant(0.0))
        });
        let adapter = self.config.adapters.as_ref().and_then(|adapters| adapters.of(&name));
        let adapter = adapter.map(|adapter| {
            let first_input = inputs.first().unwrap_or(0);
            let held = [inputs, outputs.clone()];
            let [a, b] = self.factors(&name, adapter, [input, output], held, is_summand, sharing.clone());
            let magnitude = adapter.is_dora.then(|| {
                let Init::Normal { deviation } = init else {
                    unreachable!("matrices are drawn from a normal distribution")
                };
                let norm = deviation * (input as f32).sqrt();
                self.magnitude(&name, output, outputs, norm, is_summand, sharing)
            });
            let dropout = Dropout::new(adapter.dropout, Site::Adapter(self.adapters));
            self.adapters += 1;
            AdapterWeights { a, b, scale: adapter.scale, dropout, first_input, inputs: input, magnitude }
        });
        LinearWeights { weight, bias, adds_bias, transposed, adapter }
    }

    /// The factors A and B of an adapter. The one along the layer's cut dim is cut as the layer is; the other is whole on every
    /// shard, and each has a summand of its gradient.
    fn factors(
        &mut self,
        name: &str,
        LayerAdapter { rank, init, .. }: LayerAdapter,
        [input, output]: [usize; 2],
        [inputs, outputs]: [Ranges; 2],
        is_summand: bool,
        sharing: Sharing,
    ) -> [ParamId; 2] {
        let whole = self.summed(&sharing);
        let [a_sharing, b_sharing] = if is_summand { [sharing, whole] } else { [whole, sharing] };
        let init = a_init(init, input, rank);
        let a = Slice::of_cols(rank, inputs);
        let a = self.tensor(&format!("{name}.lora_A.weight"), vec![rank, input], a, a_sharing, init);
        let b = Slice::of_rows(outputs, rank);
        let b = self.tensor(&format!("{name}.lora_B.weight"), vec![output, rank], b, b_sharing, Init::Constant(0.0));
        [a, b].map(|id| {
            self.specs[id.0].is_adapter = true;
            id
        })
    }

    /// DoRA's magnitudes, and the squared norms of rows that they stand over. Both have an element for each output. If the layer's
    /// inputs are cut, its output is a summand, and so are the magnitudes' gradient and the squares. `norm` is that of a row of
    /// random weights.
    fn magnitude(
        &mut self,
        name: &str,
        output: usize,
        outputs: Ranges,
        norm: f32,
        is_summand: bool,
        sharing: Sharing,
    ) -> MagnitudeParameters {
        let of_squares = match (is_summand, &sharing) {
            (_, Sharing::Same) => Sharing::Same,
            (true, _) => self.summed(&sharing),
            (false, _) => Sharing::Alone,
        };
        let of_magnitudes = if is_summand { self.summed(&sharing) } else { sharing };
        let mut vector = |name: String, sharing: Sharing, init: f32| {
            let slice = Slice::of_cols(1, outputs.clone());
            let id = self.tensor(&name, vec![output], slice, sharing, Init::Constant(init));
            self.specs[id.0].is_adapter = true;
            id
        };
        let magnitudes = vector(format!("{name}.lora_magnitude_vector"), of_magnitudes, norm);
        let squares = vector(format!("{name}.lora_squared_norm"), of_squares, norm * norm);
        self.specs[squares.0].is_derived = true;
        MagnitudeParameters { magnitudes, squares }
    }

    /// The sharing of what every shard has a summand of, if shards share this layer.
    fn summed(&self, sharing: &Sharing) -> Sharing {
        if *sharing == Sharing::Same { Sharing::Same } else { Sharing::Summed(0..self.shard.count) }
    }

    /// A norm of the stream, which every shard has.
    fn norm(&mut self, name: &str, width: usize) -> NormSpec {
        self.norm_of(name, width, self.stream_sharing())
    }

    fn norm_of(&mut self, name: &str, width: usize, sharing: Sharing) -> NormSpec {
        let mut norm = self.norm_named(format!("{name}.weight"), width, sharing.clone());
        norm.bias = self.config.family.has_norm_bias.then(|| {
            let slice = Slice::whole([1, width]);
            self.tensor(&format!("{name}.bias"), vec![width], slice, sharing, Init::Constant(0.0))
        });
        norm
    }

    /// A norm whose weight has this name.
    fn norm_named(&mut self, name: String, width: usize, sharing: Sharing) -> NormSpec {
        let Config { norm: kind, epsilon, family, .. } = *self.config;
        let init = Init::Constant(1.0 - family.norm_offset);
        let weight = self.tensor(&name, vec![width], Slice::whole([1, width]), sharing, init);
        NormSpec { kind, weight: Some(weight), bias: None, weight_offset: family.norm_offset, epsilon }
    }

    /// If the stream is split by tokens, each shard sees its own tokens and has a summand of the gradient.
    fn stream_sharing(&self) -> Sharing {
        if self.shard.split_sequence { Sharing::Summed(0..self.shard.count) } else { Sharing::Same }
    }

    fn vector(&mut self, name: &str, len: usize, value: f32) -> ParamId {
        self.replicated(name, vec![len], Init::Constant(value))
    }

    /// A parameter that every shard holds and whose gradient every shard computes.
    fn replicated(&mut self, name: &str, shape: Vec<usize>, init: Init) -> ParamId {
        let slice = Slice::whole(matrix_of(&shape));
        self.tensor(name, shape, slice, Sharing::Same, init)
    }

    fn tensor(&mut self, name: &str, shape: Vec<usize>, slice: Slice, sharing: Sharing, init: Init) -> ParamId {
        let (whole, matrix) = (matrix_of(&shape), slice.dims());
        self.specs.push(ParamSpec {
            name: name.to_owned(),
            shape,
            tensors: Vec::new(),
            whole,
            slice,
            matrix,
            sharing,
            init,
            is_trained: true,
            is_adapter: false,
            expert_factor: None,
            experts: None,
            is_derived: false,
            is_constant: false,
            is_packed: false,
        });
        ParamId(self.specs.len() - 1)
    }
}

fn matrix_of(shape: &[usize]) -> [usize; 2] {
    as_matrix(shape).expect("every parameter has a dim")
}

/// The numbers that a new factor A of so many inputs begins with.
fn a_init(init: AdapterInit, input: usize, rank: usize) -> Init {
    match init {
        AdapterInit::Uniform => Init::Uniform { bound: 1.0 / (input as f32).sqrt() },
        AdapterInit::Gaussian => Init::Normal { deviation: 1.0 / rank as f32 },
    }
}

/// The sharing of a part that a shard has to itself, or that every shard has whole.
fn sharing(shard: &Shard) -> Sharing {
    if shard.is_whole() { Sharing::Same } else { Sharing::Alone }
}

#[derive(Default)]
struct BodyBuilder {
    ops: Vec<Op>,
    slots: usize,
    again: Vec<Slot>,
}

impl BodyBuilder {
    fn slot(&mut self) -> Slot {
        self.slots += 1;
        Slot(self.slots - 1)
    }

    /// A layer without bias or activation, not added yet.
    fn plain_linear(&mut self, x: Slot, weight: ParamId) -> Linear {
        let out = self.slot();
        Linear {
            x,
            out,
            weight,
            bias: None,
            adds_bias: true,
            transposed: false,
            activation: None,
            first: false,
            part: None,
            adds: false,
            adapter: None,
        }
    }

    /// A layer with these parameters or a part of them, not added yet.
    fn linear_with(&mut self, x: Slot, weights: LinearWeights, part: Option<LinearPart>) -> Linear {
        let LinearWeights { weight, bias, adds_bias, transposed, adapter } = weights;
        let adapter = adapter.map(|AdapterWeights { a, b, scale, dropout, first_input, inputs, magnitude }| {
            let skipped = if let Some(LinearPart::Inputs(part)) = &part { part.start } else { 0 };
            let (first_input, s) = (first_input + skipped, self.slot());
            let magnitude = magnitude.map(|parameters| LinearMagnitude { parameters, u: self.slot() });
            LinearAdapter { a, b, scale, dropout, first_input, inputs, s, magnitude, place: None, beside: None }
        });
        Linear { bias, adds_bias, transposed, part, adapter, ..self.plain_linear(x, weight) }
    }

    fn linear(&mut self, linear: Linear) -> Slot {
        let out = linear.out;
        self.ops.push(Op::Linear(linear));
        out
    }

    /// A lookup into a new slot.
    fn lookup(&mut self, lookup: Lookup) -> Slot {
        let out = self.slot();
        self.ops.push(Op::Lookup(Lookup { out, ..lookup }));
        out
    }

    /// A lookup that is added to those in a slot.
    fn add_lookup(&mut self, lookup: Lookup, out: Slot) {
        self.ops.push(Op::Lookup(Lookup { out, accumulate: true, ..lookup }));
    }

    fn finish(self, inputs: Vec<Slot>, stream: Option<Slot>, output: Slot) -> Body {
        // Backward of an activation overwrites its gradient in place, and the output's gradient is shared with the stream.
        let activated =
            |op: &Op| matches!(op, Op::Linear(linear) if linear.out == output && linear.activation.is_some());
        assert!(!self.ops.iter().any(activated), "an output has no activation");
        Body { ops: self.ops, rooms: vec![0; self.slots], again: self.again, inputs, stream, output }
    }
}
