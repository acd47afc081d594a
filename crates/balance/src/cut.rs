//! Where a chain is cut in stages: so that a step takes least time.
//!
//! With m micro-batches and stages that take t₁, t₂, … for one of them, forward and backward together, a step in turn takes at most
//! Σt + (m - 1)·max t. Stages are runs of units, and t depends on the place. The least maximum comes first; among cuts with a
//! somewhat larger one, places of different speed may have a smaller sum.

/// The starts of all stages but the first, if stage k takes `seconds[k][unit]` for a micro-batch of each of its units. Every stage
/// has at least one unit.
pub fn best_cut(seconds: &[Vec<f64>], micros: usize) -> Vec<usize> {
    let stages = Stages::of(seconds);
    let rest = (micros.max(1) - 1) as f64;
    let mut limits = stages.times();
    limits.sort_by(f64::total_cmp);
    limits.dedup();
    let least = limits.partition_point(|limit| stages.least_sum(*limit).is_none());
    let (smallest_sum, _) = stages.least_sum(f64::INFINITY).expect("there are as many units as stages");
    let mut best: Option<(f64, Vec<usize>)> = None;
    for &limit in &limits[least..] {
        let bound = smallest_sum + rest * limit;
        if best.as_ref().is_some_and(|(time, _)| *time <= bound) {
            break;
        }
        let (sum, cuts) = stages.least_sum(limit).expect("larger limits leave more choice");
        let time = sum + rest * limit;
        if best.as_ref().is_none_or(|(other, _)| time < *other) {
            best = Some((time, cuts));
        }
    }
    best.expect("some limit is large enough").1
}

/// By stage: the seconds of all units before each unit, and of all.
struct Stages {
    before: Vec<Vec<f64>>,
}

impl Stages {
    fn of(seconds: &[Vec<f64>]) -> Stages {
        let sums = |seconds: &Vec<f64>| {
            let mut sums = vec![0.0];
            sums.extend(seconds.iter().scan(0.0, |sum, unit| {
                *sum += unit;
                Some(*sum)
            }));
            sums
        };
        let stages = Stages { before: seconds.iter().map(sums).collect() };
        assert!(stages.units() >= stages.count(), "{} units in {} stages", stages.units(), stages.count());
        stages
    }

    fn count(&self) -> usize {
        self.before.len()
    }

    fn units(&self) -> usize {
        self.before[0].len() - 1
    }

    /// The seconds that a stage takes for these units.
    fn time(&self, stage: usize, start: usize, end: usize) -> f64 {
        self.before[stage][end] - self.before[stage][start]
    }

    /// Every time that a stage can take.
    fn times(&self) -> Vec<f64> {
        let runs = (0..self.units()).flat_map(|start| (start + 1..=self.units()).map(move |end| (start, end)));
        runs.flat_map(|(start, end)| (0..self.count()).map(move |stage| (stage, start, end)))
            .map(|(stage, start, end)| self.time(stage, start, end))
            .collect()
    }

    /// The least sum of times that are all within a limit, and its cuts.
    fn least_sum(&self, limit: f64) -> Option<(f64, Vec<usize>)> {
        let (count, units) = (self.count(), self.units());
        // By number of units before: the least sum of the stages so far.
        let mut sums = vec![f64::INFINITY; units + 1];
        sums[0] = 0.0;
        let mut starts = vec![vec![0; units + 1]; count];
        for (stage, starts) in starts.iter_mut().enumerate() {
            let mut next = vec![f64::INFINITY; units + 1];
            for end in stage + 1..=units {
                for start in (stage..end).rev() {
                    let time = self.time(stage, start, end);
                    if time > limit {
                        break;
                    }
                    if sums[start] + time < next[end] {
                        (next[end], starts[end]) = (sums[start] + time, start);
                    }
                }
            }
            sums = next;
        }
        let sum = Some(sums[units]).filter(|sum| sum.is_finite())?;
        let mut cuts = Vec::new();
        let mut end = units;
        for stage in (1..count).rev() {
            end = starts[stage][end];
            cuts.push(end);
        }
        cuts.reverse();
        Some((sum, cuts))
    }
}

#[cfg(test)]
mod tests {
    use evenkeel_random::Random;

    use super::*;

    fn time(seconds: &[Vec<f64>], cuts: &[usize], micros: usize) -> f64 {
        let bounds: Vec<usize> = [0].into_iter().chain(cuts.iter().copied()).chain([seconds[0].len()]).collect();
        let times: Vec<f64> =
            bounds.windows(2).zip(seconds).map(|(run, seconds)| seconds[run[0]..run[1]].iter().sum()).collect();
        times.iter().sum::<f64>() + (micros - 1) as f64 * times.iter().copied().fold(0.0, f64::max)
    }

    /// Every choice of so many increasing numbers.
    fn all_cuts(count: usize, from: usize, end: usize) -> Vec<Vec<usize>> {
        if count == 0 {
            return vec![Vec::new()];
        }
        let with = |first: usize| {
            let rest = all_cuts(count - 1, first + 1, end).into_iter();
            rest.map(move |rest| [vec![first], rest].concat())
        };
        (from..end).flat_map(with).collect()
    }

    #[test]
    fn no_cut_is_better() {
        let mut random = Random::new(&[5]);
        let mut draw = |below: usize| random.below(below as u64) as usize;
        for case in 0..300 {
            let stages = 1 + draw(4);
            let units = stages + draw(11 - stages);
            let micros = 1 + draw(8);
            let costs: Vec<f64> = (0..units).map(|_| (1 + draw(9)) as f64).collect();
            let slowness: Vec<f64> = (0..stages).map(|_| (1 + draw(3)) as f64).collect();
            let seconds: Vec<Vec<f64>> =
                slowness.iter().map(|slow| costs.iter().map(|cost| cost * slow).collect()).collect();
            let found = best_cut(&seconds, micros);
            let best = all_cuts(stages - 1, 1, units);
            let best = best.iter().map(|cuts| time(&seconds, cuts, micros)).fold(f64::INFINITY, f64::min);
            assert_eq!(
                time(&seconds, &found, micros),
                best,
                "case {case}: {seconds:?}, {micros} micro-batches, {found:?}"
            );
        }
    }

    #[test]
    fn a_place_at_half_speed_gets_half_the_units() {
        let seconds = [vec![1.0; 12], vec![2.0; 12]];
        assert_eq!(best_cut(&seconds, 16), [8]);
        assert_eq!(best_cut(&[vec![1.0; 12], vec![1.0; 12]], 16), [6]);
    }
}
