//! Watches how long the places of a pipeline compute, and decides where to cut the chain anew.

use std::collections::VecDeque;

use crate::cut::best_cut;
use crate::statistics::{push, trimmed_mean};

/// Steps that the first decision looks back on; each change doubles them, so that a pipeline whose places take turns at being slow is
/// not cut all the time.
const FIRST_WINDOW: usize = 6;
const LAST_WINDOW: usize = 24;
/// A new cut must be foretold to take this share less time: moving state costs about a step, and estimates err.
const LEAST_GAIN: f64 = 0.06;

/// The stages of a run, and how long their places compute.
#[derive(Clone, Debug)]
pub struct StageWatch {
    /// By unit: what it takes in proportion to others.
    units: Vec<f64>,
    /// By stage.
    places: Vec<usize>,
    micros: usize,
    cuts: Vec<usize>,
    window: usize,
    /// By step and place: seconds.
    busy_s: VecDeque<Vec<f64>>,
    /// Whether a step was made since the last change: the first one includes start-up work.
    has_begun: bool,
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
    /// `units` are in proportion; `places` says which place has each stage.
    pub fn new(units: Vec<f64>, places: Vec<usize>, micros: usize, cuts: Vec<usize>) -> StageWatch {
        assert_eq!(places.len(), cuts.len() + 1, "every stage has a place");
        StageWatch { units, places, micros, cuts, window: FIRST_WINDOW, busy_s: VecDeque::new(), has_begun: false }
    }

    /// Takes in the seconds that each place computed in a step; returns a cut that is better by far, which is the present one from
    /// here on.
    pub fn observe(&mut self, busy_s: &[f64]) -> Option<Recut> {
        if !std::mem::replace(&mut self.has_begun, true) {
            return None;
        }
        push(&mut self.busy_s, busy_s.to_vec(), self.window);
        if self.busy_s.len() < self.window {
            return None;
        }
        let slowness = self.slowness();
        let at_stage = |place: &usize| self.units.iter().map(|unit| unit * slowness[*place]).collect();
        let seconds: Vec<Vec<f64>> = self.places.iter().map(at_stage).collect();
        let cuts = best_cut(&seconds, self.micros);
        let ratio = self.step(&cuts, &slowness) / self.step(&self.cuts, &slowness);
        if ratio > 1.0 - LEAST_GAIN {
            return None;
        }
        self.cuts.clone_from(&cuts);
        self.window = LAST_WINDOW.min(2 * self.window);
        self.busy_s.clear();
        self.has_begun = false;
        Some(Recut { cuts, slowness, ratio })
    }

    /// By place: how much longer it takes for its units than the fastest would.
    fn slowness(&self) -> Vec<f64> {
        let of_place = |place: usize| {
            let busy_s = trimmed_mean(self.busy_s.iter().map(|step| step[place]).collect());
            busy_s.expect("the window is full") / self.work(&self.cuts, place)
        };
        let places = self.places.iter().max().map_or(0, |last| last + 1);
        let rates: Vec<f64> = (0..places).map(of_place).collect();
        let fastest = rates.iter().copied().fold(f64::INFINITY, f64::min);
        rates.into_iter().map(|rate| rate / fastest).collect()
    }

    /// A place's work for a micro-batch.
    fn work(&self, cuts: &[usize], place: usize) -> f64 {
        let bounds: Vec<usize> = [0].into_iter().chain(cuts.iter().copied()).chain([self.units.len()]).collect();
        let stages = bounds.windows(2).zip(&self.places).filter(|(_, of)| **of == place);
        stages.map(|(run, _)| self.units[run[0]..run[1]].iter().sum::<f64>()).sum()
    }

    /// The longest that a step takes: every place once, and the slowest for all other micro-batches.
    fn step(&self, cuts: &[usize], slowness: &[f64]) -> f64 {
        let times: Vec<f64> = (0..slowness.len()).map(|place| slowness[place] * self.work(cuts, place)).collect();
        times.iter().sum::<f64>() + (self.micros - 1) as f64 * times.iter().copied().fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps until a cut is found, and that cut, if places take so long for a unit.
    fn found(rates: &[f64], noise: f64, cuts: &[usize]) -> Option<(usize, Recut)> {
        let mut watch = StageWatch::new(vec![1.0; 12], (0..rates.len()).collect(), 8, cuts.to_vec());
        (1..=30).find_map(|step| {
            let wobble = |place: usize| 1.0 + noise * ((step * 7 + place * 3) % 5) as f64 / 4.0;
            let busy: Vec<f64> =
                (0..rates.len()).map(|place| rates[place] * watch.work(&watch.cuts, place) * wobble(place)).collect();
            Some((step, watch.observe(&busy)?))
        })
    }

    #[test]
    fn a_place_that_is_slow_gets_fewer_units_within_a_few_steps() {
        let (steps, recut) = found(&[1.0, 2.0], 0.0, &[6]).expect("one is slow");
        assert!(steps <= 10, "{steps}");
        assert_eq!(recut.cuts, [8]);
        assert_eq!(recut.slowness, [1.0, 2.0]);
        // Both take 8 for a micro-batch then; before, 6 and 12.
        assert!((recut.ratio - (16.0 + 7.0 * 8.0) / (18.0 + 7.0 * 12.0)).abs() < 1e-12, "{}", recut.ratio);
    }

    #[test]
    fn equal_places_are_left_alone_whatever_their_noise() {
        assert_eq!(found(&[1.0, 1.0], 0.1, &[6]), None);
        assert_eq!(found(&[1.0, 1.0, 1.0], 0.1, &[4, 8]), None);
    }
}
