//! When something is done about a slow rank, and what.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::observation::{Class, Dim, Division, Observation};
use crate::target::{LEAST_GAIN, Mode, Rules, STRAGGLES, Target, best};
use crate::watch::{Speeds, Watch, middle, push};

#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    pub mode: Mode,
    pub rules: Rules,
    /// Bytes of state that one of the width has, by dim: what resharding moves.
    pub state_bytes: [f64; Dim::ALL.len()],
    /// Bytes of values and gradients of one of the width: what migration moves in every step.
    pub work_bytes: [f64; Dim::ALL.len()],
}

/// What is expected of an action.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prospect {
    /// By rank.
    pub slowness: Vec<f64>,
    /// The step since which ranks have been so slow.
    pub since: u64,
    /// Of a step: as it is, as it should be, and with all work divided by speed.
    pub now_s: f64,
    pub then_s: f64,
    pub optimum_s: f64,
}

/// An action to take before the next step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    pub target: Target,
    pub prospect: Prospect,
}

/// Watches a run and says when to change it. Everything it does follows from what it is told.
#[derive(Clone, Debug)]
pub struct Balancer {
    options: Options,
    watch: Watch,
    pub now: Target,
    /// What was kept longest without a change, and for how many steps.
    usual: Target,
    usual_steps: usize,
    /// For how many steps in a row it would have done, and for how many it must before it is come back to; whether it was last.
    over_for: u64,
    patience: u64,
    is_back: bool,
    /// Measured: seconds of the last steps and how many there were since the layout changed, seconds for a byte of state and of
    /// work to be moved.
    steps_s: VecDeque<f64>,
    steps: usize,
    reshard_s_per_byte: f64,
    migration_s_per_byte: f64,
    /// What a first step in another layout takes beyond those behind it.
    beginning_s: f64,
    /// What was foretold of a step in this layout, and by how much of it that has been wrong before.
    foretold_s: Option<f64>,
    misjudged: f64,
}

/// Steps whose middle is typical.
const TYPICAL: usize = 9;
/// Steps in a layout that tell what came of it.
const TELLING: usize = 5;
/// Where nobody says how fast ranks exchange: a hundredth of what memory moves.
const GUESSED_S_PER_BYTE: f64 = 1e-9;
/// Whoever keeps a rank's cores busy may pause, or do so only while the rank has much to do on them.
const LEAST_PATIENCE: u64 = 6;
const MOST_PATIENCE: u64 = 160;
/// To leave what is usual, steps must gain so many times what they are uncertain by, which is two standard errors.
const DOUBT: f64 = 2.0;
/// What takes less than so many times as long as the best may be the best.
const AS_GOOD: f64 = 1.1;
/// The share of migration's transfers that computation does not hide.
const EXPOSED: f64 = 0.25;
/// What is slow for fewer steps may be over as soon, which is a matter for migration.
const LASTS: u64 = 20;

impl Balancer {
    pub fn new(options: Options, home: Division) -> Balancer {
        let now = Target::at_home(home);
        Balancer {
            options,
            watch: Watch::default(),
            usual: now.clone(),
            usual_steps: 0,
            over_for: 0,
            patience: LEAST_PATIENCE,
            is_back: false,
            now,
            steps_s: VecDeque::new(),
            steps: 0,
            reshard_s_per_byte: GUESSED_S_PER_BYTE,
            migration_s_per_byte: GUESSED_S_PER_BYTE,
            beginning_s: 0.0,
            foretold_s: None,
            misjudged: 0.0,
        }
    }

    /// How long a rank takes to hand another a byte: what moving is taken to cost until it is seen.
    pub fn expect_exchanges(&mut self, s_per_byte: f64) {
        // State is allocated, written and copied to what is computed with, too.
        self.reshard_s_per_byte = 2.0 * s_per_byte;
        self.migration_s_per_byte = s_per_byte;
    }

    /// Bytes of state for one of the width.
    pub fn state_bytes(&self, dim: Dim) -> f64 {
        self.options.state_bytes[dim as usize]
    }

    /// Bytes that migration moves in a step for one of the width.
    pub fn work_bytes(&self, dim: Dim) -> f64 {
        self.options.work_bytes[dim as usize]
    }

    /// By dim: the most that memory leaves each rank room for.
    pub fn limit(&mut self, most: impl Fn(Dim) -> Vec<usize>) {
        self.options.rules.most = Dim::ALL.map(most);
    }

    /// Takes in a step, and says what to do before the next, if anything. `left` are the steps still to come.
    pub fn step(&mut self, step: u64, step_s: f64, observed: &[Observation], left: u64) -> Option<Decision> {
        self.watch.observe(step, &self.now, observed);
        self.steps += 1;
        if self.steps > self.usual_steps {
            self.usual_steps = self.steps;
            self.usual.clone_from(&self.now);
        }
        push(&mut self.steps_s, step_s, TYPICAL);
        if let Some(foretold_s) = self.foretold_s.filter(|_| self.steps == TELLING) {
            let typical_s = self.typical_step_s();
            self.beginning_s = 0.5 * (self.beginning_s + (self.steps_s[0] - typical_s).max(0.0));
            // What was wrong has been learnt from.
            self.misjudged = 0.5 * self.misjudged + 0.25 * (typical_s / foretold_s - 1.0).abs().min(1.0);
        }
        let moved: u64 = observed.iter().map(|rank| rank.migrated_bytes).sum();
        let seconds = observed.iter().map(|rank| rank.migration_s).fold(0.0, f64::max);
        if moved > 0 && seconds.is_finite() {
            self.migration_s_per_byte += 0.3 * (seconds / moved as f64 - self.migration_s_per_byte);
        }
        if self.options.mode == Mode::Off {
            return None;
        }
        let speeds = self.watch.speeds(&self.now.work);
        let is_over = self.now != self.usual && speeds.as_ref().is_some_and(|speeds| self.is_over(speeds));
        self.over_for = if is_over { self.over_for + 1 } else { 0 };
        self.decide(step, &speeds?, left)
    }

    /// Whether what is usual would do again: the best may gain no more beyond it than noise.
    fn is_over(&self, speeds: &Speeds) -> bool {
        let best = self.best(self.options.mode, speeds);
        let [usual_s, best_s] = [&self.usual, &best].map(|target| self.step_then_s(target, speeds));
        usual_s <= AS_GOOD.max(1.0 + speeds.uncertainty) * best_s
    }

    fn best(&self, mode: Mode, speeds: &Speeds) -> Target {
        best(mode, &self.options.rules, speeds, &self.now, |target| self.exposed_s(target))
    }

    fn step_then_s(&self, target: &Target, speeds: &Speeds) -> f64 {
        target.compute_s(speeds) + self.exposed_s(target)
    }

    /// Pure: the same speeds at the same place give the same answer.
    pub fn decide(&self, step: u64, speeds: &Speeds, left: u64) -> Option<Decision> {
        let is_over = self.over_for > 0;
        if is_over && self.over_for < self.patience {
            return None;
        }
        let step_then_s = |target: &Target| self.step_then_s(target, speeds);
        let now_s = step_then_s(&self.now);
        let lasted = (step + 1).saturating_sub(speeds.since);
        // What has lasted for long is expected to last as long again.
        let lasting = lasted.max(3).min(left) as f64;
        let modes = match self.options.mode {
            Mode::Auto if lasted < LASTS => vec![Mode::Migrate, Mode::Reshard],
            Mode::Auto if self.options.rules.gamma_max > 0.0 => vec![Mode::Reshard, Mode::Semi],
            Mode::Auto => vec![Mode::Reshard],
            mode => vec![mode],
        };
        // What the whole time until the end of it takes, with getting there.
        let takes_s = |target: &Target| lasting * step_then_s(target) + self.moving_s(target);
        let targets = modes.into_iter().map(|mode| self.best(mode, speeds));
        let best = targets.min_by(|a, b| takes_s(a).total_cmp(&takes_s(b)))?;
        let since = self.steps_s.iter().rev().take(lasted as usize);
        let step_s = middle(since.copied().collect()).unwrap_or(0.0);
        // To leave what is usual is thought of in every step, and noise has as many chances.
        let doubt = if self.now == self.usual { DOUBT * speeds.uncertainty } else { speeds.uncertainty };
        let least_gain_s = (LEAST_GAIN * step_s).max(doubt.max(self.misjudged) * now_s);
        let leaves_out = |target: &Target| target.gammas.iter().sum::<f64>();
        let pays = |target: &Target| {
            // What is usual needs no proof: it was right for longest.
            let least_s = if *target == self.usual { LEAST_GAIN * step_s } else { least_gain_s };
            let gained_s = now_s - step_then_s(target);
            let is_faster = takes_s(target) < lasting * now_s && gained_s > least_s;
            // Nothing is left out for no gain, nor to be faster than ranks are that nobody slows down.
            let is_truer = leaves_out(&self.now) - leaves_out(target) > LEAST_GAIN.max(speeds.uncertainty)
                && (gained_s > -LEAST_GAIN * step_s || speeds.slowness.iter().all(|slow| *slow <= STRAGGLES));
            (is_faster || is_truer) && *target != self.now
        };
        let is_true = leaves_out(&self.usual) <= leaves_out(&best);
        let usual = Some(&self.usual).filter(|usual| is_over && is_true && self.options.rules.allow(&usual.work));
        let target = usual.into_iter().chain([&best]).find(|target| pays(target))?.clone();
        let then_s = step_then_s(&target);
        let besides_s = (step_s - now_s).max(0.0);
        let total = |class: Class| self.now.work.total(class.dim());
        let optimum_s: f64 = Class::ALL.iter().map(|&class| speeds.optimum_s(class, total(class))).sum();
        let prospect = Prospect {
            slowness: speeds.slowness.clone(),
            since: speeds.since,
            now_s: step_s,
            then_s: then_s + besides_s,
            optimum_s: optimum_s + besides_s,
        };
        Some(Decision { target, prospect })
    }

    /// The decision was carried out, in so many seconds.
    pub fn done(&mut self, decision: &Decision, seconds: f64) {
        let bytes = self.moved_bytes(&decision.target);
        if bytes > 0.0 {
            self.reshard_s_per_byte = 0.5 * (self.reshard_s_per_byte + seconds / bytes);
        }
        if self.is_back {
            // Whoever is slow again so soon had not recovered.
            let was_over = self.steps as u64 >= LASTS;
            self.patience = if was_over { LEAST_PATIENCE } else { (2 * self.patience).min(MOST_PATIENCE) };
        }
        self.is_back = decision.target == self.usual;
        self.over_for = 0;
        self.watch.relaid(&self.now.work);
        self.now = decision.target.clone();
        self.foretold_s = Some(decision.prospect.then_s).filter(|seconds| *seconds > 0.0);
        self.steps_s.clear();
        self.steps = 0;
    }

    /// The middle of the steps since the layout changed.
    pub fn typical_step_s(&self) -> f64 {
        middle(self.steps_s.iter().copied().collect()).unwrap_or(0.0)
    }

    /// Steps since the layout changed.
    pub fn steps_since_change(&self) -> usize {
        self.steps
    }

    /// Of state on its way to another home.
    fn moved_bytes(&self, target: &Target) -> f64 {
        let dim_bytes =
            |dim: Dim| target.home.gained(&self.now.home, dim) as f64 * self.options.state_bytes[dim as usize];
        Dim::ALL.iter().map(|&dim| dim_bytes(dim)).sum()
    }

    /// What it takes to get there.
    fn moving_s(&self, target: &Target) -> f64 {
        let begins_s = if *target == self.now { 0.0 } else { self.beginning_s };
        self.moved_bytes(target) * self.reshard_s_per_byte + begins_s
    }

    /// What migration adds to a step. It runs beside computation, which slows down by what it takes from memory.
    fn exposed_s(&self, target: &Target) -> f64 {
        let bytes: f64 =
            Dim::ALL.iter().map(|&dim| target.migrated(dim) as f64 * self.options.work_bytes[dim as usize]).sum();
        EXPOSED * bytes * self.migration_s_per_byte
    }
}

impl Prospect {
    /// The ranks that are slower than the fastest, and how many times.
    pub fn stragglers(&self) -> impl Iterator<Item = (usize, f64)> {
        let straggles = |(_, slowness): &(usize, f64)| *slowness > STRAGGLES;
        self.slowness.iter().copied().enumerate().filter(straggles)
    }
}
