//! The tasks of a long chain from those of a short one: units that are alike launch the same kernels and keep as much memory.

use std::collections::HashMap;

use evenkeel_device::{Count, Counts};
use evenkeel_step::{Program, Strategy, Task, Work, WorkFamily};

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

/// The kernels of a rank's tasks, by what they depend on.
pub struct TaskKernels {
    /// By unit, work, part, and whether the micro-batch is the first one.
    of_micros: HashMap<(usize, Work, usize, bool), Counts>,
    of_tail: HashMap<Work, Counts>,
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

    /// The same tasks in a program of a strategy, whose units are like those of `alike`, and whose tail does `tail` times as much.
    pub fn in_program(
        &self,
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
        let of_task = |task: &Task| {
            if task.exchange.is_some() {
                return Counts::default();
            }
            let found = match task.work.is_of_tail() {
                true => self.of_tail.get(&task.work).map(|counts| scaled(counts, tail)),
                false => self.of_micros.get(&like(task)).cloned(),
            };
            found.unwrap_or_else(|| panic!("{task} is like no task of the short chain"))
        };
        let counts = program.tasks.iter().map(of_task).collect();
        Counted { rank, program, counts, kept_bytes: Vec::new() }
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
