//! Mode `semi`: splits a straggler's excess between migrating and pruning.
//!
//! The search tries limits on pruning, from none to the largest allowed. With each limit, stragglers are expected to prune what
//! they need to keep up, and work is divided by the speed that this gives them: those that can prune enough keep their work, the
//! slowest migrate some. A rank that is still slower than the rest prunes its excess. The fastest target wins, with the measured
//! cost of migration; among targets about as fast, the one that prunes least.

use crate::fill::fill;
use evenkeel_widths::{Dim, Widths};

use crate::observation::{ByClass, Class, classes};
use crate::target::{Search, Target};

impl Search<'_> {
    /// The best split; plain migration if the rules allow no pruning.
    pub(crate) fn pruned_and_migrated(&self, home: &Widths, migration_s: impl Fn(&Target) -> f64) -> Target {
        let exact = self.migrated(home);
        if self.rules.gamma_max == 0.0 {
            return exact;
        }
        let at_home = Target { home: home.clone(), work: home.clone(), gammas: self.gammas_needed(home) };
        let wanted = self.gammas_wanted(home);
        let tried = self.tuning.prune_limits_tried;
        let with_limit = |index: usize| {
            let limit = self.rules.gamma_max * index as f64 / tried as f64;
            let expected: Vec<f64> = wanted.iter().map(|share| share.min(limit)).collect();
            let work = self.work_with_pruning(home, &expected);
            Target { gammas: self.gammas_needed(&work), work, ..at_home.clone() }
        };
        let mut targets: Vec<Target> = (0..=tried).filter(|_| self.rules.may_migrate).map(with_limit).collect();
        targets.push(at_home.clone());
        // Rows of the stream have no state and are never pruned.
        let tokens = exact.work.of(Dim::Tokens).to_vec();
        targets.iter_mut().for_each(|target| target.work.set(Dim::Tokens, tokens.clone()));
        targets.push(exact);
        self.prunes_least(targets, migration_s)
    }

    /// Among the targets about as fast as the fastest.
    fn prunes_least(&self, targets: Vec<Target>, migration_s: impl Fn(&Target) -> f64) -> Target {
        let takes_s =
            |target: &Target| target.compute_s(self.speeds) + if target.migrates() { migration_s(target) } else { 0.0 };
        let times: Vec<f64> = targets.iter().map(takes_s).collect();
        let enough = self.tuning.as_fast_factor * times.iter().copied().fold(f64::INFINITY, f64::min);
        let mut fast: Vec<(Target, f64)> = targets.into_iter().zip(times).filter(|(_, time)| *time <= enough).collect();
        fast.sort_by(|(a, a_s), (b, b_s)| a.pruned().total_cmp(&b.pruned()).then(a_s.total_cmp(b_s)));
        fast.swap_remove(0).0
    }

    /// Divides work by speed where ranks prune as expected. Heads stay in whole groups: a group that ranks share by samples
    /// cannot be pruned.
    fn work_with_pruning(&self, home: &Widths, expected: &[f64]) -> Widths {
        let mut work = home.clone();
        for dim in [Dim::Heads, Dim::Columns] {
            let Some(grain) = self.rules.grains[dim as usize] else { continue };
            // Times are lines over the width. Computing each from the speeds would take most of a decision's time.
            let seconds = |rank: usize, width: f64| {
                classes(dim).map(|class| self.speeds.seconds(class, rank, width)).sum::<f64>()
            };
            let line = |rank: usize| {
                let [one, two] = [1.0, 2.0].map(|width| seconds(rank, width));
                let pruned_s = classes(dim).map(|class| self.speeds.pruned_s(class, rank, 2.0, expected[rank]));
                let slope = pruned_s.sum::<f64>() - (2.0 * one - two);
                (2.0 * one - two, slope / 2.0)
            };
            let lines: Vec<(f64, f64)> = (0..home.shards()).map(line).collect();
            let on_line = |rank: usize, width: usize| (lines[rank].0 + lines[rank].1 * width as f64).max(0.0);
            if let Some(widths) = fill(home.total(dim), grain, &self.rules.most[dim as usize], on_line) {
                work.set(dim, widths);
            }
        }
        work
    }

    /// By rank: the least share to prune so that stragglers hold up nobody. Ranks that may not prune enough set the pace, and
    /// the others prune only what that pace asks for. None prunes if that makes it no faster.
    pub(crate) fn gammas_needed(&self, work: &Widths) -> Vec<f64> {
        let gaining = |rank: usize, gamma: f64| if self.gains(work, rank, gamma) { gamma } else { 0.0 };
        let largest = |rank: usize| if self.straggles(rank) { gaining(rank, self.rules.gamma_max) } else { 0.0 };
        let pace_s = self.paces(work, |rank| Some(largest(rank)));
        let needed = self.excesses(work, pace_s).into_iter().enumerate();
        needed.map(|(rank, excess)| gaining(rank, excess.min(self.rules.gamma_max))).collect()
    }

    /// Whether a rank is faster if it prunes this share.
    fn gains(&self, work: &Widths, rank: usize, gamma: f64) -> bool {
        let seconds = |gamma: f64| -> f64 {
            let of_class = |&class: &Class| self.speeds.pruned_s(class, rank, work.of(class.dim())[rank] as f64, gamma);
            Class::ALL.iter().map(of_class).sum()
        };
        seconds(gamma) < seconds(0.0)
    }

    /// By rank: the share to prune to be as fast as the ranks that do not straggle.
    fn gammas_wanted(&self, work: &Widths) -> Vec<f64> {
        self.excesses(work, self.paces(work, |rank| (!self.straggles(rank)).then_some(0.0)))
    }

    /// By class: seconds of the slowest of the ranks with a `gamma`, each pruning that share.
    fn paces(&self, work: &Widths, gamma: impl Fn(usize) -> Option<f64>) -> ByClass<f64> {
        Class::ALL.map(|class| {
            let width = |rank: usize| work.of(class.dim())[rank] as f64;
            let seconds = |rank: usize| Some(self.speeds.pruned_s(class, rank, width(rank), gamma(rank)?));
            (0..work.shards()).filter_map(seconds).fold(0.0, f64::max)
        })
    }

    /// By rank: the share that stragglers prune to keep these paces.
    fn excesses(&self, work: &Widths, pace_s: ByClass<f64>) -> Vec<f64> {
        let excess = |rank: usize| {
            let prunable = Class::ALL.into_iter().filter(|class| class.is_prunable());
            let of_class = |class: Class| {
                self.speeds.excess(class, rank, work.of(class.dim())[rank] as f64, pace_s[class as usize])
            };
            prunable.map(of_class).fold(0.0, f64::max)
        };
        let of_straggler = |rank: usize| if self.straggles(rank) { excess(rank) } else { 0.0 };
        let above_noise = |excess: f64| if excess > self.tuning.gamma_least { excess } else { 0.0 };
        (0..work.shards()).map(of_straggler).map(above_noise).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::speeds::Speeds;
    use crate::target::Rules;
    use crate::tuning::Tuning;

    const HEAD_SHARES: usize = 64;

    #[derive(Debug)]
    struct Case {
        slowness: Vec<f64>,
        gamma_max: f64,
        /// A migrated column or head group costs this share of an even step.
        cost: f64,
        /// All ranks together take so long for attention, and for the MLP.
        work_s: [f64; 2],
    }

    const COLUMNS: usize = 24;
    const GRAIN: usize = 2;
    const GROUPS: usize = 4;

    impl Case {
        fn home(&self) -> Widths {
            let ranks = self.slowness.len();
            let even = |total: usize| -> Vec<usize> {
                (0..ranks).map(|rank| total / ranks + usize::from(rank < total % ranks)).collect()
            };
            Widths::new(|dim| match dim {
                Dim::Heads => even(GROUPS).into_iter().map(|groups| groups * HEAD_SHARES).collect(),
                Dim::Columns => even(COLUMNS),
                _ => vec![1; ranks],
            })
        }

        fn rules(&self) -> Rules {
            let ranks = self.slowness.len();
            Rules {
                gamma_max: self.gamma_max,
                grains: Dim::ALL.map(|dim| match dim {
                    Dim::Heads => Some(HEAD_SHARES).filter(|_| self.work_s[0] > 0.0),
                    Dim::Columns => Some(GRAIN),
                    _ => None,
                }),
                may_migrate: true,
                work_heads_grain: HEAD_SHARES,
                most: Dim::ALL.map(|_| vec![usize::MAX; ranks]),
            }
        }

        fn speeds(&self) -> Speeds {
            let seconds = Class::ALL.map(|class| match class {
                Class::Attention => self.work_s[0] / (GROUPS * HEAD_SHARES) as f64,
                Class::Mlp => self.work_s[1] / COLUMNS as f64,
                Class::Layer | Class::Head | Class::Stream => 0.0,
            });
            Speeds::of_slowness(seconds, self.slowness.clone())
        }

        fn migration_s(&self, target: &Target) -> f64 {
            let migrated = target.migrated(Dim::Columns) + target.migrated(Dim::Heads) / HEAD_SHARES;
            self.cost * migrated as f64 * self.work_s.iter().sum::<f64>() / self.slowness.len() as f64
        }

        fn found(&self, rules: &Rules) -> Target {
            let search = Search { tuning: &Tuning::default(), rules, speeds: &self.speeds() };
            search.pruned_and_migrated(&self.home(), |target| self.migration_s(target))
        }

        fn takes_s(&self, target: &Target) -> f64 {
            target.compute_s(&self.speeds()) + if target.migrates() { self.migration_s(target) } else { 0.0 }
        }

        /// Every division in grains that gives stragglers no more work, with every sixteenth of the largest share to prune.
        fn all_targets(&self) -> Vec<Target> {
            let home = self.home();
            let ranks = self.slowness.len();
            let straggles = |rank: usize| self.slowness[rank] > Tuning::default().straggler_slowness;
            let heads = match self.work_s[0] > 0.0 {
                true => divisions(GROUPS, ranks).iter().map(|groups| scaled(groups, HEAD_SHARES)).collect(),
                false => vec![home.of(Dim::Heads).to_vec()],
            };
            let shares: Vec<Vec<f64>> = (0..ranks).fold(vec![Vec::new()], |all, rank| {
                let steps = if straggles(rank) { 0..=16 } else { 0..=0 };
                let with = |before: &Vec<f64>, step: usize| {
                    before.iter().copied().chain([self.gamma_max * step as f64 / 16.0]).collect::<Vec<f64>>()
                };
                all.iter().flat_map(|before| steps.clone().map(|step| with(before, step)).collect::<Vec<_>>()).collect()
            });
            let mut targets = Vec::new();
            for heads in &heads {
                for columns in divisions(COLUMNS / GRAIN, ranks) {
                    let mut work = home.clone();
                    work.set(Dim::Heads, heads.clone());
                    work.set(Dim::Columns, scaled(&columns, GRAIN));
                    let gains = |rank: usize| {
                        let dims = [Dim::Heads, Dim::Columns];
                        straggles(rank) && dims.iter().any(|&dim| work.of(dim)[rank] > home.of(dim)[rank])
                    };
                    if (0..ranks).any(gains) {
                        continue;
                    }
                    for gammas in &shares {
                        targets.push(Target { home: home.clone(), work: work.clone(), gammas: gammas.clone() });
                    }
                }
            }
            targets
        }
    }

    fn scaled(widths: &[usize], by: usize) -> Vec<usize> {
        widths.iter().map(|width| width * by).collect()
    }

    /// Every way to divide `total` among ranks.
    fn divisions(total: usize, ranks: usize) -> Vec<Vec<usize>> {
        if ranks == 1 {
            return vec![vec![total]];
        }
        let with = |first: usize| {
            divisions(total - first, ranks - 1).into_iter().map(move |rest| [vec![first], rest].concat())
        };
        (0..=total).flat_map(with).collect()
    }

    fn case(slowness: &[f64], gamma_max: f64, cost: f64, work_s: [f64; 2]) -> Case {
        Case { slowness: slowness.to_vec(), gamma_max, cost, work_s }
    }

    #[test]
    fn no_other_split_is_much_faster_or_as_fast_with_less_pruned() {
        let mlp = [0.0, 1.0];
        let both = [0.5, 1.0];
        let mut kinds = [false; 4];
        for case in [
            case(&[1.0, 2.0], 0.5, 0.0, mlp),
            case(&[1.0, 2.0], 0.5, 0.02, mlp),
            case(&[1.0, 2.0], 0.3, 0.05, mlp),
            case(&[1.0, 2.0], 0.5, 0.3, mlp),
            case(&[8.0, 1.0], 0.5, 0.01, mlp),
            case(&[1.0, 4.0, 1.0], 0.3, 0.01, mlp),
            case(&[1.0, 4.0, 1.0], 0.9, 0.04, mlp),
            case(&[1.0, 3.0, 2.0], 0.4, 0.02, mlp),
            case(&[6.0, 1.0, 2.0], 0.25, 0.02, mlp),
            case(&[2.0, 2.0, 1.0], 0.25, 0.1, mlp),
            case(&[1.0, 2.0], 0.4, 0.01, both),
            case(&[4.0, 1.0], 0.25, 0.02, both),
            case(&[1.0, 1.2], 0.5, 0.02, both),
            case(&[1.0, 1.1], 0.5, 0.02, mlp),
            case(&[1.0, 3.0], 0.02, 0.01, mlp),
            case(&[1.0, 2.0, 1.0], 0.1, 0.01, mlp),
            case(&[1.0, 5.0, 1.0, 3.0], 0.3, 0.01, mlp),
            case(&[1.0, 8.0, 2.0], 0.25, 10.0, mlp),
            case(&[1.0, 6.0, 1.4], 0.3, 0.04, mlp),
            case(&[1.0, 1.3, 1.0, 6.0], 0.25, 0.02, mlp),
        ] {
            let found = case.found(&case.rules());
            let found_s = case.takes_s(&found);
            let found_share = found.pruned();
            let all: Vec<(f64, f64)> =
                case.all_targets().iter().map(|target| (case.takes_s(target), target.pruned())).collect();
            let best_s = all.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
            let as_fast = all.iter().filter(|(time, _)| *time <= found_s * (1.0 + 1e-9));
            let least_share = as_fast.map(|(_, share)| *share).fold(f64::INFINITY, f64::min);
            let what = format!("{case:?}: {found:?} in {found_s}");
            assert!(found_s <= 1.01 * best_s, "{what}, the best takes {best_s}");
            // The search above tries every sixteenth only.
            let stragglers = found.gammas.iter().filter(|gamma| **gamma > 0.0).count() as f64;
            let allowed = least_share + stragglers * case.gamma_max / 16.0;
            assert!(found_share <= allowed, "{what}, another as fast prunes {least_share}");
            kinds[usize::from(found.migrates()) + 2 * usize::from(found_share > 0.0)] = true;
        }
        assert_eq!(kinds, [true; 4], "neither, migrating, pruning and both were each best in some case");
    }

    #[test]
    fn nothing_is_pruned_if_migrating_is_about_as_fast() {
        let ranks = 20;
        let slowness: Vec<f64> = (0..ranks).map(|rank| if rank == 7 { 1.2 } else { 1.0 }).collect();
        let home = Widths::new(|dim| vec![if dim == Dim::Columns { 600 } else { 1 }; ranks]);
        let seconds = Class::ALL.map(|class| if class == Class::Mlp { 1e-3 } else { 0.0 });
        let rules = Rules {
            grains: Dim::ALL.map(|dim| Some(1).filter(|_| dim == Dim::Columns)),
            most: Dim::ALL.map(|_| vec![usize::MAX; ranks]),
            ..case(&[1.0, 1.2], 0.5, 0.0, [0.0, 1.0]).rules()
        };
        let found = |cost: f64| {
            let speeds = Speeds::of_slowness(seconds, slowness.clone());
            let search = Search { tuning: &Tuning::default(), rules: &rules, speeds: &speeds };
            search.pruned_and_migrated(&home, |target| cost * target.migrated(Dim::Columns) as f64)
        };
        assert_eq!((found(0.0).gammas[7], found(0.0).migrates()), (0.0, true));
        let costly = found(1e-3);
        assert!(costly.gammas[7] > 0.15 && !costly.migrates(), "{costly:?}");
    }

    #[test]
    fn without_pruning_it_is_migration() {
        for slowness in [vec![1.0, 2.0], vec![1.0, 3.0, 2.0], vec![6.0, 1.0, 1.0, 2.0]] {
            let case = case(&slowness, 0.0, 10.0, [0.5, 1.0]);
            let found = case.found(&case.rules());
            let search = Search { tuning: &Tuning::default(), rules: &case.rules(), speeds: &case.speeds() };
            assert_eq!(found, search.migrated(&case.home()));
            assert!(found.migrates());
        }
    }

    #[test]
    fn ranks_that_may_not_migrate_only_prune_and_memory_bounds_migration() {
        let case = case(&[1.0, 4.0, 1.0], 0.3, 0.0, [0.0, 1.0]);
        let with = |change: &dyn Fn(&mut Rules)| {
            let mut rules = case.rules();
            change(&mut rules);
            case.found(&rules)
        };
        let alone = with(&|rules| rules.may_migrate = false);
        assert_eq!((alone.migrates(), alone.gammas), (false, vec![0.0, 0.3, 0.0]));
        let narrow = with(&|rules| rules.most[Dim::Columns as usize] = vec![9, 100, 8]);
        assert_eq!(narrow.work.of(Dim::Columns), [8, 8, 8]);
        let wider = with(&|rules| rules.most[Dim::Columns as usize] = vec![12, 100, 8]);
        assert_eq!((wider.work.of(Dim::Columns), &wider.gammas[..]), (&[12, 4, 8][..], &[0.0, 0.25, 0.0][..]));
    }
}
