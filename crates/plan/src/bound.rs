//! A time that a step takes at least, from what a micro-batch takes unit by unit: it needs no program of the strategy, so it is cheap.

use evenkeel_step::{Scope, Strategy, Task, Work, WorkFamily};

use crate::counted::Counted;
use crate::prices::Prices;

/// What a unit takes for a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UnitTime {
    pub forward_s: f64,
    /// The gradients of its input, and what is computed again for them.
    pub input_s: f64,
    /// The gradients of its weights.
    pub weight_s: f64,
    pub exchange_s: f64,
}

impl UnitTime {
    pub fn compute_s(&self) -> f64 {
        self.forward_s + self.input_s + self.weight_s
    }
}

/// What a micro-batch takes unit by unit on a rank, if `first` is the first of those that share its layers. `counted` is the program
/// of one micro-batch, all units in one place. What nobody knows takes no time.
pub fn unit_times(prices: &dyn Prices, first: usize, rank: usize, counted: &Counted, units: usize) -> Vec<UnitTime> {
    let mut times = vec![UnitTime::default(); units];
    // Sums over buckets and the tail come once a step, not with every micro-batch.
    let is_of_micro = |task: &Task| !task.work.is_of_tail() && !matches!(task.work.row().scope, Scope::Bucket(_));
    for (task, kernels) in counted.program.tasks.iter().zip(&counted.counts).filter(|(task, _)| is_of_micro(task)) {
        let time = &mut times[task.unit.0];
        let Some(exchange) = task.exchange else {
            let seconds = prices.task_s(rank, task, kernels).unwrap_or(0.0);
            match task.work {
                Work::Enter | Work::Arrive | Work::Join | Work::Forward => time.forward_s += seconds,
                work if work.row().family == WorkFamily::BackwardWeight => time.weight_s += seconds,
                _ => time.input_s += seconds,
            }
            continue;
        };
        let of_one_place = &counted.program.groups[exchange.group.0].ranks;
        let members: Vec<usize> = of_one_place.iter().map(|member| first + member).collect();
        time.exchange_s += prices.exchange_s(rank, task.work, exchange.bytes, &members).unwrap_or(0.0);
    }
    times
}

/// Seconds that a step takes at least, if units take `times[place]` at the places of the pipeline: no place computes, or exchanges,
/// less than all of its micro-batches; and its first one has to come through the stages before, its last one back.
pub fn least_step_s(strategy: &Strategy, times: &[impl AsRef<[UnitTime]>]) -> f64 {
    let times: Vec<&[UnitTime]> = times.iter().map(AsRef::as_ref).collect();
    let (units, micros) = (times[0].len(), strategy.accumulate as f64);
    let mesh = strategy.mesh();
    let runs: Vec<_> = (0..strategy.pp).map(|place| strategy.units(mesh.rank(place, 0, 0), units)).collect();
    let mut place_of = vec![0; units];
    for (place, runs) in runs.iter().enumerate() {
        runs.iter().cloned().flatten().for_each(|unit| place_of[unit] = place);
    }
    let at_place = |place: usize| {
        let own = || runs[place].iter().cloned().flatten().map(|unit| &times[place][unit]);
        let sum = |of: fn(&UnitTime) -> f64| own().map(of).sum::<f64>();
        let before = |of: fn(&UnitTime) -> f64| -> f64 {
            let all: f64 = (0..runs[place][0].start).map(|unit| of(&times[place_of[unit]][unit])).sum();
            all / strategy.arrangement.parts as f64
        };
        // Gradients of weights can wait until the last micro-batch is on its way back.
        let is_deferred = strategy.pipeline.order.splits_backward();
        let deferred = sum(|unit| unit.weight_s) * if is_deferred { micros } else { 1.0 };
        let behind = before(|unit| unit.input_s).max(deferred) - deferred;
        let computing = micros * sum(UnitTime::compute_s) + behind;
        before(|unit| unit.forward_s) + computing.max(micros * sum(|unit| unit.exchange_s))
    };
    (0..strategy.pp).map(at_place).fold(0.0, f64::max)
}

/// Seconds that a step takes at least wherever stages are cut: every unit at its fastest place, and all places as busy.
pub fn least_step_s_of_any_cut(strategy: &Strategy, times: &[impl AsRef<[UnitTime]>]) -> f64 {
    let times: Vec<&[UnitTime]> = times.iter().map(AsRef::as_ref).collect();
    let shared = |of: fn(&UnitTime) -> f64| {
        let least = |unit: usize| times.iter().map(|times| of(&times[unit])).fold(f64::INFINITY, f64::min);
        (0..times[0].len()).map(least).sum::<f64>() / times.len() as f64
    };
    strategy.accumulate as f64 * shared(UnitTime::compute_s).max(shared(|unit| unit.exchange_s))
}

#[cfg(test)]
mod tests {
    use evenkeel_model::Cut;
    use evenkeel_step::{Pipeline, PipelineOrder};

    use super::*;

    #[test]
    fn a_pipeline_fills_and_drains_and_every_place_computes_all() {
        let unit = UnitTime { forward_s: 1.0, input_s: 2.0, weight_s: 1.0, exchange_s: 0.5 };
        let times = vec![vec![unit; 8]; 2];
        let of = |order: PipelineOrder, cuts: &[usize], accumulate: usize| {
            let pipeline = Pipeline { cuts: cuts.to_vec(), order };
            let strategy = Strategy { accumulate, ..Strategy::of(Cut::even(1)) }.in_stages(2, pipeline);
            (least_step_s(&strategy, &times), least_step_s_of_any_cut(&strategy, &times))
        };
        // Four units of four seconds, four times; four forwards before, and four gradients behind, of which one micro-batch's weights
        // can be computed at the same time.
        assert_eq!(of(PipelineOrder::OneForwardOneBackward, &[4], 4), (64.0 + 4.0 + (8.0 - 4.0), 64.0));
        assert_eq!(of(PipelineOrder::ZbH1, &[4], 4), (64.0 + 4.0, 64.0));
        assert_eq!(of(PipelineOrder::OneForwardOneBackward, &[6], 4).0, 96.0);
        let twice_as_fast = UnitTime { forward_s: 0.5, input_s: 1.0, weight_s: 0.5, exchange_s: 0.25 };
        let strategy = Strategy::of(Cut::even(1)).in_stages(2, Pipeline { cuts: vec![4], order: PipelineOrder::Gpipe });
        assert_eq!(least_step_s_of_any_cut(&strategy, &[vec![unit; 8], vec![twice_as_fast; 8]]), 8.0);
    }

    #[test]
    fn exchanges_bound_a_step_too() {
        let unit = UnitTime { forward_s: 1.0, input_s: 0.0, weight_s: 0.0, exchange_s: 3.0 };
        assert_eq!(least_step_s(&Strategy::of(Cut::even(1)), &[vec![unit; 2]]), 6.0);
    }
}
