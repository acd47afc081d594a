//! Samples of strategies: their micro-batches on short chains, from dry runs.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use evenkeel_model::ZeroStage;
use evenkeel_plan::{Counted, ShortChain, TaskKernels};
use evenkeel_step::{Pipeline, Strategy};
use evenkeel_train::{Cost, Samples, TrainerOptions, costs_and_tasks, in_two_threads};

use super::job::{Job, Shards};

/// A strategy's micro-batches on a short chain, without other replicas.
pub struct Sample {
    /// By unit of the model: one of the short chain that is like it.
    pub alike: Vec<usize>,
    /// At every place, on every kind of shard.
    ranks: Vec<SampledRank>,
}

pub struct SampledRank {
    pub place: usize,
    /// The first one of its kind.
    pub shard: usize,
    pub counted: Counted,
    pub(super) kernels: TaskKernels,
    pub state_bytes: u64,
    /// Of all parameters that are trained: those that it has.
    pub trained_share: f64,
}

impl Sample {
    pub fn at(&self, place: usize, shard: usize) -> &SampledRank {
        let found = self.ranks.iter().find(|rank| (rank.place, rank.shard) == (place, shard));
        found.expect("every kind of shard is sampled at every place")
    }

    /// At every place.
    pub(super) fn of_shard(&self, shard: usize) -> impl Iterator<Item = &SampledRank> {
        self.ranks.iter().filter(move |rank| rank.shard == shard)
    }

    /// One for every kind of shard.
    pub fn shards(&self) -> impl Iterator<Item = &SampledRank> {
        self.ranks.iter().filter(|rank| rank.place == 0)
    }
}

/// What a sample is taken of.
struct Subject {
    /// The strategy without other replicas.
    alone: Strategy,
    chain: ShortChain,
    /// Of the short chain.
    shards: Arc<Shards>,
    /// One of each kind of shard at every place.
    ranks: Vec<usize>,
    /// Of a micro-batch.
    blank: Arc<Samples>,
}

impl Subject {
    fn new(job: &Job, alone: Strategy) -> Subject {
        let chain = ShortChain::of(&alone, job.model.units.len(), job.period());
        let shards = job.shortened(chain.units(&alone), &alone.cut).shards(&alone);
        let mesh = alone.mesh();
        let is_first = |rank: &usize| shards.first_alike[mesh.shard(*rank)] == mesh.shard(*rank);
        let ranks = (0..mesh.ranks()).filter(is_first).collect();
        Subject { blank: job.blank(&alone), alone, chain, shards, ranks }
    }

    /// By rank.
    fn dry_runs(&self, options: TrainerOptions) -> Vec<(Cost, Counted)> {
        let short = self.chain.strategy(&self.alone);
        costs_and_tasks(&self.shards.models, &short, options, &vec![&*self.blank; short.micros_per_step()], &self.ranks)
    }

    fn sample(&self, job: &Job, dry_runs: Vec<(Cost, Counted)>) -> Sample {
        let short = self.chain.strategy(&self.alone);
        let (mesh, units, short_units) = (short.mesh(), job.model.units.len(), self.chain.units(&self.alone));
        let shares = job.trained_shares();
        let sampled = |(&rank, (cost, counted)): (&usize, (Cost, Counted))| {
            let own = short.units(rank, short_units).into_iter().flatten();
            let of_unit = |unit: usize| shares[if unit + 1 == short_units { units - 1 } else { unit }];
            SampledRank {
                place: mesh.place(rank),
                shard: mesh.shard(rank),
                kernels: TaskKernels::of(&counted),
                counted,
                state_bytes: cost.state_bytes,
                trained_share: own.map(of_unit).sum(),
            }
        };
        Sample { alike: self.chain.alike(&self.alone), ranks: self.ranks.iter().zip(dry_runs).map(sampled).collect() }
    }
}

impl Job<'_> {
    /// The strategy's micro-batches on a short chain.
    pub fn sample(&self, strategy: &Strategy) -> Rc<Sample> {
        let (alone, key) = alone(strategy);
        if let Some(seen) = self.seen.samples.borrow().get(&key) {
            return seen.clone();
        }
        let subject = Subject::new(self, alone);
        let sample = Rc::new(subject.sample(self, subject.dry_runs(self.options)));
        self.seen.samples.borrow_mut().insert(key, sample.clone());
        sample
    }

    /// The same with all units in one place.
    pub fn sample_in_one_place(&self, strategy: &Strategy) -> Rc<Sample> {
        self.sample(&in_one_place(strategy))
    }

    /// Takes such samples of all these strategies beforehand, two at a time.
    pub fn sample_all_in_one_place<'b>(&self, strategies: impl Iterator<Item = &'b Strategy>) {
        let mut missing = BTreeMap::new();
        for strategy in strategies {
            let (alone, key) = alone(&in_one_place(strategy));
            if !self.seen.samples.borrow().contains_key(&key) {
                missing.insert(key, alone);
            }
        }
        let subjects: Vec<_> = missing.into_iter().map(|(key, alone)| (key, Subject::new(self, alone))).collect();
        let options = self.options;
        let places: Vec<usize> = (0..subjects.len()).collect();
        let of_all = in_two_threads(&places, |place| subjects[place].1.dry_runs(options));
        for ((key, subject), dry_runs) in subjects.into_iter().zip(of_all) {
            self.seen.samples.borrow_mut().insert(key, Rc::new(subject.sample(self, dry_runs)));
        }
    }
}

fn in_one_place(strategy: &Strategy) -> Strategy {
    strategy.clone().in_stages(1, Pipeline::default())
}

/// The strategy as it is sampled, and what the sample depends on.
fn alone(strategy: &Strategy) -> (Strategy, String) {
    // The first micro-batch may initialise what later ones only use.
    let alone = Strategy { accumulate: strategy.accumulate.min(2), ..strategy.clone() };
    let alone = alone.with_replicas(1, ZeroStage::Nothing);
    let Strategy { pp, micro_batch, accumulate, arrangement, pipeline, cut, .. } = &alone;
    let key = format!("{:?}", (pp, micro_batch, accumulate, arrangement, pipeline, cut));
    (alone, key)
}
