//! Targets: where state is kept and work is done, and the best one that a mode allows.

use serde::{Deserialize, Serialize};

use crate::fill::fill;
use evenkeel_widths::{Dim, Widths};

use crate::observation::{Class, classes};
use crate::speeds::Speeds;
use crate::tuning::Tuning;

/// Ways to relieve a slow rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Off,
    /// The slow rank prunes a part of its products.
    Resize,
    /// Other ranks compute a part of its work in every step; its state stays at home.
    Migrate,
    /// Prunes and migrates, as much of each as makes the fastest step.
    Semi,
    /// A part of its weights and their state moves to other ranks for good.
    Reshard,
    /// Migrates what may soon be over, reshards what lasts.
    Auto,
}

impl Mode {
    pub const ALL: [Mode; 6] = [Mode::Off, Mode::Resize, Mode::Migrate, Mode::Semi, Mode::Reshard, Mode::Auto];
    /// In the order of [`Mode::ALL`].
    pub const NAMES: [&str; Mode::ALL.len()] = ["off", "resize", "migrate", "semi", "reshard", "auto"];

    /// The name in configurations, on the command line and in results.
    pub fn name(self) -> &'static str {
        Mode::NAMES[self as usize]
    }

    pub fn named(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Whether a rank may prune, if the run allows any pruning.
    pub fn prunes(self) -> bool {
        matches!(self, Mode::Resize | Mode::Semi | Mode::Auto)
    }
}

/// The limits of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// The largest share of its products that a rank may prune.
    pub gamma_max: f64,
    /// Widths are multiples of this, which keeps tiles full. By dim; `None` if a dim is not divided.
    pub grains: [Option<usize>; Dim::ALL.len()],
    /// Whether work may differ from home.
    pub may_migrate: bool,
    /// The grain of heads that migrate.
    pub work_heads_grain: usize,
    /// By dim: the largest width that each rank has memory for.
    pub most: [Vec<usize>; Dim::ALL.len()],
}

impl Rules {
    /// Whether the ranks have memory for this.
    pub(crate) fn allow(&self, work: &Widths) -> bool {
        let fits = |dim: Dim| work.of(dim).iter().zip(&self.most[dim as usize]).all(|(width, most)| width <= most);
        Dim::ALL.into_iter().all(fits)
    }
}

/// The widths that ranks keep (home), the widths that they compute with (work), and the share that each prunes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Target {
    pub home: Widths,
    pub work: Widths,
    /// By rank: the share of its products that it prunes.
    pub gammas: Vec<f64>,
}

impl Target {
    /// Every rank works on what it keeps.
    pub fn at_home(home: Widths) -> Target {
        Target { work: home.clone(), gammas: vec![0.0; home.shards()], home }
    }

    /// Seconds of a step's compute tasks: the slowest rank of each class counts.
    pub fn compute_s(&self, speeds: &Speeds) -> f64 {
        Class::ALL.iter().map(|&class| self.class_s(speeds, class)).sum()
    }

    fn class_s(&self, speeds: &Speeds, class: Class) -> f64 {
        let of = |rank: usize| {
            let width = self.work.of(class.dim())[rank] as f64;
            let migrates = self.migrates_in(class, rank) && width > 0.0;
            let migrating_s = if migrates { speeds.migrating_s(class, rank) } else { 0.0 };
            speeds.pruned_s(class, rank, width, self.gammas[rank]) + migrating_s
        };
        (0..self.work.shards()).map(of).fold(0.0, f64::max)
    }

    /// The width of a dim that ranks work on and do not keep, summed over the ranks.
    pub fn migrated(&self, dim: Dim) -> usize {
        self.work.gained(&self.home, dim)
    }

    /// Whether a rank's work differs from its home.
    pub(crate) fn migrates_in(&self, class: Class, rank: usize) -> bool {
        let dim = class.dim();
        matches!(dim, Dim::Heads | Dim::Columns) && self.work.of(dim)[rank] != self.home.of(dim)[rank]
    }

    /// Whether any rank's work differs from its home.
    pub fn migrates(&self) -> bool {
        [Dim::Heads, Dim::Columns].iter().any(|&dim| self.migrated(dim) > 0)
    }

    /// Summed over the ranks.
    pub(crate) fn pruned(&self) -> f64 {
        self.gammas.iter().sum()
    }
}

/// Finds the best target of a mode.
#[derive(Clone, Copy)]
pub(crate) struct Search<'a> {
    pub tuning: &'a Tuning,
    pub rules: &'a Rules,
    pub speeds: &'a Speeds,
}

impl Search<'_> {
    /// `migration_s` is the time that a target's migration adds to a step.
    pub fn best(&self, mode: Mode, now: &Target, migration_s: impl Fn(&Target) -> f64) -> Target {
        match mode {
            Mode::Off => now.clone(),
            Mode::Resize => Target { gammas: self.gammas_needed(&now.home), ..Target::at_home(now.home.clone()) },
            Mode::Migrate => self.migrated(&now.home),
            Mode::Semi => self.pruned_and_migrated(&now.home, migration_s),
            Mode::Reshard | Mode::Auto => self.resharded(&now.home, migration_s),
        }
    }

    /// Divides state and work by speed. Heads also migrate, in a finer grain than state has, if that pays.
    fn resharded(&self, now: &Widths, migration_s: impl Fn(&Target) -> f64) -> Target {
        let mut home = now.clone();
        for dim in [Dim::Heads, Dim::Columns, Dim::Classes] {
            if let Some(grain) = self.rules.grains[dim as usize] {
                home.set(dim, self.divided(now, dim, grain, |_| 0.0));
            }
        }
        let with = |dims: &[Dim]| Target {
            gammas: vec![0.0; home.shards()],
            work: self.work_by_speed(&home, dims),
            home: home.clone(),
        };
        let takes_s = |target: &Target| target.compute_s(self.speeds) + migration_s(target);
        let at_home = with(&[Dim::Tokens]);
        let migrated = with(&[Dim::Heads, Dim::Tokens]);
        let least = 1.0 - self.tuning.step_gain_least_share;
        if takes_s(&migrated) < least * takes_s(&at_home) { migrated } else { at_home }
    }

    /// Divides work by speed; state stays at home.
    pub fn migrated(&self, home: &Widths) -> Target {
        let work = self.work_by_speed(home, &[Dim::Heads, Dim::Columns, Dim::Tokens]);
        Target { home: home.clone(), work, gammas: vec![0.0; home.shards()] }
    }

    fn work_by_speed(&self, home: &Widths, dims: &[Dim]) -> Widths {
        let mut work = home.clone();
        for &dim in dims {
            let may_move = self.rules.may_migrate || dim == Dim::Tokens;
            let Some(grain) = self.rules.grains[dim as usize].filter(|_| may_move) else {
                continue;
            };
            let grain = if dim == Dim::Heads { grain.min(self.rules.work_heads_grain) } else { grain };
            let migrating_s = |rank: usize| match dim {
                Dim::Tokens => 0.0,
                _ => classes(dim).map(|class| self.speeds.migrating_s(class, rank)).sum(),
            };
            let mut other = work.clone();
            other.set(dim, self.divided(home, dim, grain, migrating_s));
            let takes_s = |work: &Widths| -> f64 {
                let target = Target { work: work.clone(), ..Target::at_home(home.clone()) };
                classes(dim).map(|class| target.class_s(self.speeds, class)).sum()
            };
            if takes_s(&other) < (1.0 - self.tuning.class_gain_least_share) * takes_s(&work) {
                work = other;
            }
        }
        work
    }

    /// Divides a dim by speed, or keeps it if memory leaves no room. A rank with any width takes `besides_s` longer.
    fn divided(&self, now: &Widths, dim: Dim, grain: usize, besides_s: impl Fn(usize) -> f64) -> Vec<usize> {
        let seconds = |rank: usize, width: usize| -> f64 {
            let computing_s: f64 = classes(dim).map(|class| self.speeds.seconds(class, rank, width as f64)).sum();
            computing_s + if width > 0 { besides_s(rank) } else { 0.0 }
        };
        let filled = fill(now.total(dim), grain, &self.rules.most[dim as usize], seconds);
        filled.unwrap_or_else(|| now.of(dim).to_vec())
    }

    pub fn straggles(&self, rank: usize) -> bool {
        self.speeds.slowness[rank] > self.tuning.straggler_slowness
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_is_found_by_its_name_and_by_no_other() {
        for (index, mode) in Mode::ALL.into_iter().enumerate() {
            assert_eq!((mode as usize, Mode::named(mode.name())), (index, Some(mode)));
            assert_eq!(format!("{mode:?}").to_lowercase(), mode.name());
        }
        for other in ["", "Off", "fast", "auto "] {
            assert_eq!(Mode::named(other), None, "{other:?}");
        }
    }
}
