//! Cutting a run's stages anew: observes how long places compute, and has the ranks move units where that pays.

use evenkeel_balance::{Observation, Recut, StageWatch};
use evenkeel_step::{Mesh, Strategy};

use crate::Error;
use crate::ranks::Ranks;

/// Whether stages that begin at these units fit in memory.
type Fits<'a> = dyn Fn(&[usize]) -> bool + 'a;

/// A run's response to slow places of its pipeline.
pub struct Restage<'a> {
    watch: StageWatch,
    mesh: Mesh,
    fits: Box<Fits<'a>>,
}

/// A change made because of slow places.
#[derive(Clone, Debug, PartialEq)]
pub struct Restaged {
    /// The last step before the change.
    pub step: u64,
    pub recut: Recut,
}

impl<'a> Restage<'a> {
    /// `units` are what the chain's units take in proportion.
    pub fn new(strategy: &Strategy, units: Vec<f64>, fits: impl Fn(&[usize]) -> bool + 'a) -> Restage<'a> {
        let pipeline = &strategy.pipeline;
        let places = (0..pipeline.stages()).map(|stage| pipeline.place(stage, strategy.pp)).collect();
        let watch = StageWatch::new(units, places, strategy.accumulate, pipeline.cuts.clone());
        Restage { watch, mesh: strategy.mesh(), fits: Box::new(fits) }
    }

    /// Takes in a step, and has units moved if that pays and fits.
    pub fn after_step(
        &mut self,
        ranks: &Ranks,
        step: u64,
        observed: &[Observation],
    ) -> Result<Option<Restaged>, Error> {
        let before = self.watch.clone();
        let Some(recut) = self.watch.observe(&self.busy_s(observed)) else { return Ok(None) };
        if !(self.fits)(&recut.cuts) {
            tracing::info!(step, ?recut, "stages would not fit in memory");
            self.watch = before;
            return Ok(None);
        }
        tracing::info!(step, ?recut, "cuts the stages anew");
        ranks.recut(recut.cuts.clone())?;
        Ok(Some(Restaged { step, recut }))
    }

    /// By place: how long the slowest of its ranks computed.
    fn busy_s(&self, observed: &[Observation]) -> Vec<f64> {
        let at = |place: usize| {
            let ranks = (0..observed.len()).filter(|&rank| self.mesh.stage(rank) == place);
            ranks.map(|rank| observed[rank].total_s()).fold(0.0, f64::max)
        };
        (0..self.mesh.pp).map(at).collect()
    }
}
