//! Decides when to change a run's target, and to which.

use std::collections::VecDeque;

use evenkeel_widths::{Dim, Widths};
use serde::{Deserialize, Serialize};

use crate::observation::{Class, Observation};
use crate::speeds::Speeds;
use crate::statistics::{push, trimmed_mean};
use crate::target::{Mode, Rules, Search, Target};
use crate::tuning::Tuning;
use crate::watch::Watch;

#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    pub mode: Mode,
    pub rules: Rules,
    /// Bytes of state per unit of width, by dim: resharding moves them.
    pub state_bytes: [f64; Dim::ALL.len()],
    /// Bytes of values and gradients per unit of width, by dim: migration moves them in every step.
    pub work_bytes: [f64; Dim::ALL.len()],
}

/// The forecast of a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prospect {
    /// By rank.
    pub slowness: Vec<f64>,
    /// The first step with this slowness.
    pub since: u64,
    /// Seconds of a step now.
    pub now_s: f64,
    /// Seconds of a step after the change.
    pub then_s: f64,
    /// Seconds of a step with all work divided by speed.
    pub optimum_s: f64,
}

/// A change to make before the next step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    pub target: Target,
    pub prospect: Prospect,
}

/// Watches a run and decides when to change it. Its decisions depend on its inputs alone.
#[derive(Clone, Debug)]
pub struct Balancer {
    options: Options,
    tuning: Tuning,
    watch: Watch,
    pub now: Target,
    /// The target kept longest without a change, and for how many steps.
    usual: Target,
    usual_steps: usize,
    /// Steps in a row in which the usual target would have sufficed.
    over_for: u64,
    /// Steps in a row in which it must suffice before the run returns to it.
    patience: u64,
    /// Whether the last change returned to the usual target.
    is_back: bool,
    /// Seconds of the last steps in this target.
    steps_s: VecDeque<f64>,
    /// Steps in this target.
    steps: usize,
    /// Measured; exponential averages. Bytes are counted once, though one rank sends and another receives them.
    reshard_s_per_byte: f64,
    migration_s_per_byte: f64,
    migration_exposed_share: f64,
    /// Extra seconds of the first step in a target.
    first_step_s: f64,
    /// Seconds that the forecast gave a step in this target.
    forecast_s: Option<f64>,
    /// The relative error of forecasts; an exponential average.
    forecast_error: f64,
}

impl Balancer {
    pub fn new(options: Options, home: Widths) -> Balancer {
        Balancer::with_tuning(options, home, Tuning::default())
    }

    pub fn with_tuning(options: Options, home: Widths, tuning: Tuning) -> Balancer {
        let now = Target::at_home(home);
        Balancer {
            options,
            watch: Watch::new(tuning),
            usual: now.clone(),
            usual_steps: 0,
            over_for: 0,
            patience: tuning.patience_steps_least,
            is_back: false,
            now,
            steps_s: VecDeque::new(),
            steps: 0,
            reshard_s_per_byte: tuning.exchange_s_per_byte,
            migration_s_per_byte: tuning.exchange_s_per_byte,
            migration_exposed_share: tuning.migration_exposed_share,
            first_step_s: 0.0,
            forecast_s: None,
            forecast_error: 0.0,
            tuning,
        }
    }

    /// Sets the cost of moving a byte between ranks until it is measured.
    pub fn expect_exchanges(&mut self, s_per_byte: f64) {
        self.reshard_s_per_byte = self.tuning.reshard_exchange_factor * s_per_byte;
        self.migration_s_per_byte = s_per_byte;
    }

    /// Bytes of state per unit of width.
    pub fn state_bytes(&self, dim: Dim) -> f64 {
        self.options.state_bytes[dim as usize]
    }

    /// Bytes that migration moves in a step per unit of width.
    pub fn work_bytes(&self, dim: Dim) -> f64 {
        self.options.work_bytes[dim as usize]
    }

    /// Sets the largest width of a dim that each rank has memory for.
    pub fn limit(&mut self, most: impl Fn(Dim) -> Vec<usize>) {
        self.options.rules.most = Dim::ALL.map(most);
    }

    /// Takes in a step and decides what to change before the next. `left` is the number of steps still to come.
    pub fn step(&mut self, step: u64, step_s: f64, observed: &[Observation], left: u64) -> Option<Decision> {
        self.watch.observe(step, &self.now, observed);
        self.steps += 1;
        if self.steps > self.usual_steps {
            self.usual_steps = self.steps;
            self.usual.clone_from(&self.now);
        }
        push(&mut self.steps_s, step_s, self.tuning.typical_steps);
        self.judge_forecast();
        self.measure_migration(observed);
        if self.options.mode == Mode::Off {
            return None;
        }
        let speeds = self.watch.speeds(&self.now.work);
        let is_over = self.now != self.usual && speeds.as_ref().is_some_and(|speeds| self.usual_suffices(speeds));
        self.over_for = if is_over { self.over_for + 1 } else { 0 };
        self.decide(step, &speeds?, left)
    }

    /// Compares the forecast with the steps that came of it, once there are enough.
    fn judge_forecast(&mut self) {
        let Some(forecast_s) = self.forecast_s.filter(|_| self.steps == self.tuning.forecast_steps) else { return };
        let typical_s = self.typical_step_s();
        let first_step_s = (self.steps_s[0] - typical_s).max(0.0);
        let weight = self.tuning.first_step_weight;
        self.first_step_s = (1.0 - weight) * self.first_step_s + weight * first_step_s;
        let error = (typical_s / forecast_s - 1.0).abs().min(1.0);
        let weight = self.tuning.forecast_error_weight;
        self.forecast_error =
            (1.0 - weight) * self.forecast_error + weight * self.tuning.forecast_error_kept_share * error;
    }

    fn measure_migration(&mut self, observed: &[Observation]) {
        // What one rank sends another receives.
        let bytes = 0.5 * observed.iter().map(|rank| rank.migrated_bytes as f64).sum::<f64>();
        let longest = |of: fn(&Observation) -> f64| observed.iter().map(of).fold(0.0, f64::max);
        let [seconds, exposed_s] = [longest(|rank| rank.migration_s), longest(|rank| rank.exposed_s)];
        if bytes > 0.0 && seconds.is_finite() && seconds > 0.0 {
            let weight = self.tuning.migration_weight;
            self.migration_s_per_byte += weight * (seconds / bytes - self.migration_s_per_byte);
            self.migration_exposed_share +=
                weight * ((exposed_s / seconds).clamp(0.0, 1.0) - self.migration_exposed_share);
        }
    }

    /// Whether the best target gains no more over the usual one than noise explains.
    fn usual_suffices(&self, speeds: &Speeds) -> bool {
        let best = self.best(self.options.mode, speeds);
        let [usual_s, best_s] = [&self.usual, &best].map(|target| self.step_then_s(target, speeds));
        usual_s <= self.tuning.usual_suffices_factor.max(1.0 + speeds.uncertainty) * best_s
    }

    fn best(&self, mode: Mode, speeds: &Speeds) -> Target {
        let search = Search { tuning: &self.tuning, rules: &self.options.rules, speeds };
        search.best(mode, &self.now, |target| self.exposed_s(target))
    }

    fn step_then_s(&self, target: &Target, speeds: &Speeds) -> f64 {
        target.compute_s(speeds) + self.exposed_s(target)
    }

    /// Pure: the same speeds in the same state give the same decision.
    pub fn decide(&self, step: u64, speeds: &Speeds, left: u64) -> Option<Decision> {
        let is_over = self.over_for > 0;
        if is_over && self.over_for < self.patience {
            return None;
        }
        let lasted = (step + 1).saturating_sub(speeds.since);
        let recent = self.steps_s.iter().rev().take(lasted as usize);
        let outlook = Outlook {
            balancer: self,
            speeds,
            // Slowness is expected to last as long again as it has lasted.
            lasting: lasted.max(self.tuning.expected_steps_least).min(left) as f64,
            step_s: trimmed_mean(recent.copied().collect()).unwrap_or(0.0),
            now_s: self.step_then_s(&self.now, speeds),
        };
        let targets = self.modes(lasted).into_iter().map(|mode| self.best(mode, speeds));
        let best = targets.min_by(|a, b| outlook.takes_s(a).total_cmp(&outlook.takes_s(b)))?;
        let prunes_no_more = self.usual.pruned() <= best.pruned();
        let usual =
            Some(&self.usual).filter(|usual| is_over && prunes_no_more && self.options.rules.allow(&usual.work));
        let target = usual.into_iter().chain([&best]).find(|target| outlook.pays(target))?.clone();
        let prospect = outlook.prospect(&target);
        Some(Decision { target, prospect })
    }

    /// The modes to choose from after `lasted` steps of the present speeds.
    fn modes(&self, lasted: u64) -> Vec<Mode> {
        match self.options.mode {
            Mode::Auto if lasted < self.tuning.lasting_steps => vec![Mode::Migrate, Mode::Reshard],
            Mode::Auto if self.options.rules.gamma_max > 0.0 => vec![Mode::Reshard, Mode::Semi],
            Mode::Auto => vec![Mode::Reshard],
            mode => vec![mode],
        }
    }

    /// The run carried out a decision, in `seconds`.
    pub fn done(&mut self, decision: &Decision, seconds: f64) {
        let bytes = self.moved_bytes(&decision.target);
        if bytes > 0.0 {
            let weight = self.tuning.reshard_weight;
            self.reshard_s_per_byte = (1.0 - weight) * self.reshard_s_per_byte + weight * (seconds / bytes);
        }
        if self.is_back {
            // A rank that is slow again so soon had not recovered.
            let was_over = self.steps as u64 >= self.tuning.lasting_steps;
            let longer = (2 * self.patience).min(self.tuning.patience_steps_most);
            self.patience = if was_over { self.tuning.patience_steps_least } else { longer };
        }
        self.is_back = decision.target == self.usual;
        self.over_for = 0;
        self.watch.relaid(&self.now.work);
        self.now = decision.target.clone();
        self.forecast_s = Some(decision.prospect.then_s).filter(|seconds| *seconds > 0.0);
        self.steps_s.clear();
        self.steps = 0;
    }

    /// The trimmed mean of the last steps in this target.
    pub fn typical_step_s(&self) -> f64 {
        trimmed_mean(self.steps_s.iter().copied().collect()).unwrap_or(0.0)
    }

    /// Steps in this target.
    pub fn steps_since_change(&self) -> usize {
        self.steps
    }

    /// Bytes of state that move to another home.
    fn moved_bytes(&self, target: &Target) -> f64 {
        let dim_bytes =
            |dim: Dim| target.home.gained(&self.now.home, dim) as f64 * self.options.state_bytes[dim as usize];
        Dim::ALL.iter().map(|&dim| dim_bytes(dim)).sum()
    }

    /// Seconds that changing to a target costs once.
    fn moving_s(&self, target: &Target) -> f64 {
        let first_step_s = if *target == self.now { 0.0 } else { self.first_step_s };
        self.moved_bytes(target) * self.reshard_s_per_byte + first_step_s
    }

    /// Seconds that migration adds to a step: those that computation does not hide.
    fn exposed_s(&self, target: &Target) -> f64 {
        let bytes: f64 =
            Dim::ALL.iter().map(|&dim| target.migrated(dim) as f64 * self.options.work_bytes[dim as usize]).sum();
        self.migration_exposed_share * bytes * self.migration_s_per_byte
    }
}

/// One decision's view of the time until the slowness ends.
struct Outlook<'a> {
    balancer: &'a Balancer,
    speeds: &'a Speeds,
    /// Steps until then.
    lasting: f64,
    /// Measured seconds of a step.
    step_s: f64,
    /// Forecast seconds of a step in the present target, without what no target changes.
    now_s: f64,
}

impl Outlook<'_> {
    fn step_then_s(&self, target: &Target) -> f64 {
        self.balancer.step_then_s(target, self.speeds)
    }

    /// Seconds of all steps, and of changing to the target.
    fn takes_s(&self, target: &Target) -> f64 {
        self.lasting * self.step_then_s(target) + self.balancer.moving_s(target)
    }

    /// Whether changing to the target gains enough time, or stops pruning that gains none.
    fn pays(&self, target: &Target) -> bool {
        let Balancer { tuning, now, usual, forecast_error, .. } = self.balancer;
        let uncertainty = self.speeds.uncertainty;
        let least_s = tuning.step_gain_least_share * self.step_s;
        let doubt = if now == usual { tuning.leaving_doubt * uncertainty } else { uncertainty };
        let proven_s = least_s.max(doubt.max(*forecast_error) * self.now_s);
        // The usual target needs no proof: it was right for longest.
        let needed_s = if target == usual { least_s } else { proven_s };
        let gained_s = self.now_s - self.step_then_s(target);
        let is_faster = self.takes_s(target) < self.lasting * self.now_s && gained_s > needed_s;
        let prunes_less = now.pruned() - target.pruned() > tuning.step_gain_least_share.max(uncertainty);
        let nobody_straggles = self.speeds.slowness.iter().all(|slow| *slow <= tuning.straggler_slowness);
        // Pruning must gain time, and is not for making ranks faster than they are without a straggler.
        let is_truer = prunes_less && (gained_s > -tuning.step_gain_least_share * self.step_s || nobody_straggles);
        (is_faster || is_truer) && target != now
    }

    fn prospect(&self, target: &Target) -> Prospect {
        let then_s = self.step_then_s(target);
        let besides_s = (self.step_s - self.now_s).max(0.0);
        let total = |class: Class| self.balancer.now.work.total(class.dim());
        let optimum_s: f64 = Class::ALL.iter().map(|&class| self.speeds.optimum_s(class, total(class))).sum();
        Prospect {
            slowness: self.speeds.slowness.clone(),
            since: self.speeds.since,
            now_s: self.step_s,
            then_s: then_s + besides_s,
            optimum_s: optimum_s + besides_s,
        }
    }
}

impl Prospect {
    /// The stragglers by [`Tuning::default`], and how many times as long as the fastest rank they take.
    pub fn stragglers(&self) -> impl Iterator<Item = (usize, f64)> {
        let least = Tuning::default().straggler_slowness;
        self.slowness.iter().copied().enumerate().filter(move |(_, slowness)| *slowness > least)
    }
}
