//! The parameters and operations of experts.

use std::ops::Range;

use super::{BodyBuilder, Builder, sharing};
use crate::chain::body::Slot;
use crate::chain::experts::{self, Router, Routes};
use crate::chain::op::Op;
use crate::config::Experts;
use crate::config::family::ExpertOptions;
use crate::parameters::{FileTensor, Init, ParamId};
use crate::sharding::layout::{Ranges, Slice};
use crate::sharding::shard::Shard;

impl Builder<'_> {
    pub(super) fn experts(
        &mut self,
        body: &mut BodyBuilder,
        x: Slot,
        prefix: &str,
        experts: Experts,
        shard: &Shard,
    ) -> Slot {
        let options = self.config.family.experts.as_ref().expect("a family with experts has their names");
        let Experts { count, chosen, ffn, renormalises, .. } = experts;
        let hidden = self.config.hidden;
        let init = Init::Normal { deviation: self.config.init_deviation };
        // Every shard computes the whole router, and has a summand of its gradient.
        let router_sharing = self.summed(&sharing(shard));
        let router = format!("{prefix}{}.weight", options.router);
        let router = self.tensor(&router, vec![count, hidden], Slice::whole([count, hidden]), router_sharing, init);
        let columns = columns_of_experts(&shard.ffn, self.config.ffn, ffn);
        let own = sharing(shard);
        // Each expert has the gate's rows before the others.
        let firsts = (0..2 * count).map(|part| part * ffn);
        let rows = firsts.map(|first| first + columns.start..first + columns.end).collect();
        let slice = Slice::of_rows(Ranges::new(rows), hidden);
        let shape = vec![2 * count * ffn, hidden];
        let gate_up = self.tensor(&format!("{prefix}{}", options.stacked[0]), shape, slice, own.clone(), init);
        let slice = Slice::of_cols(count * hidden, columns);
        let down = self.tensor(&format!("{prefix}{}", options.stacked[1]), vec![count * hidden, ffn], slice, own, init);
        self.name_experts(prefix, options, experts, [gate_up, down]);
        let routes = Routes {
            weights: body.slot(),
            chosen: body.slot(),
            pairs: body.slot(),
            places: body.slot(),
            offsets: body.slot(),
        };
        let (logits, wide, narrow, out) = (body.slot(), body.slot(), body.slot(), body.slot());
        body.ops.push(Op::Router(Router { x, weight: router, logits, chosen, renormalises, routes }));
        let activation = self.config.activation;
        body.ops.push(Op::Experts(experts::Experts { x, routes, activation, gate_up, down, wide, narrow, out }));
        out
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
fn columns_of_experts(columns: &Range<usize>, ffn: usize, of_expert: usize) -> Range<usize> {
    columns.start * of_expert / ffn..columns.end * of_expert / ffn
}
