//! The tasks of a long chain from those of a short one: units that are alike launch the same kernels and keep as much memory.

use std::collections::HashMap;
use std::sync::Arc;

use evenkeel_device::{Count, Counts};
use evenkeel_step::{BucketIdx, Lane, Pipeline, PipelineOrder, Program, Scope, Strategy, Task, Work, WorkFamily};

use crate::counted::Counted;

/// A chain with fewer units, if stages have many: each has its first ones and its last ones, and of those between them some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortChain {
    /// Of the whole chain.
    units: usize,
    /// After so many units they are alike again.
    period: usize,
    /// Units that every stage lacks, whole periods.
    lacking: usize,
}

/// Periods of the smallest stage: the first, the last, and one between.
const KEPT: usize = 3;

impl ShortChain {
    pub fn of(strategy: &Strategy, units: usize, period: usize) -> ShortChain {
        let stages = strategy.pipeline.stages();
        let periods = |stage: usize| {
            let ends = usize::from(stage == 0) + usize::from(stage + 1 == stages);
            strategy.pipeline.units(stage, units).len().saturating_sub(ends) / period
        };
        let fewest = (0..stages).map(periods).min().expect("there is a stage");
        ShortChain { units, period, lacking: fewest.saturating_sub(KEPT) * period }
    }

    /// Its own units.
    pub fn units(&self, strategy: &Strategy) -> usize {
        self.units - strategy.pipeline.stages() * self.lacking
    }

    /// The strategy with its stages.
    pub fn strategy(&self, strategy: &Strategy) -> Strategy {
        let cuts = strategy.pipeline.cuts.iter().enumerate().map(|(stage, cut)| cut - (stage + 1) * self.lacking);
        strategy.clone().cut_at(&cuts.collect::<Vec<_>>())
    }

    /// By unit of the whole chain: one of its own that is like it.
    pub fn alike(&self, strategy: &Strategy) -> Vec<usize> {
        let (short, units, period) = (self.strategy(strategy), self.units(strategy), self.period);
        let of_stage = |stage: usize| {
            let (all, own) = (strategy.pipeline.units(stage, self.units), short.pipeline.units(stage, units));
            let is_whole = all.len() == own.len();
            (0..all.len()).map(move |index| match index {
                _ if is_whole || index + period < own.len() => own.start + index,
                _ if index + period >= all.len() => own.end - (all.len() - index),
                _ => own.end - 2 * period + (index + period - own.len()) % period,
            })
        };
        (0..strategy.pipeline.stages()).flat_map(of_stage).collect()
    }
}

/// A chain whose stages all have the same few periods. The first and the last unit of a stage stand for themselves, since passes wait
/// for them; each other one for several that are like it. So its steps take about as long as those of the whole chain, and the
/// closer the more periods there are.
#[derive(Clone, Debug, PartialEq)]
pub struct EvenChain {
    /// Of each stage.
    periods: usize,
    period: usize,
    /// By stage and unit in it: the units that each of its own stands for.
    stand_for: Vec<Vec<f64>>,
    /// Periods of the whole chain's stages, in the mean.
    whole_periods: f64,
}

impl EvenChain {
    /// None if it would be no shorter than the strategy's own.
    pub fn of(strategy: &Strategy, units: usize, period: usize, periods: usize) -> Option<EvenChain> {
        let stages = strategy.pipeline.stages();
        let of_stage = |stage: usize| {
            let mut counts = vec![0.0; period];
            let layers = strategy.pipeline.units(stage, units).filter(|unit| (1..units - 1).contains(unit));
            layers.for_each(|unit| counts[(unit - 1) % period] += 1.0);
            let is_end = |index: usize| index == 0 || index + 1 == period * periods;
            let alike = |index: usize| (index % period..period * periods).step_by(period);
            let of_unit = |index: usize| {
                let (count, ends) =
                    (counts[index % period], alike(index).filter(|other| is_end(*other)).count() as f64);
                match is_end(index) {
                    _ if count < periods as f64 => count / periods as f64,
                    true => 1.0,
                    false => (count - ends) / (periods as f64 - ends),
                }
            };
            (0..period * periods).map(of_unit).collect()
        };
        let whole_periods = (units - 2) as f64 / (stages * period) as f64;
        let chain = EvenChain { periods, period, stand_for: (0..stages).map(of_stage).collect(), whole_periods };
        (chain.units() < units).then_some(chain)
    }

    pub fn units(&self) -> usize {
        2 + self.stand_for.len() * self.stage_units()
    }

    /// The strategy with its stages.
    pub fn strategy(&self, strategy: &Strategy) -> Strategy {
        let cuts = (1..self.stand_for.len()).map(|stage| 1 + stage * self.stage_units());
        strategy.clone().cut_at(&cuts.collect::<Vec<_>>())
    }

    fn stage_units(&self) -> usize {
        self.periods * self.period
    }

    /// How often the step of the whole chain differs from this one's as this one's does from that of a chain with fewer periods.
    pub fn often_from(&self, fewer: &EvenChain) -> f64 {
        let share = |periods: f64| 1.0 / (periods - 1.0).max(1.0);
        let [fewer, own, whole] = [fewer.periods as f64, self.periods as f64, self.whole_periods].map(share);
        (own - whole) / (fewer - own)
    }

    /// The strategy on a still shorter chain that has all kinds of units that there are: in the first stage, in the last, and in one
    /// between.
    pub fn sampled(&self, strategy: &Strategy) -> Strategy {
        let cuts = (1..self.sampled_stages()).map(|stage| 1 + stage * KEPT * self.period);
        let pipeline = Pipeline { cuts: cuts.collect(), order: PipelineOrder::OneForwardOneBackward };
        strategy.clone().in_stages(self.sampled_stages(), pipeline)
    }

    pub fn sampled_units(&self) -> usize {
        2 + self.sampled_stages() * KEPT * self.period
    }

    fn sampled_stages(&self) -> usize {
        self.stand_for.len().min(3)
    }

    /// The stage of the sample that is like a stage.
    pub fn sampled_stage(&self, stage: usize) -> usize {
        match stage {
            0 => 0,
            _ if stage + 1 == self.stand_for.len() => self.sampled_stages() - 1,
            _ => 1,
        }
    }

    /// By unit: one of the sample that is like it.
    pub fn alike_sampled(&self) -> Vec<usize> {
        let (own, sampled) = (self.stage_units(), KEPT * self.period);
        let of_layer = |index: usize| {
            let (stage, index) = (self.sampled_stage(index / own), index % own);
            let is_of_last_period = index + self.period >= own;
            1 + stage * sampled + if is_of_last_period { index + sampled - own } else { index.min(sampled - 1) }
        };
        let layers = (0..self.units() - 2).map(of_layer);
        [0].into_iter().chain(layers).chain([self.sampled_units() - 1]).collect()
    }

    /// Its tasks, each for as many as it stands for. Those of the tail stand for themselves.
    pub fn stand_for(&self, counted: Counted) -> Counted {
        let of_unit = |unit: usize| match unit {
            0 => 1.0,
            _ if unit + 1 == self.units() => 1.0,
            _ => self.stand_for[(unit - 1) / self.stage_units()][(unit - 1) % self.stage_units()],
        };
        let bucket = |task: &Task| match task.work.row().scope {
            Scope::Bucket(bucket) => Some(bucket),
            _ => None,
        };
        let of_micros = counted.program.tasks.iter().filter(|task| !task.work.is_of_tail());
        let units: HashMap<BucketIdx, usize> =
            of_micros.filter_map(|task| Some((bucket(task)?, task.unit.0))).collect();
        let of_task = |task: &Task| match (task.work, bucket(task)) {
            (Work::Arrive | Work::Join | Work::BackwardJoin, _) => 1.0,
            (work, _) if work.lane() == Lane::Pass => 1.0,
            (work, Some(bucket)) if work.is_of_tail() => units.get(&bucket).map_or(1.0, |unit| of_unit(*unit)),
            (work, None) if work.is_of_tail() => 1.0,
            _ => of_unit(task.unit.0),
        };
        let stands_for = counted.program.tasks.iter().map(of_task).collect();
        Counted { stands_for, ..counted }
    }
}

/// The kernels of a rank's tasks, by what they depend on.
pub struct TaskKernels {
    /// By unit, work, part, and whether the micro-batch is the first one.
    of_micros: HashMap<(usize, Work, usize, bool), Arc<Counts>>,
    of_tail: HashMap<Work, Arc<Counts>>,
}

impl TaskKernels {
    pub fn of(counted: &Counted) -> TaskKernels {
        let (mut of_micros, mut of_tail) = (HashMap::new(), HashMap::new());
        let computing = counted.program.tasks.iter().zip(&counted.counts).filter(|(task, _)| task.exchange.is_none());
        for (task, counts) in computing {
            if task.work.is_of_tail() {
                of_tail.entry(task.work).or_insert_with(|| counts.clone());
            } else {
                of_micros.entry(key(task, task.unit.0)).or_insert_with(|| counts.clone());
            }
        }
        TaskKernels { of_micros, of_tail }
    }

    /// The tasks of a rank's program in a strategy, whose units are like those of `alike` in the programs that these kernels are
    /// of, and whose tail does `tail` times as much as one of these.
    pub fn in_program(
        all: &[&TaskKernels],
        of_tail: &TaskKernels,
        strategy: &Strategy,
        rank: usize,
        program: Program,
        alike: &[usize],
        tail: f64,
    ) -> Counted {
        // Gradients that are split are written, and not added to, by every micro-batch. Those of entries are not split.
        let splits_gradients = strategy.zero_sharding(rank).splits_gradients();
        let like = |task: &Task| {
            let (unit, work, part, is_first) = key(task, alike[task.unit.0]);
            (unit, work, part, is_first || splits_gradients && work.row().family != WorkFamily::Entry)
        };
        let none: Arc<Counts> = Arc::default();
        let of_task = |task: &Task| {
            if task.exchange.is_some() {
                return none.clone();
            }
            let found = match task.work.is_of_tail() {
                true => of_tail.of_tail.get(&task.work).map(|counts| Arc::new(scaled(counts, tail))),
                false => {
                    let key = like(task);
                    all.iter().find_map(|kernels| kernels.of_micros.get(&key)).cloned()
                }
            };
            found.unwrap_or_else(|| panic!("{task} is like no task of the short chain"))
        };
        let counts = program.tasks.iter().map(of_task).collect();
        Counted { rank, program, counts, stands_for: Vec::new(), kept_bytes: Vec::new() }
    }
}

fn key(task: &Task, unit: usize) -> (usize, Work, usize, bool) {
    (unit, task.work, task.micro.part, task.micro.index == 0)
}

fn scaled(counts: &Counts, factor: f64) -> Counts {
    let of_kernel = |count: &Count| Count {
        launches: (count.launches as f64 * factor).ceil() as u64,
        flops: (count.flops as f64 * factor) as u128,
        bytes: (count.bytes as f64 * factor) as u128,
    };
    Counts(counts.0.iter().map(|(name, count)| (*name, of_kernel(count))).collect())
}

#[cfg(test)]
mod tests {
    use evenkeel_model::Cut;
    use evenkeel_step::{Pipeline, PipelineOrder};

    use super::*;

    #[test]
    fn every_unit_is_like_one_at_the_same_place_of_its_stage() {
        // An embedding, ten layers of two units, a head.
        let whole = Strategy::of(Cut::even(1));
        let chain = ShortChain::of(&whole, 22, 2);
        assert_eq!((chain.units(&whole), chain.strategy(&whole)), (8, whole.clone()));
        let alike = chain.alike(&whole);
        assert_eq!(alike[..6], [0, 1, 2, 3, 4, 5]);
        assert_eq!(alike[6..20], [4, 5].repeat(7)[..]);
        assert_eq!(alike[20..], [6, 7]);
        let staged = whole.in_stages(2, Pipeline { cuts: vec![13], order: PipelineOrder::Gpipe });
        let chain = ShortChain::of(&staged, 22, 2);
        // Six layers and four: one of each is left out.
        assert_eq!((chain.units(&staged), chain.strategy(&staged).pipeline.cuts), (18, vec![11]));
        let alike = chain.alike(&staged);
        assert_eq!(alike[..13], [0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10]);
        assert_eq!(alike[13..], [11, 12, 13, 14, 15, 14, 15, 16, 17]);
    }
}
