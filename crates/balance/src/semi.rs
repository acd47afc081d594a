//! Lending and leaving out at once: how much of each makes the fastest step.
//!
//! What stragglers will leave out is guessed, in a few steps from nothing to all that they may: each as much as keeps up with
//! the others, and no more than the guess. Work is then divided by what speed that leaves them, so those who can leave out
//! enough keep their work and the slowest lend; whoever is still slower than the rest leaves that out. Of all these the fastest is
//! taken, with what migration was measured to cost, and of those that are about as fast the one that leaves out least.

use crate::fill::fill;
use crate::observation::{Class, Dim, Division};
use crate::target::{LEAST_GAMMA, Rules, Target, migrated, straggles};
use crate::watch::Speeds;

/// Guesses between leaving out nothing and all that is allowed: more make a decision among many ranks take milliseconds.
const GUESSES: usize = 8;
/// So much of a step's time is not worth leaving out more.
const ABOUT: f64 = 1.01;

/// The best of these; without leave to leave anything out, plain migration.
pub(crate) fn semi(rules: &Rules, speeds: &Speeds, home: &Division, migration_s: impl Fn(&Target) -> f64) -> Target {
    let exact = migrated(rules, speeds, home);
    if rules.gamma_max == 0.0 {
        return exact;
    }
    let at_home = Target { home: home.clone(), work: home.clone(), gammas: needed(rules, speeds, home) };
    let wanted = wanted(speeds, home);
    let with_guess = |guess: usize| {
        let most = rules.gamma_max * guess as f64 / GUESSES as f64;
        let guessed: Vec<f64> = wanted.iter().map(|share| share.min(most)).collect();
        let work = lent(rules, speeds, home, &guessed);
        Target { gammas: needed(rules, speeds, &work), work, ..at_home.clone() }
    };
    let mut targets: Vec<Target> = (0..=GUESSES).filter(|_| rules.may_migrate).map(with_guess).collect();
    targets.push(at_home.clone());
    // Rows of the stream are no state and never left out.
    let tokens = exact.work.of(Dim::Tokens).to_vec();
    targets.iter_mut().for_each(|target| target.work.set(Dim::Tokens, tokens.clone()));
    targets.push(exact);
    let takes_s =
        |target: &Target| target.compute_s(speeds) + if target.migrates() { migration_s(target) } else { 0.0 };
    let times: Vec<f64> = targets.iter().map(takes_s).collect();
    let enough = ABOUT * times.iter().copied().fold(f64::INFINITY, f64::min);
    let mut fast: Vec<(Target, f64)> = targets.into_iter().zip(times).filter(|(_, time)| *time <= enough).collect();
    let left_out = |target: &Target| target.gammas.iter().sum::<f64>();
    fast.sort_by(|(a, a_s), (b, b_s)| left_out(a).total_cmp(&left_out(b)).then(a_s.total_cmp(b_s)));
    fast.swap_remove(0).0
}

/// Work by speed where ranks leave out what was guessed. Heads stay in whole groups: what is shared by samples cannot be left
/// out.
fn lent(rules: &Rules, speeds: &Speeds, home: &Division, guessed: &[f64]) -> Division {
    let mut work = home.clone();
    for dim in [Dim::Heads, Dim::Columns] {
        let Some(grain) = rules.grains[dim as usize] else { continue };
        // Times are lines over the width; asked for each anew, they would be what a decision takes longest for.
        let seconds =
            |rank: usize, width: f64| dim.classes().map(|class| speeds.seconds(class, rank, width)).sum::<f64>();
        let line = |rank: usize| {
            let [one, two] = [1.0, 2.0].map(|width| seconds(rank, width));
            (2.0 * one - two, (two - one) * (1.0 - guessed[rank]))
        };
        let lines: Vec<(f64, f64)> = (0..home.ranks()).map(line).collect();
        let on_line = |rank: usize, width: usize| (lines[rank].0 + lines[rank].1 * width as f64).max(0.0);
        if let Some(widths) = fill(home.total(dim), grain, &rules.most[dim as usize], on_line) {
            work.set(dim, widths);
        }
    }
    work
}

/// By rank: the least share to leave out with which stragglers hold up nobody. Those who may not leave out enough set the
/// pace, and the others leave out no more than that asks for.
fn needed(rules: &Rules, speeds: &Speeds, work: &Division) -> Vec<f64> {
    let least = |rank: usize| if straggles(speeds, rank) { rules.gamma_max } else { 0.0 };
    let pace_s = paces(speeds, work, |rank| Some(least(rank)));
    excesses(speeds, work, pace_s).into_iter().map(|excess| excess.min(rules.gamma_max)).collect()
}

/// By rank: the share to leave out to be as fast as those who do not straggle.
fn wanted(speeds: &Speeds, work: &Division) -> Vec<f64> {
    excesses(speeds, work, paces(speeds, work, |rank| (!straggles(speeds, rank)).then_some(0.0)))
}

/// By class: what the slowest of some ranks takes, each leaving out a share.
fn paces(speeds: &Speeds, work: &Division, gamma: impl Fn(usize) -> Option<f64>) -> [f64; Class::ALL.len()] {
    Class::ALL.map(|class| {
        let width = |rank: usize| work.of(class.dim())[rank] as f64;
        let seconds = |rank: usize| Some(speeds.seconds(class, rank, width(rank) * (1.0 - gamma(rank)?)));
        (0..work.ranks()).filter_map(seconds).fold(0.0, f64::max)
    })
}

/// By rank: what stragglers are to leave out to keep these paces.
fn excesses(speeds: &Speeds, work: &Division, pace_s: [f64; Class::ALL.len()]) -> Vec<f64> {
    let excess = |rank: usize| {
        let resizable = Class::ALL.into_iter().filter(|class| class.is_resizable());
        let of_class =
            |class: Class| speeds.excess(class, rank, work.of(class.dim())[rank] as f64, pace_s[class as usize]);
        resizable.map(of_class).fold(0.0, f64::max)
    };
    let of_straggler = |rank: usize| if straggles(speeds, rank) { excess(rank) } else { 0.0 };
    (0..work.ranks()).map(of_straggler).map(|excess| if excess > LEAST_GAMMA { excess } else { 0.0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD_SHARES: usize = 64;

    #[derive(Debug)]
    struct Case {
        slowness: Vec<f64>,
        gamma_max: f64,
        /// For a column or a head group that travels, as a share of what an even step takes.
        cost: f64,
        /// Of attention and MLP on all ranks together.
        work_s: [f64; 2],
    }

    const COLUMNS: usize = 24;
    const GRAIN: usize = 2;
    const GROUPS: usize = 4;

    impl Case {
        fn home(&self) -> Division {
            let ranks = self.slowness.len();
            let even = |total: usize| -> Vec<usize> {
                (0..ranks).map(|rank| total / ranks + usize::from(rank < total % ranks)).collect()
            };
            Division::new(|dim| match dim {
                Dim::Heads => even(GROUPS).into_iter().map(|groups| groups * HEAD_SHARES).collect(),
                Dim::Columns => even(COLUMNS),
                Dim::Classes | Dim::Tokens => vec![1; ranks],
            })
        }

        fn rules(&self) -> Rules {
            let ranks = self.slowness.len();
            Rules {
                gamma_max: self.gamma_max,
                grains: Dim::ALL.map(|dim| match dim {
                    Dim::Heads => Some(HEAD_SHARES).filter(|_| self.work_s[0] > 0.0),
                    Dim::Columns => Some(GRAIN),
                    Dim::Classes | Dim::Tokens => None,
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
            let travelling = target.migrated(Dim::Columns) + target.migrated(Dim::Heads) / HEAD_SHARES;
            self.cost * travelling as f64 * self.work_s.iter().sum::<f64>() / self.slowness.len() as f64
        }

        fn takes_s(&self, target: &Target) -> f64 {
            target.compute_s(&self.speeds()) + if target.migrates() { self.migration_s(target) } else { 0.0 }
        }

        /// Every division in grains in which stragglers do not gain, with every share in sixteenths of what is allowed.
        fn all_targets(&self) -> Vec<Target> {
            let (home, speeds) = (self.home(), self.speeds());
            let ranks = self.slowness.len();
            let heads = match self.work_s[0] > 0.0 {
                true => divisions(GROUPS, ranks).iter().map(|groups| scaled(groups, HEAD_SHARES)).collect(),
                false => vec![home.of(Dim::Heads).to_vec()],
            };
            let shares: Vec<Vec<f64>> = (0..ranks).fold(vec![Vec::new()], |all, rank| {
                let steps = if straggles(&speeds, rank) { 0..=16 } else { 0..=0 };
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
                        straggles(&speeds, rank) && dims.iter().any(|&dim| work.of(dim)[rank] > home.of(dim)[rank])
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

    /// Every way to divide so many among ranks.
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
    fn no_split_between_lending_and_leaving_out_is_much_faster_or_as_fast_with_less_left_out() {
        let (mlp, both) = ([0.0, 1.0], [0.5, 1.0]);
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
            let found = semi(&case.rules(), &case.speeds(), &case.home(), |target| case.migration_s(target));
            let (found_s, found_share) = (case.takes_s(&found), found.gammas.iter().sum::<f64>());
            let all: Vec<(f64, f64)> =
                case.all_targets().iter().map(|target| (case.takes_s(target), target.gammas.iter().sum())).collect();
            let best_s = all.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
            let as_fast = all.iter().filter(|(time, _)| *time <= found_s * (1.0 + 1e-9));
            let least_share = as_fast.map(|(_, share)| *share).fold(f64::INFINITY, f64::min);
            let what = format!("{case:?}: {found:?} in {found_s}");
            assert!(found_s <= 1.01 * best_s, "{what}, the best takes {best_s}");
            // Between two shares that were tried for each straggler.
            let stragglers = found.gammas.iter().filter(|gamma| **gamma > 0.0).count() as f64;
            let allowed = least_share + stragglers * case.gamma_max / 16.0;
            assert!(found_share <= allowed, "{what}, others as fast leave out {least_share}");
            kinds[usize::from(found.migrates()) + 2 * usize::from(found_share > 0.0)] = true;
        }
        assert_eq!(kinds, [true; 4], "nothing, lending, leaving out and both were best in some case");
    }

    #[test]
    fn what_is_about_as_fast_without_is_not_left_out() {
        let ranks = 20;
        let slowness: Vec<f64> = (0..ranks).map(|rank| if rank == 7 { 1.2 } else { 1.0 }).collect();
        let home = Division::new(|dim| vec![if dim == Dim::Columns { 600 } else { 1 }; ranks]);
        let seconds = Class::ALL.map(|class| if class == Class::Mlp { 1e-3 } else { 0.0 });
        let rules = Rules {
            grains: Dim::ALL.map(|dim| Some(1).filter(|_| dim == Dim::Columns)),
            most: Dim::ALL.map(|_| vec![usize::MAX; ranks]),
            ..case(&[1.0, 1.2], 0.5, 0.0, [0.0, 1.0]).rules()
        };
        let found = |cost: f64| {
            let speeds = Speeds::of_slowness(seconds, slowness.clone());
            semi(&rules, &speeds, &home, |target| cost * target.migrated(Dim::Columns) as f64)
        };
        assert_eq!((found(0.0).gammas[7], found(0.0).migrates()), (0.0, true));
        let costly = found(1e-3);
        assert!(costly.gammas[7] > 0.15 && !costly.migrates(), "{costly:?}");
    }

    #[test]
    fn without_leave_to_leave_anything_out_it_is_migration() {
        for slowness in [vec![1.0, 2.0], vec![1.0, 3.0, 2.0], vec![6.0, 1.0, 1.0, 2.0]] {
            let case = case(&slowness, 0.0, 10.0, [0.5, 1.0]);
            let found = semi(&case.rules(), &case.speeds(), &case.home(), |target| case.migration_s(target));
            assert_eq!(found, migrated(&case.rules(), &case.speeds(), &case.home()));
            assert!(found.migrates());
        }
    }

    #[test]
    fn who_may_not_migrate_leaves_out_only_and_memory_bounds_what_others_take() {
        let case = case(&[1.0, 4.0, 1.0], 0.3, 0.0, [0.0, 1.0]);
        let with = |change: &dyn Fn(&mut Rules)| {
            let mut rules = case.rules();
            change(&mut rules);
            semi(&rules, &case.speeds(), &case.home(), |target| case.migration_s(target))
        };
        let alone = with(&|rules| rules.may_migrate = false);
        assert_eq!((alone.migrates(), alone.gammas), (false, vec![0.0, 0.3, 0.0]));
        let narrow = with(&|rules| rules.most[Dim::Columns as usize] = vec![9, 100, 8]);
        assert_eq!(narrow.work.of(Dim::Columns), [8, 8, 8]);
        let wider = with(&|rules| rules.most[Dim::Columns as usize] = vec![12, 100, 8]);
        assert_eq!((wider.work.of(Dim::Columns), &wider.gammas[..]), (&[12, 4, 8][..], &[0.0, 0.25, 0.0][..]));
    }
}
