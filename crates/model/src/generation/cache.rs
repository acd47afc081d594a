//! The keys and values of sequences so far, layer by layer. New tokens attend to them.

use std::sync::Arc;

use evenkeel_device::{DType, Heads, Queue, Tensor};

use crate::chain::model::Model;
use crate::chain::op::Op;
use crate::chain::unit::{Unit, UnitKind};

/// Room for B sequences of `capacity` tokens. Clones share the memory and keep their own lengths.
#[derive(Clone)]
pub(crate) struct Cache {
    layers: Arc<[LayerCache]>,
    pub capacity: usize,
    /// Tokens that each sequence holds.
    pub lengths: Arc<[usize]>,
}

struct LayerCache {
    /// [B · capacity, heads · dim] each, one sequence after another.
    keys: Tensor,
    values: Tensor,
    heads: usize,
}

impl Cache {
    /// One pair of tensors for each attention in the chain, as wide as its keys.
    pub fn new(model: &Model, dtype: DType, queue: &Queue, sequences: usize, capacity: usize) -> Cache {
        let bodies = model.units.iter().filter(|unit| unit.kind != UnitKind::Head).map(Unit::body);
        let ops = bodies.flat_map(|body| &body.ops);
        let attentions = ops.filter_map(|op| if let Op::Attention(attention) = op { Some(attention) } else { None });
        let layers = attentions.enumerate().map(|(index, attention)| {
            assert_eq!(attention.layer, index, "layers lie in the cache in the chain's order");
            let (heads, width) = (attention.k.count, attention.k.count * attention.k.dim);
            let [keys, values] = [(); 2].map(|_| queue.tensor(sequences * capacity, width, dtype));
            LayerCache { keys, values, heads }
        });
        Cache { layers: layers.collect(), capacity, lengths: vec![0; sequences].into() }
    }

    pub fn heads(&self, layer: usize) -> [Heads; 2] {
        let LayerCache { keys, values, heads } = &self.layers[layer];
        [keys, values].map(|tensor| Heads::packed(tensor, *heads))
    }
}
