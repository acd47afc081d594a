//! The stages of a run: where the chain is best cut, how long its places compute, and when to cut it anew.

use std::collections::{HashMap, VecDeque};

use crate::cut::{self, best_cut_that_fits, bounds, sums, weight_of_slowest};
use crate::statistics::{push, trimmed_mean};

/// Observed steps that the first decision looks back on; each change doubles them, so that a pipeline whose places take turns at
/// being slow is not cut all the time.
const FIRST_WINDOW: usize = 6;
const LAST_WINDOW: usize = 24;
/// A new cut must be foretold to take this share less time: moving state costs about a step, and estimates err.
const LEAST_GAIN: f64 = 0.06;
/// The same before the first step, when units have been measured one by one.
const LEAST_GAIN_AT_FIRST: f64 = 0.02;
/// A change costs as much as so many steps: state moves, and programs are written anew.
const STEPS_OF_RECUT: f64 = 2.0;
/// Places whose slowness has changed by less than this share are as slow as before.
const LEAST_CHANGE: f64 = LEAST_GAIN / 2.0;
/// Rounds after which kinds of units and places are told apart.
const ROUNDS: usize = 200;

/// By place: the memory that it needs over what it has, if stages begin at these units.
pub type Fullness<'a> = dyn Fn(&[usize]) -> Vec<f64> + 'a;

/// What a unit takes for a micro-batch, by an estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitCost {
    pub seconds: f64,
    /// Weights, gradients and the optimizer's state.
    pub state_bytes: f64,
    /// Kept from forward to backward.
    pub kept_bytes: f64,
}

/// A stage, wherever the chain is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePlace {
    pub place: usize,
    /// The most micro-batches that it keeps for their backward at a time.
    pub kept_micros: usize,
}

/// A chain that is cut in stages.
#[derive(Clone, Debug)]
pub struct Staging {
    pub units: Vec<UnitCost>,
    pub stages: Vec<StagePlace>,
    /// Of a step.
    pub micros: usize,
}

impl Staging {
    /// The cuts with the shortest step that fits, if there are any. `slowness` is by place what a unit takes there over the estimate,
    /// `fullness` what places need over what they have.
    pub fn best_cut(&self, slowness: &[f64], fullness: &Fullness) -> Option<Vec<usize>> {
        let seconds = self.seconds(slowness);
        let bytes = |stage: &StagePlace| {
            let bytes = |unit: &UnitCost| unit.state_bytes + stage.kept_micros as f64 * unit.kept_bytes;
            self.units.iter().map(bytes).collect()
        };
        let bytes: Vec<Vec<f64>> = self.stages.iter().map(bytes).collect();
        let by_stages = best_cut_that_fits(&seconds, self.micros, &bytes, |cuts| {
            let of_places = fullness(cuts);
            self.stages.iter().map(|stage| of_places[stage.place]).collect()
        })?;
        if self.stages.len() == self.places() {
            return Some(by_stages);
        }
        let before = sums(&self.units.iter().map(|unit| unit.seconds).collect::<Vec<f64>>());
        let times = |cuts: &[usize]| self.times(cuts, &before, slowness);
        let shorter = self.better_for_places(by_stages.clone(), |cuts| self.step_of(&times(cuts)));
        let evener = self.better_for_places(shorter.clone(), |cuts| self.penalised_step_of(&times(cuts)));
        let fitting = [evener, shorter].into_iter().find(|cuts| *cuts == by_stages || cut::fits(&fullness(cuts)));
        Some(fitting.unwrap_or(by_stages))
    }

    /// A search by stages leaves places with several of them unequal: moves a unit over a cut, or one over each of two, as long as
    /// that makes the cost less.
    fn better_for_places(&self, mut cuts: Vec<usize>, cost: impl Fn(&[usize]) -> f64) -> Vec<usize> {
        let mut least = cost(&cuts);
        loop {
            let moved = |steps: &[(usize, isize)]| {
                let mut moved = cuts.clone();
                steps.iter().for_each(|&(index, by)| moved[index] = moved[index].saturating_add_signed(by));
                let bounds = bounds(&moved, self.units.len());
                bounds.windows(2).all(|pair| pair[0] < pair[1]).then(|| (cost(&moved), moved))
            };
            let steps: Vec<(usize, isize)> = (0..cuts.len()).flat_map(|index| [(index, -1), (index, 1)]).collect();
            let best_of = |moves: &mut dyn Iterator<Item = (f64, Vec<usize>)>| {
                moves.min_by(|a, b| a.0.total_cmp(&b.0)).filter(|(cost, _)| *cost < least * (1.0 - 1e-9))
            };
            let one = || best_of(&mut steps.iter().filter_map(|&step| moved(&[step])));
            // There are many pairs.
            let two = || {
                let pairs = steps
                    .iter()
                    .enumerate()
                    .flat_map(|(place, first)| steps[place..].iter().map(move |it| [*first, *it]));
                best_of(&mut pairs.filter_map(|pair| moved(&pair)))
            };
            match one().or_else(two) {
                Some(best) => (least, cuts) = best,
                None => return cuts,
            }
        }
    }

    /// By stage, then by unit.
    fn seconds(&self, slowness: &[f64]) -> Vec<Vec<f64>> {
        let at = |stage: &StagePlace| self.units.iter().map(|unit| unit.seconds * slowness[stage.place]).collect();
        self.stages.iter().map(at).collect()
    }

    fn places(&self) -> usize {
        self.stages.iter().map(|stage| stage.place + 1).max().unwrap_or(0)
    }

    /// By unit.
    fn places_of_units(&self, cuts: &[usize]) -> Vec<usize> {
        let bounds = bounds(cuts, self.units.len());
        let runs = bounds.windows(2).zip(&self.stages);
        runs.flat_map(|(run, stage)| std::iter::repeat_n(stage.place, run[1] - run[0])).collect()
    }

    /// By place: its estimate for a micro-batch.
    fn work(&self, cuts: &[usize]) -> Vec<f64> {
        let before = sums(&self.units.iter().map(|unit| unit.seconds).collect::<Vec<f64>>());
        self.times(cuts, &before, &vec![1.0; self.places()])
    }

    /// The longest that a step takes.
    fn step_s(&self, cuts: &[usize], slowness: &[f64]) -> f64 {
        let times: Vec<f64> = self.work(cuts).iter().zip(slowness).map(|(work, slowness)| work * slowness).collect();
        self.step_of(&times)
    }

    /// The same if places take so long for a micro-batch: every place once, and the slowest for all others.
    fn step_of(&self, times: &[f64]) -> f64 {
        let slowest_s = times.iter().copied().fold(0.0, f64::max);
        times.iter().sum::<f64>() + weight_of_slowest(self.micros, times.len()) * slowest_s
    }

    /// The step's time plus a small penalty for uneven places: where several are slowest, relieving one alone does not shorten the
    /// step.
    fn penalised_step_of(&self, times: &[f64]) -> f64 {
        const WEIGHT: f64 = 1e-3;
        let squares: f64 = times.iter().map(|time| time * time).sum();
        self.step_of(times) + WEIGHT * squares / times.iter().sum::<f64>()
    }

    /// By place: its seconds for a micro-batch, if units take `before` until each of them.
    fn times(&self, cuts: &[usize], before: &[f64], slowness: &[f64]) -> Vec<f64> {
        let mut times = vec![0.0; slowness.len()];
        let mut start = 0;
        for (stage, end) in self.stages.iter().zip(cuts.iter().copied().chain([self.units.len()])) {
            times[stage.place] += slowness[stage.place] * (before[end] - before[start]);
            start = end;
        }
        times
    }

    /// A time that no cut makes a step shorter than: all places take equally long, and everything is computed at the fastest.
    fn least_step_s(&self, slowness: &[f64]) -> f64 {
        let work: f64 = self.units.iter().map(|unit| unit.seconds).sum();
        let even_s = work / slowness.iter().map(|slowness| 1.0 / slowness).sum::<f64>();
        let fastest = slowness.iter().copied().fold(f64::INFINITY, f64::min);
        work * fastest + weight_of_slowest(self.micros, slowness.len()) * even_s
    }

    /// Replaces the estimates by what units took where they were. Units with one estimate are alike, and each place is slower than
    /// another by one factor, so both follow from units that are alike at several places; without any, estimates remain in
    /// proportion between places. Returns the slowness of places.
    fn measure(&mut self, cuts: &[usize], unit_s: &[f64]) -> Vec<f64> {
        let places = self.places_of_units(cuts);
        let kind_of = |unit: &UnitCost| (unit.seconds as f32).to_bits();
        let kinds: Vec<u32> = self.units.iter().map(kind_of).collect();
        let mut seconds: HashMap<u32, f64> =
            kinds.iter().zip(&self.units).map(|(kind, unit)| (*kind, unit.seconds)).collect();
        let mut slowness = vec![1.0; self.places()];
        for _ in 0..ROUNDS {
            let mut at_places = vec![[0.0; 2]; slowness.len()];
            for ((place, kind), measured) in places.iter().zip(&kinds).zip(unit_s) {
                at_places[*place][0] += measured;
                at_places[*place][1] += seconds[kind];
            }
            slowness = at_places.iter().map(|[measured, expected]| measured / expected).collect();
            let mut of_kinds: HashMap<u32, [f64; 2]> = HashMap::new();
            for ((place, kind), measured) in places.iter().zip(&kinds).zip(unit_s) {
                let sums = of_kinds.entry(*kind).or_default();
                sums[0] += measured;
                sums[1] += slowness[*place];
            }
            seconds = of_kinds.into_iter().map(|(kind, [measured, slowness])| (kind, measured / slowness)).collect();
        }
        let fastest = slowness.iter().copied().fold(f64::INFINITY, f64::min);
        for (unit, kind) in self.units.iter_mut().zip(&kinds) {
            unit.seconds = seconds[kind] * fastest;
        }
        slowness.into_iter().map(|slowness| slowness / fastest).collect()
    }
}

/// The stages of a run, and how long their places compute.
#[derive(Clone, Debug)]
pub struct StageWatch {
    staging: Staging,
    cuts: Vec<usize>,
    window: usize,
    /// It looks at one step in so many, and at the next ones, too, once one looks unequal.
    every_steps: u64,
    /// By step and place: seconds.
    busy_s: VecDeque<Vec<f64>>,
    /// Whether a step was observed since the last change: the first one includes start-up work.
    has_begun: bool,
    /// By place: the slowness for which no cut was found to be better than the present one.
    settled: Option<Vec<f64>>,
}

/// Another cut, and what is expected of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Recut {
    pub cuts: Vec<usize>,
    /// By place, over the fastest.
    pub slowness: Vec<f64>,
    /// The time of a step then, over that of one now.
    pub ratio: f64,
}

impl StageWatch {
    pub fn new(staging: Staging, cuts: Vec<usize>) -> StageWatch {
        assert_eq!(staging.stages.len(), cuts.len() + 1, "every stage but the first has a start");
        StageWatch {
            staging,
            cuts,
            window: FIRST_WINDOW,
            every_steps: 1,
            busy_s: VecDeque::new(),
            has_begun: false,
            settled: None,
        }
    }

    /// The same where looking at a step makes it slower: one in so many is enough as long as places seem equal.
    pub fn glancing(self, every_steps: u64) -> StageWatch {
        StageWatch { every_steps, ..self }
    }

    /// Whether to observe the step of this number.
    pub fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every_steps) || !self.has_begun || !self.busy_s.is_empty()
    }

    /// By place: the number of its units.
    pub fn units(&self) -> Vec<usize> {
        let mut units = vec![0; self.staging.places()];
        self.staging.places_of_units(&self.cuts).into_iter().for_each(|place| units[place] += 1);
        units
    }

    /// Takes in the seconds that each unit took at its place in a step; returns a cut that is better, which is the present one from
    /// here on.
    pub fn measure(&mut self, unit_s: &[f64], fullness: &Fullness) -> Option<Recut> {
        let slowness = self.staging.measure(&self.cuts, unit_s);
        if !self.may_gain(&slowness, LEAST_GAIN_AT_FIRST) {
            return None;
        }
        self.decide(slowness, LEAST_GAIN_AT_FIRST, fullness)
    }

    /// The same for the seconds that each place computed in a step, once there are enough of them. A cut must pay in the `left` steps.
    pub fn observe(&mut self, busy_s: &[f64], left: u64, fullness: &Fullness) -> Option<Recut> {
        if !std::mem::replace(&mut self.has_begun, true) {
            return None;
        }
        push(&mut self.busy_s, busy_s.to_vec(), self.window);
        let (slowness, least_gain) = (self.slowness(), LEAST_GAIN.max(STEPS_OF_RECUT / left as f64));
        let glances = self.every_steps > 1;
        let is_known = self.settled.as_ref().is_some_and(|settled| are_close(settled, &slowness));
        if is_known || !self.may_gain(&slowness, least_gain) {
            if glances {
                self.busy_s.clear();
            }
            return None;
        }
        if self.busy_s.len() < self.window {
            return None;
        }
        self.settled = Some(slowness.clone());
        let recut = self.decide(slowness, least_gain, fullness);
        if recut.is_some() {
            self.window = LAST_WINDOW.min(2 * self.window);
        }
        if glances || recut.is_some() {
            self.busy_s.clear();
        }
        recut
    }

    /// Whether some cut might make a step shorter by this share. It is asked before [`StageWatch::decide`]: a search takes long with
    /// many units, and dry runs for memory take longer.
    fn may_gain(&self, slowness: &[f64], least_gain: f64) -> bool {
        self.staging.least_step_s(slowness) <= self.staging.step_s(&self.cuts, slowness) * (1.0 - least_gain)
    }

    fn decide(&mut self, slowness: Vec<f64>, least_gain: f64, fullness: &Fullness) -> Option<Recut> {
        let now_s = self.staging.step_s(&self.cuts, &slowness);
        let ratio = |cuts: &[usize]| self.staging.step_s(cuts, &slowness) / now_s;
        let is_better = |cuts: &[usize]| ratio(cuts) <= 1.0 - least_gain;
        self.staging.best_cut(&slowness, &|_| vec![0.0; slowness.len()]).filter(|cuts| is_better(cuts))?;
        let cuts = self.staging.best_cut(&slowness, fullness).filter(|cuts| is_better(cuts))?;
        let ratio = ratio(&cuts);
        self.cuts.clone_from(&cuts);
        (self.has_begun, self.settled) = (false, None);
        Some(Recut { cuts, slowness, ratio })
    }

    /// By place: how much longer it takes for its units than the fastest would.
    fn slowness(&self) -> Vec<f64> {
        let of_place = |(place, work): (usize, f64)| {
            let busy_s = trimmed_mean(self.busy_s.iter().map(|step| step[place]).collect());
            busy_s.expect("a step was observed") / work
        };
        let rates: Vec<f64> = self.staging.work(&self.cuts).into_iter().enumerate().map(of_place).collect();
        let fastest = rates.iter().copied().fold(f64::INFINITY, f64::min);
        rates.into_iter().map(|rate| rate / fastest).collect()
    }
}

fn are_close(before: &[f64], now: &[f64]) -> bool {
    before.iter().zip(now).all(|(before, now)| (now / before - 1.0).abs() < LEAST_CHANGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOMY: &Fullness<'static> = &|_| vec![0.0; 3];

    /// Units that take so long, at places that keep a micro-batch each.
    fn staging(seconds: &[f64], places: usize, micros: usize) -> Staging {
        let unit = |&seconds: &f64| UnitCost { seconds, state_bytes: 1.0, kept_bytes: 1.0 };
        let stages = (0..places).map(|place| StagePlace { place, kept_micros: 1 }).collect();
        Staging { units: seconds.iter().map(unit).collect(), stages, micros }
    }

    /// The steps until a cut is found, and that cut, if places take so long for a unit.
    fn found(rates: &[f64], noise: f64, cuts: &[usize], fullness: &Fullness) -> Option<(usize, Recut)> {
        let mut watch = StageWatch::new(staging(&[1.0; 12], rates.len(), 8), cuts.to_vec());
        (1..=30).find_map(|step| {
            let wobble = |place: usize| 1.0 + noise * ((step * 7 + place * 3) % 5) as f64 / 4.0;
            let work = watch.staging.work(&watch.cuts);
            let busy: Vec<f64> = (0..rates.len()).map(|place| rates[place] * work[place] * wobble(place)).collect();
            Some((step, watch.observe(&busy, 1000, fullness)?))
        })
    }

    #[test]
    fn a_place_that_is_slow_gets_fewer_units_within_a_few_steps() {
        let (steps, recut) = found(&[1.0, 2.0], 0.0, &[6], ROOMY).expect("one is slow");
        assert!(steps <= 10, "{steps}");
        assert_eq!(recut.cuts, [8]);
        assert_eq!(recut.slowness, [1.0, 2.0]);
        // Both take 8 for a micro-batch then; before, 6 and 12.
        assert!((recut.ratio - (16.0 + 7.0 * 8.0) / (18.0 + 7.0 * 12.0)).abs() < 1e-12, "{}", recut.ratio);
    }

    #[test]
    fn a_glance_at_one_step_in_four_is_enough_until_places_seem_unequal() {
        let mut watch = StageWatch::new(staging(&[1.0; 12], 2, 8), vec![6]).glancing(4);
        let mut looks = Vec::new();
        let (equal, unequal) = ([6.0, 6.2], [6.0, 12.0]);
        let recut = (1..=60).find_map(|step| {
            if !watch.is_due(step) {
                return None;
            }
            looks.push(step);
            Some((step, watch.observe(if step < 22 { &equal } else { &unequal }, 1000, ROOMY)?))
        });
        let (step, recut) = recut.expect("one becomes slow");
        assert_eq!(recut.cuts, [8]);
        assert_eq!(looks, [1, 4, 8, 12, 16, 20, 24, 25, 26, 27, 28, 29]);
        assert!(step <= 22 + 30);
    }

    /// Three units cannot be spread evenly over two places.
    #[test]
    fn a_slowness_that_no_cut_improves_is_examined_once() {
        let mut watch = StageWatch::new(staging(&[1.0; 3], 2, 8), vec![2]).glancing(4);
        let mut looks = Vec::new();
        for step in 1..=40 {
            if watch.is_due(step) {
                looks.push(step);
                assert_eq!(watch.observe(&[2.0, if step < 32 { 1.1 } else { 1.5 }], 1000, ROOMY), None);
            }
        }
        let expected = [1, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 28, 32, 33];
        assert_eq!(looks[..expected.len()], expected);
    }

    /// At first the cut could be better, if units could be divided.
    #[test]
    fn a_gain_just_above_the_least_is_found_after_nothing_was() {
        for every_steps in [1, 4] {
            let mut watch = StageWatch::new(staging(&[1.0; 9], 2, 8), vec![4]).glancing(every_steps);
            let mut observe = |steps: std::ops::Range<u64>, second: f64| {
                steps.into_iter().find_map(|step| {
                    if watch.is_due(step) { Some((step, watch.observe(&[4.0, second], 1000, ROOMY)?)) } else { None }
                })
            };
            assert_eq!(observe(1..60, 5.0), None);
            let (step, recut) = observe(60..90, 5.45).expect("the second place takes 9 % longer");
            assert_eq!((recut.cuts, step < 75), (vec![5], true), "{step}");
        }
    }

    #[test]
    fn equal_places_are_left_alone_whatever_their_noise() {
        assert_eq!(found(&[1.0, 1.0], 0.1, &[6], ROOMY), None);
        assert_eq!(found(&[1.0, 1.0, 1.0], 0.1, &[4, 8], ROOMY), None);
    }

    #[test]
    fn nothing_moves_for_the_last_steps() {
        let mut watch = StageWatch::new(staging(&[1.0; 12], 2, 8), vec![6]);
        assert_eq!((1..=12).find_map(|step| watch.observe(&[6.0, 12.0], 12 - step, ROOMY)), None);
    }

    #[test]
    fn one_micro_batch_does_not_give_everything_to_the_place_that_seems_fastest() {
        let mut watch = StageWatch::new(staging(&[1.0; 160], 16, 1), (1..16).map(|stage| 10 * stage).collect());
        let noisy: Vec<f64> = (0..16).map(|place| 10.0 + 0.3 * (place % 3) as f64).collect();
        assert_eq!((0..30).find_map(|_| watch.observe(&noisy, 1000, ROOMY)), None);
    }

    #[test]
    fn a_place_without_memory_for_more_gets_what_fits() {
        let with_room_for = |units: usize| move |cuts: &[usize]| vec![cuts[0] as f64 / units as f64, 0.0];
        let (_, recut) = found(&[1.0, 2.0], 0.0, &[6], &with_room_for(7)).expect("one is slow");
        assert_eq!(recut.cuts, [7]);
        assert_eq!(found(&[1.0, 2.0], 0.0, &[6], &with_room_for(6)), None);
    }

    #[test]
    fn units_and_places_are_told_apart() {
        // Layers take 1, not 2; the head takes 6 instead of 3, and the second place twice as long as the first.
        let mut watch = StageWatch::new(staging(&[&[2.0; 12][..], &[3.0]].concat(), 2, 8), vec![7]);
        let recut = watch.measure(&[&[1.0; 7][..], &[2.0; 5], &[12.0]].concat(), ROOMY).expect("the head is heavy");
        assert!(recut.slowness.iter().zip([1.0, 2.0]).all(|(a, b)| (a - b).abs() < 1e-6), "{:?}", recut.slowness);
        let seconds: Vec<f64> = watch.staging.units.iter().map(|unit| unit.seconds).collect();
        assert!(seconds[..12].iter().all(|layer| (layer - 1.0).abs() < 1e-6) && (seconds[12] - 6.0).abs() < 1e-6);
        assert_eq!(recut.cuts, [12]);
    }

    #[test]
    fn places_with_two_stages_take_equally_long() {
        // The last unit is a head as heavy as eleven others. In a V, the first place has it.
        let mut staging = staging(&[&[1.0; 21][..], &[11.0]].concat(), 2, 8);
        staging.stages = [0, 1, 1, 0].map(|place| StagePlace { place, kept_micros: 2 }).to_vec();
        let cuts = staging.best_cut(&[1.0; 2], ROOMY).expect("everything fits");
        assert_eq!(staging.work(&cuts), [16.0, 16.0], "{cuts:?}");
    }

    /// Two places are slowest at first, and neither can be relieved to any avail before the other.
    #[test]
    fn no_place_of_four_with_two_stages_has_much_more_than_another() {
        let mut seconds = [0.5, 1.0].repeat(17);
        *seconds.last_mut().unwrap() = 2.5;
        let mut staging = staging(&seconds, 4, 8);
        staging.stages = [0, 1, 2, 3, 3, 2, 1, 0].map(|place| StagePlace { place, kept_micros: 4 }).to_vec();
        let cuts = staging.best_cut(&[1.0; 4], &|_| vec![0.0; 4]).expect("everything fits");
        let (times, even) = (staging.work(&cuts), seconds.iter().sum::<f64>() / 4.0);
        assert!(times.iter().all(|time| *time <= even * 1.1), "{times:?} {cuts:?}");
    }

    #[test]
    fn places_without_units_alike_differ_as_measured_and_expected_times_do() {
        let mut staging = staging(&[1.0, 1.0, 3.0, 3.0], 2, 8);
        let slowness = staging.measure(&[2], &[2.0, 2.0, 3.0, 3.0]);
        assert_eq!(slowness, [2.0, 1.0]);
    }
}
