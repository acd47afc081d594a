//! Micro-batches on their way into a step: dealt to replicas, cut into parts, put on the device.

use std::borrow::{Borrow, Cow};

use evenkeel_comm::Group;
use evenkeel_device::kernel::seed_of;
use evenkeel_model::{Batch, Noise};
use evenkeel_step::schedule::PartSize;

use super::Trainer;
use super::programs::Shape;
use crate::Error;
use crate::samples::Samples;

/// By replica, micro-batch and part.
pub(super) type Sizes = Vec<Vec<Vec<PartSize>>>;

/// A step's micro-batches on a rank's device.
pub struct Prepared {
    pub(super) batches: Vec<Vec<Batch>>,
    pub(super) shape: Shape,
    pub(super) sizes: Sizes,
    /// The fewest parts of any rank's micro-batches.
    pub(super) parts: usize,
    /// Labels that count, and tokens, of all ranks.
    pub(super) targets: usize,
    pub(super) tokens: usize,
}

impl Trainer {
    /// Puts a step's samples on the device, for several steps on the same samples or to fetch samples ahead. They suit this
    /// trainer as it is arranged now.
    pub fn prepare(&self, micros: &[Samples]) -> Result<Prepared, Error> {
        self.compare_samples(micros)?;
        Ok(self.prepare_uncompared(micros))
    }

    pub(super) fn prepare_uncompared(&self, micros: &[impl Borrow<Samples>]) -> Prepared {
        let shares = deal(micros, self.mesh().dp);
        let parts = self.parts(&shares);
        let (shape, sizes) = Shape::of_step(self.sizes(&shares, &parts));
        Prepared {
            batches: self.batches(&shares, &parts, micros.len()),
            shape,
            sizes,
            parts: parts.iter().flatten().copied().min().unwrap_or(1),
            targets: micros.iter().map(|samples| samples.borrow().targets()).sum(),
            tokens: micros.iter().map(|samples| samples.borrow().tokens(self.model.config.input)).sum(),
        }
    }

    /// Ranks that compute on different samples would train nonsense without any other sign of it.
    fn compare_samples(&self, micros: &[Samples]) -> Result<(), Error> {
        let groups = [Some(&self.groups[0]), self.data_group(), self.pipeline_group()].into_iter().flatten();
        let groups: Vec<&Group> = groups.filter(|group| group.size() > 1).collect();
        if groups.is_empty() {
            return Ok(());
        }
        let digest = Samples::digest(micros);
        // All exchanges come before the first complaint, so that nobody waits for a rank that has complained.
        let found: Vec<(&Group, Vec<u64>)> = groups.into_iter().map(|group| (group, group.exchange(digest))).collect();
        let differs = found.iter().find_map(|(group, digests)| {
            let member = digests.iter().position(|&digest| digest != digests[0])?;
            Some([group.ranks()[0], group.ranks()[member]])
        });
        differs.map_or(Ok(()), |ranks| Err(Error::DifferentSamples { ranks }))
    }

    /// This rank's micro-batches in their parts, each with the first of its tokens among those of the whole step. `count` is that of
    /// the micro-batches of all replicas.
    fn batches(&self, shares: &[Vec<Cow<Samples>>], parts: &[Vec<usize>], count: usize) -> Vec<Vec<Batch>> {
        let (own, mut batches, mut first_token) = (self.mesh().replica(self.rank), Vec::new(), 0);
        let turns = (0..shares[own].len()).flat_map(|turn| (0..shares.len()).map(move |share| (turn, share)));
        for (turn, share) in turns {
            let samples = &shares[share][turn];
            if share == own {
                let mut first_of_part = first_token;
                let mut placed = |part: &Samples| {
                    let batch = self.batch(part).with_noise(Noise { seed: 0, first_token: first_of_part });
                    // Replicas without samples of their own get some without labels.
                    let share = if part.targets() > 0 { 1.0 / count as f32 } else { 0.0 };
                    let (queue, config) = (self.device.compute(), &self.model.config);
                    let batch = batch.with_tallies(queue, config, share);
                    first_of_part += batch.token_count() as u64;
                    batch
                };
                batches.push(match parts[share][turn] {
                    1 => vec![placed(samples.as_ref())],
                    parts => samples.parts(parts).iter().map(placed).collect(),
                });
            }
            first_token += samples.tokens(self.model.config.input) as u64;
        }
        batches
    }

    /// Dropout depends on the updates so far, so steps differ, and a continued run drops what it would have dropped.
    pub(super) fn set_noise(&self, batches: &mut [Vec<Batch>]) {
        let seed = seed_of(self.options.dropout_seed, self.updates.into());
        batches.iter_mut().flatten().filter_map(|batch| batch.noise.as_mut()).for_each(|noise| noise.seed = seed);
    }

    /// By replica and micro-batch: the number of its parts, at most one per document or image. If state that moves during the
    /// step is split, all replicas move it in the same order, so the one with the fewest parts decides.
    fn parts(&self, shares: &[Vec<Cow<Samples>>]) -> Vec<Vec<usize>> {
        let most = if self.model.config.can_be_in_parts() { self.strategy.arrangement.parts } else { 1 };
        let own = |samples: &Cow<Samples>| samples.most_parts().min(most);
        let mut parts: Vec<Vec<usize>> = shares.iter().map(|share| share.iter().map(own).collect()).collect();
        if self.parameters.split.splits_gradients() {
            for turn in 0..parts[0].len() {
                let fewest = parts.iter().map(|share| share[turn]).min().expect("there is a share");
                parts.iter_mut().for_each(|share| share[turn] = fewest);
            }
        }
        parts
    }

    fn sizes(&self, shares: &[Vec<Cow<Samples>>], parts: &[Vec<usize>]) -> Sizes {
        let of_share = |(share, parts): (&Vec<Cow<Samples>>, &Vec<usize>)| {
            share.iter().zip(parts).map(|(samples, &parts)| samples.part_sizes(self.shard(), parts)).collect()
        };
        shares.iter().zip(parts).map(of_share).collect()
    }
}

/// Deals micro-batches to replicas in turn. If they do not come out even, some replicas get one without labels, which changes
/// nothing.
fn deal<S: Borrow<Samples>>(micros: &[S], shares: usize) -> Vec<Vec<Cow<'_, Samples>>> {
    let missing = micros.len().next_multiple_of(shares) - micros.len();
    let blanks = (0..missing).filter_map(|_| micros.last()).map(|last| Cow::Owned(last.borrow().without_labels()));
    let mut dealt = vec![Vec::new(); shares];
    for (index, samples) in micros.iter().map(|samples| Cow::Borrowed(samples.borrow())).chain(blanks).enumerate() {
        dealt[index % shares].push(samples);
    }
    dealt
}
