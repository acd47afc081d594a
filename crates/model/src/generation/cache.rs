//! What new tokens need of the sequences so far, layer by layer: the keys and values that they attend to, or the state of linear
//! attention.

use std::sync::Arc;

use evenkeel_device::kernel::Fill;
use evenkeel_device::{DType, Heads, Queue, Tensor};

use crate::chain::attention::Attention;
use crate::chain::delta::{Delta, DynamicConv, ShortConv};
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

/// One layer's part, as far as it has operations that need it.
#[derive(Default)]
struct LayerCache {
    attention: Option<KeysAndValues>,
    /// [B · (taps - 1), columns]: the last rows of each sequence before a short convolution.
    past: Option<Tensor>,
    /// f32 [B · value heads · key elements, value elements]
    states: Option<Tensor>,
}

struct KeysAndValues {
    /// [B · capacity, heads · dim] each, one sequence after another.
    keys: Tensor,
    values: Tensor,
    heads: usize,
}

impl Cache {
    pub fn new(model: &Model, dtype: DType, queue: &Queue, sequences: usize, capacity: usize) -> Cache {
        let mut layers: Vec<LayerCache> = model.config.layers.iter().map(|_| LayerCache::default()).collect();
        let bodies = model.units.iter().filter(|unit| unit.kind != UnitKind::Head).map(Unit::body);
        for op in bodies.flat_map(|body| &body.ops) {
            match op {
                Op::Attention(Attention { layer, k, .. }) => {
                    let (heads, width) = (k.count, k.count * k.dim);
                    // Layers that share keys and values are named by the one that has them.
                    layers[*layer].attention.get_or_insert_with(|| {
                        let [keys, values] = [(); 2].map(|_| queue.tensor(sequences * capacity, width, dtype));
                        KeysAndValues { keys, values, heads }
                    });
                }
                Op::ShortConv(ShortConv { layer, weight, .. }) => {
                    let [columns, taps] = model.specs[weight.0].matrix;
                    let past = || queue.tensor(sequences * (taps - 1), columns, dtype);
                    layers[*layer].past.get_or_insert_with(past);
                }
                Op::DynamicConv(DynamicConv { layer, columns, taps, .. }) => {
                    layers[*layer].past = Some(queue.tensor(sequences * (taps - 1), *columns, dtype));
                }
                Op::Delta(Delta { layer, k, v, .. }) => {
                    let rows = sequences * v.count * k.dim;
                    layers[*layer].states = Some(queue.tensor(rows, v.dim, DType::F32));
                }
                _ => (),
            }
        }
        Cache { layers: layers.into(), capacity, lengths: vec![0; sequences].into() }
    }

    /// Clears what sequences without tokens would read.
    pub fn forget(&self, queue: &Queue) {
        for tensor in self.layers.iter().flat_map(|layer| [&layer.past, &layer.states]).flatten() {
            queue.launch(Fill { out: tensor.view(), value: 0.0 });
        }
    }

    pub fn heads(&self, layer: usize) -> [Heads; 2] {
        let KeysAndValues { keys, values, heads } =
            self.layers[layer].attention.as_ref().expect("a layer with attention");
        [keys, values].map(|tensor| Heads::packed(tensor, *heads))
    }

    pub fn past(&self, layer: usize) -> &Tensor {
        self.layers[layer].past.as_ref().expect("a layer with a short convolution")
    }

    pub fn states(&self, layer: usize) -> &Tensor {
        self.layers[layer].states.as_ref().expect("a layer with linear attention")
    }
}
