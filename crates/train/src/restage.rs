//! Cutting a run's stages anew: observes how long units and places compute, and has the ranks move units where that pays.

use evenkeel_balance::{Fullness, Observation, Recut, StageWatch, Staging};
use evenkeel_device::DeviceKind;
use evenkeel_step::{Mesh, Strategy};

use crate::Error;
use crate::ranks::Ranks;
use crate::run::RankReport;
use crate::samples::Samples;

/// On GPUs, where stamps cut graphs short: a small model's observed step took a quarter longer on parts of an H200.
const GLANCE_EVERY_STEPS: u64 = 4;

/// A run's response to slow places of its pipeline.
pub struct Restage<'a> {
    watch: StageWatch,
    mesh: Mesh,
    fullness: Box<Fullness<'a>>,
    is_measured: bool,
}

/// A change made because of slow places.
#[derive(Clone, Debug, PartialEq)]
pub struct Restaged {
    /// The last step before the change.
    pub step: u64,
    pub recut: Recut,
}

impl<'a> Restage<'a> {
    pub fn new(strategy: &Strategy, staging: Staging, fullness: impl Fn(&[usize]) -> Vec<f64> + 'a) -> Restage<'a> {
        let watch = StageWatch::new(staging, strategy.pipeline.cuts.clone());
        let watch = watch.glancing(if strategy.devices.kind() == DeviceKind::Cuda { GLANCE_EVERY_STEPS } else { 1 });
        Restage { watch, mesh: strategy.mesh(), fullness: Box::new(fullness), is_measured: false }
    }

    /// Measures units before the first step behind `step`, on its samples, and has them moved if that pays and fits.
    pub fn before_step(&mut self, ranks: &Ranks, step: u64, micros: &[Samples]) -> Result<Option<Restaged>, Error> {
        if std::mem::replace(&mut self.is_measured, true) {
            return Ok(None);
        }
        // A few micro-batches tell as much as all.
        let few = micros.len().min(2 * self.mesh.pp * self.mesh.dp);
        let by_rank = ranks.unit_seconds(micros[..few].to_vec())?;
        // A unit takes as long as the slowest of the ranks that have it.
        let slowest = |unit: usize| by_rank.iter().map(|units| units[unit]).fold(0.0, f64::max);
        let unit_s: Vec<f64> = (0..by_rank[0].len()).map(slowest).collect();
        tracing::debug!(?unit_s, "measured units");
        if unit_s.iter().any(|seconds| *seconds <= 0.0) {
            // A clock too coarse tells nothing.
            return Ok(None);
        }
        let recut = self.watch.measure(&unit_s, &self.fullness);
        recut.map(|recut| carry_out(ranks, step, recut)).transpose()
    }

    /// Whether to observe the step of this number.
    pub fn is_due(&self, step: u64) -> bool {
        self.watch.is_due(step)
    }

    /// Takes in an observed step, and has units moved if that pays in the steps that are left and fits.
    pub fn after_step(
        &mut self,
        ranks: &Ranks,
        step: u64,
        observed: &[Observation],
        left: u64,
    ) -> Result<Option<Restaged>, Error> {
        let busy_s: Vec<f64> = self.slowest(observed).iter().map(Observation::total_s).collect();
        let recut = self.watch.observe(&busy_s, left, &self.fullness);
        recut.map(|recut| carry_out(ranks, step, recut)).transpose()
    }

    /// A report of each place's step.
    pub fn reports(&self, observed: &[Observation]) -> Vec<RankReport> {
        let report = |(observed, units)| RankReport { observed, units, ..RankReport::default() };
        self.slowest(observed).into_iter().zip(self.watch.units()).map(report).collect()
    }

    /// By place: the one of its ranks that computed for longest.
    fn slowest(&self, observed: &[Observation]) -> Vec<Observation> {
        let at = |place: usize| {
            let ranks = (0..observed.len()).filter(|&rank| self.mesh.place(rank) == place);
            let slowest = ranks.max_by(|&a, &b| observed[a].total_s().total_cmp(&observed[b].total_s()));
            observed[slowest.expect("every place has ranks")]
        };
        (0..self.mesh.pp).map(at).collect()
    }
}

fn carry_out(ranks: &Ranks, step: u64, recut: Recut) -> Result<Restaged, Error> {
    tracing::info!(step, ?recut, "cuts the stages anew");
    ranks.recut(recut.cuts.clone())?;
    Ok(Restaged { step, recut })
}
