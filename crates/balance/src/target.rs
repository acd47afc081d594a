//! What a mode makes of speeds, costs and limits.

use serde::{Deserialize, Serialize};

use crate::fill::fill;
use crate::observation::{Class, Dim, Division};
use crate::semi::semi;
use crate::watch::{Speeds, worked};

/// What may be done about a slow rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Off,
    /// The slow rank leaves out a part of its products.
    Resize,
    /// Others compute a part of its work in every step.
    Migrate,
    /// Both at once, as much of each as makes the fastest step.
    Semi,
    /// A part of its weights and their state moves to others for good.
    Reshard,
    /// Migration for what may soon be over, resharding for what lasts.
    Auto,
}

impl Mode {
    pub const ALL: [Mode; 6] = [Mode::Off, Mode::Resize, Mode::Migrate, Mode::Semi, Mode::Reshard, Mode::Auto];
    /// As they are listed above.
    pub const NAMES: [&str; Mode::ALL.len()] = ["off", "resize", "migrate", "semi", "reshard", "auto"];

    /// What it is called in configurations, on the command line and in results.
    pub fn name(self) -> &'static str {
        Mode::NAMES[self as usize]
    }

    pub fn named(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Whether a rank may leave out a part of its products, where that is allowed at all.
    pub fn resizes(self) -> bool {
        matches!(self, Mode::Resize | Mode::Semi | Mode::Auto)
    }
}

/// What a run allows.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// The largest share of its products that a rank may leave out.
    pub gamma_max: f64,
    /// What keeps tiles full, by dim: widths are multiples of it. None where a dim is not divided.
    pub grains: [Option<usize>; Dim::ALL.len()],
    /// Whether work can be done elsewhere than its state is kept, and the grain of heads then.
    pub may_migrate: bool,
    pub work_heads_grain: usize,
    /// By dim: the most that memory leaves each rank room for.
    pub most: [Vec<usize>; Dim::ALL.len()],
}

/// Where state is kept, where work is done, and what is left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Target {
    pub home: Division,
    pub work: Division,
    /// By rank: the share of its products that it leaves out.
    pub gammas: Vec<f64>,
}

impl Target {
    /// Everybody works on what it keeps.
    pub fn at_home(home: Division) -> Target {
        Target { work: home.clone(), gammas: vec![0.0; home.ranks()], home }
    }

    /// What the compute tasks of a step take, by the slowest rank of each class.
    pub fn compute_s(&self, speeds: &Speeds) -> f64 {
        Class::ALL.iter().map(|&class| self.class_s(speeds, class)).sum()
    }

    fn class_s(&self, speeds: &Speeds, class: Class) -> f64 {
        let of = |rank: usize| {
            let width = worked(class, &self.work, &self.gammas, rank);
            let shares = self.shares(class, rank) && width > 0.0;
            speeds.seconds(class, rank, width) + if shares { speeds.sharing_s(class, rank) } else { 0.0 }
        };
        (0..self.work.ranks()).map(of).fold(0.0, f64::max)
    }

    /// What is worked on away from home: by dim, the sum over the ranks of what they work on beyond what they keep.
    pub fn migrated(&self, dim: Dim) -> usize {
        self.work.gained(&self.home, dim)
    }

    /// Whether a rank works on what another keeps, or keeps what another works on.
    pub(crate) fn shares(&self, class: Class, rank: usize) -> bool {
        let dim = class.dim();
        matches!(dim, Dim::Heads | Dim::Columns) && self.work.of(dim)[rank] != self.home.of(dim)[rank]
    }

    /// Whether anybody works on what another keeps.
    pub fn migrates(&self) -> bool {
        [Dim::Heads, Dim::Columns].iter().any(|&dim| self.migrated(dim) > 0)
    }
}

/// A step must gain so much of its time.
pub(crate) const LEAST_GAIN: f64 = 0.03;

impl Rules {
    /// Whether memory has room for this.
    pub(crate) fn allow(&self, work: &Division) -> bool {
        let fits = |dim: Dim| work.of(dim).iter().zip(&self.most[dim as usize]).all(|(width, most)| width <= most);
        Dim::ALL.into_iter().all(fits)
    }
}

/// Slower than the fastest by more than this is a straggler.
pub const STRAGGLES: f64 = 1.15;

/// The best target of a mode, from where a run is now.
pub fn best(mode: Mode, rules: &Rules, speeds: &Speeds, now: &Target, migration_s: impl Fn(&Target) -> f64) -> Target {
    match mode {
        Mode::Off => now.clone(),
        Mode::Resize => resized(rules, speeds, Target::at_home(now.home.clone())),
        Mode::Migrate => migrated(rules, speeds, &now.home),
        Mode::Semi => semi(rules, speeds, &now.home, migration_s),
        Mode::Reshard | Mode::Auto => resharded(rules, speeds, &now.home, migration_s),
    }
}

/// State and work by speed. What is too coarse for state is done elsewhere than it is kept, where that pays.
fn resharded(rules: &Rules, speeds: &Speeds, now: &Division, migration_s: impl Fn(&Target) -> f64) -> Target {
    let mut home = now.clone();
    for dim in [Dim::Heads, Dim::Columns, Dim::Classes] {
        if let Some(grain) = rules.grains[dim as usize] {
            home.set(dim, divided(rules, speeds, now, dim, grain, |_| 0.0));
        }
    }
    let with = |dims: &[Dim]| Target {
        gammas: vec![0.0; home.ranks()],
        work: work_of(rules, speeds, &home, dims),
        home: home.clone(),
    };
    let takes_s = |target: &Target| target.compute_s(speeds) + migration_s(target);
    let (alone, shared) = (with(&[Dim::Tokens]), with(&[Dim::Heads, Dim::Tokens]));
    if takes_s(&shared) < (1.0 - LEAST_GAIN) * takes_s(&alone) { shared } else { alone }
}

/// State stays, work goes by speed.
pub(crate) fn migrated(rules: &Rules, speeds: &Speeds, home: &Division) -> Target {
    let work = work_of(rules, speeds, home, &[Dim::Heads, Dim::Columns, Dim::Tokens]);
    Target { home: home.clone(), work, gammas: vec![0.0; home.ranks()] }
}

fn work_of(rules: &Rules, speeds: &Speeds, home: &Division, dims: &[Dim]) -> Division {
    let mut work = home.clone();
    for &dim in dims {
        let Some(grain) = rules.grains[dim as usize].filter(|_| rules.may_migrate || dim == Dim::Tokens) else {
            continue;
        };
        let grain = if dim == Dim::Heads { grain.min(rules.work_heads_grain) } else { grain };
        let shared_s = |rank: usize| match dim {
            Dim::Tokens => 0.0,
            _ => dim.classes().map(|class| speeds.sharing_s(class, rank)).sum(),
        };
        let divided = divided(rules, speeds, home, dim, grain, shared_s);
        let mut other = work.clone();
        other.set(dim, divided);
        let takes_s = |work: &Division| -> f64 {
            let target = Target { work: work.clone(), ..Target::at_home(home.clone()) };
            dim.classes().map(|class| target.class_s(speeds, class)).sum()
        };
        // What gains next to nothing is not worth a message.
        if takes_s(&other) < 0.98 * takes_s(&work) {
            work = other;
        }
    }
    work
}

/// A dim by speed, where a rank that has any of it takes so much longer; as it is where memory leaves no room for that.
fn divided(
    rules: &Rules,
    speeds: &Speeds,
    now: &Division,
    dim: Dim,
    grain: usize,
    besides_s: impl Fn(usize) -> f64,
) -> Vec<usize> {
    let seconds = |rank: usize, width: usize| -> f64 {
        let computing_s: f64 = dim.classes().map(|class| speeds.seconds(class, rank, width as f64)).sum();
        computing_s + if width > 0 { besides_s(rank) } else { 0.0 }
    };
    let filled = fill(now.total(dim), grain, &rules.most[dim as usize], seconds);
    filled.unwrap_or_else(|| now.of(dim).to_vec())
}

/// Stragglers leave out what they take longer than the others, up to what is allowed.
fn resized(rules: &Rules, speeds: &Speeds, target: Target) -> Target {
    let others = (0..speeds.ranks()).filter(|&rank| !straggles(speeds, rank));
    let pace_s = others.map(|rank| rank_s(speeds, &target.work, rank)).fold(0.0, f64::max);
    let gammas = (0..speeds.ranks()).map(|rank| gamma(rules, speeds, &target.work, rank, pace_s)).collect();
    Target { gammas, ..target }
}

pub(crate) fn straggles(speeds: &Speeds, rank: usize) -> bool {
    speeds.slowness[rank] > STRAGGLES
}

/// What a rank computes in a step if it leaves nothing out.
fn rank_s(speeds: &Speeds, work: &Division, rank: usize) -> f64 {
    Class::ALL.iter().map(|&class| speeds.seconds(class, rank, work.of(class.dim())[rank] as f64)).sum()
}

/// A share to leave out that is less is noise.
pub(crate) const LEAST_GAMMA: f64 = 0.02;

/// The share to leave out so that a rank is done in `pace_s`, up to what is allowed.
fn gamma(rules: &Rules, speeds: &Speeds, work: &Division, rank: usize, pace_s: f64) -> f64 {
    let resizable = Class::ALL.iter().filter(|class| class.is_resizable());
    let products_s: f64 = resizable.map(|&class| speeds.width_s(class, rank, work.of(class.dim())[rank] as f64)).sum();
    let excess = (rank_s(speeds, work, rank) - pace_s) / products_s.max(f64::MIN_POSITIVE);
    if excess > LEAST_GAMMA { excess.clamp(0.0, rules.gamma_max) } else { 0.0 }
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
