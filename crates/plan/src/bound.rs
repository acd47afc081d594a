//! A time that a step takes at least, from what a micro-batch takes unit by unit: it needs no program of the strategy, so it is cheap.

use evenkeel_model::ZeroStage;
use evenkeel_step::{Scope, Strategy, Task, Work, WorkFamily};

use crate::counted::Counted;
use crate::prices::Prices;

/// What a unit takes for a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UnitTime {
    pub forward_s: f64,
    /// The gradients of its input, and what is computed again for them.
    pub input_s: f64,
    /// The part of it that is computed again.
    pub again_s: f64,
    /// The gradients of its weights.
    pub weight_s: f64,
    /// Exchanges before the losses, and behind them.
    pub forward_exchange_s: f64,
    pub backward_exchange_s: f64,
}

/// What a place takes beside its units.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlaceTime {
    /// All sums of gradients over replicas, and those that come after everything else.
    pub reduce_s: f64,
    pub last_reduce_s: f64,
    /// What follows the gradients.
    pub tail_s: f64,
    /// Gathers of split parameters for a micro-batch.
    pub gathers_s: f64,
    /// All passes of a micro-batch from and to other places.
    pub passes_s: f64,
    /// Passes that a micro-batch's first part comes through before, and its gradient behind.
    pub passes_before_s: f64,
    pub passes_behind_s: f64,
}

impl UnitTime {
    pub fn compute_s(&self) -> f64 {
        self.forward_s + self.input_s + self.weight_s
    }

    fn exchange_s(&self) -> f64 {
        self.forward_exchange_s + self.backward_exchange_s
    }
}

/// What the last micro-batch of a program takes unit by unit on a rank, if `first` is the first of those that share its layers.
/// `counted` has all units in one place. What nobody knows takes no time.
pub fn unit_times(prices: &dyn Prices, first: usize, rank: usize, counted: &Counted, units: usize) -> Vec<UnitTime> {
    let mut times = vec![UnitTime::default(); units];
    let last = counted.program.tasks.iter().map(|task| task.micro.index).max().unwrap_or(0);
    let is_loss = |task: &Task| matches!(task.work, Work::Loss(_)) && task.micro.index == last;
    let losses = counted.program.tasks.iter().position(is_loss).unwrap_or(counted.program.tasks.len());
    // Sums over buckets and the tail come once a step, not with every micro-batch.
    let is_of_step = |task: &Task| task.work.is_of_tail() || matches!(task.work.row().scope, Scope::Bucket(_));
    let is_of_micro = |task: &Task| task.micro.index == last && !is_of_step(task);
    let tasks = counted.program.tasks.iter().zip(&counted.counts).enumerate();
    for (index, (task, kernels)) in tasks.filter(|(_, (task, _))| is_of_micro(task)) {
        let time = &mut times[task.unit.0];
        let Some(exchange) = task.exchange else {
            let seconds = prices.task_s(rank, task, kernels).unwrap_or(0.0);
            match task.work {
                Work::Enter | Work::Arrive | Work::Join | Work::Forward => time.forward_s += seconds,
                work if work.row().family == WorkFamily::BackwardWeight => time.weight_s += seconds,
                work => {
                    time.input_s += seconds;
                    time.again_s += if work.row().family == WorkFamily::Recompute { seconds } else { 0.0 };
                }
            }
            continue;
        };
        let of_one_place = &counted.program.groups[exchange.group.0].ranks;
        let members: Vec<usize> = of_one_place.iter().map(|member| first + member).collect();
        let seconds = prices.exchange_s(rank, task.work, exchange.bytes, &members).unwrap_or(0.0);
        *if index < losses { &mut time.forward_exchange_s } else { &mut time.backward_exchange_s } += seconds;
    }
    times
}

/// The sums over some units.
fn total<'a>(units: impl Iterator<Item = &'a UnitTime>) -> UnitTime {
    units.fold(UnitTime::default(), |sum, unit| UnitTime {
        forward_s: sum.forward_s + unit.forward_s,
        input_s: sum.input_s + unit.input_s,
        again_s: sum.again_s + unit.again_s,
        weight_s: sum.weight_s + unit.weight_s,
        forward_exchange_s: sum.forward_exchange_s + unit.forward_exchange_s,
        backward_exchange_s: sum.backward_exchange_s + unit.backward_exchange_s,
    })
}

/// Seconds that a step takes at least, if units take `times[place]` at the places of the pipeline, and their state takes
/// `states[place]`: no place computes, exchanges or passes on less than all of its micro-batches; and its first one has to come
/// through the stages before, its last one back.
pub fn least_step_s(strategy: &Strategy, times: &[impl AsRef<[UnitTime]>], states: &[PlaceTime]) -> f64 {
    let times: Vec<&[UnitTime]> = times.iter().map(AsRef::as_ref).collect();
    let units = times[0].len();
    let mesh = strategy.mesh();
    let runs: Vec<_> = (0..strategy.pp).map(|place| strategy.units(mesh.rank(place, 0, 0), units)).collect();
    let mut place_of = vec![0; units];
    for (place, runs) in runs.iter().enumerate() {
        runs.iter().cloned().flatten().for_each(|unit| place_of[unit] = place);
    }
    let at_place = |place: usize| {
        let own = total(runs[place].iter().cloned().flatten().map(|unit| &times[place][unit]));
        let before = total((0..runs[place][0].start).map(|unit| &times[place_of[unit]][unit]));
        let parts = strategy.arrangement.parts as f64;
        // Gradients of weights can wait until the last micro-batch is on its way back.
        let is_deferred = strategy.pipeline.order.splits_backward();
        let deferred = own.weight_s * if is_deferred { strategy.accumulate as f64 } else { 1.0 };
        let state = &states[place];
        let behind = (before.input_s / parts + state.passes_behind_s).max(deferred) - deferred;
        let arrival_s = before.forward_s / parts + state.passes_before_s;
        let at_ends = |run: &std::ops::Range<usize>| most_exchange_s(&times[place][run.clone()]);
        let at_ends_s = if strategy.pp == 1 { 0.0 } else { runs[place].iter().map(at_ends).sum() };
        (arrival_s + of_micros(strategy, &own, state, behind, at_ends_s)).max(of_passes(strategy, state))
    };
    (0..strategy.pp).map(at_place).fold(0.0, f64::max)
}

/// Seconds that a step takes at least wherever stages are cut: every unit at its fastest place, and all places as busy. `state` is
/// that of a place with its share of the parameters.
pub fn least_step_s_of_any_cut(strategy: &Strategy, times: &[impl AsRef<[UnitTime]>], state: &PlaceTime) -> f64 {
    let times: Vec<&[UnitTime]> = times.iter().map(AsRef::as_ref).collect();
    let shared = |of: fn(&UnitTime) -> f64| {
        let least = |unit: usize| times.iter().map(|times| of(&times[unit])).fold(f64::INFINITY, f64::min);
        (0..times[0].len()).map(least).sum::<f64>() / times.len() as f64
    };
    let mean = UnitTime {
        forward_s: shared(|unit| unit.forward_s),
        input_s: shared(|unit| unit.input_s),
        again_s: shared(|unit| unit.again_s),
        weight_s: shared(|unit| unit.weight_s),
        forward_exchange_s: shared(|unit| unit.forward_exchange_s),
        backward_exchange_s: shared(|unit| unit.backward_exchange_s),
    };
    let stages = strategy.pipeline.stages() as f64 / strategy.pp as f64;
    let most_s = times.iter().map(|times| most_exchange_s(times)).fold(0.0, f64::max);
    let at_ends_s = if strategy.pp == 1 { 0.0 } else { stages * most_s };
    let state = &PlaceTime { last_reduce_s: 0.0, ..*state };
    of_micros(strategy, &mean, state, 0.0, at_ends_s).max(of_passes(strategy, state))
}

/// The exchanges of the unit that has most.
fn most_exchange_s(units: &[UnitTime]) -> f64 {
    units.iter().map(UnitTime::exchange_s).fold(0.0, f64::max)
}

/// Seconds of a place's passes, which follow one another.
fn of_passes(strategy: &Strategy, state: &PlaceTime) -> f64 {
    strategy.accumulate as f64 * state.passes_s
}

/// Seconds of a place from its first task to its last, if a micro-batch takes so long there, and waits so long at the end. The place
/// need not wait for the exchanges at the ends of its stages.
fn of_micros(strategy: &Strategy, own: &UnitTime, state: &PlaceTime, behind_s: f64, at_ends_s: f64) -> f64 {
    let micros = strategy.accumulate as f64;
    // A part alone waits for its exchanges; meanwhile layers are computed again, and gradients of weights, if they come with those of
    // inputs.
    let splits_backward = strategy.pipeline.order.splits_backward() && strategy.pp > 1;
    let meanwhile_s = own.again_s + if splits_backward { 0.0 } else { own.weight_s };
    let exposed_s = match strategy.arrangement.parts {
        1 => own.forward_exchange_s + (own.backward_exchange_s - meanwhile_s).max(0.0) - at_ends_s,
        _ => 0.0,
    };
    let exposed_s = exposed_s.max(0.0);
    let computing_s = micros * (own.compute_s() + exposed_s);
    // Gradients are summed behind the backward of the last micro-batch, or of every one if they are split.
    let (sums, beside_s) = match strategy.zero {
        ZeroStage::Gradients | ZeroStage::Values => (micros, computing_s - own.forward_s),
        ZeroStage::Nothing | ZeroStage::State => (1.0, own.compute_s() + exposed_s - own.forward_s),
    };
    let late_s = (sums * state.reduce_s - beside_s).max(state.last_reduce_s);
    // One lane has all exchanges but passes.
    let exchanging_s = micros * (own.exchange_s() + state.gathers_s) + sums * state.reduce_s;
    (computing_s + behind_s.max(late_s)).max(exchanging_s) + state.tail_s
}

#[cfg(test)]
mod tests {
    use evenkeel_model::Cut;
    use evenkeel_step::{Pipeline, PipelineOrder};

    use super::*;

    fn unit(seconds: f64, exchange_s: f64) -> UnitTime {
        UnitTime {
            forward_s: seconds,
            input_s: 2.0 * seconds,
            again_s: 0.0,
            weight_s: seconds,
            forward_exchange_s: exchange_s,
            backward_exchange_s: exchange_s,
        }
    }

    #[test]
    fn a_pipeline_fills_and_drains_and_every_place_computes_all() {
        let (times, states) = (vec![vec![unit(1.0, 0.0); 8]; 2], [PlaceTime::default(); 2]);
        let of = |order: PipelineOrder, cuts: &[usize], accumulate: usize| {
            let pipeline = Pipeline { cuts: cuts.to_vec(), order };
            let strategy = Strategy { accumulate, ..Strategy::of(Cut::even(1)) }.in_stages(2, pipeline);
            (least_step_s(&strategy, &times, &states), least_step_s_of_any_cut(&strategy, &times, &states[0]))
        };
        // Four units of four seconds, four times; four forwards before, and four gradients behind, of which one micro-batch's weights
        // can be computed at the same time.
        assert_eq!(of(PipelineOrder::OneForwardOneBackward, &[4], 4), (64.0 + 4.0 + (8.0 - 4.0), 64.0));
        assert_eq!(of(PipelineOrder::ZbH1, &[4], 4), (64.0 + 4.0, 64.0));
        assert_eq!(of(PipelineOrder::OneForwardOneBackward, &[6], 4).0, 96.0);
        let strategy = Strategy::of(Cut::even(1)).in_stages(2, Pipeline { cuts: vec![4], order: PipelineOrder::Gpipe });
        let unequal = [vec![unit(1.0, 0.0); 8], vec![unit(0.5, 0.0); 8]];
        assert_eq!(least_step_s_of_any_cut(&strategy, &unequal, &states[0]), 8.0);
    }

    #[test]
    fn exchanges_of_a_part_alone_are_waited_for_but_for_the_gradients_of_weights() {
        let of = |parts: usize, exchange_s: f64| {
            let strategy = Strategy::of(Cut::even(1));
            let strategy = strategy.clone().arranged(strategy.arrangement.in_parts(parts));
            least_step_s(&strategy, &[vec![unit(1.0, exchange_s); 2]], &[PlaceTime::default()])
        };
        assert_eq!((of(1, 0.5), of(1, 3.0)), (8.0 + 1.0, 8.0 + 6.0 + (6.0 - 2.0)));
        assert_eq!((of(2, 0.5), of(2, 3.0)), (8.0, 12.0));
    }

    #[test]
    fn sums_of_gradients_follow_the_last_micro_batch_and_the_tail_follows_them() {
        let of = |zero: ZeroStage, reduce_s: f64, last_reduce_s: f64| {
            let strategy = Strategy { accumulate: 2, ..Strategy::of(Cut::even(1)) }.with_replicas(2, zero);
            let state = PlaceTime { reduce_s, last_reduce_s, tail_s: 1.0, ..PlaceTime::default() };
            least_step_s(&strategy, &[vec![unit(1.0, 0.0)]], &[state])
        };
        assert_eq!(of(ZeroStage::Nothing, 2.0, 0.5), 8.0 + 0.5 + 1.0);
        assert_eq!(of(ZeroStage::Nothing, 5.0, 0.5), 8.0 + (5.0 - 3.0) + 1.0);
        // Split gradients are summed for both micro-batches, behind the first one's forward.
        assert_eq!(of(ZeroStage::Gradients, 5.0, 0.5), 1.0 + 10.0 + 1.0);
    }

    #[test]
    fn passes_follow_one_another_and_fill_the_pipeline() {
        let of = |passes_s: f64| {
            let pipeline = Pipeline { cuts: vec![4], order: PipelineOrder::OneForwardOneBackward };
            let strategy = Strategy { accumulate: 4, ..Strategy::of(Cut::even(1)) }.in_stages(2, pipeline);
            let first = PlaceTime { passes_s, ..PlaceTime::default() };
            let last = PlaceTime { passes_before_s: 0.5 * passes_s, passes_behind_s: 0.5 * passes_s, ..first };
            least_step_s(&strategy, &vec![vec![unit(1.0, 0.0); 8]; 2], &[first, last])
        };
        assert_eq!((of(2.0), of(40.0)), (64.0 + 4.0 + 1.0 + (8.0 + 1.0 - 4.0), 160.0));
    }

    #[test]
    fn gathers_and_sums_of_gradients_take_turns_with_other_exchanges() {
        let strategy = Strategy { accumulate: 2, ..Strategy::of(Cut::even(1)) }.with_replicas(2, ZeroStage::Values);
        let state = PlaceTime { reduce_s: 5.0, gathers_s: 4.0, tail_s: 1.0, ..PlaceTime::default() };
        assert_eq!(least_step_s(&strategy, &[vec![unit(1.0, 1.0)]], &[state]), 2.0 * (2.0 + 4.0 + 5.0) + 1.0);
    }
}
