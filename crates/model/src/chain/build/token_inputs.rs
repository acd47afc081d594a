//! Numbers for each token and layer, which layers take in beside attention and MLP.
//!
//! The first attention's unit makes those of all layers, because it has the embedding as its input. A shard has some columns of
//! each layer's.

use std::ops::Range;

use super::experts::columns_of_experts;
use super::{BodyBuilder, Builder, LinearCut, LinearSpec, sharing};
use crate::chain::attention::HeadSlot;
use crate::chain::body::Slot;
use crate::chain::entry::Join;
use crate::chain::handed::{HandOn, Handed, TakeHanded};
use crate::chain::lookup::{Index, Lookup};
use crate::chain::norm::NormSpec;
use crate::chain::op::Op;
use crate::chain::unit::{Sublayer, Unit, UnitKind};
use crate::config::TokenInputSizes;
use crate::config::family::TokenInputs;
use crate::parameters::Init;
use crate::sharding::layout::{Ranges, Slice};

impl Builder<'_> {
    fn token_input_names(&self) -> &'static TokenInputs {
        self.config.family.token_inputs.as_ref().expect("a family with token inputs has their names")
    }

    /// The columns of a layer's numbers that the shard has.
    fn held_inputs(&self, width: usize) -> Range<usize> {
        columns_of_experts(&self.shard.ffn, self.config.ffn, width)
    }

    /// Makes the numbers of all layers of the embedding, whose slot it returns, and hands them on.
    pub(super) fn hand_token_inputs(&mut self, body: &mut BodyBuilder, sizes: TokenInputSizes) -> Slot {
        let (names, TokenInputSizes { width, rows }) = (self.token_input_names(), sizes);
        let (base, hidden, layers) = (self.names.base, self.config.hidden, self.config.layers.len());
        let held = self.held_inputs(width);
        let own = sharing(self.shard);
        // Norms need all columns, so every shard projects all of them, and has a summand of the gradients.
        let summed = self.summed(&own);
        let of_layers = (0..layers).map(|layer| layer * width + held.start..layer * width + held.end);
        let slice = Slice { rows: (0..rows).into(), cols: Ranges::new(of_layers.collect()) };
        let init = Init::Normal { deviation: self.config.init_deviation };
        let table = self.tensor(&format!("{base}{}", names.table), vec![rows, layers * width], slice, own, init);
        let looked_up = body.lookup(Lookup { scale: (width as f32).sqrt(), ..Lookup::of(table, Index::Tokens) });
        let embedding = body.slot();
        let projection = LinearSpec {
            name: format!("{base}{}", names.projection),
            dims: [hidden, layers * width],
            cut: LinearCut::Outputs((0..layers * width).into()),
            sharing: summed.clone(),
            has_bias: false,
            transposed: false,
            init_scale: 1.0,
        };
        let projected = self.linear(body, embedding, projection);
        body.ops.push(Op::Scale { x: projected, factor: 1.0 / (hidden as f32).sqrt() });
        let norm = self.norm_of(&format!("{base}{}", names.norm), width, summed);
        let (normalised, stats) = (body.slot(), body.slot());
        let x = HeadSlot::packed(projected, layers, width);
        body.ops.push(Op::HeadNorm { x, out: normalised, stats, norm, adds: false });
        let taken = body.slot();
        let x = HeadSlot { slot: normalised, first: held.start, count: layers, dim: held.len(), step: width };
        body.ops.push(Op::TakeHeads { x, out: taken, alone: true });
        let sum = body.slot();
        body.ops.push(Op::Add { a: taken, b: looked_up, out: sum });
        body.ops.push(Op::Scale { x: sum, factor: 0.5f32.sqrt() });
        body.ops.push(Op::HandOn(HandOn { what: Handed::TokenInputs, x: sum }));
        embedding
    }

    /// The unit that takes a layer's numbers in, and the norm of its output.
    pub(super) fn token_input(
        &mut self,
        unit: usize,
        layer: usize,
        prefix: &str,
        sizes: TokenInputSizes,
        join: Join,
    ) -> (NormSpec, Unit) {
        let (names, width, hidden) = (self.token_input_names(), sizes.width, self.config.hidden);
        let held = self.held_inputs(width);
        let linear = |name: &str, dims: [usize; 2], cut: LinearCut| LinearSpec {
            name: format!("{prefix}{name}"),
            dims,
            cut,
            sharing: sharing(self.shard),
            has_bias: false,
            transposed: false,
            init_scale: 1.0,
        };
        let widening = linear(names.gate, [hidden, width], LinearCut::Outputs(held.clone().into()));
        let narrowing = linear(names.out, [width, hidden], LinearCut::Inputs(held.clone()));
        let mut body = BodyBuilder::default();
        let x = body.slot();
        let gate = self.linear(&mut body, x, widening);
        let (up, out) = (body.slot(), body.slot());
        let columns = Some(layer * held.len()..(layer + 1) * held.len());
        body.ops.push(Op::TakeHanded(TakeHanded { what: Handed::TokenInputs, columns, out: up }));
        body.ops.push(Op::Gated { activation: self.config.activation, gate, up, out });
        let output = self.linear(&mut body, out, narrowing);
        let post = self.norm(&format!("{prefix}{}", names.post_norm), hidden);
        let entry = self.entry(unit, join, vec![None]);
        let sublayer = Sublayer::Body(body.finish(vec![x], None, output));
        let is_partial = !self.shard.is_whole();
        (post, Unit { kind: UnitKind::TokenInput(layer), entry, sublayer, is_partial })
    }
}
