//! The parameters and operations of experts.

use std::ops::Range;

use super::{BodyBuilder, Builder, a_init, sharing};
use crate::adapter::{ExpertFactor, LayerAdapter};
use crate::chain::adapted_experts::ExpertAdapter;
use crate::chain::body::Slot;
use crate::chain::experts::{self, ExpertBiases, ExpertMatrix, ExpertScales, Gate, Router, Routes};
use crate::chain::norm::NormSpec;
use crate::chain::op::Op;
use crate::config::Experts;
use crate::config::family::{ClampedExperts, ExpertOptions, SharedExpert};
use crate::parameters::{FileTensor, Init, ParamId};
use crate::sharding::layout::{Ranges, Sharing, Slice};
use crate::sharding::shard::Shard;

/// The parameters of a layer's experts.
struct ExpertWeights {
    gate_up: ParamId,
    down: ParamId,
    biases: Option<ExpertBiases>,
}

/// What a shard has of a layer's experts: some columns of each, or some experts whole.
struct ExpertCut {
    experts: Range<usize>,
    columns: Range<usize>,
    /// Of what concerns these experts and columns alone.
    own: Sharing,
    /// Of what concerns all columns of these experts.
    of_experts: Sharing,
    /// Whether no other shard has these experts.
    are_whole: bool,
}

impl ExpertCut {
    /// The same columns of each expert, where it has so many stretches of that width.
    fn columns_of_each(&self, stretches: usize, width: usize, columns: &Range<usize>) -> Ranges {
        let all = stretches * self.experts.start..stretches * self.experts.end;
        let firsts = all.map(|stretch| stretch * width);
        Ranges::new(firsts.map(|first| first + columns.start..first + columns.end).collect())
    }

    /// All rows of these experts, where each has so many.
    fn rows(&self, of_each: usize) -> Range<usize> {
        self.experts.start * of_each..self.experts.end * of_each
    }
}

impl Builder<'_> {
    /// An MLP and experts beside it: each reads the stream by a norm of its own, and they make the halves of the output. Returns
    /// the output, the inputs with their norms, and the norms of the halves.
    pub(super) fn mlp_and_experts(
        &mut self,
        body: &mut BodyBuilder,
        prefix: &str,
        index: usize,
        experts: Experts,
        shard: &Shard,
    ) -> (Slot, Vec<(Slot, NormSpec)>, [NormSpec; 2]) {
        let options = self.config.family.experts.as_ref().and_then(|options| options.beside.as_ref());
        let beside = options.expect("a family with experts beside an MLP has their names");
        let hidden = self.config.hidden;
        let inputs = [body.slot(), body.slot(), body.slot()];
        let [of_mlp, of_router, of_experts] = inputs;
        let mlp_norm = self.names.mlp_norm.expect("an MLP beside experts has a norm of its own");
        let mut norm = |name: &str| self.norm(&format!("{prefix}{name}"), hidden);
        let [mlp_norm, experts_norm] = [mlp_norm, beside.norm].map(&mut norm);
        let post_norms = beside.post_norms.map(&mut norm);
        let router_norm = self.norm_named(format!("{prefix}{}", beside.router_norm), hidden, self.stream_sharing());
        let mlp = self.mlp(body, of_mlp, prefix, self.config.layers[index].mlp_factor, shard);
        let experts = self.experts(body, [of_router, of_experts], prefix, index, experts, shard);
        let out = body.slot();
        body.ops.push(Op::SideBySide { parts: [mlp, experts], out });
        (out, inputs.into_iter().zip([mlp_norm, router_norm, experts_norm]).collect(), post_norms)
    }

    /// The router and the experts may read different slots.
    pub(super) fn experts(
        &mut self,
        body: &mut BodyBuilder,
        [router_x, x]: [Slot; 2],
        prefix: &str,
        index: usize,
        experts: Experts,
        shard: &Shard,
    ) -> Slot {
        let options = self.config.family.experts.as_ref().expect("a family with experts has their names");
        let Experts { count, chosen, renormalises, limit, balance, .. } = experts;
        let hidden = self.config.hidden;
        let init = Init::Normal { deviation: self.config.init_deviation };
        // Every shard computes the whole router, and has a summand of its gradient.
        let whole = self.summed(&sharing(shard));
        let router = format!("{prefix}{}", options.router);
        let weight = format!("{router}.weight");
        let weight = self.tensor(&weight, vec![count, hidden], Slice::whole([count, hidden]), whole.clone(), init);
        let bias = options.clamped.as_ref().map(|_| {
            let (slice, init) = (Slice::whole([1, count]), Init::Constant(0.0));
            self.tensor(&format!("{router}.bias"), vec![count], slice, whole.clone(), init)
        });
        let expert_scales = options.beside.as_ref().map(|beside| {
            let (name, slice) = (format!("{prefix}{}", beside.expert_scales), Slice::whole([1, count]));
            let scales = self.tensor(&name, vec![count], slice, whole, Init::Constant(1.0));
            ExpertScales { scales, unscaled: body.slot() }
        });
        let scale = if options.beside.is_some() { 1.0 / (hidden as f32).sqrt() } else { 1.0 };
        let cut = self.expert_cut(experts, shard);
        let weights = match &options.clamped {
            Some(clamped) => self.clamped_experts(prefix, options, clamped, experts, &cut, shard),
            None => self.plain_experts(prefix, options, experts, &cut),
        };
        let routes = Routes {
            weights: body.slot(),
            chosen: body.slot(),
            pairs: body.slot(),
            places: body.slot(),
            offsets: body.slot(),
        };
        let (logits, wide, narrow, out) = (body.slot(), body.slot(), body.slot(), body.slot());
        let (layer, balance) = (self.config.expert_layer(index), balance.filter(|_| shard.index == 0));
        body.ops.push(Op::Router(Router {
            x: router_x,
            weight,
            bias,
            logits,
            scale,
            chosen,
            first: cut.experts.start,
            renormalises,
            expert_scales,
            routes,
            layer,
            balance,
        }));
        let gate = match limit {
            Some(limit) => Gate::Clamped { limit },
            None => Gate::Halves(self.config.activation),
        };
        let [gate_up, down] = self.expert_matrices(body, prefix, options, experts, &weights, &cut);
        let biases = weights.biases;
        let transposed = options.clamped.is_some();
        body.ops.push(Op::Experts(experts::Experts {
            x,
            routes,
            held: cut.experts.len(),
            gate,
            gate_up,
            down,
            transposed,
            biases,
            wide,
            narrow,
            out,
        }));
        match (&options.shared, experts.shared) {
            (Some(names), Some(ffn)) => {
                let shared = self.shared_expert(body, x, prefix, names, ffn, shard);
                let sum = body.slot();
                body.ops.push(Op::Add { a: out, b: shared, out: sum });
                sum
            }
            _ => out,
        }
    }

    /// The experts' matrices with their adapters, if they have some.
    fn expert_matrices(
        &mut self,
        body: &mut BodyBuilder,
        prefix: &str,
        options: &ExpertOptions,
        Experts { count, ffn, .. }: Experts,
        weights: &ExpertWeights,
        cut: &ExpertCut,
    ) -> [ExpertMatrix; 2] {
        let hidden = self.config.hidden;
        let names = options.stacked.map(|name| format!("{prefix}{name}"));
        let adapter = |name: &String| self.config.adapters.as_ref().and_then(|adapters| adapters.of_parameter(name));
        let adapters = [adapter(&names[0]), adapter(&names[1])];
        // PEFT wraps the module once for each parameter; the last one is outside.
        let module = names[0].rsplit_once('.').map_or("", |(module, _)| module).to_owned();
        let inner = if adapters[1].is_some() { format!("{module}.base_layer") } else { module.clone() };
        let ExpertCut { columns, own, of_experts, .. } = cut;
        let of_gate_up = adapters[0].map(|adapter| {
            let a = (Slice::of_rows(cut.rows(adapter.rank), hidden), of_experts.clone());
            let b = (Slice::of_rows(self.wide_rows(ffn, cut), adapter.rank), own.clone());
            self.expert_adapter(body, &inner, adapter, count, [hidden, 2 * ffn], [a, b])
        });
        let of_down = adapters[1].map(|adapter| {
            let a = (Slice { rows: cut.rows(adapter.rank).into(), cols: columns.clone().into() }, own.clone());
            let b = (Slice::of_rows(cut.rows(hidden), adapter.rank), of_experts.clone());
            self.expert_adapter(body, &module, adapter, count, [ffn, hidden], [a, b])
        });
        [
            ExpertMatrix { weight: weights.gate_up, adapter: of_gate_up },
            ExpertMatrix { weight: weights.down, adapter: of_down },
        ]
    }

    /// The factors of all experts, one below the other. Files have those of B side by side.
    fn expert_adapter(
        &mut self,
        body: &mut BodyBuilder,
        module: &str,
        LayerAdapter { rank, scale, init, .. }: LayerAdapter,
        experts: usize,
        [input, output]: [usize; 2],
        [(of_a, a_sharing), (of_b, b_sharing)]: [(Slice, Sharing); 2],
    ) -> ExpertAdapter {
        let (a_shape, b_shape) = (vec![experts * rank, input], vec![experts * output, rank]);
        let init = a_init(init, input, rank);
        let a = self.tensor(&format!("{module}.lora_A.weight"), a_shape, of_a, a_sharing, init);
        let zeros = Init::Constant(0.0);
        let b = self.tensor(&format!("{module}.lora_B.weight"), b_shape, of_b, b_sharing, zeros);
        let is_transposed = self.config.family.experts.as_ref().is_some_and(|options| options.clamped.is_some());
        for (id, is_b) in [(a, false), (b, true)] {
            let spec = &mut self.specs[id.0];
            spec.is_adapter = true;
            spec.expert_factor = Some(ExpertFactor { experts, rank, input, output, is_b, is_transposed });
        }
        ExpertAdapter { a, b, scale, s: body.slot() }
    }

    fn shared_expert(
        &mut self,
        body: &mut BodyBuilder,
        x: Slot,
        prefix: &str,
        names: &SharedExpert,
        ffn: usize,
        shard: &Shard,
    ) -> Slot {
        let columns = (ffn, columns_of_experts(&shard.ffn, self.config.ffn, ffn));
        let (narrow, down) = self.widened(body, x, prefix, &names.mlp, columns, shard);
        // As with the router, every shard has a summand of the gradient.
        let (gate, hidden) = (format!("{prefix}{}.weight", names.gate), self.config.hidden);
        let init = Init::Normal { deviation: self.config.init_deviation };
        let gate_sharing = self.summed(&sharing(shard));
        let weight = self.tensor(&gate, vec![1, hidden], Slice::whole([1, hidden]), gate_sharing, init);
        let (logits, out) = (body.slot(), body.slot());
        body.ops.push(Op::SharedGate(experts::SharedGate { x, weight, logits, narrow, out }));
        self.linear(body, out, down)
    }

    fn expert_cut(&self, experts: Experts, shard: &Shard) -> ExpertCut {
        let own = sharing(shard);
        match shard.experts.clone() {
            Some(held) => {
                ExpertCut { experts: held, columns: 0..experts.ffn, of_experts: own.clone(), own, are_whole: true }
            }
            None => ExpertCut {
                experts: 0..experts.count,
                columns: columns_of_experts(&shard.ffn, self.config.ffn, experts.ffn),
                of_experts: self.summed(&own),
                own,
                are_whole: false,
            },
        }
    }

    /// The outputs of `gate_up` that a shard has, of each expert one behind the other.
    fn wide_rows(&self, ffn: usize, cut: &ExpertCut) -> Ranges {
        let ExpertCut { columns, .. } = cut;
        match self.config.family.experts.as_ref().is_some_and(|options| options.clamped.is_some()) {
            true => cut.columns_of_each(1, 2 * ffn, &(2 * columns.start..2 * columns.end)),
            // Each expert has the gate's rows before the others.
            false => cut.columns_of_each(2, ffn, columns),
        }
    }

    fn plain_experts(
        &mut self,
        prefix: &str,
        options: &ExpertOptions,
        experts: Experts,
        cut: &ExpertCut,
    ) -> ExpertWeights {
        let (Experts { count, ffn, .. }, hidden) = (experts, self.config.hidden);
        let init = Init::Normal { deviation: self.config.init_deviation };
        let of_wide = Slice::of_rows(self.wide_rows(ffn, cut), hidden);
        let of_down = Slice { rows: cut.rows(hidden).into(), cols: cut.columns.clone().into() };
        let mut stacked = |name: &str, shape: [usize; 2], slice: Slice| {
            self.tensor(&format!("{prefix}{name}"), shape.to_vec(), slice, cut.own.clone(), init)
        };
        let gate_up = stacked(options.stacked[0], [2 * count * ffn, hidden], of_wide);
        let down = stacked(options.stacked[1], [count * hidden, ffn], of_down);
        self.name_experts(prefix, options, experts, [gate_up, down]);
        ExpertWeights { gate_up, down, biases: None }
    }

    fn clamped_experts(
        &mut self,
        prefix: &str,
        options: &ExpertOptions,
        clamped: &ClampedExperts,
        experts: Experts,
        cut: &ExpertCut,
        shard: &Shard,
    ) -> ExpertWeights {
        let (Experts { count, ffn, .. }, hidden) = (experts, self.config.hidden);
        let init = Init::Normal { deviation: self.config.init_deviation };
        let ExpertCut { columns, own, are_whole, .. } = cut;
        let wide = self.wide_rows(ffn, cut);
        let mut stacked = |name: &str, in_files: [usize; 3], slice: Slice| {
            let [count, rows, cols] = in_files;
            let id = self.tensor(&format!("{prefix}{name}"), vec![count * rows, cols], slice, own.clone(), init);
            self.name_stacked(id, in_files.to_vec());
            id
        };
        let slice = Slice { rows: cut.rows(hidden).into(), cols: (2 * columns.start..2 * columns.end).into() };
        let gate_up = stacked(options.stacked[0], [count, hidden, 2 * ffn], slice);
        let slice = Slice::of_rows(cut.columns_of_each(1, ffn, columns), hidden);
        let down = stacked(options.stacked[1], [count, ffn, hidden], slice);
        // As vectors, biases are used in f32 and do not decay.
        let mut bias = |name: &str, width: usize, held: Ranges, sharing: Sharing| {
            let (slice, init) = (Slice::of_cols(1, held), Init::Constant(0.0));
            let id = self.tensor(&format!("{prefix}{name}"), vec![count * width], slice, sharing, init);
            self.name_stacked(id, vec![count, width]);
            id
        };
        let of_wide = bias(clamped.biases[0], 2 * ffn, wide, own.clone());
        let of_down = if *are_whole { own.clone() } else { Sharing::Same };
        let of_down = bias(clamped.biases[1], hidden, cut.rows(hidden).into(), of_down);
        let biases = ExpertBiases { gate_up: of_wide, down: of_down, adds_down: *are_whole || shard.index == 0 };
        ExpertWeights { gate_up, down, biases: Some(biases) }
    }

    /// Says that a parameter has this shape in files, whose first dim counts experts.
    fn name_stacked(&mut self, id: ParamId, shape: Vec<usize>) {
        let spec = &mut self.specs[id.0];
        spec.experts = shape.first().copied();
        spec.tensors = vec![FileTensor { name: spec.name.clone(), shape }];
    }

    /// Says which tensors of files the experts' parameters are.
    fn name_experts(&mut self, prefix: &str, options: &ExpertOptions, experts: Experts, [gate_up, down]: [ParamId; 2]) {
        let Experts { count, ffn, are_stacked, .. } = experts;
        let hidden = self.config.hidden;
        let of_expert = |expert: usize, name: &str, shape: [usize; 2]| {
            let one = options.one.replace("{}", &expert.to_string());
            FileTensor { name: format!("{prefix}{one}{name}.weight"), shape: shape.to_vec() }
        };
        let stacked = |name: &str, [rows, cols]: [usize; 2]| {
            vec![FileTensor { name: format!("{prefix}{name}"), shape: vec![count, rows, cols] }]
        };
        for id in [gate_up, down] {
            self.specs[id.0].experts = Some(count);
        }
        let gate_and_up = |expert| [options.gate, options.up].map(|name| of_expert(expert, name, [ffn, hidden]));
        [self.specs[gate_up.0].tensors, self.specs[down.0].tensors] = match are_stacked {
            true => [stacked(options.stacked[0], [2 * ffn, hidden]), stacked(options.stacked[1], [hidden, ffn])],
            false => [
                (0..count).flat_map(gate_and_up).collect(),
                (0..count).map(|expert| of_expert(expert, options.down, [hidden, ffn])).collect(),
            ],
        };
    }
}

/// An expert's columns on a shard with such columns of an MLP: as large a share of them.
pub(super) fn columns_of_experts(columns: &Range<usize>, ffn: usize, of_expert: usize) -> Range<usize> {
    columns.start * of_expert / ffn..columns.end * of_expert / ffn
}
