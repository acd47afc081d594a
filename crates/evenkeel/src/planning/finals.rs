//! The finals of a plan: what is foretold to be the fastest is run, whole models in turns, before one is taken. Foretold times are off
//! by a few percent, and so are the differences between the best.

use evenkeel_plan::Profile;
use evenkeel_step::Strategy;

use super::choice::Plan;
use super::job::Job;
use crate::Failure;

/// Strategies that are run.
pub const FINALISTS: usize = 5;
/// The share by which a finalist may be slower than the best.
const NEAR: f64 = 0.12;
/// Times that each is run.
const ROUNDS: usize = 3;
/// More strategies of a job are not run, however the order changes by what was measured: the same profile gives the same plan.
pub const MOST_RUNS: usize = 15;

/// The foremost strategies of a plan that were never run.
pub fn finalists(job: &Job, plan: &Plan, profile: &Profile) -> Vec<Strategy> {
    let Some(best) = plan.fitting.first() else { return Vec::new() };
    let foremost = plan.fitting.iter().take(FINALISTS).map(|judged| &judged.timed);
    let near = foremost.filter(|timed| timed.step_s <= best.timed.step_s * (1.0 + NEAR));
    let new = near.filter(|timed| profile.run_s(&job.name(&timed.strategy)).is_none());
    new.map(|timed| timed.strategy.clone()).collect()
}

/// Runs whole models in turns.
pub fn run(job: &Job, strategies: &[Strategy], profile: &mut Profile) -> Result<(), Failure> {
    for round in 0..ROUNDS as u64 {
        for strategy in strategies {
            tracing::info!(%strategy, "runs a finalist");
            let ranks = job.start_whole(strategy)?;
            profile.note_run(&job.name(strategy), job.step(&ranks, strategy, round)?.untraced_s);
        }
    }
    Ok(())
}
