//! Balancing a run: observes the ranks' work, asks `evenkeel_balance` for a decision, and has the ranks carry it out.

use std::time::{Duration, Instant};

use evenkeel_balance::{Balancer, Decision, Mode, Observation, Options, Prospect, Rules, Target};
use evenkeel_model::{Cut, Dim, Model, Part, SHARES, UnitKind, Widths, ZeroStage, widths_of};
use evenkeel_step::Mesh;

use crate::Error;
use crate::prune::Prune;
use crate::ranks::{RankMemory, Ranks};
use crate::run::RankReport;

/// A run's response to slow ranks.
pub struct Balance {
    balancer: Balancer,
    cut: Cut,
    mesh: Mesh,
    /// How ranks prune, if they may.
    prune: Option<Prune>,
    /// The last change, until its effect is known.
    pending: Option<Balanced>,
}

/// A change made because of slow ranks, and its effect.
#[derive(Clone, Debug, PartialEq)]
pub struct Balanced {
    /// The last step before the change.
    pub step: u64,
    pub prospect: Prospect,
    /// The layout of state and work before, and now.
    pub before: Target,
    pub now: Target,
    /// A typical step since the change; the forecast if there was none.
    pub after: Duration,
    /// Steps made before the change was judged.
    pub steps_after: usize,
    /// Slownesses and divisions are by shard, which is a rank if there is one replica.
    pub mesh: Mesh,
}

/// The balancing that a run allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BalanceOptions {
    pub mode: Mode,
    /// The largest share that a rank may prune, and how it prunes; `prune.gamma` is ignored.
    pub gamma_max: f64,
    pub prune: Prune,
    /// Bytes of a number in computation.
    pub value_bytes: usize,
    /// Bytes kept per parameter: its master and its optimizer state.
    pub state_bytes: usize,
    pub zero: ZeroStage,
    /// Samples of a part of a micro-batch: heads are shared by whole samples.
    pub samples: usize,
}

/// Steps after which a change is judged.
const STEPS_TO_JUDGE: usize = 5;

/// The token shares that every rank of an even cut has.
const TOKEN_SHARES: usize = 64;

impl Balance {
    /// For ranks that begin with these shards of a model.
    pub fn new(options: BalanceOptions, model: &Model, cut: &Cut, shards: &[Model], mesh: Mesh) -> Balance {
        let BalanceOptions { mode, gamma_max, prune, value_bytes, state_bytes, .. } = options;
        let mut widths = widths_of(shards.iter().map(|model| &model.shard));
        if widths.of(Dim::Tokens).iter().all(|&share| share == 1) {
            widths.set(Dim::Tokens, vec![TOKEN_SHARES; widths.shards()]);
        }
        let bytes = |each: usize| Dim::ALL.map(|dim| each as f64 * elements(model, dim));
        let options = Options {
            mode,
            rules: rules(model, cut, &widths, &options),
            state_bytes: bytes(state_bytes),
            work_bytes: bytes(value_bytes + 4),
        };
        let balancer = Balancer::new(options, widths);
        let prunes = mode.prunes() && gamma_max > 0.0;
        let prune = prunes.then_some(prune);
        Balance { balancer, cut: cut.clone(), mesh, prune, pending: None }
    }

    /// Times an exchange, and has prunable columns watched from the beginning. To be called before the first step.
    pub fn start(&mut self, ranks: &Ranks) -> Result<(), Error> {
        let exchanges_s = ranks.exchange_s_per_byte()?;
        self.balancer.expect_exchanges(exchanges_s.into_iter().fold(0.0, f64::max));
        self.leave_out(ranks, &vec![0.0; self.mesh.tp])
    }

    fn leave_out(&self, ranks: &Ranks, gammas: &[f64]) -> Result<(), Error> {
        let Some(prune) = self.prune else { return Ok(()) };
        ranks.prune(gammas.iter().map(|&gamma| Some(Prune { gamma, ..prune })).collect())
    }

    pub fn target(&self) -> &Target {
        &self.balancer.now
    }

    /// Bytes of state per unit of a dim's width.
    pub fn state_bytes(&self, dim: Dim) -> f64 {
        self.balancer.state_bytes(dim)
    }

    /// Bytes that migration moves in a step per unit of a dim's width.
    pub fn work_bytes(&self, dim: Dim) -> f64 {
        self.balancer.work_bytes(dim)
    }

    /// Takes in a simulated step, and adopts the decision without any ranks.
    pub fn simulate_step(&mut self, step: u64, step_s: f64, observed: &[Observation]) {
        if let Some(decision) = self.balancer.step(step, step_s, observed, u64::MAX) {
            self.note(step, decision, 0.0);
        }
    }

    /// A report of each shard's step.
    pub fn reports(&self, observed: &[Observation]) -> Vec<RankReport> {
        let work = &self.balancer.now.work;
        let report = |(rank, observed): (usize, Observation)| RankReport {
            observed,
            head_groups: work.of(Dim::Heads)[rank] as f64 / SHARES as f64,
            columns: work.of(Dim::Columns)[rank],
            units: 0,
        };
        self.by_shard(observed).into_iter().enumerate().map(report).collect()
    }

    /// Takes in a step, and acts on slow ranks if that pays. Returns the previous change once its effect is known.
    pub fn after_step(
        &mut self,
        ranks: &Ranks,
        step: u64,
        duration: Duration,
        observed: &[Observation],
        left: u64,
    ) -> Result<Option<Balanced>, Error> {
        if self.balancer.steps_since_change() == 1 {
            self.respect_memory(ranks)?;
        }
        let decision = self.balancer.step(step, duration.as_secs_f64(), &self.by_shard(observed), left);
        if let Some(decision) = &decision {
            tracing::info!(step, ?decision, "balances");
        }
        let is_judged = decision.is_some() || self.balancer.steps_since_change() >= STEPS_TO_JUDGE;
        let said = if is_judged { self.judge() } else { None };
        if let Some(decision) = decision {
            self.carry_out(ranks, step, decision)?;
        }
        Ok(said)
    }

    /// The pending change, judged by the steps so far; also for the end of a run.
    pub fn judge(&mut self) -> Option<Balanced> {
        let balanced = self.pending.take()?;
        let steps_after = self.balancer.steps_since_change();
        let seconds = if steps_after > 0 { self.balancer.typical_step_s() } else { balanced.prospect.then_s };
        Some(Balanced { after: Duration::from_secs_f64(seconds), steps_after, ..balanced })
    }

    /// Derives the limits of widths from how full each rank's memory was.
    fn respect_memory(&mut self, ranks: &Ranks) -> Result<(), Error> {
        let (memory, all) = (ranks.memory()?, self.mesh.ranks());
        let growth = |shard: usize| {
            let own = (0..all).filter(|&rank| self.mesh.shard(rank) == shard).map(|rank| memory[rank]);
            let growth = |RankMemory { capacity_bytes, peak_bytes, is_shared }: RankMemory| {
                let sharing = if is_shared { all as f64 } else { 1.0 };
                capacity_bytes as f64 / sharing / peak_bytes.max(1) as f64
            };
            own.map(growth).fold(f64::INFINITY, f64::min)
        };
        let growth: Vec<f64> = (0..self.mesh.tp).map(growth).collect();
        let Target { home, work, .. } = self.balancer.now.clone();
        self.balancer.limit(|dim| most(&home, &work, dim, &growth));
        Ok(())
    }

    fn carry_out(&mut self, ranks: &Ranks, step: u64, decision: Decision) -> Result<(), Error> {
        let (begun, before, target) = (Instant::now(), &self.balancer.now, &decision.target);
        let reshards = target.home != before.home || target.work.of(Dim::Tokens) != before.work.of(Dim::Tokens);
        if reshards {
            // Rows of the stream are no state, so they go by work.
            let home = target.home.clone().with(Dim::Tokens, target.work.of(Dim::Tokens).to_vec());
            ranks.reshard(Cut { widths: Some(home), ..self.cut.clone() })?;
        }
        let work = target.work.clone();
        ranks.migrate(target.migrates().then_some(work))?;
        if reshards || target.gammas != before.gammas {
            self.leave_out(ranks, &target.gammas)?;
        }
        self.note(step, decision, begun.elapsed().as_secs_f64());
        Ok(())
    }

    /// Notes that a decision was carried out after a step.
    fn note(&mut self, step: u64, decision: Decision, seconds: f64) {
        let before = self.balancer.now.clone();
        self.balancer.done(&decision, seconds);
        let Decision { target: now, prospect } = decision;
        let after = Duration::from_secs_f64(prospect.then_s);
        self.pending = Some(Balanced { step, prospect, before, now, after, steps_after: 0, mesh: self.mesh });
    }

    /// By shard: the slowest of the ranks that have it, since all replicas are cut alike.
    fn by_shard(&self, observed: &[Observation]) -> Vec<Observation> {
        let of = |shard: usize| {
            let ranks = (0..self.mesh.ranks()).filter(|&rank| self.mesh.shard(rank) == shard);
            ranks.map(|rank| observed[rank]).reduce(|a, b| a.slower(&b)).expect("every shard has a rank")
        };
        (0..self.mesh.tp).map(of).collect()
    }
}

/// Memory grows with widths, at most as they do: a rank whose peak fits in its memory `growth` times may get as many times its
/// width, and may always compute what it keeps. A rank with nothing may get an even share, whatever its peak says: every rank
/// began with one.
fn most(home: &Widths, work: &Widths, dim: Dim, growth: &[f64]) -> Vec<usize> {
    let even = work.total(dim) / work.shards();
    let most = |rank: usize| match (home.of(dim)[rank], work.of(dim)[rank]) {
        (0, 0) => even,
        (kept, width) => kept.max((width as f64 * growth[rank]) as usize),
    };
    (0..work.shards()).map(most).collect()
}

/// Whether work can be done elsewhere than its state is kept.
pub fn may_migrate(model: &Model, cut: &Cut, zero: ZeroStage) -> bool {
    zero <= ZeroStage::State
        && cut.uncut.is_empty()
        && model.config.whole_parts(cut.weights.len()).is_empty()
        && model.config.kv_heads >= cut.weights.len()
        && !model.config.hands_values_on()
}

fn rules(model: &Model, cut: &Cut, widths: &Widths, options: &BalanceOptions) -> Rules {
    let shards = widths.shards();
    let is_cut =
        |part: fn(usize) -> Part| (0..model.config.layers.len()).all(|layer| !cut.uncut.contains(&part(layer)));
    let classes_are_cut = ![Part::Embedding, Part::Head].iter().any(|part| cut.uncut.contains(part));
    let grains = Dim::ALL.map(|dim| match dim {
        // If attention and MLP are one unit, their times are not told apart: heads stay, and columns make up for them.
        Dim::Heads if model.config.parallel => None,
        Dim::Heads => (is_cut(Part::Attention) && model.config.kv_heads >= shards).then_some(SHARES),
        Dim::Columns => is_cut(Part::Mlp).then(|| grain(model.config.ffn / shards)),
        Dim::Classes => classes_are_cut.then(|| grain(model.config.classes / shards)),
        Dim::Inputs => None,
        Dim::Tokens => cut.split_sequence.then_some(1),
    });
    Rules {
        gamma_max: options.gamma_max,
        grains,
        may_migrate: may_migrate(model, cut, options.zero),
        work_heads_grain: (SHARES / options.samples.max(1)).max(1),
        most: Dim::ALL.map(|_| vec![usize::MAX; shards]),
    }
}

/// The largest grain, which tiles prefer, that still lets a part of about this width change by a few per cent.
fn grain(width: usize) -> usize {
    [64, 32, 16, 8, 4, 2].into_iter().find(|grain| width / grain >= 32).unwrap_or(1)
}

/// Elements of matrices per unit of a dim's width, in all layers together.
fn elements(model: &Model, dim: Dim) -> f64 {
    let of_dim = |users: &[usize]| match users {
        [unit] => match model.unit(*unit).kind {
            UnitKind::Attention(_) => dim == Dim::Heads,
            UnitKind::Mlp(_) | UnitKind::TokenInput(_) | UnitKind::Layer(_) => dim == Dim::Columns,
            UnitKind::Embedding if model.config.input.is_classified() => dim == Dim::Inputs,
            UnitKind::Embedding | UnitKind::Head => dim == Dim::Classes,
        },
        _ => dim == Dim::Classes,
    };
    let buckets = model.buckets.iter().filter(|bucket| bucket.is_of_one_place() && of_dim(&bucket.users));
    let elements: usize = buckets.map(|bucket| bucket.len).sum();
    let width = match dim {
        Dim::Heads => SHARES * model.config.kv_heads,
        Dim::Columns => model.config.ffn,
        Dim::Classes => model.config.classes,
        Dim::Inputs | Dim::Tokens => return 0.0,
    };
    elements as f64 / width as f64
}

#[cfg(test)]
mod tests {
    use evenkeel_balance::{Class, Selection};
    use evenkeel_model::Imputation;

    use super::*;

    #[test]
    fn a_change_is_said_with_what_is_known_of_it_when_a_run_ends() {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 64,
        });
        let (model, cut) = (Model::from_json(&config).unwrap(), Cut::even(2));
        let (imputation, selection) = (Imputation::Zero, Selection::Random);
        let prune = Prune { gamma: 0.0, imputation, freeze: true, selection, period_steps: 1, seed: 0 };
        let mode = Mode::Reshard;
        let options = BalanceOptions {
            mode,
            gamma_max: 0.0,
            prune,
            value_bytes: 4,
            state_bytes: 12,
            zero: ZeroStage::Nothing,
            samples: 1,
        };
        let mut balance = Balance::new(options, &model, &cut, &model.cut(&cut).unwrap(), Mesh::of_shards(2));
        let observed = |columns: &[usize]| -> Vec<Observation> {
            let of = |(slow, &columns): (f64, &usize)| {
                let mut observation = Observation::default();
                observation.compute_s[Class::Mlp as usize] = slow * columns as f64 / 256.0;
                observation
            };
            [1.0, 4.0].into_iter().zip(columns).map(of).collect()
        };
        let mut step = 0;
        while balance.target().home.of(Dim::Columns) == [128, 128] {
            step += 1;
            assert!(step < 10, "a rank that takes four times as long is noticed");
            balance.simulate_step(step, 2.0, &observed(&[128, 128]));
        }
        let pending = balance.pending.clone();
        let foretold = balance.judge().expect("it was changed");
        assert_eq!((foretold.step, foretold.steps_after), (step, 0));
        assert_eq!(foretold.after.as_secs_f64(), foretold.prospect.then_s);
        assert_eq!(balance.judge(), None, "it is said once");
        balance.pending = pending;
        let columns = balance.target().home.of(Dim::Columns).to_vec();
        for seconds in [0.9, 0.8, 1.1] {
            step += 1;
            balance.simulate_step(step, seconds, &observed(&columns));
        }
        let known = balance.judge().expect("it was changed");
        assert_eq!((known.after, known.steps_after), (Duration::from_millis(900), 3));
    }

    #[test]
    fn a_rank_may_grow_as_often_as_its_peak_fits_and_one_without_work_to_an_even_share() {
        for (columns, growth, expected) in [
            (vec![100, 100], vec![3.0, 1.5], vec![300, 150]),
            // A peak belongs to the width at which it was seen, even if that is less than an even one.
            (vec![40, 160], vec![2.0, 2.0], vec![80, 320]),
            (vec![0, 200], vec![50.0, 1.0], vec![100, 200]),
            (vec![0, 100, 200], vec![0.5, 1.2, 0.9], vec![100, 120, 200]),
        ] {
            let work = Widths::new(|dim| if dim == Dim::Columns { columns.clone() } else { vec![1; columns.len()] });
            assert_eq!(most(&work, &work, Dim::Columns, &growth), expected, "{columns:?} growing {growth:?}");
        }
    }
}
