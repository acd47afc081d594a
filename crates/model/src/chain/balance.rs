//! What routers send where: the load of experts, and a loss of their balance beside that of labels, over all layers with experts
//! together, as transformers has it.
//!
//! With that loss, routers' backward reads the notes of all layers, so every layer's forward comes before the first backward of a
//! batch.

use std::ops::Range;

use evenkeel_device::{DType, Queue, Tensor, View};

use crate::config::Config;

/// What the routers note of a batch.
pub struct Tallies {
    /// f32 [2·L, E]: of each layer with experts, the pairs that each expert got, and the sums of its shares of the softmax.
    tallies: Tensor,
    /// u32 [1, T]: 0 for padding.
    pub(crate) counted: Tensor,
    /// Tokens that count.
    tokens: usize,
    /// The factor of this batch's loss in a step's.
    share: f32,
}

impl Tallies {
    /// `None` if the model has no experts, or if no token counts.
    pub(crate) fn of_batch(
        queue: &Queue,
        config: &Config,
        tokens: usize,
        padding: &[Range<usize>],
        share: f32,
    ) -> Option<Tallies> {
        let experts = config.experts?;
        let mut counted = vec![1; tokens];
        padding.iter().for_each(|segment| counted[segment.clone()].fill(0));
        let tokens = tokens - padding.iter().map(Range::len).sum::<usize>();
        let layers = config.layers.iter().filter(|layer| layer.has_experts).count();
        (tokens > 0).then(|| Tallies {
            tallies: queue.tensor(2 * layers, experts.count, DType::F32),
            counted: queue.indices(&counted),
            tokens,
            share,
        })
    }

    pub(crate) fn tally(&self, layer: usize) -> View {
        self.tallies.view().row_range(2 * layer..2 * layer + 2)
    }

    pub(crate) fn tallies(&self) -> View {
        self.tallies.view()
    }

    /// What pairs are multiplied with in the gradient of a loss with this coefficient.
    pub(crate) fn factor(&self, coefficient: f32) -> f32 {
        (f64::from(coefficient * self.share) * self.scale()) as f32
    }

    /// E / N², for shares of N tokens of all layers.
    fn scale(&self) -> f64 {
        let tokens = (self.tokens * (self.tallies.rows / 2)) as f64;
        self.tallies.cols as f64 / (tokens * tokens)
    }

    pub fn read(&self, queue: &Queue) -> ReadTallies<'_> {
        ReadTallies { tallies: self, read: queue.read(&self.tallies) }
    }
}

/// The routers' tallies, in the host's memory.
pub struct ReadTallies<'a> {
    tallies: &'a Tallies,
    read: Vec<f32>,
}

impl ReadTallies<'_> {
    /// The pairs that each expert of a layer got. Layers are counted among those with experts.
    fn pairs(&self, layer: usize) -> &[f32] {
        let experts = self.tallies.tallies.cols;
        &self.read[2 * layer * experts..][..experts]
    }

    /// The loss of balance that this batch adds to a step's, without the coefficient: 1 for each expert that a token goes to, if all
    /// experts are alike.
    pub fn loss(&self) -> f64 {
        let experts = self.tallies.tallies.cols;
        let mut sums = vec![[0.0f64; 2]; experts];
        for (row, tally) in self.read.chunks_exact(experts).enumerate() {
            sums.iter_mut().zip(tally).for_each(|(sums, &count)| sums[row % 2] += f64::from(count));
        }
        let products = sums.iter().map(|[pairs, shares]| pairs * shares);
        f64::from(self.tallies.share) * self.tallies.scale() * products.sum::<f64>()
    }
}

/// How unequal the work of a layer's experts is.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ExpertLoad {
    /// The tokens of the busiest expert beside those that an equal share would give it.
    pub largest: f64,
    /// The share of experts without a token.
    pub idle: f64,
}

impl ExpertLoad {
    /// The load of a layer, counted among those with experts, in all parts of a micro-batch. `None` if no token counts.
    pub fn of_layer(layer: usize, parts: &[ReadTallies]) -> Option<ExpertLoad> {
        let parts = parts.iter().filter(|part| part.tallies.share > 0.0);
        let pairs = parts.map(|part| part.pairs(layer).to_vec()).reduce(|mut sum, part| {
            sum.iter_mut().zip(part).for_each(|(sum, pairs)| *sum += pairs);
            sum
        })?;
        let mean = pairs.iter().map(|&pairs| f64::from(pairs)).sum::<f64>() / pairs.len() as f64;
        let largest = pairs.iter().copied().fold(0.0, f32::max);
        let idle = pairs.iter().filter(|&&pairs| pairs == 0.0).count();
        Some(ExpertLoad { largest: f64::from(largest) / mean, idle: idle as f64 / pairs.len() as f64 })
    }
}
