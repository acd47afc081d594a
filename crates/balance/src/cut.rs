//! Where a chain is cut in stages: so that a step takes least time, and every place has memory for its stages.
//!
//! With m micro-batches and stages that take t₁, t₂, … for one of them, forward and backward together, a step in turn takes at most
//! Σt + (m - 1)·max t. Stages are runs of units, and t depends on the place. The least maximum comes first; among cuts with a
//! somewhat larger one, places of different speed may have a smaller sum. With fewer micro-batches than stages the sum is almost all,
//! and would leave everything to the fastest place; then m counts as the number of stages.

/// Dry runs that a search for a cut that fits may take.
const MOST_TRIES: usize = 32;

/// The starts of all stages but the first, if stage k takes `seconds[k][unit]` for a micro-batch of each of its units. Every stage
/// has at least one unit.
pub fn best_cut(seconds: &[Vec<f64>], micros: usize) -> Vec<usize> {
    Stages::of(seconds).best(micros).expect("there are as many units as stages")
}

/// Whether nothing needs more than it has, if these are the shares that are needed.
pub fn fits(fullness: &[f64]) -> bool {
    fullness.iter().all(|share| *share <= 1.0)
}

/// The best cut that fits in memory, if there is one: `fullness` is by stage what its place needs over what it has. `bytes[k][unit]`
/// is about what a unit needs in stage k. A stage whose place would be too full has to do with fewer of them, again and again.
pub fn best_cut_that_fits(
    seconds: &[Vec<f64>],
    micros: usize,
    bytes: &[Vec<f64>],
    fullness: impl Fn(&[usize]) -> Vec<f64>,
) -> Option<Vec<usize>> {
    let mut stages = Stages::of(seconds);
    stages.bytes_before = bytes.iter().map(|of_stage| sums(of_stage)).collect();
    for _ in 0..MOST_TRIES {
        let cuts = stages.best(micros)?;
        let fullness = fullness(&cuts);
        if fits(&fullness) {
            return Some(cuts);
        }
        let bounds = bounds(&cuts, stages.units());
        for (stage, share) in fullness.iter().enumerate().filter(|(_, share)| **share > 1.0) {
            stages.most_bytes[stage] = stages.bytes(stage, bounds[stage], bounds[stage + 1]) / share;
        }
    }
    None
}

/// How often a step takes the time of the slowest stage beside that of all, with so many micro-batches and stages.
pub(crate) fn weight_of_slowest(micros: usize, stages: usize) -> f64 {
    (micros.max(stages) - 1) as f64
}

/// The first unit of every stage, and the end of the last.
pub(crate) fn bounds(cuts: &[usize], units: usize) -> Vec<usize> {
    [0].into_iter().chain(cuts.iter().copied()).chain([units]).collect()
}

/// The sums of all numbers before each, and of all.
pub(crate) fn sums(numbers: &[f64]) -> Vec<f64> {
    let mut sums = vec![0.0];
    sums.extend(numbers.iter().scan(0.0, |sum, number| {
        *sum += number;
        Some(*sum)
    }));
    sums
}

struct Stages {
    /// By stage: the seconds of all units before each unit, and of all.
    before: Vec<Vec<f64>>,
    /// By stage: the bytes of all units before each unit, and of all.
    bytes_before: Vec<Vec<f64>>,
    /// By stage.
    most_bytes: Vec<f64>,
}

impl Stages {
    fn of(seconds: &[Vec<f64>]) -> Stages {
        let before: Vec<Vec<f64>> = seconds.iter().map(|of_stage| sums(of_stage)).collect();
        let bytes_before = vec![vec![0.0; before[0].len()]; before.len()];
        let stages = Stages { bytes_before, most_bytes: vec![f64::INFINITY; before.len()], before };
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

    /// The bytes that a stage needs for these units.
    fn bytes(&self, stage: usize, start: usize, end: usize) -> f64 {
        self.bytes_before[stage][end] - self.bytes_before[stage][start]
    }

    fn best(&self, micros: usize) -> Option<Vec<usize>> {
        let rest = weight_of_slowest(micros, self.count());
        let mut limits = self.times();
        limits.sort_by(|a, b| b.total_cmp(a));
        // Sums in another order differ by rounding; the largest of them is a limit for all.
        limits.dedup_by(|smaller, larger| *smaller > *larger * (1.0 - 1e-9));
        limits.reverse();
        let least = limits.partition_point(|limit| self.least_sum(*limit).is_none());
        let (smallest_sum, _) = self.least_sum(f64::INFINITY)?;
        let mut best: Option<(f64, Vec<usize>)> = None;
        for &limit in &limits[least..] {
            let bound = smallest_sum + rest * limit;
            if best.as_ref().is_some_and(|(time, _)| *time <= bound) {
                break;
            }
            let (sum, cuts) = self.least_sum(limit).expect("larger limits leave more choice");
            let time = sum + rest * limit;
            if best.as_ref().is_none_or(|(other, _)| time < *other) {
                best = Some((time, cuts));
            }
        }
        best.map(|(_, cuts)| cuts)
    }

    /// Every time that a stage can take.
    fn times(&self) -> Vec<f64> {
        // Stages at places of the same speed take as long.
        let is_first = |stage: &usize| !self.before[..*stage].contains(&self.before[*stage]);
        let unlike: Vec<usize> = (0..self.count()).filter(is_first).collect();
        let runs = (0..self.units()).flat_map(|start| (start + 1..=self.units()).map(move |end| (start, end)));
        runs.flat_map(|(start, end)| unlike.iter().map(move |&stage| (stage, start, end)))
            .map(|(stage, start, end)| self.time(stage, start, end))
            .collect()
    }

    /// The least sum of times that are all within a limit, with memory for every stage, and its cuts.
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
                    if time > limit || self.bytes(stage, start, end) > self.most_bytes[stage] {
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
        let bounds = bounds(cuts, seconds[0].len());
        let times: Vec<f64> =
            bounds.windows(2).zip(seconds).map(|(run, seconds)| seconds[run[0]..run[1]].iter().sum()).collect();
        let slowest_s = times.iter().copied().fold(0.0, f64::max);
        times.iter().sum::<f64>() + weight_of_slowest(micros, times.len()) * slowest_s
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

    /// Random costs: of stages by unit in seconds and bytes, and a number of micro-batches.
    fn costs(draw: &mut impl FnMut(usize) -> usize) -> ([Vec<Vec<f64>>; 2], usize) {
        let stages = 1 + draw(4);
        let units = stages + draw(11 - stages);
        let mut at_stages = || {
            let costs: Vec<f64> = (0..units).map(|_| (1 + draw(9)) as f64).collect();
            let factors = (0..stages).map(|_| (1 + draw(3)) as f64);
            factors.map(|factor| costs.iter().map(|cost| cost * factor).collect()).collect()
        };
        ([at_stages(), at_stages()], 1 + draw(8))
    }

    #[test]
    fn no_cut_is_better() {
        let mut random = Random::new(&[5]);
        let mut draw = |below: usize| random.below(below as u64) as usize;
        for case in 0..300 {
            let ([seconds, _], micros) = costs(&mut draw);
            let found = best_cut(&seconds, micros);
            let best = all_cuts(seconds.len() - 1, 1, seconds[0].len());
            let best = best.iter().map(|cuts| time(&seconds, cuts, micros)).fold(f64::INFINITY, f64::min);
            assert_eq!(
                time(&seconds, &found, micros),
                best,
                "case {case}: {seconds:?}, {micros} micro-batches, {found:?}"
            );
        }
    }

    #[test]
    fn no_cut_that_fits_is_better() {
        let mut random = Random::new(&[6]);
        let mut draw = |below: usize| random.below(below as u64) as usize;
        let mut outcomes = [0; 3];
        for case in 0..300 {
            let ([seconds, bytes], micros) = costs(&mut draw);
            let room: Vec<f64> = bytes.iter().map(|_| (5 + draw(60)) as f64).collect();
            let fullness = |cuts: &[usize]| -> Vec<f64> {
                let bounds = bounds(cuts, bytes[0].len());
                let needed = |stage: usize| bytes[stage][bounds[stage]..bounds[stage + 1]].iter().sum::<f64>();
                room.iter().enumerate().map(|(stage, room)| needed(stage) / room).collect()
            };
            let fits = |cuts: &[usize]| fits(&fullness(cuts));
            let found = best_cut_that_fits(&seconds, micros, &bytes, fullness);
            let fitting = all_cuts(seconds.len() - 1, 1, seconds[0].len()).into_iter().filter(|cuts| fits(cuts));
            let best = fitting.map(|cuts| time(&seconds, &cuts, micros)).min_by(f64::total_cmp);
            assert!(found.as_deref().is_none_or(fits), "case {case}");
            assert_eq!(found.as_ref().map(|cuts| time(&seconds, cuts, micros)), best, "case {case}");
            outcomes[usize::from(found.is_some()) + usize::from(fits(&best_cut(&seconds, micros)))] += 1;
        }
        assert!(outcomes.iter().all(|count| *count > 20), "none, another, the best without limits: {outcomes:?}");
    }

    #[test]
    fn memory_beside_the_units_counts_too() {
        let (seconds, bytes) = (vec![vec![1.0; 40]; 2], vec![vec![1.0; 40]; 2]);
        let fullness = |cuts: &[usize]| vec![(10 + cuts[0]) as f64 / 17.0, 0.5];
        assert_eq!(best_cut_that_fits(&seconds, 4, &bytes, fullness), Some(vec![7]));
    }

    #[test]
    fn a_place_at_half_speed_gets_half_the_units() {
        let seconds = [vec![1.0; 12], vec![2.0; 12]];
        assert_eq!(best_cut(&seconds, 16), [8]);
        assert_eq!(best_cut(&[vec![1.0; 12], vec![1.0; 12]], 16), [6]);
    }
}
